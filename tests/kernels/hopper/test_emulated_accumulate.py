"""The Hopper forward kernel merges its result into an existing one, in the emulator; and bugs planted there
are noticed."""

from __future__ import annotations

import pytest
from accumulated import BESIDE, CASES, NOT_FINITE, WRONG_LSE, WRONG_OUTPUT, check
from cases import INTERPRETER_REMARKS
from emulated import ORDERS, mutate, on_the_cpu
from mutations import Mutation

from attnlib.kernels.hopper import accumulate

pytestmark = INTERPRETER_REMARKS


@pytest.mark.parametrize("name", CASES)
def test_parts_are_the_whole(name):
    with on_the_cpu() as kernels:
        check(CASES[name], "hopper")
    assert kernels["attention_forward_hopper"].reports


@pytest.mark.parametrize("order", ORDERS)
def test_in_other_orders(order):
    for seed in range(4 if order == "random" else 1):
        with on_the_cpu(order, seed):
            check(CASES["causal"], "hopper")


def bug(name: str, right: str, wrong: str, caught_by: str, verdict: str, module=accumulate) -> Mutation:
    return Mutation(name, right, wrong, caught_by, verdict, module=module)


MUTATIONS = [
    bug("no maximum is subtracted", "top = gl.maximum(before, here)", "top = gl.maximum(before, here) * 0.0",
        "large scores", NOT_FINITE),
    bug("the smaller LSE is subtracted", "gl.maximum(before, here)", "gl.minimum(before, here)",
        "large scores", NOT_FINITE),
    bug("-inf is subtracted from -inf", 'top = gl.where(top == float("-inf"), 0.0, top)', "top = top + 0.0",
        "rows without keys", NOT_FINITE),
    bug("the sign of an exponent", "gl.exp2(before - top)", "gl.exp2(top - before)", "two parts", NOT_FINITE),
    bug("0 / 0 in a row without keys", "1.0 / gl.where(total == 0.0, 1.0, total)", "1.0 / total",
        "rows without keys", NOT_FINITE),
    bug("weights do not add up to 1", "return old * inverse, new", "return old, new", "two parts",
        WRONG_OUTPUT),
    bug("the LSE without its maximum", "(top + gl.log2(total)) * LN2", "gl.log2(total) * LN2", "one of one",
        WRONG_LSE),
    bug("an LSE in the wrong units", 'other=float("-inf")) * LOG2_E', 'other=float("-inf"))', "two parts",
        WRONG_OUTPUT),
    bug("what nobody has written is read", "((o_m < S_q) & (old > 0.0))[:, None]", "(o_m < S_q)[:, None]",
        "two parts", NOT_FINITE),
    bug("rows beyond the last", "before.to(gl.float32), mask=(o_m < S_q)[:, None]",
        "before.to(gl.float32), mask=(o_m < S_q + 1)[:, None]", "two parts", BESIDE),
    bug("columns beyond the last", "(o_d < plan.accumulate)", "(o_d < plan.accumulate + 1)", "narrow",
        f"{NOT_FINITE}|{WRONG_OUTPUT}|{BESIDE}"),
    bug("an LSE beyond the last row", "mask=weights.o_m < S_q", "mask=weights.o_m <= S_q", "two parts",
        f"{BESIDE}|{WRONG_LSE}"),
    bug("the other half of the columns", "START + N // 2, plan", "START, plan", "256", NOT_FINITE),
    bug("the second part of the columns", "o[i], old, row, S_q, plan.d, plan", "o[i], old, row, S_q, 0, plan",
        "two parts of columns", NOT_FINITE),
    bug("strides of a head and a batch exchanged",
        "at[0].to(gl.int64) * into.out_b + at[1].to(gl.int64) * into.out_h",
        "at[1].to(gl.int64) * into.out_b + at[0].to(gl.int64) * into.out_h", "grouped heads",
        f"{NOT_FINITE}|{WRONG_OUTPUT}|{BESIDE}"),
    bug("the new output without its weight", "factor *= weights.new", "factor *= 1.0", "two parts",
        WRONG_OUTPUT),
    bug("the new LSE without the shift", "here = shift + gl.log2(row_sums)", "here = gl.log2(row_sums)",
        "two parts", WRONG_OUTPUT),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_planted_bug_is_noticed(mutation):
    with (
        pytest.raises((AssertionError, IndexError), match=f"{mutation.verdict}|outside of its tensor"),
        on_the_cpu(mutants=mutate(mutation)),
    ):
        check(CASES[mutation.caught_by], "hopper")
