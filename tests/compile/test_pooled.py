"""attention_pooled() compiled for sm_90: the Hopper forward kernel that keeps maxima."""

from __future__ import annotations

import pytest
import side_by_side
import torch
from chosen import more
from gluon_kernels import tile_types
from hopper_forward import compile_forward

from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Stats
from attnlib.kernels.common.signature import Signature
from attnlib.kernels.hopper import launch, pooled
from attnlib.kernels.hopper.configs import M128N128, M192N128, M256N64, hopper_config
from attnlib.params import MaskWindow

# ---------------------------------------------------------------- on Hopper

CONFIGS = {
    "64": M256N64, "64 M192N128": M192N128, "64 M128N128": M128N128, "128": hopper_config(128),
    "256": hopper_config(256),
}  # fmt: skip
CASES = [("64", True), ("128", False), ("256", True)]
CASES += more([("64", False), ("128", True), ("64 M192N128", True), ("64 M128N128", True)])


def compile_case(case: tuple[str, bool]) -> Stats:
    """The compiled kernel in numbers."""
    name, causal = case
    width, config = int(name.split()[0]), CONFIGS[name]
    shape = (2, 4, 4096, width)
    window = MaskWindow(None, 0 if causal else None)
    call = Signature(shape, shape, (None,) * 3, torch.float16, 0, window, 0.1, None, True, config)
    types = tile_types(launch.descriptors((None,) * 4, width, config, torch.float16, False), "fp16")
    return compile_forward(pooled.plan_of(call), types, {"LSE", "pooled"}, config.max_registers)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, Stats]:
    return dict(zip(CASES, side_by_side.run(compile_case, CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_forward(compiled: dict[tuple, Stats], case: tuple) -> None:
    """No serialized wgmma beside the stores of the maxima, and no spill but of 2 words at D = 256."""
    stats = compiled[case]
    print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
    assert stats.opcodes.get("UTMALDG") and not stats.opcodes.get("HMMA")
    assert stats.spills <= (2 if case == ("256", True) else 0)
    assert stats.warnings == () and stats.shared_bytes <= SMEM_LIMIT
