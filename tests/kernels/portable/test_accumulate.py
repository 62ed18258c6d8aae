"""The portable forward kernel merges its result into an existing one; and bugs planted there are noticed."""

from __future__ import annotations

import inspect

import pytest
from accumulated import BESIDE, CASES, NOT_FINITE, WRONG_LSE, WRONG_OUTPUT, check
from cases import INTERPRETER_REMARKS
from forward_mutations import use_source  # noqa: F401  (a fixture)
from mutations import Mutation

from attnlib.kernels.portable import forward_kernel

pytestmark = INTERPRETER_REMARKS


@pytest.mark.parametrize("name", CASES)
def test_parts_are_the_whole(name):
    check(CASES[name], "triton")


@pytest.mark.parametrize("name", CASES)
def test_parts_are_the_whole_in_the_reference(name):
    check(CASES[name], "reference")


MUTATIONS = [
    Mutation("no maximum is subtracted", "b_max = tl.maximum(b_before, b_here)",
             "b_max = tl.zeros_like(b_here)", "large scores", NOT_FINITE),
    Mutation("the smaller LSE is subtracted", "tl.maximum(b_before, b_here)", "tl.minimum(b_before, b_here)",
             "large scores", NOT_FINITE),
    Mutation("-inf is subtracted from -inf", 'b_max = tl.where(b_max == float("-inf"), 0.0, b_max)',
             "b_max = b_max", "rows without keys", NOT_FINITE),
    Mutation("the sign of an exponent", "tl.exp(b_before - b_max)", "tl.exp(b_max - b_before)", "two parts",
             NOT_FINITE),
    Mutation("0 / 0 in a row without keys", "1.0 / tl.where(b_sum == 0.0, 1.0, b_sum)", "1.0 / b_sum",
             "rows without keys", NOT_FINITE),
    Mutation("weights do not add up to 1", "return b_old * b_inverse, b_new * b_inverse",
             "return b_old, b_new * b_inverse", "two parts", WRONG_OUTPUT),
    Mutation("the LSE without its maximum", "b_max + tl.log(b_sum)", "tl.log(b_sum)", "one of one",
             WRONG_LSE),
    Mutation("the LSE of these keys alone", "b_max + tl.log(b_sum)", "b_here", "two parts", WRONG_LSE),
    Mutation("what nobody has written is read", "mask=((o_m < S_q) & (b_old > 0.0))[:, None]",
             "mask=(o_m < S_q)[:, None]", "two parts", NOT_FINITE),
    Mutation("rows beyond the last", "b_before.to(tl.float32), mask=(o_m < S_q)[:, None]",
             "b_before.to(tl.float32), mask=(o_m < S_q + 1)[:, None]", "two parts", BESIDE),
    Mutation("columns beyond the last", "in_d = (o_d < COLUMNS)", "in_d = (o_d < COLUMNS + 1)", "narrow",
             f"{NOT_FINITE}|{WRONG_OUTPUT}|{BESIDE}"),
    Mutation("an LSE beyond the last row", "b_max + tl.log(b_sum), mask=o_m < S_q",
             "b_max + tl.log(b_sum), mask=o_m <= S_q", "two parts", f"{BESIDE}|{WRONG_LSE}"),
    Mutation("every head in the place of the first", "into_b + i_h.to(tl.int64) * into_h",
             "into_b + 0 * into_h", "grouped heads", f"{NOT_FINITE}|{WRONG_OUTPUT}|{BESIDE}"),
    Mutation("the new output without its weight", "b_o * b_new[:, None]", "b_o", "two parts", WRONG_OUTPUT),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_planted_bug_is_noticed(mutation, use_source):  # noqa: F811
    use_source(mutation.of(inspect.getsource(forward_kernel)))
    with pytest.raises(AssertionError, match=mutation.verdict):
        check(CASES[mutation.caught_by], "triton")
