"""The comparison of the forward kernel with the model catches planted bugs: edits of the kernel's source,
run in the emulator, judged by `check_forward` as on a GPU."""

from __future__ import annotations

import re

import pytest
import torch
from cases import INTERPRETER_REMARKS
from emulated import mutate, on_the_cpu
from emulated_fp8 import Call
from fp8_cases import check_forward
from mutations import Mutation

from attnlib.kernels.hopper import forward_kernel, launch_fp8, softmax

pytestmark = INTERPRETER_REMARKS

SPREAD = Call(64, 2, 1, 200, 400, causal=False, spread=6.0)
HEADS = Call(64, 4, 2, 70, 150, B=2, scaling="head", causal=False)
ROWS = Call(64, 1, 1, 300, 100)
LARGE = Call(64, 1, 1, 130, 300, causal=False, sm_scale=2.0)
CALLS = {"spread": SPREAD, "heads": HEADS, "rows without keys": ROWS, "large": LARGE}

MUTATIONS = [
    Mutation("all queries of a tile have the scale of its first block", "last_row >> 6", "last_row >> 30",
             "spread", "(RMS|max) error|LSE", (), forward_kernel),
    Mutation("two blocks of keys share a scale", "(first >> 7) * stride", "(first >> 8) * stride",
             "spread", "(RMS|max) error|LSE", (), forward_kernel),
    Mutation("V is not scaled back", "factor *= v_scale", "factor *= 1.0", "heads", "(RMS|max) error", (),
             forward_kernel),
    Mutation("weights are 16 times too large for e4m3", "shift -= plan.offset", "shift -= plan.offset + 4",
             "spread", "(RMS|max) error", (), softmax),
    Mutation("the shift does not follow the maximum", "shift > plan.room", "shift > plan.room + 8", "large",
             "(RMS|max) error", (), softmax),
    Mutation("pairs of weights are swapped", "mov.b32 $0, {low, high};", "mov.b32 $0, {high, low};", "heads",
             "(RMS|max) error", (), softmax),
]  # fmt: skip


def judged(call: Call, mutants: dict | None = None) -> None:
    operands = tuple(call.operands(*call.tensors()))
    with on_the_cpu("random", 0, mutants=mutants):
        found = launch_fp8.forward(*operands, call.params(), torch.float16)
    check_forward(found, operands, call.params(), "the kernel")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_kernel_passes(call: Call) -> None:
    judged(call)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_is_caught(mutation: Mutation) -> None:
    with pytest.raises(AssertionError) as raised:
        judged(CALLS[mutation.caught_by], mutate(mutation))
    said = str(raised.value).splitlines()[0]
    assert re.match(rf"the kernel is wrong: ({mutation.verdict})", said), said
