"""Checks of the exercises of chapter 14. Each raises AssertionError with a hint if the answer is wrong."""

from unittest import mock

import torch

from attnlib.bench.shapes import Shape
from attnlib.book import changes
from attnlib.book.exercises import judge_gluon

STEP = "14_ring"
LONG, DENSE = Shape(1, 3, 400, 64), Shape(1, 2, 260, 128, causal=False)


def check_mended_ring(functions):
    """Right in each order, with more blocks than slots."""
    module = changes.with_functions(STEP, functions)
    for shape in (LONG, DENSE, Shape(1, 2, 400, 256)):
        judge_gluon(module.attention, shape)


def check_whole_shifts(functions):
    """Right, with a factor that is a power of two and a lazy shift."""
    module = changes.with_functions(STEP, functions)
    exponents, blocks, exp2 = [], [], torch.exp2

    def noted(x):
        (exponents if x.ndim == 1 else blocks).append(x)
        return exp2(x)

    with mock.patch.object(torch, "exp2", noted):
        for shape in (LONG, DENSE):
            judge_gluon(module.attention, shape)
    steps = torch.cat(exponents)
    steps = steps[steps > -1e20]  # of rows that had seen nothing
    assert bool((steps == steps.round()).all()), (
        "right, but a factor of the rescaling is 2 to a power that is no whole number"
    )
    top = max(float(x.max()) for x in blocks)
    assert top < 9, f"a weight reaches 2^{top:.1f}: expected less than 2^9"
    assert bool((steps == 0).float().mean() > 0.5), "right, but the shift follows most of the maxima"
