"""The kernels of chapters 14 and 15 compiled for sm_90, each change at each head dimension."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from chosen import with_more
from launches import jobs_of

from attnlib.bench import changed_kernels, inspect_sm90, sources
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Stats

DIMS = (64, 128, 256)
DENSE = with_more([256], DIMS)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int], Stats]:
    later = changed_kernels.load("15_teaching")
    kernels, last = later | changed_kernels.load("14_ring"), list(later)[-1]  # "14_ring": before its changes
    dense = changed_kernels.compiled({f"{last}, dense": kernels[last]}, DENSE, causal=False)
    return changed_kernels.compiled(kernels, DIMS) | dense


def test_no_kernel_spills_or_serializes_its_products(compiled: dict[tuple[str, int], Stats]) -> None:
    for case, stats in compiled.items():
        assert stats.spills == 0, f"{case}: spills"
        assert stats.warnings == (), f"{case}: {stats.warnings}"
        assert stats.shared_bytes <= SMEM_LIMIT, f"{case}: does not fit"
        assert stats.opcodes.get("HGMMA") and not stats.opcodes.get("HMMA"), case


def in_loop(stats: Stats, what: str) -> int:
    return sum(what in text for text in stats.loop_listings[0])


@pytest.mark.parametrize("d", DIMS)
def test_what_each_change_takes_out_of_the_loop(d: int, compiled: dict[tuple[str, int], Stats]) -> None:
    synchronized = [in_loop(compiled[name, d], "BAR.SYNC") for name in ("14_ring", "ring", "named")]
    assert synchronized == [3, 2, 1]
    exchanges = [in_loop(compiled[name, d], "SHFL") for name in ("lazy", "parts")]
    assert exchanges == [8, 4]
    assert in_loop(compiled["lazy", d], "VOTE") == 1 and not in_loop(compiled["named", d], "VOTE")
    if d == 256:
        assert in_loop(compiled["told", d], "ISETP") > 30 > 3 > in_loop(compiled["diagonal", d], "ISETP")


def test_the_place_of_the_wait(compiled: dict[tuple[str, int], Stats]) -> None:
    assert compiled["parts", 128].order(0).endswith("wait 1, wait 0, 66 EX2")
    assert compiled["place", 128].order(0).endswith("wait 1, 34 EX2, wait 0, 32 EX2")


@pytest.mark.parametrize("d", DIMS)
def test_what_stands_behind_the_branch(d: int, compiled: dict[tuple[str, int], Stats]) -> None:
    """What chapters 14 and 15 say of lazy and place: where the conversions of P and the exchanges stand."""
    at = {row["kernel"]: row for row in changed_kernels.order_in_loop(compiled, ("named", "lazy", "place"))
          if row["D"] == d}  # fmt: skip
    conversions = {name: row["conversions behind it"] for name, row in at.items()}
    assert conversions["lazy"] == (16 if d == 256 else 32)
    assert max(conversions["named"], conversions["place"]) <= 3
    assert at["named"]["branch"] is None
    assert at["lazy"]["branch"] > at["lazy"]["last exponential"] > at["place"]["branch"]
    assert at["lazy"]["used after"] <= 3 < 10 < at["named"]["used after"]


def test_the_kernel_in_pieces_is_that_of_chapter_13(compiled: dict[tuple[str, int], Stats]) -> None:
    module, jobs = sources.load_step("13_scheduling"), []
    with pytest.MonkeyPatch.context() as patch:  # for a launcher that counts SMs
        sms = SimpleNamespace(multi_processor_count=132)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
        for d in DIMS:
            q = torch.zeros(1, 1, 4096, d, dtype=torch.float16)
            jobs += jobs_of(module, partial(module.attention, q, q, q, True))
    old = inspect_sm90.compile_all(jobs)
    for d, stats in zip(DIMS, old, strict=True):
        new = compiled["14_ring", d]
        assert new.order(0) == stats.order(0)
        assert sum(new.loops[0].values()) == sum(stats.loops[0].values())
