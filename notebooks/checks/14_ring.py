"""Checks of the exercises of chapter 14. Each raises AssertionError with a hint if the answer is wrong."""

from unittest import mock

import torch

from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.book import changes
from attnlib.book.exercises import judge_gluon
from attnlib.emulator import emulated

STEP = "14_ring"
LONG, DENSE = Shape(1, 1, 700, 64), Shape(1, 1, 260, 128, causal=False)


def check_mended_ring(functions):
    """Right in each order, with more blocks than slots."""
    module = changes.with_functions(STEP, functions)
    for shape in (LONG, Shape(1, 1, 200, 256)):
        judge_gluon(module.attention, shape)


def check_whole_shifts(functions):
    """Right, with a factor that is a power of two and a lazy shift."""
    module = changes.with_functions(STEP, functions)
    judge_gluon(module.attention, DENSE)
    exponents, blocks, exp2 = [], [], torch.exp2

    def noted(x):
        (exponents if x.ndim == 1 else blocks).append(x)
        return exp2(x)

    q, k, v = make_inputs(LONG, "large", device="cpu")  # whose maxima grow by more than 8
    with mock.patch.object(torch, "exp2", noted), emulated(vars(module)):
        verdict = Oracle(q, k, v, causal=True).judge(module.attention(q, k, v))
    assert verdict.ok, f"large inputs: {verdict.reason}"
    steps = torch.cat(exponents)
    assert bool((steps < 0).any()), "right, but the shift never moves"
    assert bool((steps == steps.round()).all()), (
        "right, but a factor of the rescaling is 2 to a power that is no whole number"
    )
    moved = steps[steps < 0].max()
    assert moved <= -8, f"right, but a shift moves by {-moved:.0f}: expected by more than 8, or not at all"
    top = max(float(x.max()) for x in blocks)
    assert top < 9, f"a weight reaches 2^{top:.1f}: expected less than 2^9"
