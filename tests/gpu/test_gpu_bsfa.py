"""attention_bsfa() on a CUDA GPU: both kernels in random draws and at full size, the limits of the threshold,
equal bits, streams, CUDA graphs, more than 2^31 elements."""

from __future__ import annotations

import math

import pytest
import torch
from bsfa_cases import FAMILIES, BsfaCase, check, draw, make

from attnlib import attention, attention_bsfa, bsfa_threshold
from attnlib.kernels.bsfa import hopper
from attnlib.params import BsfaParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICE, DRAWS = "cuda", 320
IMPLEMENTATIONS = "triton", "hopper"


def skip_unless(impl: str) -> None:
    q = torch.zeros(1, 1, 8, 64, device=DEVICE, dtype=torch.float16)
    if impl == "hopper":
        lacks = hopper.unsupported(q, q, q, BsfaParams(torch.zeros(1, 1, 1), True, 0.1))
        if lacks is not None:
            pytest.skip(lacks)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", range(FAMILIES))
def test_random_calls(family: int, impl: str) -> None:
    skip_unless(impl)
    for number in range(family, DRAWS, FAMILIES):
        check(draw(number), DEVICE, number, impl)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_full_size(head_dim: int, impl: str) -> None:
    skip_unless(impl)
    for asked in ("0.05", "0.5"):
        case = BsfaCase("long", 4096, 4096, asked, head_dim=head_dim, kind="structured")
        kept = check(case, DEVICE, 0, impl)
        assert 0 < kept.float().mean() < 0.6


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_minus_infinity_is_the_dense_kernel(head_dim: int, causal: bool) -> None:
    """Not bit by bit: its products are added in another order than where P V overlaps the softmax. So each
    is within the budget, and they differ by a rounding of the output here and there."""
    skip_unless("hopper")
    q, k, v = make(BsfaCase("dense", 3000, 3000, head_dim=head_dim, heads=4), DEVICE)
    out = attention_bsfa(q, k, v, threshold=-math.inf, causal=causal, impl="hopper")
    dense = attention(q, k, v, causal=causal, impl="hopper")
    assert (out.float() - dense.float()).abs().max() < 4e-3
    check(BsfaCase("dense", 3000, 3000, -math.inf, causal, head_dim=head_dim), DEVICE, 0, "hopper")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_same_bits_every_time(impl: str) -> None:
    skip_unless(impl)
    q, k, v = make(BsfaCase("bits", 5000, 5000, heads=8, head_dim=128, kind="structured"), DEVICE)
    limits = bsfa_threshold(q, k, kept=0.1)
    first = attention_bsfa(q, k, v, threshold=limits, impl=impl)
    again = (attention_bsfa(q, k, v, threshold=limits, impl=impl) for _ in range(20))
    assert all(torch.equal(out, first) for out in again)


def test_the_two_kernels_keep_the_same_blocks() -> None:
    skip_unless("hopper")
    q, k, v = make(BsfaCase("both", 4000, 4000, heads=4, head_dim=128, kind="structured"), DEVICE)
    limits = bsfa_threshold(q, k, kept=0.1)
    kept = [attention_bsfa(q, k, v, threshold=limits, return_kept=True, impl=x)[1] for x in IMPLEMENTATIONS]
    assert (kept[0] != kept[1]).float().mean() < 1e-3  # ties, up to the order of sums


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_streams_and_graphs(impl: str) -> None:
    """A captured call decides anew about other numbers, and nothing waits for the GPU."""
    skip_unless(impl)
    q, k, v = make(BsfaCase("graphs", 2000, 2000, head_dim=64), DEVICE)
    limits = bsfa_threshold(q, k, kept=0.3)

    def call() -> torch.Tensor:
        return attention_bsfa(q, k, v, threshold=limits, impl=impl)

    expected, stream = call(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            out = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(5):
        k.copy_(torch.randn_like(k))
        graph.replay()
        assert torch.equal(out, call())


def test_more_than_2_31_elements() -> None:
    """Heads that lie 2^31 elements apart."""
    skip_unless("hopper")
    whole = torch.zeros((1 << 31) + 4096 * 64 * 2, dtype=torch.float16, device=DEVICE)
    far = whole.as_strided((1, 2, 2048, 64), (0, (1 << 31) + 64 * 64, 64, 1))
    far.copy_(torch.randn(1, 2, 2048, 64, device=DEVICE))
    near = far.contiguous()
    for impl in IMPLEMENTATIONS:
        out = attention_bsfa(far, far, far, threshold=5.0, impl=impl)
        assert torch.equal(out, attention_bsfa(near, near, near, threshold=5.0, impl=impl))
