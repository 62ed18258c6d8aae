"""The checks catch planted bugs: each edit of a kernel's source fails a case of test_distr."""

from __future__ import annotations

import inspect
from operator import attrgetter

import pytest
from cases import INTERPRETER_REMARKS
from chosen import first_of_each
from distr_cases import CASES, DistrCase, check
from emulated import mutate, on_the_cpu
from families import fresh_launches  # noqa: F401  (a fixture)
from mutations import Mutation, check_places, load

from attnlib.kernels.common.distr import Grouping
from attnlib.kernels.distr import group_kernels
from attnlib.kernels.hopper import coordinates, narrow
from attnlib.kernels.portable import forward_kernel as portable_kernel

pytestmark = INTERPRETER_REMARKS

KERNELS = "project_columns", "order_columns", "sum_queries", "gather_keys"
PLAIN, DENSE = str(DistrCase()), str(DistrCase(causal=False))
SHARED = "B2 H4/2 S200x230 D64 G2 k causal float16"
OWN = "B2 H4/2 S200x230 D64 G2 q dense float16"
BLOCKED, NARROW = "B1 H2/2 S300x300 D64 G2 q128 causal float16", "B1 H2/2 S40x40 D40 G5 k causal float16"
GROUPED = "B1 H2/1 S300x330 D128 G2 q128 causal float16"
WIDE = "B1 H2/2 S150x150 D128 G4 k causal float16"
FEWER = "B1 H2/2 S300x200 D64 G2 q128 causal float16"
VALUES = r"max error .* \(budget .*\), RMS error|\d+ of \d+ values are not finite"

MUTATIONS = [
    Mutation("the seed changes nothing", "_mixed(seed.to(tl.uint32))", "_mixed(0 * seed.to(tl.uint32))", WIDE,
             "places"),
    Mutation("rows of a chunk are taken twice", "tl.range(i_c * chunk_rows, tl",
             "tl.range(0 * i_c, tl", BLOCKED, "places"),
    Mutation("a projection is left out", "1 << o_j[:, None], 0), 0)",
             "(1 << o_j[:, None]) & 0x7FFF, 0), 0)", PLAIN, "places"),
    Mutation("codes are sorted as numbers", "    code ^= code >> 1\n    code ^= code >> 2\n",
             "    code ^= code >> 16\n", PLAIN, "places"),
    Mutation("equal codes have one place", "code * WIDTH + o_c, CODES", "code * WIDTH, CODES", str(
        DistrCase(70, alike=(2, 2))), "places: not a permutation"),
    Mutation("columns beyond the last one are sorted in", "CODES * WIDTH + o_c)", "o_c - WIDTH)", NARROW,
             "places"),
    Mutation("parts of other blocks are summed", "tl.range(i_n * of_block,", "tl.range(0 * i_n,", BLOCKED,
             "places"),
    Mutation("sums are of the next group", "D, WIDTH) // GROUP", "D, WIDTH) // GROUP + 1", PLAIN, "q"),
    Mutation("sums miss a column", "(group[:, None] == tl",
             "((group - (tl.arange(0, WIDTH) == 3))[:, None] == tl", PLAIN, "q"),
    Mutation("all rows have the groups of the first block", "+ i_m * ROWS // shared)", "+ 0 * i_m)", BLOCKED,
             "q"),
    Mutation("query heads have the groups of another key head", "(i_bh // PER_KEY_HEAD) * blocks",
             "(i_bh % H // PER_KEY_HEAD) * blocks", SHARED, "q"),
    Mutation("the last column of a group is taken", "place[:, None] == (tl.arange(0, COLUMNS) * GROUP)[",
             "place[:, None] == (tl.arange(0, COLUMNS) * GROUP + GROUP - 1)[", PLAIN, "k"),
    Mutation("keys are of the wrong head", "(i_bh % H // PER_KEY_HEAD)", "(i_bh % H // (PER_KEY_HEAD + 1))",
             SHARED, "k"),
    Mutation("all blocks have the first one's columns", "head.to(tl.int64) * D, D, WIDTH)",
             "(head - i_n).to(tl.int64) * D, D, WIDTH)", BLOCKED, "k"),
    Mutation("keys that are seen are left out", "(i_m * ROWS - shift, 0) // shared",
             "(i_m * ROWS - shift, 0) // shared + 1", BLOCKED, "k"),
    Mutation("a shift is forgotten", "(i_m * ROWS - shift, 0)", "(i_m * ROWS, 0)", GROUPED, "k"),
]  # fmt: skip

PRODUCT = [
    Mutation("all rows have the keys of the first block",
             "own = i_h * tl.cdiv(S_q, shared_rows) + start // shared",
             "own = i_h * tl.cdiv(S_q, shared_rows) + 0 * start // shared", BLOCKED, VALUES),
    Mutation("keys are of the key head", "at_kv = (i_b, own), (i_b, i_kv)",
             "at_kv = (i_b, i_kv), (i_b, i_kv)", OWN, VALUES),
    Mutation("values are of the keys' head", "at_kv = (i_b, own), (i_b, i_kv)",
             "at_kv = (i_b, own), (i_b, i_h)", GROUPED, VALUES),
]  # fmt: skip

HOPPER = [
    Mutation("all rows have the keys of the first block", "+ i_own, 0", "+ 0 * i_own, 0", "blocks", VALUES,
             (), coordinates),
    Mutation("values are of the keys' head",
             "    if plan.own_keys:\n        return at[0], at[1], key, 0\n    elif",
             "    if plan.own_keys:\n        return at[0], at[2], key, 0\n    elif", "blocks", VALUES, (),
             coordinates),
    Mutation("a head has as many blocks as it has in one tile", "i_h * work.key_blocks + i_own",
             "i_h * 2 + i_own", "blocks", VALUES, (), coordinates),
]  # fmt: skip
HOPPER_CASES = {"blocks": DistrCase(300, Grouping(2, "q", 128), 64, 2, 1)}


def check_in_emulator(case: DistrCase, mutants: dict | None = None) -> None:
    def forward(made, v, params):
        with on_the_cpu("random", 0, mutants=mutants):
            return narrow.forward(made, v, params)

    check(case, "cpu", forward)


def test_each_bug_has_its_place() -> None:
    check_places(MUTATIONS, group_kernels)


@pytest.mark.parametrize("mutation", first_of_each(MUTATIONS, attrgetter("kind")), ids=str)
def test_is_caught(
    mutation: Mutation, device: str, tmp_path, monkeypatch: pytest.MonkeyPatch, fresh_launches
) -> None:
    mutant = load(mutation.of(inspect.getsource(group_kernels)), tmp_path)
    for name in KERNELS:
        monkeypatch.setattr(group_kernels, name, getattr(mutant, name))
    with pytest.raises(AssertionError, match=rf"is wrong: ({mutation.verdict})"):
        check(CASES[mutation.caught_by], device)


@pytest.mark.parametrize("mutation", PRODUCT, ids=str)
def test_product_is_caught(
    mutation: Mutation, device: str, tmp_path, monkeypatch: pytest.MonkeyPatch, fresh_launches
) -> None:
    mutant = load(mutation.of(inspect.getsource(portable_kernel)), tmp_path)
    monkeypatch.setattr(portable_kernel, "attention_forward", mutant.attention_forward)
    with pytest.raises(AssertionError, match=rf"is wrong: ({mutation.verdict})"):
        check(CASES[mutation.caught_by], device)


@pytest.mark.parametrize("mutation", HOPPER, ids=str)
def test_hopper_is_caught(mutation: Mutation) -> None:
    with pytest.raises(AssertionError, match=rf"is wrong: ({mutation.verdict})"):
        check_in_emulator(HOPPER_CASES[mutation.caught_by], mutate(mutation))
