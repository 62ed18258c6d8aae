"""Scores in the Hopper kernels in the emulator, their gradients too; and bugs planted."""

from __future__ import annotations

import re
from operator import attrgetter

import families
import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import first_of_each, in_turn, with_more
from emulated import mutate, on_the_cpu
from mutations import Mutation, check_places
from score_cases import (
    bent,
    bent_derivative,
    bent_reference,
    of_place,
    of_place_derivative,
    of_place_reference,
)
from sparse_cases import FUNCTIONS

from attnlib import Score, explain
from attnlib.block_mask import BlockMask
from attnlib.emulator import Deadlock, Race
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.kernels.reference.gradients import gradient_fp64
from attnlib.kernels.sparse import (
    hopper,
    hopper_backward_columns,
    hopper_backward_kernel,
    hopper_backward_steps,
    hopper_backward_wide_kernel,
    hopper_bias,
    hopper_bias_kernel,
    hopper_kernel,
    hopper_scores,
    launch_hopper,
)
from attnlib.kernels.sparse.configs_hopper import HopperBiasConfig, HopperSparseConfig
from attnlib.params import MaskWindow, Params
from attnlib.scores import parts_of

pytestmark = INTERPRETER_REMARKS
SLOPES, LOGITS = torch.tensor([0.05, -0.02, 0.01]), torch.tensor([1.0, -2.0, 300.0])
SCORES = {
    "cap": Score(soft_cap=2.0), "alibi": Score(alibi=SLOPES), "sinks": Score(sinks=LOGITS),
    "steep": Score(alibi=torch.tensor([2.0, -1.0, 0.5])),
    "all": Score(soft_cap=3.0, alibi=SLOPES, sinks=LOGITS),
    "no sinks": Score(sinks=torch.full((3,), -torch.inf)),
    "relative": Score(relative=torch.randn(3, 121, generator=torch.Generator().manual_seed(3))),
    "own": Score(function=bent, derivative=bent_derivative, reference=bent_reference),
    "place": Score(function=of_place, derivative=of_place_derivative, reference=of_place_reference),
    "all_own": Score(3.0, SLOPES, LOGITS, None, None, bent, bent_derivative, bent_reference),
}  # fmt: skip
BIASES = {"bias": (3, 0, 0), "queries": (3, 0, 1), "batch": (2, 1, 0, 0), "half": (3, 0, 0),
          "each": (2, 3, 0, 0), "shared": (0, 0)}  # fmt: skip
"""Name -> sizes of a bias, 0 for that of the call."""


def score_of(name: str, S_q: int, S_k: int) -> Score:
    """One of `SCORES`, or with a bias that hides some keys, and all of one query."""
    part = name.removeprefix("capped_")
    if part not in BIASES:
        return SCORES[name]
    own = BIASES[part]
    sizes = [x or y for x, y in zip(own, (2, 3, S_q, S_k)[-len(own) :], strict=True)]
    bias = torch.randn(sizes, generator=torch.Generator().manual_seed(4))
    bias[..., 5, :] = -torch.inf
    bias[..., 40:45] = bias[..., 40:45].masked_fill(bias[..., 40:45] > 0, -torch.inf)
    if part == "half":
        bias = bias.bfloat16()
    return Score(2.0, SLOPES, LOGITS, bias) if part != name else Score(bias=bias.half())


MAKE_PLAN = launch_hopper.make_plan
PAIRS = HopperSparseConfig(64, 2, 64, pairs=2, joint=True)
CALLS = {  # D, mask, S_q, S_k, sm_scale, config
    "64": (64, "documents", 100, 130, 0.1, None),
    "pairs": (64, "causal", 200, 190, 0.1, PAIRS),
    "128": (128, "dots", 70, 100, -0.1, None),
    "nothing": (64, "none", 70, 100, 0.1, None),
    "bfloat16": (64, "band by head", 70, 140, 0.2, None),
    "copied": (64, "documents", 200, 264, 0.1, None),
    "copied, 128": (128, "dots", 330, 200, -0.1, None),
    "copied, bfloat16": (64, "band by head", 70, 144, 0.2, None),
    "both sides": (64, "dots", 330, 330, -0.1, None),  # keys all before their queries, all behind them
    "both sides, 128": (128, "all", 200, 500, 0.1, None),
    "wide": (136, "documents", 260, 392, 0.1, None),
    "256": (256, "dots", 70, 100, -0.1, None),
}
CASES = [*[("64", score) for score in SCORES], ("pairs", "all"), ("pairs", "alibi"), ("128", "all"),
         ("128", "alibi"), ("128", "sinks"), ("nothing", "all"), ("nothing", "no sinks"),
         ("bfloat16", "all"), ("bfloat16", "batch"),
         ("bfloat16", "relative"), ("both sides", "alibi"), ("both sides, 128", "alibi"),
         ("both sides", "all"), ("both sides", "steep"), ("nothing", "alibi"),
         ("64", "capped_bias"), ("64", "queries"), ("pairs", "relative"),
         ("128", "relative"), ("128", "bias"), ("wide", "all"), ("wide", "relative"),
         ("128", "all_own"), ("bfloat16", "own"), ("256", "own"), ("nothing", "own"),
         ("wide", "all_own"),
         ("wide", "alibi"), ("256", "all"), ("256", "capped_bias"), ("256", "relative")]  # fmt: skip
COPIED = [("copied", "bias"), ("copied", "capped_half"),
          ("copied, 128", "bias"), ("copied, 128", "capped_half"), ("copied, bfloat16", "each"),
          ("copied, bfloat16", "shared")]  # fmt: skip
"""TMA reads their bias."""


def check(call: str, score: str, order: str = "random", seed: int = 0, **where) -> None:
    """AssertionError for a wrong output, LSE or gradient. mutants: see `on_the_cpu`."""
    D, mask, S_q, S_k, sm_scale, config = CALLS[call]
    heads = 3 if mask.endswith("by head") else None
    rng = torch.Generator().manual_seed(0)
    mask = BlockMask.from_function(FUNCTIONS[mask], S_q, S_k, H=heads)
    B, dtype = (2, torch.bfloat16) if call.endswith("bfloat16") else (1, torch.float16)
    shapes = (B, 3, S_q, D), *2 * [(B, 1, S_k, D)]
    q, k, v, d_out = (torch.randn(shape, generator=rng).to(dtype) for shape in (*shapes, shapes[0]))
    close, close_gradient = (dict.fromkeys(("rtol", "atol"), e * (1 + 7 * (dtype == torch.bfloat16)))
                             for e in (1e-3, 5e-3))  # fmt: skip
    # Where plain Triton makes the gradient of a bias: the interpreter's bfloat16 dot is wrong (triton 3.6).
    parts = parts_of(score_of(score, S_q, S_k), q, k)
    made = parts.bias is not None
    made = made and (dtype == torch.float16 or hopper_bias.adds_alone(parts.form, S_q, S_k))
    parts = parts._replace(bias_gradient=made)
    params = Params(
        MaskWindow(None, None), sm_scale, return_lse=True, config=config, block_mask=mask, score=parts
    )
    with on_the_cpu(order, seed, **where):
        out, lse = families.forward(hopper, q, k, v, params)
    how = {"sm_scale": sm_scale, "mask": mask.to_dense(), "score": parts}
    truth, truth_lse = attention_fp64(q, k, v, **how)
    torch.testing.assert_close(out.double(), truth, **close)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=2e-5, atol=2e-5)
    with on_the_cpu(order, seed, **where):
        found = families.backward(
            hopper, d_out, q, k, v, truth.to(dtype), truth_lse.float(), params._replace(config=None)
        )
    assert [x is None for x in found[3:]] == [parts.sinks is None, not parts.bias_gradient]
    for ours, theirs in zip(found, gradient_fp64(d_out, q, k, v, **how), strict=True):
        if ours is not None:
            torch.testing.assert_close(ours.double(), theirs, **close_gradient)


ALIKE = [("128", "alibi"), ("128", "sinks"), ("nothing", "all"), ("nothing", "alibi"), ("both sides", "all"),
         ("wide", "alibi"), ("wide", "relative"), ("256", "capped_bias"), ("pairs", "relative")]  # fmt: skip
"""Of whose call another score is computed, and of whose score another call."""


@pytest.mark.parametrize(("call", "score"), with_more((case for case in CASES if case not in ALIKE), CASES))
def test_call(call, score):
    check(call, score)


@pytest.mark.parametrize(("call", "score"), COPIED)
def test_a_bias_is_copied(call, score, monkeypatch):
    made = []
    monkeypatch.setattr(
        launch_hopper, "make_plan", lambda *given: made.append(MAKE_PLAN(*given)) or made[-1]
    )
    check(call, score)
    assert [plan.copies_bias.value for plan in made] == [True]


@pytest.mark.parametrize(("call", "order"), in_turn(["copied", "copied, 128"], ["eager", "late"]))
def test_orders(call, order):
    check(call, "bias", order)


def test_a_bias_that_tma_does_not_read_is_loaded():
    """At an odd place, of four bytes, in rows of an odd length, of one query."""
    q, k = torch.zeros(1, 2, 64, 64), torch.zeros(1, 2, 136, 64)
    half = torch.zeros(2, 64, 137).half()
    for bias, copied in ((half[..., :136], False), (half[..., :136].contiguous(), True),
                         (torch.zeros(2, 64, 136), False), (torch.zeros(1, 136).half(), False),
                         (torch.zeros(64 * 136 + 1).half()[1:].view(64, 136), False),
                         (torch.zeros(136, 64).half().T, False),
                         (half[..., :136].bfloat16().contiguous(), True)):  # fmt: skip
        form = parts_of(Score(bias=bias), q, k).form
        assert (launch_hopper.bias_window(form, 64, 136) is not None) == copied
    assert launch_hopper.bias_window(parts_of(Score(relative=torch.zeros(2, 9)), q, k).form, 64, 136) is None


def test_what_is_left_to_the_portable_kernels_is_named():
    q = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
    with on_the_cpu():
        for score, reason in (
            (Score(bias=torch.zeros(64, 64).T), "whose keys follow each other in memory; their stride is 64"),
        ):
            found = explain(q, q, q, score=score)
            assert found.kernel == "triton" and reason in found.reason
        for score in (Score(soft_cap=3.0), Score(relative=torch.zeros(2, 9)), Score(bias=torch.zeros(64, 1)),
                      Score(function=bent)):  # fmt: skip
            assert explain(q, q, q, score=score).kernel == "hopper"


@pytest.mark.parametrize(("score", "D", "own"), [
    (Score(bias=torch.zeros(64, 136)), 64, True), (Score(bias=torch.zeros(2, 64, 136).half()), 128, True),
    (Score(relative=torch.zeros(2, 9)), 96, True),
    (Score(sinks=torch.zeros(2), bias=torch.zeros(64, 136)), 64, True),
    (Score(bias=torch.zeros(64, 136)), 136, False), (Score(bias=torch.zeros(1, 136)), 64, False),
    (Score(bias=torch.zeros(64, 1).expand(64, 136)), 64, False),  # it lies there once
    (Score(3.0, bias=torch.zeros(64, 136)), 64, False),
    (Score(alibi=torch.zeros(2), relative=torch.zeros(2, 9)), 64, False),
    (Score(bias=torch.zeros(64, 136), function=bent, derivative=bent_derivative), 64, False),
])  # fmt: skip
def test_which_kernel_makes_the_gradient_of_a_bias(score, D, own):
    """The Hopper kernel that of a bias alone, of queries and keys or of diagonals; the one in plain Triton
    others."""
    q, k = torch.zeros(1, 2, 64, D).half(), torch.zeros(1, 2, 136, D).half()
    mask = BlockMask.from_function(FUNCTIONS["causal"], 64, 136)
    parts = parts_of(score, q, k, bias_gradient=True)
    params = Params(MaskWindow(None, None), 0.1, return_lse=True, block_mask=mask, score=parts)
    assert isinstance(hopper.configuration(q, k, k, params, True).bias, HopperBiasConfig) == own


def planted(bug: str, case: str, before: str, after: str, module=hopper_kernel) -> Mutation:
    return Mutation(bug, before, after, case, "Race|Deadlock|Assertion|Overflow|Index", module=module)


MUTATIONS = [
    planted("all slots have the number of one step", "pairs alibi",
            "put_word(mem.steps.index(s)", "put_word(mem.steps.index(0)"),
    planted("the number of a step is stored too late", "pairs alibi",
            "word_in(mem.steps.index(slot(c, plan)))", "word_in(mem.steps.index(slot(c + 1, plan)))"),
    planted("all heads have the slope of the first", "64 alibi",
            "score.alibi + head", "score.alibi + 0 * head", hopper_scores),
    planted("all heads have the sink of the first", "64 sinks",
            "score.sinks + head", "score.sinks + 0 * head"),
    planted("a sink larger than all scores", "64 sinks",
            "            shift = gl.maximum(shift, sink)\n", "            shift = shift - 0 * sink\n"),
    planted("a sink does not count", "64 sinks", "row_sums += gl.exp2(sink", "row_sums += 0 * gl.exp2(sink"),
    planted("a slope that is not flipped", "128 alibi", "slope = -slope\n", "slope = slope\n",
            hopper_scores),
    planted("the place is that of the first row of all", "64 alibi",
            "place = row + score.place", "place = score.place", hopper_scores),
    planted("keys after a query count as those before", "pairs alibi",
            "2 * slope * gl.minimum(distance, 0.0)", "0 * slope * distance", hopper_scores),
    planted("and so in the backward pass", "pairs alibi",
            "gl.maximum(distance, -distance)", "distance", hopper_scores),
    planted("rows and keys never meet", "both_sides alibi", "(place > -63) & (place < N - 1)",
            "(place > -63) & (place < 0)", hopper_scores),
    planted("keys far behind a query count as those before", "both_sides alibi",
            "gl.where(place > -63, slope, -slope)", "gl.where(place > -630, slope, -slope)", hopper_scores),
    planted("a key behind all rows, or not", "both_sides,_128 alibi",
            "gl.where(place > -63, slope, -slope)", "gl.where(place >= 0, slope, -slope)", hopper_scores),
    planted("all threads of a row have the first keys", "64 alibi", "pair = 2 * gl", "pair = 0 * gl",
            hopper_scores),
    planted("what is left of the distance is not in the maximum", "both_sides steep", "of_threads + rest, 1",
            "of_threads + 0 * rest, 1", hopper_scores),
    planted("nor in the exponents", "64 alibi", "[:, None] - rest * qk_scale", "[:, None] - 0 * rest",
            hopper_scores),
    planted("what is left of the distance is not flipped", "128 alibi", "rest = -rest", "rest = 1 * rest",
            hopper_scores),
    planted("a bias of the first head", "64 capped_bias", "head.to(gl.int64) * score.bias_h",
            "0 * head", hopper_scores),
    planted("a bias of the first batch element", "bfloat16 batch",
            "batch.to(gl.int64) * score.bias_b", "0 * batch", hopper_scores),
    planted("a bias that is not flipped", "128 bias", "unit = -unit\n", "unit = unit\n", hopper_scores),
    planted("a bias of the first rows", "pairs relative", "gl.minimum(row + gl", "gl.minimum(0 * row + gl",
            hopper_scores),
    planted("a bias of the first keys", "pairs relative", "bias_ptr += first_key * plan.bias_n",
            "bias_ptr += 0 * first_key", hopper_scores),
    planted("a bias of keys that there are not", "128 bias", "mask=o_n < keys", "mask=o_n <= keys",
            hopper_scores),
    planted("a bias of queries that there are not", "64 queries", ", S_q - 1)", ", S_q + 1000)",
            hopper_scores),
    planted("a row that sees nothing for its bias", "128 bias",
            "return softmax.weights(s, shift, qk_scale, plan.hides)",
            "return softmax.weights(s, shift, qk_scale, False)", hopper_scores),
    planted("a row that sees nothing under ALiBi", "nothing alibi",
            "exponentials(s, rest, shift, qk_scale, plan.hides)",
            "exponentials(s, rest, shift, qk_scale, False)", hopper_scores),
    planted("a function gets the rows of the first tile", "64 own", "query, i_h, i_b = row,",
            "query, i_h, i_b = 0 * row,", hopper_scores),
    planted("a function gets the keys of the first step", "bfloat16 own", "o_n = first + gl",
            "o_n = 0 * first + gl", hopper_scores),
    planted("a function gets the first head", "64 own", "= row, head, batch", "= row, 0 * head, batch",
            hopper_scores),
    planted("a function gets the first batch element", "bfloat16 own", "= row, head, batch",
            "= row, head, 0 * batch", hopper_scores),
    planted("a cap behind a function has the scale before it", "128 all_own", "s * score.after",
            "s * score.inner", hopper_scores),
    *(planted(*bug) for bug in (
        ("a copied bias is not waited for", "copied bias",
         "        mbarrier.wait(mem.bias_full.index(WG), c & 1)\n", ""),
        ("the parity of a copied bias stays", "copied bias", "mem.bias_full.index(WG), c & 1",
         "mem.bias_full.index(WG), 0 * c"),
        ("a copied bias is not given back", "copied bias",
         '        named_barrier("arrive", BIAS_FREE + WG, 160)\n', ""),
        ("a copied bias is given back without a fence", "copied bias",
         "fence_async_shared()  # between the load and the copy that", "pass  #"),
        ("a bias is copied without asking", "copied bias",
         '            if c > 0:\n                named_barrier("sync", BIAS_FREE + w, 160)\n', ""),
        ("both consumers have one's bias", "copied bias", "tile.row + w * 64, step", "tile.row, step"),
        ("a bias of the first keys, copied", "copied bias", "step * plan.block_n]", "0 * step]"),
        ("a bias of the first head, copied", "copied bias", "tile.i_h if plan.bias_heads else 0", "0"),
        ("a bias of the first batch element, copied", "copied,_bfloat16 each",
         "tile.i_b if plan.bias_batches else 0", "0"),
        ("a shared bias of each head", "copied,_bfloat16 shared", "tile.i_h if plan.bias_heads else 0",
         "tile.i_h"),
        ("a tile begins with the bias of the one before", "copied bias", "mem, c, next_tile, first, plan)",
         "mem, c, tile, first, plan)"),
        ("a step has the bias of the one before", "copied bias",
         "_copy_bias(desc_bias, mem, c + i, tile, step, plan)",
         "_copy_bias(desc_bias, mem, c + i, tile, before, plan)"),
    )),
    *(planted(*bug, hopper_backward_steps) for bug in (
        ("dQ and dK do not know the cap", "64 all", "derivative = 1.0 - s * s", "derivative = 1.0 - 0 * s"),
        ("slopes of the first head, backward", "64 alibi", "work.alibi + i_h", "work.alibi + 0 * head"),
        ("slopes of another batch element", "bfloat16 all", "work.alibi + i_h", "work.alibi + head"),
        ("the place of another step", "pairs alibi", "mem.places.index(j & 3)) + WG",
         "mem.places.index((j + 1) & 3)) + WG"),
        ("both consumers stand at the first one's keys", "128 alibi", "+ WG * 64\n        s = away",
         "+ 0\n        s = away"),
        ("queries stand at their own number, backward", "64 alibi", "m * plan.block_m + work.place",
         "m * plan.block_m"),
        ("the bias of another step", "pairs relative",
         "word_in(mem.heads.index(j & 3)), word_in(mem.queries.index(j & 3))",
         "word_in(mem.heads.index(j & 3)), word_in(mem.queries.index((j + 1) & 3))"),
        ("a loaded bias of the first head, backward", "64 capped_bias", "i_h.to(gl.int64) * work.bias_h",
         "0 * i_h"),
        ("a loaded bias of the first batch element, backward", "bfloat16 batch",
         "column.i_b.to(gl.int64) * work.bias_b", "0 * i_h"),
        ("both consumers have one's keys of a loaded bias", "128 bias",
         "keys_of(mem) * plan.block_n + WG * 64\n", "keys_of(mem) * plan.block_n\n"),
        ("a bias that is copied is not waited for", "copied bias", "nbytes + row_bytes + biases\n",
         "nbytes + row_bytes\n"),
        ("a copied bias of the first head, backward", "copied bias", "i_h if plan.bias_heads else 0", "0"),
        ("a copied bias of the first batch element, backward", "copied,_bfloat16 each",
         "column.i_b if plan.bias_batches else 0", "0"),
        ("both consumers have one's bias, backward", "copied bias",
         "column.i_n * plan.block_n + w * 64]", "column.i_n * plan.block_n]"),
        ("a copied bias of another slot", "copied bias", "plan.parts * q_slot(j, plan) + WG",
         "plan.parts * q_slot(j + 1, plan) + WG"),
        ("both consumers' functions get one's keys", "64 own", "plan.block_n + WG * 64, word_in",
         "plan.block_n, word_in"),
        ("a function gets the queries of another step", "64 own",
         "word_in(mem.queries.index(j & 3))\n        o_n",
         "word_in(mem.queries.index((j + 1) & 3))\n        o_n"),
        ("a function gets the first head, backward", "64 own", "i_h, s = word_in(mem.heads.index(j & 3))",
         "i_h, s = 0"),
        ("a function has no derivative", "64 own", "derivative = DERIVATIVE(",
         "derivative = 1 + 0 * DERIVATIVE("),
    )),
    planted("a place is told again, too late", "pairs alibi", "    acquire(DO_FREE, i)\n",
            "    acquire(DO_FREE, i)\n                put_word(mem.places.index(i & 3), 0)\n",
            hopper_backward_columns),
    *(planted(*bug, hopper_bias_kernel) for bug in (
        ("dbias: a slot is filled too early", "copied bias",
         "                acquire(mem, 2 * j + 1, plan)\n", ""),
        ("dbias: a slot is not given back", "copied bias", "            release(mem, 2 * j + 1, plan)\n", ""),
        ("dbias: a slot is given back too early", "copied bias",
         "            dp = warpgroup_mma_wait(0, deps=(dp_token,))  # [64, 128]\n"
         "            release(mem, 2 * j + 1, plan)\n",
         "            release(mem, 2 * j + 1, plan)\n"
         "            dp = warpgroup_mma_wait(0, deps=(dp_token,))  # [64, 128]\n"),
        ("dbias: the LSE is overwritten without a fence", "copied bias",
         "            fence_async_shared()\n            s = ", "            s = "),
        ("dbias: words are told of another visit", "copied,_bfloat16 shared", "(j & 3) + w)", "(j & 1) + w)"),
        ("dbias: both consumers have one's rows", "copied bias", "at = 2 * slot(c, plan) + WG",
         "at = 2 * slot(c, plan)"),
        ("dbias: both consumers have one's places", "128 relative", "rows = WG * 64 + gl", "rows = gl"),
        ("dbias: with the bias of the first head", "copied bias", "item.i_h.to(gl.int64) * bias_h", "0"),
        ("dbias: with the bias of the first batch element", "copied,_bfloat16 each",
         "item.i_b.to(gl.int64) * bias_b", "0"),
        ("dbias: with the LSE of the first batch element", "copied,_bfloat16 shared",
         "[sums, i_b * work.H + i_h,", "[sums, i_h,"),
        ("dbias: of one of the batch elements that share it", "copied,_bfloat16 shared",
         "1 if plan.batches else work.B", "1"),
        ("dbias: of the first head alone", "copied,_bfloat16 shared", "item.i_h + head % item.heads",
         "item.i_h"),
        ("dbias: each head has keys of its own", "copied bias", "i_h // work.GROUP", "i_h"),
        ("dbias: of what nobody sees", "bfloat16 batch", "            if some:\n",
         "            if True:\n"),
        ("dbias: of what is hidden", "copied bias", "if found >= 0:", "if found >= 1000:"),
        ("dbias: visits behind the last one are counted", "64 relative", "gl.where(o_t < item.visits,",
         "gl.where(o_t <= item.visits,"),
        ("dbias: what nobody sees is not set to 0", "copied bias", "_seen(item, work) == 0 else",
         "_seen(item, work) == 1 else"),
        ("dbias: a band begins behind its first tile", "pairs relative", "row = gl.maximum(0, -d)",
         "row = gl.minimum(gl.maximum(0, 1 - d), work.down - 1)"),
        ("dbias: a band without its last tile", "pairs relative", "gl.minimum(work.down, work.across - d)",
         "gl.maximum(gl.minimum(work.down, work.across - d) - 1, row + 1)"),
        ("dbias: distances of the other side", "64 relative", "* work.dbias_own + (o_n - o_m)",
         "* work.dbias_own + (o_m - o_n)"),
        ("dbias: all heads in the first one's place", "copied bias", "(number * work.S_q + o_m)",
         "(0 * number + o_m)"),
    )),
    planted("dV knows the cap's derivative", "128 all", "p_half = gl.convert_layout(p.to(",
            "p_half = gl.convert_layout((p * derivative).to(", hopper_backward_kernel),
    planted("dV knows the cap's derivative, of 64 keys", "wide all", "p_half = p.to(dtype)",
            "p_half = (p * derivative).to(dtype)", hopper_backward_wide_kernel),
    planted("dK and dQ do not know it", "wide all",
            ".store(by_derivative(p, derivative, plan).to(dtype))", ".store(p_half)",
            hopper_backward_wide_kernel),
]  # fmt: skip


def test_each_bug_has_its_place() -> None:
    check_places(MUTATIONS)


@pytest.mark.parametrize("mutation", first_of_each(MUTATIONS, attrgetter("kind")), ids=str)
def test_a_planted_bug_is_found(mutation):
    mutants = mutate(mutation)
    for order, seed in [("eager", 0), ("late", 0), *(("random", seed) for seed in range(4))]:
        try:
            call, score = mutation.caught_by.split()
            check(call.replace("_", " "), score, order, seed, mutants=mutants)
        except (Race, Deadlock, AssertionError, OverflowError, IndexError) as found:
            assert re.match(mutation.verdict, f"{type(found).__name__}: {found}")
            return
    pytest.fail(f"no run revealed: {mutation.bug}")
