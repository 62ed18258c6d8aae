"""attention_pooled() compiled for sm_90: the Hopper forward kernel that keeps maxima."""

from __future__ import annotations

import pytest
import side_by_side
import torch
from chosen import more
from gluon_kernels import tile_types
from hopper_forward import compile_forward

from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Stats
from attnlib.bench.sass import opcode
from attnlib.kernels.common.signature import Signature
from attnlib.kernels.hopper import launch, pooled
from attnlib.kernels.hopper.configs import M128N128, M256N64, hopper_config
from attnlib.params import MaskWindow

# ---------------------------------------------------------------- on Hopper

CONFIGS = {
    "64": M256N64, "64 M128N128": M128N128, "128": hopper_config(128),
    "128 bf16": hopper_config(128), "256": hopper_config(256),
}  # fmt: skip
SHIFTED = "shifted"  # causal, whose second block may need a mask: no shift is kept
CASES = [("64", False), ("256", True), ("128", SHIFTED)]
CASES += more([("128", True), ("128", False)])
CASES += more([("64", True), ("256", False), ("128 bf16", True)])
CASES += more([("64 M128N128", True), ("64 M128N128", False), ("64", SHIFTED), ("256", SHIFTED)])
KEPT = [case for case in CASES if case[1] != SHIFTED]
SPILLS = {
    ("64", False): 4, ("128", True): 4,
    ("128", False): 6, ("128 bf16", True): 4, ("256", True): 12, ("256", False): 10, ("256", SHIFTED): 2,
}  # fmt: skip
"""Words, all of them stored and loaded between tiles."""


def compile_case(case: tuple[str, bool | str]) -> Stats:
    """The compiled kernel in numbers."""
    name, causal = case
    width, config = int(name.split()[0]), CONFIGS[name]
    dtype = torch.bfloat16 if "bf16" in name else torch.float16
    shape, keys = (2, 4, 4096, width), (2, 4, 4096 + 30 * (causal == SHIFTED), width)
    window = MaskWindow(None, 0 if causal else None)
    call = Signature(shape, keys, (None,) * 3, dtype, 0, window, 0.1, None, True, config)
    described = launch.descriptors((None,) * 4, width, config, dtype, False)
    types = tile_types(described, "bf16" if "bf16" in name else "fp16")
    return compile_forward(pooled.plan_of(call), types, {"LSE", "pooled"}, config)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, Stats]:
    return dict(zip(CASES, side_by_side.run(compile_case, CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_forward(compiled: dict[tuple, Stats], case: tuple) -> None:
    """No serialized wgmma beside the stores of the maxima, and nothing that is spilled in a loop."""
    stats = compiled[case]
    print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
    assert stats.opcodes.get("UTMALDG") and not stats.opcodes.get("HMMA")
    assert stats.spills == SPILLS.get(case, 0)
    assert not any({"LDL", "STL"} & set(loop) for loop in stats.loops)
    assert stats.warnings == () and stats.shared_bytes <= SMEM_LIMIT


@pytest.mark.parametrize("case", KEPT, ids=lambda case: "-".join(map(str, case)))
def test_maxima_are_of_weights(compiled: dict[tuple, Stats], case: tuple) -> None:
    """Up to the branch around the slow way: a comparison for two weights, no float maximum, and for a thread
    one logarithm and one store."""
    stats, config = compiled[case], CONFIGS[case[0]]
    assert len(stats.loop_listings) == config.warpgroups
    units = config.block_n // 64
    for listing in stats.loop_listings:
        found = [opcode(text) for text in listing]
        fast = found[: found.index("BRA", found.index("VOTE"))]
        assert fast.count("MUFU.EX2") == config.block_n // 2 and "FMNMX" not in fast
        assert fast.count("VIMNMX3") + fast.count("VIMNMX") <= 17.5 * units + 1
        assert fast.count("SHFL") == 1 + units
        assert fast.count("MUFU.LG2") == fast.count("STG") == 1
