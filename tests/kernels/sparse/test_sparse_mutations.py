"""Bugs planted in the portable kernels under a block mask, and in the lists: a case of test_sparse fails."""

from __future__ import annotations

import inspect
from operator import attrgetter

import pytest
from cases import INTERPRETER_REMARKS
from chosen import first_of_each
from families import fresh_launches  # noqa: F401  (a fixture)
from mutations import Mutation, check_places, load
from sparse_cases import CASES, check_backward, check_forward

from attnlib.block_mask import lists, mask, tiles
from attnlib.kernels.sparse import backward_kernels, forward_kernel, walk

pytestmark = INTERPRETER_REMARKS

DOTS = "B1 H2 S150x200 D64 dense fp16 dots"
CAUSAL = "B1 H2 S150x200 D64 dense fp16 causal"
NONE = "B1 H2 S150x200 D64 dense fp16 none"
STRIPES = "B1 H2 S150x200 D64 dense fp16 stripes"
CORNER = "B1 H2 S150x200 D64 dense fp16 corner"
GROUPS = "B2 H4/2 S130x170 D64 dense fp16 band by both"
WRONG = r"max error|not finite|LSE"
FORWARD = [
    Mutation("bits are not looked at", "& 1 != 0", "& 1 != 2", DOTS, WRONG, module=walk),
    Mutation("bits of the pair's columns change places", "(o_c // 8 * 2 + o_c % 2)",
             "(o_c // 8 * 2 + 1 - o_c % 2)",
             DOTS, WRONG, module=walk),
    Mutation("words of other columns", "(o_c % 8 // 2)", "(o_c // 2 % 2)", DOTS, WRONG, module=walk),
    Mutation("the right half of a tile has the bits of the left", "bits % 2 * 64 +", "", DOTS, WRONG,
             module=walk),
    Mutation("all tiles have the words of the first", "(bits // 2).to(tl.int64)",
             "(bits // 2 * 0).to(tl.int64)",
             DOTS, WRONG, module=walk),
    Mutation("steps with bits are left out",
             "b_acc, b_m, b_l = _steps(\n            b_acc, b_m, b_l, b_q, desc_k, "
             "desc_v, at_k, middle, end",
             "b_acc, b_m, b_l = _steps(\n            b_acc, b_m, b_l, b_q, desc_k, "
             "desc_v, at_k, end, end", CAUSAL, WRONG, module=forward_kernel),
    Mutation("steps without bits are left out", "at_k, first, middle, row", "at_k, middle, middle, row",
             CAUSAL,
             WRONG, module=forward_kernel),
    Mutation("a row that has seen nothing subtracts -inf from -inf",
             'm_ref = tl.where(m_new == float("-inf"), 0.0, m_new)', "m_ref = m_new", CORNER, "not finite",
             module=forward_kernel),
    Mutation("a row that sees nothing divides by 0", "tl.where(empty, 1.0, b_l)", "b_l", NONE, "not finite",
             module=forward_kernel),
    Mutation("a row that sees nothing has no LSE of -inf", 'tl.where(empty, float("-inf"), b_lse)',
             "tl.where(empty, 0.0, b_lse)", NONE, "LSE", module=forward_kernel),
    Mutation("all heads have the mask of the first", "i_b * mask_b + i_h * mask_h", "i_b * mask_b", GROUPS,
             WRONG,
             module=forward_kernel),
    Mutation("all batch elements have the mask of the first", "i_b * mask_b + i_h * mask_h", "i_h * mask_h",
             GROUPS, WRONG, module=forward_kernel),
]  # fmt: skip
BACKWARD = [
    Mutation("delta is forgotten in dK", "b_dst = b_pt * (b_dpt - b_delta[None, :])", "b_dst = b_pt * b_dpt",
             CAUSAL, "dk", module=backward_kernels),
    Mutation("delta is forgotten in dQ", "b_ds = b_p * (b_dp - b_delta[:, None])", "b_ds = b_p * b_dp",
             CAUSAL,
             "dq", module=backward_kernels),
    Mutation("hidden keys count in dQ", "BLOCK_M, BLOCK_N), b_p, 0.0)", "BLOCK_M, BLOCK_N), b_p, b_p)", DOTS,
             "dq",
             module=backward_kernels),
    Mutation("hidden queries count in dK and dV", "BLOCK_N, BLOCK_M), b_pt, 0.0)",
             "BLOCK_N, BLOCK_M), b_pt, b_pt)",
             DOTS, "d[kv]", module=backward_kernels),
    Mutation("only the first head of a group adds to dK and dV", "for g in range(GROUP)", "for g in range(1)",
             GROUPS, "d[kv]", module=backward_kernels),
    Mutation("all heads of a group have the mask of the first", "(mask + g * mask_h)", "mask", GROUPS,
             "d[kv]",
             module=backward_kernels),
    Mutation("steps with bits are left out of dK and dV", "head, middle, end, row", "head, end, end, row",
             CAUSAL,
             "d[kv]", module=backward_kernels),
    Mutation("steps without bits are left out of dQ", "at_k, first, middle, row", "at_k, middle, middle, row",
             STRIPES, "dq", module=backward_kernels),
    Mutation("dQ is not scaled", "b_dq * sm_scale", "b_dq", CAUSAL, "dq", module=backward_kernels),
    Mutation("dK is not scaled", "b_dk * sm_scale", "b_dk", CAUSAL, "dk", module=backward_kernels),
]  # fmt: skip
MASK = [
    Mutation("a tile's halves of rows have one kind",
             "full, some = (pairs == FULL).all(2), (pairs != 0).any(2)",
             "full, some = (pairs == FULL).any(2), (pairs != 0).any(2)",
             "B1 H2 S150x200 D64 dense fp16 rungs",
             WRONG, module=lists),
    Mutation("the order is that of the rows of all masks", "for chosen, first in ((full, starts[:-1])",
             "for chosen, first in ((full, starts[1:] - 1)", CAUSAL, "|".join((WRONG, "index")),
             module=lists),
    Mutation("keys past the end are seen", "found & inside[:, None, :] if grid.S_k % TILE else found",
             "found",
             "B1 H2 S150x200 D64 dense fp16 all", WRONG, module=tiles),
    Mutation("words of transposed tiles are not transposed", "pack(unpack(part).mT)", "pack(unpack(part))",
             CAUSAL,
             "d[kv]", module=tiles),
    Mutation("a window reaches one key further", "(offset <= right)", "(offset <= right + 1)",
             "B1 H1 S140x170 D64 causal fp16 dots", WRONG, module=mask),
]  # fmt: skip


def use(mutation: Mutation, tmp_path, monkeypatch) -> None:
    """Put what the mutant has in the place of what its module has."""
    mutant = load(mutation.of(inspect.getsource(mutation.module)), tmp_path)
    if mutation.module is mask:
        monkeypatch.setattr(mask.BlockMask, "_cut", mutant.BlockMask._cut)
        return
    for name, value in vars(mutant).items():
        if getattr(getattr(value, "fn", value), "__module__", "") == "mutant":
            for user in (mutation.module, mask, forward_kernel, backward_kernels):
                if hasattr(user, name):
                    monkeypatch.setattr(user, name, value)


MUTATIONS = FORWARD + BACKWARD + MASK


def test_each_bug_has_its_place() -> None:
    check_places(MUTATIONS)


@pytest.mark.parametrize("mutation", first_of_each(MUTATIONS, attrgetter("kind")), ids=str)
def test_is_caught(mutation, device, tmp_path, monkeypatch, fresh_launches):
    use(mutation, tmp_path, monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError), match=mutation.verdict):
        check_forward(CASES[mutation.caught_by], device)
        check_backward(CASES[mutation.caught_by], device)
