"""Configurations of the FP8 forward kernel, chosen by a pure function."""

from dataclasses import dataclass

from attnlib.kernels.hopper.configs import HopperConfig

BARRIERS = 16
"""The hardware's, of which the ring's slots have those from 8 on and turns the last four."""


@dataclass(frozen=True)
class Fp8Config(HopperConfig):
    """The same for operands in e4m3.

    Attributes:
        turns: consumer warpgroups start their products one after the other, in a circle.
        ones: sums of weights are products with ones, of the rounded weights. Without effect where the LSE is
            asked for, which is that of weights before they are rounded.
        on_fma: of 8 exponentials so many are polynomials.
    """

    turns: bool = False
    ones: bool = False
    on_fma: int = 0

    def __post_init__(self) -> None:
        if self.named:
            slots = BARRIERS - 8 - (4 if self.turns else 0)
            if self.stages > slots:
                raise ValueError(
                    f"stages: expected at most {slots} with named barriers{' and turns' * self.turns}, which "
                    f"are {BARRIERS} in all, got {self.stages}"
                )
        if self.ones and self.late_wait:
            raise ValueError("ones: expected False with late_wait, got True")


_THREE = {"joint": True, "consumer_registers": 160, "producer_registers": 32, "max_registers": 128}
_CONFIGS = {
    64: Fp8Config(128, 3, 4, 64, pin=True, **_THREE),
    128: Fp8Config(128, 2, 4, 128, q_columns=128, late_wait=True, pin=True, joint=True),
    256: Fp8Config(64, 2, 4, 128, q_columns=256, named=True),
}


def fp8_config(width: int) -> Fp8Config:
    """The configuration for tiles of 64, 128 or 256 columns."""
    return _CONFIGS[width]
