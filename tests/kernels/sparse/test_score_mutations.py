"""Bugs planted in what the portable kernels do for a score: a case of `score_cases` fails."""

from __future__ import annotations

import inspect
from operator import attrgetter

import pytest
from cases import INTERPRETER_REMARKS
from chosen import first_of_each
from families import fresh_launches  # noqa: F401  (a fixture)
from mutations import Mutation, check_places, load
from score_cases import CASES, check_scored

from attnlib.kernels.sparse import backward_kernels, bias_kernel, forward_kernel, scores

pytestmark = INTERPRETER_REMARKS

DOTS = "B1 H2 S130x170 D64 dense fp16 dots"
GROUPS = "B2 H4/2 S70x140 D64 dense fp16 band by both, cap 2 + alibi + sinks + bias by key"
OWN = "B2 H4/2 S70x140 D64 dense fp16 band by both, own"
CAPPED = f"{OWN} + cap 2 + sinks + bias by key"
HOLE = "B1 H1 S150x330 D64 dense fp16 hole, relative"
TABLE = "B2 H4/2 S70x140 D64 dense fp16 band by both, cap 2 + relative"
WRONG = r"max error|not finite|LSE"


def of(part: str) -> str:
    return f"{DOTS}, {part}"


MUTATIONS = [
    Mutation("a cap is not scaled back", "b_s = b_t * cap", "b_s = b_t", of("cap 2"), WRONG, module=scores),
    Mutation("a cap has no derivative", "derivative * (1 - b_t * b_t)", "derivative", of("cap 2"),
             "d[qk]", module=scores),
    Mutation("tanh of negative scores", "tl.where(x < 0, -t, t)", "t", of("cap 2"), WRONG, module=scores),
    Mutation("queries stand at their own number", "(o_q + shift)", "o_q", of("alibi"), WRONG,
             module=scores),
    Mutation("keys after a query are nearer than itself", "tl.abs(o_k - (o_q + shift))",
             "(o_q + shift - o_k)", of("alibi"), WRONG, module=scores),
    Mutation("slopes of the first head", "alibi_ptr + i_h", "alibi_ptr + 0 * i_h", of("alibi"), WRONG,
             module=scores),
    Mutation("a bias in base 2", "b_bias.to(tl.float32) * LOG2_E", "b_bias.to(tl.float32)",
             of("bias by all"), WRONG, module=scores),
    Mutation("the bias of the first head", "i_h.to(tl.int64) * bias_h", "0",
             of("bias by head and key"), WRONG, module=scores),
    Mutation("the bias of the first batch element", "i_b.to(tl.int64) * bias_b", "0", GROUPS, WRONG,
             module=scores),
    Mutation("a row begins without its sink", "b_l = tl.full([BLOCK_M], 1.0, tl.float32)",
             "b_l = tl.zeros([BLOCK_M], tl.float32)", of("sinks"), WRONG, module=forward_kernel),
    Mutation("the sign of the sinks' gradient", "-tl.sum(b_sum, 0)", "tl.sum(b_sum, 0)", of("sinks"),
             "dsinks", module=scores),
    Mutation("sinks of the first batch element", "range(B * (padded // BLOCK))", "range(padded // BLOCK)",
             GROUPS, "dsinks", module=scores),
    Mutation("dK does not know the cap", "b_dst = b_dst * slope", "b_dst = b_dst * 1.0", of("cap 2"), "dk",
             module=backward_kernels),
    Mutation("dQ does not know the cap", "b_ds = b_ds * slope", "b_ds = b_ds * 1.0", of("cap 2"), "dq",
             module=backward_kernels),
    *(Mutation(bug, right, wrong, case, "dbias", module=bias_kernel) for bug, right, wrong, case in (
        ("dbias of all heads goes to the first", "own_h.to(tl.int64) * dbias_h", "0",
         of("bias by head and key")),
        ("dbias of all batch elements goes to the first", "own_b.to(tl.int64) * dbias_b", "0", GROUPS),
        ("dbias of keys is not summed up", "tl.sum(b_sum, 1), mask", "tl.max(b_sum, 1), mask",
         of("bias by query")),
        ("dbias of one of the heads that share it", "own_b * 0, H\n", "own_b * 0, 1\n",
         of("bias by both places")),
        ("dbias of one of the batch elements that share it", "1 if BATCHES else B", "1", TABLE),
        ("dbias of what is hidden", "tl.where(b_seen | (slot < 0), b_p, 0.0)", "b_p",
         of("bias by both places")),
        ("dbias of what the left half sees", "start % TILE, key % TILE, BLOCK_M", "start % TILE, 0, BLOCK_M",
         of("bias by both places")),
        ("blocks that nobody sees", "visits * mixed, own", "visits * (1 - mixed), own", of("bias by all")),
        ("dbias of a tile with words as if it had none", "(seen_by_some - mixed), own",
         "seen_by_some, own", of("bias by both places")),
        ("dbias of blocks that nobody sees", "tl.where(some, b_lse2,", "tl.where(some | True, b_lse2,", HOLE),
        ("dbias with a bias in base 2", "b_bias.to(tl.float32) * LOG2_E", "b_bias.to(tl.float32)",
         of("bias by all")),
        ("dbias with the bias of the first head", "bias_h, own_b, own_h)", "bias_h, own_b, 0 * own_h)",
         of("bias by head and key")),
        ("dbias with the bias of the first batch element", "bias_h, own_b, own_h)",
         "bias_h, 0 * own_b, own_h)", GROUPS),
        ("a band without its last block", "(columns - d + RATIO - 1) // RATIO", "(columns - d - 1) // RATIO",
         HOLE),
        ("a band without its first block", "(RATIO - 1 - d) // RATIO", "(2 * RATIO - 1 - d) // RATIO",
         of("relative")),
    )),
    Mutation("a function without what it is multiplied with", "i_h, i_b) * after", "i_h, i_b)", of("own"),
             WRONG, module=scores),
    Mutation("a function has no derivative", "derivative = DERIVATIVE(b_s, o_q, o_k, i_h, i_b)",
             "derivative = 1.0 + 0 * b_s", of("own"), "d[qk]", module=scores),
    Mutation("a derivative of other scores", "derivative = DERIVATIVE(b_s,",
             "derivative = DERIVATIVE(b_s * 2,", of("own"), "d[qk]", module=scores),
    Mutation("a cap without the derivative of a function before it", "derivative * (1 - b_t * b_t)",
             "(1 - b_t * b_t)", CAPPED, "d[qk]", module=scores),
    Mutation("functions of the first head", "after, i_h, i_b)", "after, 0, i_b)", of("own"), WRONG,
             module=forward_kernel),
    Mutation("functions of the first batch element, in dK and dV",
             "    score = (cap, slope, bias, bias_m, BIAS_N, after, i_h, i_b)\n        number",
             "    score = (cap, slope, bias, bias_m, BIAS_N, after, i_h, 0)\n        number", OWN, "d[kv]",
             module=backward_kernels),
]  # fmt: skip


def test_each_bug_has_its_place() -> None:
    check_places(MUTATIONS)


@pytest.mark.parametrize("mutation", first_of_each(MUTATIONS, attrgetter("kind")), ids=str)
def test_is_caught(mutation, device, tmp_path, monkeypatch, fresh_launches):
    mutant = load(mutation.of(inspect.getsource(mutation.module)), tmp_path)
    for name, value in vars(mutant).items():
        if getattr(getattr(value, "fn", value), "__module__", "") == "mutant":
            for user in (mutation.module, forward_kernel, backward_kernels, bias_kernel):
                if hasattr(user, name):
                    monkeypatch.setattr(user, name, value)
    with pytest.raises(Exception, match=mutation.verdict):
        check_scored(CASES[mutation.caught_by], device)
