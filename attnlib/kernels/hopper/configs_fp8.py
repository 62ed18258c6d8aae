"""Configurations of the FP8 forward kernel, chosen by a pure function."""

from dataclasses import replace

from attnlib.kernels.hopper.configs import HopperConfig

_THREE = {"joint": True, "consumer_registers": 160, "producer_registers": 32, "max_registers": 128}
_LATE = {"late_wait": True, "pin": True}
_CONFIGS = {
    64: HopperConfig(128, 3, 4, 64, q_columns=64, **_THREE, **_LATE),
    128: HopperConfig(128, 2, 4, 128, q_columns=128, named=True, **_LATE),
    256: HopperConfig(128, 2, 2, 128, named=True, **_LATE),
}


# Where each query of a batch sees all keys. Kept shifts won there at 64 and 128 columns, and lost at 256 and
# under a causal mask (docs/lab/fp8.md). At 64 columns words would spill with the late wait.
_DENSE = {
    64: replace(_CONFIGS[64], keep_shift=True, late_wait=False, pin=False),
    128: replace(_CONFIGS[128], keep_shift=True),
}


def fp8_config(width: int, dense: bool = False, crowded: bool = False) -> HopperConfig:
    """The configuration for tiles of 64, 128 or 256 columns. dense: each query of a batch sees all keys; no
    varlen call is. crowded: buffers hold queries of 16 bits and an output of 32, for which there is room if
    that leaves in two halves."""
    config = _DENSE.get(width, _CONFIGS[width]) if dense else _CONFIGS[width]
    return replace(config, o_columns=width // 2) if crowded else config
