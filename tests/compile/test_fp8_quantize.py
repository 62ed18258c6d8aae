"""The quantizing kernels compiled for sm_90: no spills, the rotation on tensor cores, few instructions."""

from __future__ import annotations

import pytest
import torch
from chosen import with_more
from launches import jobs_of

from attnlib.bench import inspect_sm90, sass
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Job, Stats
from attnlib.kernels import fp8
from attnlib.kernels.common import device
from attnlib.kernels.common.fp8 import Recipe
from attnlib.kernels.fp8 import launch_quantize, mean_kernels, quantize_kernels

DIMS = (64, 128, 256)
CASES = [
    *((role, Recipe(), D, "bfloat16", False) for D in DIMS for role in "qv"),
    ("q", Recipe("block", False), 64, "bfloat16", False), ("k", Recipe("tensor"), 256, "bfloat16", False),
    ("k", Recipe(), 128, "float32", False), ("q", Recipe(), 40, "bfloat16", False),
    ("q", Recipe(), 128, "float16", True), ("v", Recipe(center=False), 128, "bfloat16", False),
]  # fmt: skip
CASES = with_more(
    CASES,
    [
        (role, recipe, D, dtype, varlen)
        for D in DIMS
        for role, recipe, dtype, varlen in [
            ("k", Recipe(), "bfloat16", False), ("q", Recipe(), "float16", True),
            ("q", Recipe("block", False), "bfloat16", False), ("k", Recipe("tensor"), "bfloat16", False),
        ]
    ]
    + [("v", Recipe(), 128, "float16", True), ("v", Recipe(), 200, "float32", True)],
)  # fmt: skip
SPILLS_FLOAT32 = 128
"""4-byte words of a thread: its rotation is three products, of parts of the numbers in TF32."""


def name(case: tuple) -> str:
    role, recipe, D, dtype, varlen = case
    how = ("rotated" if recipe.rotate else "plain") + "-not-centered" * (not recipe.center)
    return f"{role}-{recipe.scaling}-{how}-D{D}-{dtype}{'-varlen' * varlen}"


def jobs(role: str, recipe: Recipe, D: int, dtype: str, varlen: bool) -> list[Job]:
    x = torch.zeros(*((512, 2) if varlen else (1, 2, 512)), D, dtype=getattr(torch, dtype))
    lengths = (torch.zeros(3, dtype=torch.int32), 512) if varlen else ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "overlaps", lambda index: True)
        return jobs_of((quantize_kernels, mean_kernels), lambda: fp8.quantize(x, role, recipe, *lengths))


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, list[Stats]]:
    """All at once: the compiler's start-up costs more than a kernel."""
    found = {case: jobs(*case) for case in CASES}
    stats = iter(inspect_sm90.compile_all([job for of_case in found.values() for job in of_case]))
    return {case: [next(stats) for _ in of_case] for case, of_case in found.items()}


@pytest.mark.parametrize("case", CASES, ids=name)
def test_compiles(compiled: dict[tuple, list[Stats]], case: tuple) -> None:
    role, recipe, _, dtype, _ = case
    count = 3 if role == "v" and recipe.center else 1 if recipe.scaling == "block" and role != "v" else 2
    assert len(compiled[case]) == count
    for stats in compiled[case]:
        print(f"{stats.registers} registers, {stats.ctas_per_sm} programs an SM, {stats.shared_bytes} bytes")
        assert stats.spills <= (SPILLS_FLOAT32 if dtype == "float32" else 0) and stats.warnings == ()
        assert stats.shared_bytes <= SMEM_LIMIT and stats.ctas_per_sm > 0
        rotated = recipe.rotate and role != "v"
        assert bool(stats.opcodes.get("HGMMA")) == rotated, "the rotation is a product on tensor cores"
        if dtype != "float32":
            assert not stats.opcodes.get("HMMA")


def test_passes_over_values_keep_memory_busy(compiled: dict[tuple, list[Stats]]) -> None:
    """Of each pass over centered values four programs fit on an SM, and a thread of theirs asks for 64 bytes
    before it uses the first of them."""
    for D in DIMS:
        summing, _, quantizing = compiled["v", Recipe(), D, "bfloat16", False]
        for stats in (summing, quantizing):
            assert stats.ctas_per_sm >= launch_quantize.SUMMING
            loads = [i for i, text in enumerate(stats.listing) if "LDG.E.128" in text]
            between = {sass.opcode(text) for text in stats.listing[loads[0] : loads[3]]}
            assert not between & {"PRMT", "FMNMX", "FADD", "STS", "BAR"}


def test_a_block_of_values_may_be_beyond_2_31_elements() -> None:
    """Its first token is a number of 32 bits, what that is multiplied with is not: 2^28 tokens of 16 bits are
    as many elements, with the smallest stride."""
    *_, job = jobs("v", Recipe(), 128, "bfloat16", False)
    rows, unit = job.constexprs["ROWS"], job.constexprs["UNIT"]
    compiled, _ = inspect_sm90.compiled_here(job)
    loop = compiled.asm["ttir"].split("scf.for")[1]
    assert f"%c{rows}_i32" in loop and f"%c{unit}_i64" in loop and f"%c{rows * unit}_i32" not in loop


def test_loads_feed_the_tensor_core(compiled: dict[tuple, list[Stats]]) -> None:
    """From memory to shared memory and from there to the product, not through registers."""
    for D in DIMS:
        [stats] = compiled["q", Recipe(), D, "bfloat16", False]
        assert not stats.opcodes.get("LDG") and stats.opcodes["LDGSTS"]
