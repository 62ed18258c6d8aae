"""The kernels of chapter 37 compiled for sm_90: what each exponential adds to the loop, what each kernel that
is wrong on purpose lacks, and that their copies with stamps have the same loop."""

from __future__ import annotations

import dataclasses

import pytest

from attnlib.bench import account, beside, budget, changed_kernels, inspect_sm90, sources, timeline
from attnlib.bench.inspect_sm90 import Stats

STEP, BASE = "37_exponentials", "15_teaching"
LOOP = "for i in range(start + 1, end)"
SPANS = [timeline.Span("loop", timeline.before(LOOP, tile="end"), timeline.after(LOOP, tile="end"))]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Stats]:
    kernels = changed_kernels.variants(STEP, BASE)
    # A step on the way; loops that are the kernel's own, or poly3's and multiply-adds; plans for chapter 15;
    # loops that the chapter itself looks through for spills.
    for name in ("whole", "no_copies", "no_mask", "poly2", "poly4", "two", "two_q", "vexp_three", "vexp_two",
                 "three", "poly6", "poly6_three", "no_copies_128", "no_maximum_exponentials", "staggered",
                 "twice"):  # fmt: skip
        del kernels[name]
    text = sources.kernel_source(sources.notebook_of(BASE))
    copy = timeline.of_text("37_stamped", text, kernels[BASE].attention, SPANS, range(65))
    job = changed_kernels.job(kernels[BASE], 64)
    types = {timeline.CLOCKS: "*i32:16"} | job.signature
    job = dataclasses.replace(job, kernel_file=copy.module.__file__, signature=types)
    found = {name: stats for (name, _), stats in changed_kernels.compiled(kernels, (64,)).items()}
    return found | {"stamped": inspect_sm90.compile_all([job])[0]}


def count(stats: Stats, kind: str) -> int:
    return stats.loops[0].get(kind, 0)


def test_no_loop_spills_or_serializes_its_products(compiled: dict[str, Stats]) -> None:
    for name, stats in compiled.items():
        assert stats.warnings == (), f"{name}: {stats.warnings}"
        spilling = [loop.get("STL", 0) + loop.get("LDL", 0) > 0 for loop in stats.loops]  # a loop a consumer
        assert any(spilling) == (name == "no_softmax"), f"{name}: {spilling}"  # no test of the rule, then
        assert (stats.spills > 0) == (name in ("no_softmax", "poly3_twice")), name  # the second once a tile
        assert stats.shared_bytes <= inspect_sm90.SMEM_LIMIT, name


def test_exponentials_leave_the_unit(compiled: dict[str, Stats]) -> None:
    for name in ("schraudolph", "vexp", "poly3", "no_exponentials"):
        assert count(compiled[name], "MUFU.EX2") == 2, name  # of alpha
        assert not any(count(compiled[name], kind) for kind in ("F2I", "I2F", "I2FP")), name
    assert count(compiled["poly3"], "FFMA") == 36 + 3 * 32  # of scale and shift, and a degree each
    for name in (BASE, "pairs", "pairs_bf16"):
        assert count(compiled[name], "MUFU.EX2") == 34  # not 18


def test_what_is_removed(compiled: dict[str, Stats]) -> None:
    def slots(name: str) -> int:
        return len(budget.walked(compiled[name]))

    base = slots(BASE)
    assert base == sum(compiled[BASE].loops[0].values()) - 32  # the vote jumps over 32 multiplications
    assert slots("no_exponentials") == base - 32
    assert 25 <= base - slots("no_sums") <= 34
    assert 45 <= base - slots("no_maximum") <= 65
    assert slots("no_softmax") < 90 and not count(compiled["no_softmax"], "MUFU.EX2")
    assert count(compiled["no_values"], "HGMMA") == 4 and count(compiled["no_values"], "MUFU.EX2") == 34


def test_a_loop_repeated_has_the_same_work_for_a_block(compiled: dict[str, Stats]) -> None:
    for name, of, times in (("thrice", BASE, 3), ("poly3_twice", "poly3", 2)):
        found, once = account.terms(compiled[name], times), account.terms(compiled[of])
        assert found.tensor == once.tensor
        assert found.slots == pytest.approx(once.slots, rel=0.02), name
        assert found.path == pytest.approx(once.path, rel=0.08), name
        assert found.code == pytest.approx(times * once.code, rel=0.02), name
        assert once.limit == 0 < found.limit, name


def test_budgets(compiled: dict[str, Stats]) -> None:
    found = budget.budget(compiled[BASE], copied=4096)
    assert (found.tensor, found.exp, found.shared) == (256, 272, 224)


def test_stamps_stay_out_of_the_loop(compiled: dict[str, Stats]) -> None:
    assert compiled["stamped"].order(0) == compiled[BASE].order(0)
    assert abs(len(budget.walked(compiled["stamped"])) - len(budget.walked(compiled[BASE]))) <= 2


def test_products_and_other_work_side_by_side() -> None:
    types = {"out_ptr": "*i32:16"}
    cases = (True, "multiply-adds"), (True, "exponentials"), (False, "maxima")
    jobs = [inspect_sm90.Job(beside.__file__, "beside", types, {"BUSY": busy, "KIND": kind}, max_registers=96)
            for busy, kind in cases]  # fmt: skip
    for (busy, _), stats in zip(cases, inspect_sm90.compile_all(jobs), strict=True):
        assert stats.spills == 0 and stats.warnings == ()
        assert bool(stats.loops) == busy
        if busy:
            assert stats.order(0) == "64 HGMMA, wait 0"
