"""Configurations of the FP8 forward kernel, chosen by a pure function."""

from dataclasses import dataclass

from attnlib.kernels.hopper.configs import HopperConfig


@dataclass(frozen=True)
class Fp8Config(HopperConfig):
    """The same for operands in e4m3.

    Attributes:
        turns: consumer warpgroups start their products one after the other, in a circle.
    """

    turns: bool = False
    ones: bool = False
    on_fma: int = 0


_THREE = {"joint": True, "consumer_registers": 160, "producer_registers": 32, "max_registers": 128}
_CONFIGS = {
    64: Fp8Config(128, 3, 4, 64, pin=True, **_THREE),
    128: Fp8Config(128, 2, 4, 128, q_columns=128, late_wait=True, pin=True, joint=True),
    256: Fp8Config(64, 2, 4, 128, q_columns=256, named=True),
}


def fp8_config(width: int) -> Fp8Config:
    """The configuration for tiles of 64, 128 or 256 columns."""
    return _CONFIGS[width]
