"""Configurations of the FP8 forward kernel, chosen by a pure function."""

from dataclasses import replace
from typing import Literal

from attnlib.kernels.hopper.configs import HopperConfig

_THREE = {"joint": True, "consumer_registers": 160, "producer_registers": 32, "max_registers": 128}
_LATE = {"late_wait": True, "pin": True}
_LAST = {"diagonal_bytes": 4 << 20, "last_waves": 2.5}
_CONFIGS = {
    64: HopperConfig(128, 3, 4, 64, q_columns=64, **_THREE, **_LATE),
    128: HopperConfig(128, 2, 4, 128, q_columns=128, named=True, **_LATE),
    256: HopperConfig(128, 2, 2, 128, named=True, **_LATE),
}
_SHORT_STEPS = HopperConfig(64, 3, 4, 128, keep_shift=True, **_THREE, **_LATE)
# Of batches without a window. Kept shifts at 64 columns won in dense calls and lost under a diagonal
# (docs/lab/fp8.md); words would spill with the late wait.
_BY_KIND = {
    ("dense", 64): replace(_CONFIGS[64], keep_shift=True, late_wait=False, pin=False),
    ("causal", 64): replace(_CONFIGS[64], **_LAST),
    ("dense", 128): _SHORT_STEPS, ("causal", 128): replace(_SHORT_STEPS, **_LAST),
}  # fmt: skip
# Queries that the kernel quantizes stay in registers, where three warpgroups have no room for those of 128
# columns.
_OWN_QUERIES = _BY_KIND | {
    ("dense", 128): replace(_CONFIGS[128], keep_shift=True),
    ("causal", 128): replace(_CONFIGS[128], **_LAST),
}


def fp8_config(
    width: int, kind: Literal["dense", "causal"] | None = None, own_queries: bool = False,
    crowded: bool = False,
) -> HopperConfig:  # fmt: skip
    """The configuration for tiles of 64, 128 or 256 columns.

    Args:
        kind: of a batch, each of whose queries sees all keys ("dense"), or all but those behind its diagonal
            ("causal"); None: of any other call.
        own_queries: the kernel quantizes them.
        crowded: buffers hold queries of 16 bits and an output of 32, for which there is room if that leaves
            in two halves.
    """
    by_kind = _OWN_QUERIES if own_queries else _BY_KIND
    config = by_kind.get((kind, width), _CONFIGS[width])
    return replace(config, o_columns=width // 2) if crowded else config
