"""The portable backward kernels on a CUDA GPU: gradients of real lengths, and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backward_cases import CASES, BackwardCase, check_backward

from attnlib import attention, attention_varlen
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import TASK, Shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

LENGTHS = [
    Shape(2, 3, 1000, 64),
    Shape(1, 4, 2049, 128, heads_kv=2),
    Shape(1, 2, 1000, 256, False),
    Shape(1, 4, 700, 64, seqlen_k=3000),
    Shape(1, 4, 3000, 128, seqlen_k=700),
    Shape(2, 4, 513, 96, False, "bfloat16", heads_kv=1),
    Shape(1, 2, 300, 64, True, "float32"),
    Shape(1, 2, 300, 256, True, "float32"),
]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients(case: BackwardCase, device: str) -> None:
    check_backward(case, device)


@pytest.mark.parametrize("shape", LENGTHS, ids=lambda shape: shape.label)
def test_longer(shape: Shape, device: str) -> None:
    check_backward(BackwardCase(shape), device)
    check_backward(BackwardCase(shape, window=(100, 50)), device)


@pytest.mark.parametrize("name", TASK)
def test_a_head_of_the_task(name: str, device: str) -> None:
    check_backward(BackwardCase(replace(TASK[name], batch=1, heads=1)), device)


@pytest.mark.parametrize("impl", [None, "triton"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic(head_dim: int, impl: str | None, device: str) -> None:
    """Bit by bit, over 20 runs that have the GPU to themselves or not."""
    leaves = [x.requires_grad_() for x in make_inputs(Shape(2, 4, 1500, head_dim), device=device)]
    d_out = torch.randn_like(leaves[0])
    noise, side = torch.randn(2048, 2048, device=device), torch.cuda.Stream()
    first = None
    for run in range(20):
        if run % 2:
            with torch.cuda.stream(side):
                noise = (noise @ noise).clamp(-1, 1)
        out = attention(*leaves, causal=True, deterministic=True, impl=impl)
        found = torch.autograd.grad(out, leaves, d_out)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True)), f"run {run} differs"


@pytest.mark.parametrize("impl", [None, "triton"])
def test_memory_grows_with_the_length(impl: str | None, device: str) -> None:
    """Twice as long: twice the memory on top of the inputs, not four times."""
    taken = []
    for seqlen in (4096, 8192):
        leaves = [x.requires_grad_() for x in make_inputs(Shape(1, 8, seqlen, 64), device=device)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(*leaves, causal=True, impl=impl).sum().backward()
        taken.append(torch.cuda.max_memory_allocated() - before)
    assert 1.8 < taken[1] / taken[0] < 2.2
    assert taken[0] < 12 * 8 * 4096 * 64 * 2, "more than twelve tensors of the inputs' size"


@pytest.mark.parametrize("causal", [True, False])
def test_packed(causal: bool, device: str) -> None:
    lengths = [1000, 0, 17, 300, 64]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    q, k, v = (x[0].transpose(0, 1) for x in make_inputs(Shape(1, 4, sum(lengths), 128), device=device))
    leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
    d_out = torch.randn_like(leaves[0])
    out = attention_varlen(*leaves, cu, cu, max(lengths), max(lengths), causal=causal)
    gradients = torch.autograd.grad(out, leaves, d_out)
    spans = cu.tolist()
    for first, end in zip(spans[:-1], spans[1:], strict=True):
        if first < end:
            alone = [x.detach()[first:end].transpose(0, 1)[None] for x in (d_out, *leaves)]
            found = [x[first:end].transpose(0, 1)[None] for x in gradients]
            for verdict in GradientOracle(*alone, causal=causal).judge(*found).values():
                verdict.raise_if_bad(f"rows {first} to {end}")
