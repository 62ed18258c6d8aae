"""The kernels of chapter 22 compiled for sm_90."""

from __future__ import annotations

from itertools import product
from types import ModuleType

import pytest
from chosen import with_more

from attnlib.bench import inspect_sm90, sources
from attnlib.bench.changes import changed
from attnlib.book import answers

STEP = "22_fp8"
ROW_REDUCTIONS = 8
"""SHFL of a trip: maximum and sum, two rows of a thread, two steps each among four threads."""


def job(module: ModuleType, head_dim: int, causal: bool) -> inspect_sm90.Job:
    n, stages = module.TILES[head_dim]
    tiles = {"q_desc": [1, 64, head_dim], "k_desc": [1, n, head_dim], "v_desc": [1, head_dim, n]}
    types = {name: inspect_sm90.gluon_descriptor(tile, "fp8e4nv") for name, tile in tiles.items()}
    types |= {"o_desc": inspect_sm90.gluon_descriptor([1, 64, head_dim]), "S": "i32", "qk_scale": "fp32"}
    types |= dict.fromkeys(("q_scale_ptr", "k_scale_ptr", "v_scale_ptr"), "*fp32:16")
    fixed = {"STAGES": stages, "CAUSAL": causal, "OFFSET": 8}
    return inspect_sm90.Job(module.__file__, "flash_forward", types, fixed, 4, max_registers=168)


@pytest.mark.parametrize(
    ("head_dim", "causal"),
    with_more([(64, False), (128, True), (256, True)], product((64, 128, 256), (True, False))),
)
def test_kernel(head_dim: int, causal: bool) -> None:
    (stats,) = inspect_sm90.compile_all([job(sources.load_step(STEP), head_dim, causal)])
    assert stats.fits and stats.spills == 0 and stats.warnings == ()
    for loop in stats.loops:
        assert loop.get("QGMMA") and not loop.get("HGMMA") and not loop.get("HMMA")
        assert loop.get("SHFL") == ROW_REDUCTIONS and not loop.get("STS"), "P moves between threads"


@pytest.mark.parametrize("head_dim", with_more([256], (64, 128)))
def test_exercise_4_and_its_solution(head_dim: int) -> None:
    """Both compile; a warp branches around D / 2 multiplications, and nothing spills."""
    checks, notebook = answers.checks(STEP), sources.notebook_of(STEP)
    stub = sources.cells_tagged(notebook, "exercise")[3].split("\n\n\n", 1)[1].split("\n\n\nlagging = ")[0]
    text = sources.kernel_source(notebook)
    for change in (stub, checks.FOURTEEN):
        text = changed(text, change)
    kernels = sources.load_source("22_exercise", text), checks.kernel_of(answers.solutions(STEP).lagging)
    jobs = [job(module, head_dim, True) for module in (sources.load_step(STEP), *kernels)]
    chapter, *both = inspect_sm90.compile_all(jobs)
    for stats in both:
        assert stats.fits and stats.spills == 0 and stats.warnings == ()
        assert stats.loops[-1].get("VOTE") == 1 and not chapter.loops[-1].get("VOTE")


def moves(fp8: bool, permuted: bool, trivial: bool) -> inspect_sm90.Stats:
    notebook = sources.notebook_of(STEP)
    module = sources.load_source("22_moves", sources.cells_tagged(notebook, "variant")[0])
    fixed = {"FP8": fp8, "PERMUTED": permuted, "TRIVIAL": trivial}
    job = inspect_sm90.Job(module.__file__, "two_products", {"o_ptr": "*fp32:16"}, fixed)
    return inspect_sm90.compile_all([job])[0]


def test_the_permutation_moves_nothing() -> None:
    assert not moves(True, True, True).opcodes.get("SHFL")
    assert moves(True, False, False).opcodes.get("SHFL")
    with pytest.raises(RuntimeError, match="trivial"):
        moves(True, False, True)


@pytest.mark.parametrize(("keys", "additions"), [(None, False), (128, True)])
def test_levels_of_a_sum(keys: int | None, additions: bool) -> None:
    """Two levels add in fp32 outside of the tensor core."""
    notebook = sources.notebook_of(STEP)
    module = sources.load_source("22_sums", sources.cells_tagged(notebook, "variant")[1])
    types = {"p_ptr": "*fp8e4nv:16", "v_ptr": "*fp8e4nv:16", "o_ptr": "*fp32:16", "N": "i32:16"}
    job = inspect_sm90.Job(module.__file__, "long_product", types, {"KEYS": keys})
    (stats,) = inspect_sm90.compile_all([job])
    assert stats.loop.get("QGMMA") and bool(stats.loop.get("FADD")) == additions
