"""The kernels of chapter 20 against dense gradients in fp64, in the interpreter."""

from itertools import product

import pytest
import torch
from chosen import in_turn

from attnlib.bench import backward as bench_backward
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.book import lesson

STEP = "20_backward"
WAYS = ("ONE_PASS", "PASSES")


def gradients(way, shape, kind="normal"):
    module = lesson.load_kernel(STEP)
    tensors = [x.requires_grad_() for x in make_inputs(shape, kind, device=lesson.device())]
    d_out = bench_backward.make_gradient(shape, device=lesson.device())
    out = module.attention(*tensors, shape.causal, tiles=getattr(module, way)[shape.head_dim])
    found = torch.autograd.grad(out, tensors, d_out)
    return found, bench_backward.Judge(d_out, *tensors, shape.causal).judge(*found)


@pytest.mark.parametrize(
    ("case", "causal"), in_turn(product(WAYS, (1, 64, 100, 130)), (True, False)), ids=str
)
def test_lengths(case, causal):
    way, seqlen = case
    _, verdicts = gradients(way, Shape(2, 2, seqlen, 64, causal))
    assert all(v.ok for v in verdicts.values()), [v.reason for v in verdicts.values() if not v.ok]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_head_dimensions(way, head_dim):
    _, verdicts = gradients(way, Shape(1, 2, 97, head_dim), "large")
    assert all(v.ok for v in verdicts.values()), [v.reason for v in verdicts.values() if not v.ok]


def test_two_passes_write_the_same_bits_twice():
    first, _ = gradients("PASSES", Shape(1, 2, 130, 64))
    again, _ = gradients("PASSES", Shape(1, 2, 130, 64))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_nothing_of_the_size_of_the_scores_is_kept():
    module, shape = lesson.load_kernel(STEP), Shape(1, 1, 256, 64)
    tensors = [x.requires_grad_() for x in make_inputs(shape, device=lesson.device())]
    out = module.attention(*tensors)
    assert sum(x.numel() for x in out.grad_fn.saved_tensors) == 4 * 256 * 64 + 256
