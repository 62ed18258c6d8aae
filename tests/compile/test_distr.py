"""attention_distr() compiled for sm_90: the kernels that group columns, and the product of fewer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import side_by_side
import torch
from chosen import more
from gluon_kernels import tile_types
from hopper_forward import compile_forward
from launches import jobs_of

from attnlib.bench import inspect_sm90
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Job, Stats
from attnlib.kernels import distr
from attnlib.kernels.common.distr import Grouping, Narrow
from attnlib.kernels.distr import group_kernels
from attnlib.kernels.hopper import launch
from attnlib.kernels.hopper.configs import M128N128, M256N64, hopper_config
from attnlib.kernels.hopper.narrow import EARLY

# ---------------------------------------------------------------- the product on Hopper

CONFIGS = {"M256N64": M256N64, "M192N128": EARLY, "M128N128": M128N128, "128": hopper_config(128)}
PRODUCTS = [  # D, group, configuration, causal, keys of each block of queries
    (64, 4, "M256N64", False, True), (128, 8, "128", True, False),
]  # fmt: skip
PRODUCTS += more([(64, 2, "M192N128", True, False), (128, 2, "128", True, True)])
PRODUCTS += more([(64, 1, "M256N64", True, False), (64, 2, "M128N128", True, True)])
PRODUCTS += more([(128, 2, "128", True, False), (128, 4, "128", False, False)])


def compile_product(case: tuple[int, int, str, bool, bool]) -> Stats:
    """The compiled kernel in numbers."""
    width, group, name, causal, own = case
    columns = Grouping(group).columns(width)
    config = replace(CONFIGS[name], q_columns=min(CONFIGS[name].q_columns, columns), keep_shift=False)
    narrowed = Narrow(columns, 2, 128 if own else None)
    mask = {"causal": causal, "shifted": False, "left": False, "blocks": 1, "skip": True}
    plan = launch.make_plan(width, config, mask, False, False, False, narrowed)
    types = tile_types(
        launch.descriptors((None,) * 4, width, config, torch.bfloat16, False, narrowed), "bf16"
    )
    return compile_forward(plan, types, {"own keys"} if own else set(), config)


@pytest.fixture(scope="module")
def products() -> dict[tuple, Stats]:
    return dict(zip(PRODUCTS, side_by_side.run(compile_product, PRODUCTS), strict=True))


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: "-".join(map(str, case)))
def test_product(products: dict[tuple, Stats], case: tuple) -> None:
    """No spill, no serialized wgmma, and as many products as the columns are for: D / 16 / group steps of
    Q K^T for BLOCK_N keys, BLOCK_N / 16 steps of P V."""
    width, group, name, *_ = case
    stats, config = products[case], CONFIGS[name]
    print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
    assert stats.opcodes.get("UTMALDG") and not stats.opcodes.get("HMMA")
    assert stats.spills == 0 and stats.warnings == () and stats.shared_bytes <= SMEM_LIMIT
    loops = [loop for loop in stats.loops if loop.get("HGMMA")]
    assert len(loops) == config.warpgroups
    for loop in loops:
        assert loop["HGMMA"] == width // group // 16 + config.block_n // 16


# ---------------------------------------------------------------- plain Triton

GROUPINGS = {
    "keys": Grouping(2), "queries": Grouping(4, "q"), "blocks": Grouping(2, "q", 128),
}  # fmt: skip
CASES = [
    ("keys", 64, "bfloat16", True), ("queries", 40, "float16", False), ("blocks", 128, "float32", True),
]  # fmt: skip
CASES += more([("blocks", 128, "bfloat16", True)])


def jobs(name: str, D: int, dtype: str, causal: bool) -> list[Job]:
    q, k = (torch.zeros(1, heads, 512, D, dtype=getattr(torch, dtype)) for heads in (4, 2))
    return jobs_of(group_kernels, lambda: distr.group(q, k, GROUPINGS[name], causal))


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, list[Stats]]:
    """All at once: the compiler's start-up costs more than a kernel."""
    found = {case: jobs(*case) for case in CASES}
    stats = iter(inspect_sm90.compile_all([job for of_case in found.values() for job in of_case]))
    return {case: [next(stats) for _ in of_case] for case, of_case in found.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_grouping(compiled: dict[tuple, list[Stats]], case: tuple) -> None:
    """Four kernels without spills, whose sums and gathers are products on tensor cores; in float32 these run
    on the CUDA cores, and the gather spills a little."""
    dtype = case[2]
    most = 32 if dtype == "float32" else 0
    assert len(compiled[case]) == 4
    for number, stats in enumerate(compiled[case]):
        used = f"{stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes"
        print(f"{case} {number}: {used}")
        assert stats.spills <= most and stats.warnings == () and stats.shared_bytes <= SMEM_LIMIT
        if dtype != "float32" and number != 1:
            assert stats.opcodes.get("HGMMA") or stats.opcodes.get("HMMA")
