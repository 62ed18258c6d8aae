"""The kernel cells of the notebooks compiled for sm_90, in the configurations that the chapters run."""

from __future__ import annotations

from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
import torch
from launches import jobs_of

from attnlib.bench import inspect_sm90, sources
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Job, Stats
from attnlib.bench.paths import NOTEBOOKS
from attnlib.book.chapters import STEPS

HAVE_KERNELS = [step for step, _ in STEPS if step != "08_production"]  # whose cell c08-sass compiles it
CASES = list(product(HAVE_KERNELS, (64, 128, 256), ("causal", "dense")))
NO_PRODUCT = {"softmax_kernel"}


def module_of(step: str) -> ModuleType:
    """As `lesson.load_kernel`, but lesson switches the interpreter on where no GPU is."""
    return sources.load_source(step, sources.kernel_source(NOTEBOOKS / f"{step}.ipynb"))


def jobs(step: str, head_dim: int, mask: str, **options: object) -> list[Job]:
    """The kernels that a step launches, in order, at a length of the benchmark task."""
    return launched_by(module_of(step), head_dim, mask, **options)


def launched_by(module: ModuleType, head_dim: int, mask: str = "causal", **options: object) -> list[Job]:
    q = torch.zeros(1, 1, 4096, head_dim, dtype=torch.float16)
    with pytest.MonkeyPatch.context() as patch:  # for a launcher that counts SMs
        patch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
        )
        return jobs_of(module, lambda: module.attention(q, q, q, mask == "causal", head_dim**-0.5, **options))


@pytest.fixture(scope="module")
def compiled() -> dict[tuple, list[tuple[Job, Stats]]]:
    launched = {case: jobs(*case) for case in CASES}
    stats = iter(inspect_sm90.compile_all(job for group in launched.values() for job in group))
    return {case: [(job, next(stats)) for job in group] for case, group in launched.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_step(compiled: dict[tuple, list[tuple[Job, Stats]]], case: tuple) -> None:
    assert compiled[case], "no kernel was launched"
    for job, stats in compiled[case]:
        name = job.kernel_name
        print(f"{case} {name}: {stats.registers} registers, {stats.spills} words, {stats.ctas_per_sm} CTAs")
        assert bool(stats.opcodes.get("HGMMA")) == (name not in NO_PRODUCT), f"{name}: tensor cores"
        assert not stats.opcodes.get("HMMA"), f"{name}: a product without the warpgroup instruction"
        assert stats.spills == 0, f"{name}: spills"
        assert stats.warnings == (), f"{name}: wgmma serialized?"
        assert stats.shared_bytes <= SMEM_LIMIT and stats.ctas_per_sm > 0, f"{name}: does not fit"


def test_the_spills_that_chapter_06_shows() -> None:
    """With 4 warps, the choice of the task's flash_v2, the tile does not fit the registers at D = 128."""
    step = "06_autotuning"
    configs = [module_of(step).Config(128, 64, warps, 3) for warps in (4, 8)]
    few, many = inspect_sm90.compile_all(jobs(step, 128, "causal", config=c)[0] for c in configs)
    assert few.spills > 0
    assert many.spills == 0


def test_two_loops_of_chapter_05_are_what_its_ablation_timed() -> None:
    """The kernel of the first change has no record of its own: it is the last one with another order."""
    variants = sources.variant_sources(NOTEBOOKS / "05_two_pass_causal.ipynb", "04_exp2")
    two_loops = sources.load_source("two_loops", variants["two_loops"])
    options = {"two_pass": True, "order": "head by head, shortest first"}
    pair = [*launched_by(two_loops, 64), *jobs("05_two_pass_causal", 64, "causal", **options)]
    ours, timed = inspect_sm90.compile_all(pair)
    assert ours.listing and ours.listing == timed.listing


def test_the_three_kernels_of_chapter_02_fit_as_its_one_kernel_does() -> None:
    variants = sources.variant_sources(NOTEBOOKS / "02_tiling.ipynb", "01_naive")
    three = launched_by(sources.load_source("three_kernels", variants["three_kernels"]), 64)
    assert [job.kernel_name for job in three] == ["max_kernel", "sum_kernel", "output_kernel"]
    for stats in inspect_sm90.compile_all(three):
        assert stats.opcodes.get("HGMMA") and stats.spills == 0 and stats.warnings == ()
        assert len(stats.loops) == 1 and stats.ctas_per_sm > 0
