"""attention() on a CUDA GPU against dense attention in fp64: real lengths, and calls drawn at random."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from cases import Case, check_forward, judge_forward
from layouts import LAYOUTS

from attnlib import attention
from attnlib.bench.oracle import INPUTS, Oracle, make_inputs
from attnlib.bench.shapes import TASK, Shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

MASKS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
DIMS = pytest.mark.parametrize("head_dim", [64, 128, 256])


@MASKS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", TASK.values(), ids=TASK)
def test_shapes_of_the_task(shape, dtype, causal, device):
    check_forward(Case(replace(shape, causal=causal, dtype=dtype)), device)


@MASKS
@DIMS
@pytest.mark.parametrize("seqlen", [129, 1000, 4097])
def test_odd_lengths(seqlen, head_dim, causal, device):
    check_forward(Case(Shape(2, 3, seqlen, head_dim, causal)), device)


@MASKS
@DIMS
@pytest.mark.parametrize("seqlen, keys", [(1, 4097), (1000, 3000), (512, 4096), (3000, 1000)])
def test_queries_and_keys_differ_in_number(seqlen, keys, head_dim, causal, device):
    check_forward(Case(Shape(1, 4, seqlen, head_dim, causal, seqlen_k=keys)), device)


@DIMS
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_grouped_heads(kv_heads, head_dim, device):
    check_forward(Case(Shape(2, 12, 1000, head_dim, heads_kv=kv_heads)), device)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", INPUTS)
def test_unkind_inputs(kind, dtype, device):
    check_forward(Case(Shape(1, 4, 2048, 128, dtype=dtype), kind), device)


@DIMS
def test_float32(head_dim, device):
    check_forward(Case(Shape(1, 2, 1000, head_dim, dtype="float32")), device)


@DIMS
def test_without_lse(head_dim, device):
    """Another kernel than the one that stores it."""
    q, k, v = make_inputs(Shape(1, 4, 1000, head_dim), device=device)
    out = attention(q, k, v, causal=True, impl="triton")
    Oracle(q, k, v, causal=True).judge(out).raise_if_bad("attention without LSE")


def draw(number: int) -> tuple[Case, tuple]:
    """A call at random, the same one for the same number: (case, layouts of q, k and v).

    Each kind of call is another kernel to compile, at about a second. All kinds of half precision are drawn,
    but float32 and the negative scale at D <= 64 only.
    """
    rng = random.Random(number)
    dtype = rng.choice(("float16", "float16", "bfloat16", "bfloat16", "float32"))
    width = 64 if dtype == "float32" else rng.choice((64, 128, 256))
    head_dim = width - rng.choice((0, 0, 8, 24))
    kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 4))
    seqlen, keys = (int(2 ** rng.uniform(0, 10.5)) for _ in range(2))
    if rng.random() < 0.4:
        keys = seqlen
    shape = Shape(
        rng.choice((1, 2, 3)), kv_heads * group, seqlen, head_dim, rng.random() < 0.6, dtype, kv_heads, keys
    )
    scales, kinds = [None, None, 0.05], list(INPUTS)
    if dtype == "float32":
        # The last bits of scores in the hundreds: that the yardstick errs by half as much in them is chance.
        kinds.remove("large")
    else:
        scales.append(1.0)
    if dtype == "float16" and width == 64:
        scales.append(-0.2)
    case = Case(shape, rng.choice(kinds), rng.choice(scales))
    return case, tuple(rng.choice(LAYOUTS) for _ in range(3))


@pytest.mark.parametrize("number", range(200))
def test_random_calls(number, device):
    case, layouts = draw(number)
    contiguous = make_inputs(case.shape, case.kind, seed=number, device=device)
    q, k, v = (layout(x) for layout, x in zip(layouts, contiguous, strict=True))
    causal, scale = case.shape.causal, case.sm_scale
    out, lse = attention(q, k, v, causal=causal, sm_scale=scale, return_lse=True, impl="triton")
    name = f"{case.label}, {', '.join(layout.__name__.strip('_') for layout in layouts)}"
    judge_forward(out, lse, Oracle(*contiguous, causal, scale), name)
    for now, then in zip((q, k, v), contiguous, strict=True):
        assert torch.equal(now, then), f"{name}: an input was written to"
