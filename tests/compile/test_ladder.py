"""The kernel cells of the notebooks compiled for sm_90, in the configurations that the chapters run."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
import torch
from chosen import more
from launches import jobs_of

from attnlib.bench import inspect_sm90, sources
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Job, Stats
from attnlib.bench.paths import NOTEBOOKS
from attnlib.book import late_tile
from attnlib.book.chapters import STEPS

HAVE_KERNELS = [step for step, _ in STEPS if step != "08_production"]  # whose cell c08-sass compiles it
CASES = list(product(HAVE_KERNELS, (64, 128, 256), ("causal",)))
CASES += more(product(HAVE_KERNELS, (64, 128, 256), ("dense",)))
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
    """With 4 warps, the choice of the task's flash_v2, the tile does not fit the registers at D = 128. The
    chapter shows it with the kernel that it searches tiles for, that of chapter 05."""
    (job,) = jobs("05_two_pass_causal", 128, "causal")
    tall = replace(job, constexprs=job.constexprs | {"BLOCK_M": 128, "BLOCK_N": 64})
    few, many = inspect_sm90.compile_all(replace(tall, num_warps=warps) for warps in (4, 8))
    assert few.spills > 0
    assert many.spills == 0


@pytest.fixture(scope="module")
def on_the_way() -> dict[str, list[Stats]]:
    """The kernels between two steps, at D = 64, and the one that chapter 05's ablation timed; all at once."""
    ways = {
        "three_kernels": ("02_tiling", "01_naive", {}),
        "two_loops": ("05_two_pass_causal", "04_exp2", {}),
    }
    tile = module_of("06_autotuning").Config(64, 64, 4, 2)
    beside = "07_descriptors_and_late_tile", "06_autotuning", {"config": tile}
    ways |= dict.fromkeys(("descriptors", "late"), beside)
    found = {}
    for name, (step, base, options) in ways.items():
        text = sources.variant_sources(NOTEBOOKS / f"{step}.ipynb", base)[name]
        found[name] = launched_by(sources.load_source(name, text), 64, **options)
    options = {"two_pass": True, "order": "head by head, shortest first"}
    found["timed"] = jobs("05_two_pass_causal", 64, "causal", **options)
    stats = iter(inspect_sm90.compile_all(job for group in found.values() for job in group))
    return {name: [next(stats) for _ in group] for name, group in found.items()}


@pytest.mark.parametrize(("name", "kernels"), [("three_kernels", 3), ("descriptors", 1), ("late", 1)])
def test_kernels_between_two_steps_fit(on_the_way: dict[str, list[Stats]], name: str, kernels: int) -> None:
    assert len(on_the_way[name]) == kernels
    for stats in on_the_way[name]:
        assert stats.opcodes.get("HGMMA") and stats.loops
        assert stats.spills == 0 and stats.warnings == () and stats.ctas_per_sm >= 3


def test_two_loops_of_chapter_05_are_what_its_ablation_timed(on_the_way: dict[str, list[Stats]]) -> None:
    """The kernel of the first change has no record of its own: it is the last one with another order."""
    (ours,), (timed,) = on_the_way["two_loops"], on_the_way["timed"]
    assert ours.listing and ours.listing == timed.listing


@pytest.mark.parametrize("name", ["06_autotuning", "descriptors", "late"])
def test_chapter_07_compiles_what_its_launchers_launch(name: str) -> None:
    texts = sources.variant_sources(NOTEBOOKS / "07_descriptors_and_late_tile.ipynb", "06_autotuning")
    module = sources.load_source(name, texts[name])
    tile = module.Config(64, 32, 4, 2)
    (launched,) = launched_by(module, 256, config=tile)
    described = late_tile.job(module, 256, tile)
    first, second = inspect_sm90.compile_all([launched, described])
    assert first.listing and first.listing == second.listing


def test_the_second_change_of_chapter_07_overlaps(on_the_way: dict[str, list[Stats]]) -> None:
    (in_order,), (late,) = on_the_way["descriptors"], on_the_way["late"]
    for stats in (in_order, late):
        assert stats.loops[0].get("UTMALDG") and not stats.loops[0].get("LDGSTS")
    assert late.order(0).count("HGMMA") > in_order.order(0).count("HGMMA")  # products between exponentials
