"""The kernels of chapter 21 compiled for sm_90, each change at each head dimension."""

from __future__ import annotations

import pytest
from chosen import EVERY, with_more

from attnlib.bench import changed_kernels, sources
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Stats
from attnlib.book import answers

STEP, DIMS = "21_hopper_backward", with_more([128], [64])
ALWAYS = STEP, "tall", "its solution"
"""Compiled at D = 64 where not every kernel is."""
SPILLS = {("queue", 128): 4, ("tall", 128): 4, ("tall", 64): 10, ("turns", 64): 10, ("turns", 128): 4,
          ("exercise 4", 64): 10, ("exercise 4", 128): 4,
          ("its solution", 64): 12, ("its solution", 128): 8}  # fmt: skip
"""32-bit words of a thread that may spill, addresses: the package's kernel has 10 and 6."""


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int], Stats]:
    kernels = changed_kernels.load(STEP)
    turns = sources.cells_tagged(sources.notebook_of(STEP), "variant")[0]
    kernels["turns"] = changed_kernels.beside(STEP, "tall", turns)
    stub = sources.cells_tagged(sources.notebook_of(STEP), "exercise")[3].split("\n\n\nin_turns = ")[0]
    kernels["exercise 4"] = changed_kernels.beside(STEP, "tall", stub)
    answer = answers.solutions(STEP).in_turns
    kernels["its solution"] = changed_kernels.with_functions(STEP, answer)
    found = changed_kernels.compiled(kernels, DIMS)
    if not EVERY:
        found |= changed_kernels.compiled({name: kernels[name] for name in ALWAYS}, (64,))
    return found


def test_products_are_not_serialized_and_spills_are_few(compiled: dict[tuple[str, int], Stats]) -> None:
    for case, stats in compiled.items():
        assert stats.spills <= SPILLS.get(case, 0), f"{case}: {stats.spills} words spill"
        assert stats.warnings == (), f"{case}: {stats.warnings}"
        assert stats.shared_bytes <= SMEM_LIMIT, f"{case}: does not fit"
        assert stats.opcodes.get("HGMMA") and not stats.opcodes.get("HMMA"), case


def test_the_wide_form_and_who_comes_first() -> None:
    text = sources.cells_tagged(sources.notebook_of(STEP), "variant")[2]
    of_dq = "        (form_dq, (dq_ptr, mem, work, plan)),\n"
    of_dk = "        (form_dk, (given, plan)),\n"
    later = text.replace(of_dq, "").replace(of_dk, of_dk + of_dq).replace("[192, 192, 24]", "[192, 96, 24]")
    orders = {name: changed_kernels.beside(STEP, "tall", x) for name, x in (("first", text), ("last", later))}
    stats = changed_kernels.compiled(orders, (256,))
    first, last = stats["first", 256], stats["last", 256]
    assert first.spills == 0 and first.warnings == () and first.shared_bytes <= SMEM_LIMIT
    assert sorted(loop["HGMMA"] for loop in first.loops) == [8, 24, 24]
    moves = [sum("R2UR" in text for loop in found.loop_listings for text in loop) for found in (first, last)]
    assert moves[0] <= 3 and moves[1] > 100


@pytest.mark.parametrize("d", DIMS)
def test_what_each_change_does_to_the_loop(d: int, compiled: dict[tuple[str, int], Stats]) -> None:
    additions = {name: compiled[name, d].loops[0]["REDG"] for name in (STEP, "sums", "producer", "pair")}
    assert additions == {STEP: d // 4, "sums": d // 8, "producer": d // 8, "pair": d // 16}
    waits = {name: compiled[name, d].order(0).count("wait 0") for name in ("late", "under", "queue")}
    assert waits == {"late": 5, "under": 5, "queue": 2}
    assert compiled["late", d].order(0).startswith("32 EX2")
    assert "HGMMA" in compiled["under", d].order(0).split(", ")[0]  # dP is started before the exponentials
    assert compiled["queue", d].order(0).endswith("wait 2, wait 1, wait 0")
    uniform = [sum("R2UR" in text for text in loop) for loop in compiled["tall", d].loop_listings]
    assert max(uniform) <= 3, "addresses of operands are taken for different in each thread"
