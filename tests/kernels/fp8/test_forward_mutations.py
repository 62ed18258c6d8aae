"""The comparison of the forward kernel with the model catches planted bugs: edits of the kernel's source,
run in the emulator, judged by `check_forward` as on a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import first_of_each
from emulated import mutate, on_the_cpu
from emulated_fp8 import Call
from fp8_cases import check_forward
from mutations import Mutation, check_places

from attnlib.kernels.common import kept_shift
from attnlib.kernels.hopper import coordinates, e4m3, launch_fp8, masks, queries, told
from attnlib.kernels.hopper.configs_fp8 import fp8_config

pytestmark = INTERPRETER_REMARKS

LAGGING = fp8_config(64)  # which a dense call does not have; bugs of kept shifts: test_kept_shift_fp8
SPREAD = Call(64, 2, 1, 200, 400, causal=False, spread=6.0, config=LAGGING)
HEADS = Call(64, 4, 2, 70, 150, B=2, scaling="head", causal=False, config=LAGGING)
ROWS = Call(64, 1, 1, 300, 100)
LARGE = Call(64, 1, 1, 130, 300, causal=False, sm_scale=2.0, config=LAGGING)
VARLEN = Call(64, 2, 1, varlen=((40, 70), (100, 300), (70, 90)), causal=False, spread=6.0)
TALL = replace(fp8_config(64), warpgroups=2, stages=2)
MEANS = Call(64, 4, 2, 70, 150, B=2, causal=False, mean=3.0)
EMPTY = replace(ROWS, mean=3.0)
MEANS_VARLEN = replace(VARLEN, mean=3.0)
WINDOW = Call(64, 2, 1, 300, 400, window=(70, -1), config=replace(TALL, block_n=64))
OWN = Call(128, 2, 1, 200, 300, spread=4.0, own_queries=True, config=fp8_config(128))
OWN_NARROW = Call(64, 2, 1, 300, 150, B=2, spread=4.0, own_queries=True)
CALLS = {
    "own queries": OWN, "own queries, 64 columns": OWN_NARROW,
    "spread": SPREAD, "heads": HEADS, "rows without keys": ROWS, "large": LARGE, "varlen": VARLEN,
    "window": WINDOW, "means": MEANS, "a mean, rows without keys": EMPTY, "means, varlen": MEANS_VARLEN,
}  # fmt: skip

MUTATIONS = [
    Mutation("all queries of a tile have the scale of its first block", "before >> 6", "before >> 30",
             "spread", "(RMS|max) error|LSE", (), e4m3),
    Mutation("two blocks of keys share a scale", "(first >> 7) * stride", "(first >> 8) * stride",
             "spread", "(RMS|max) error|LSE", (), e4m3),
    Mutation("V is not scaled back", "factor *= v_scale", "factor *= 1.0", "heads", "(RMS|max) error",
             (), e4m3),
    Mutation("weights are 16 times too large for e4m3",
             "OFFSET = gl.constexpr(fp8.OFFSET)", "OFFSET = gl.constexpr(10)", "spread",
             "(RMS|max) error", (), e4m3),
    Mutation("the shift does not follow the maximum",
             "ROOM = gl.constexpr(8.8)", "ROOM = gl.constexpr(16.8)", "large", "(RMS|max) error", (), e4m3),
    Mutation("pairs of weights are swapped", "{{low, high}}", "{{high, low}}", "heads", "(RMS|max) error", (),
             kept_shift),
    Mutation("V's sequences begin at multiples of 16 together", "// 16 + i_b + groups", "// 16 + groups",
             "varlen", "(RMS|max) error", (), coordinates),
    Mutation("V's last positions are those of its keys",
             "VARLEN_ROWS - 16 * groups)", "VARLEN_ROWS - seq.S_k)", "varlen",
             "(RMS|max) error", (), coordinates),
    Mutation("a sequence's first keys have the scale of the one before", "// 128 + i_b)", "// 128)", "varlen",
             "(RMS|max) error|LSE", (), coordinates),
    Mutation("a sequence's first rows have the scale of the one before", "// 64 + i_b + row", "// 64 + row",
             "varlen", "(RMS|max) error|LSE", (), coordinates),
    Mutation("V's scales are those of the first batch", "i_b * s.v_b + i_kv", "i_kv", "heads",
             "(RMS|max) error", (), coordinates),
    Mutation("the scale of a block is that of the block after", "(tile.low + end - 1 - i) * plan.block_n",
             "(tile.low + end - i) * plan.block_n", "spread", "(RMS|max) error|LSE", (), masks),
    Mutation("the mean is forgotten", "return o + gl.where(empty, 0.0, mean[None, :])", "return o", "means",
             "(RMS|max) error", (), e4m3),
    Mutation("the mean is added to empty rows", "gl.where(empty, 0.0, mean[None, :])", "mean[None, :]",
             "a mean, rows without keys", "(RMS|max) error", (), e4m3),
    Mutation("the mean is scaled as V is", "return o + gl.where", "return o + 0.01 * gl.where", "means",
             "(RMS|max) error", (), e4m3),
    Mutation("the mean of the first head", "work.scales.mean_b + i_kv", "work.scales.mean_b", "means",
             "(RMS|max) error", (), coordinates),
    Mutation("the mean of the first batch", "i_b * work.scales.mean_b + i_kv", "i_kv", "means",
             "(RMS|max) error", (), coordinates),
    Mutation("the mean of the first sequence", "i_b * work.scales.mean_b + i_kv", "i_kv", "means, varlen",
             "(RMS|max) error", (), coordinates),
    Mutation("queries are not rotated as keys are", "if plan.rotates:\n            odd",
             "if False:\n            odd", "own queries, 64 columns", "(RMS|max) error|LSE", (), queries),
    Mutation("signs of the second word are those of the first", "gl.where(i < 32, LOW, HIGH)", "LOW",
             "own queries, 64 columns", "(RMS|max) error|LSE", (), queries),
    Mutation("halves are not joined", "left, right = left + right, left - right", "pass", "own queries",
             "(RMS|max) error|LSE", (), queries),
    Mutation("halves are joined in the other order", "left + right, left - right",
             "left - right, left + right", "own queries", "(RMS|max) error|LSE", (), queries),
    Mutation("columns lie as in a result", "place // 2 % 4 * 4 + place // 8 % 2 * 2 + place % 2",
             "place % 16", "own queries", "(RMS|max) error|LSE", (), queries),
    Mutation("the largest of the left half", "gl.maximum(gl.abs(left), gl.abs(right))", "gl.abs(left)",
             "own queries", "(RMS|max) error|LSE", (), queries),
    Mutation("a scale twice as large", "used * (plan.norm / LARGEST)", "used * (2 * plan.norm / LARGEST)",
             "own queries", "(RMS|max) error|LSE", (), queries),
    Mutation("the mean of the next tile", "words = words + (before[2],)",
             "words = words + (coordinates.of_mean(i_b, i_h, work, plan),)", "means", "(RMS|max) error", (),
             told),
]  # fmt: skip


def judged(call: Call, mutants: dict | None = None) -> None:
    tensors = call.tensors()
    operands = tuple(call.operands(*tensors))
    q = tensors[0] if call.own_queries else operands[0]
    with on_the_cpu("random", 0, mutants=mutants):
        found = launch_fp8.forward(q, *operands[1:], call.params(), torch.float16)
    check_forward(found, operands, call.params(), "the kernel")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_kernel_passes(call: Call) -> None:
    judged(call)


def test_each_bug_has_its_place() -> None:
    check_places(MUTATIONS)


@pytest.mark.parametrize("mutation", first_of_each(MUTATIONS, attrgetter("kind")), ids=str)
def test_is_caught(mutation: Mutation) -> None:
    with pytest.raises(AssertionError) as raised:
        judged(CALLS[mutation.caught_by], mutate(mutation))
    said = str(raised.value).splitlines()[0]
    assert re.match(rf"the kernel is wrong: ({mutation.verdict})", said), said
