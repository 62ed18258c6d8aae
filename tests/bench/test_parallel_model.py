"""The model of many GPUs: its limits, and what it says that no method can do."""

from __future__ import annotations

import math
from itertools import count

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnlib.bench.parallel_model import Call, Cluster, estimate
from attnlib.distributed import api, heads
from attnlib.distributed.layout import parts_of
from attnlib.params import MaskWindow, Params

FAST = Cluster((600.0, 500.0), near=1e9, far=1e9, memory=1e9)
REAL = Cluster((600.0, 500.0))
CALL = Call(1 << 20, heads=32, kv_heads=32)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses", "hybrid"])
def test_links_without_a_limit_leave_the_kernels(method, which):
    for gpus in (1, 2, 8, 32):
        found = estimate(CALL, gpus, method, FAST, which)
        assert found.seconds == pytest.approx(found.kernels, rel=1e-3)
        alone = estimate(CALL, 1, method, FAST, which).seconds
        assert alone / found.seconds == pytest.approx(gpus, rel=1e-3)


def test_heads_limit_ulysses():
    assert estimate(CALL, 64, "ulysses", REAL) is None
    assert estimate(Call(1 << 20, 32, 4), 8, "hybrid", REAL) is None
    assert estimate(CALL, 1024, "hybrid", REAL) is not None


def test_a_ring_needs_rows_to_hide_its_transfers():
    efficiency = [estimate(Call(1 << bits), 64, "ring", REAL).efficiency for bits in (16, 18, 21, 24)]
    assert efficiency == sorted(efficiency) and efficiency[0] < 0.5 and efficiency[-1] > 0.95


def test_memory():
    """That of a ring is what two ranks hold, that of gathered keys grows with their number."""
    ring = [estimate(Call(tokens := 65536 * gpus), gpus, "ring", REAL).bytes for gpus in (2, 8, 64)]
    assert len(set(ring)) == 1 and tokens
    gathered = [estimate(Call(65536 * gpus), gpus, "all_gather", REAL).bytes for gpus in (2, 8, 64)]
    assert gathered == sorted(set(gathered))


def test_the_hybrid_sends_less_between_nodes():
    call = Call(1 << 20, 32, 8)
    assert estimate(call, 64, "hybrid", REAL).seconds < estimate(call, 64, "ring", REAL).seconds


class Counted:
    """In the place of links: nothing comes, and the bytes that a rank sends are counted, except those of the
    LSE, which the model leaves out."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks, self.calls, self.bytes = 1, ranks, count(), 0

    def agree(self, options, error=None) -> None:
        pass

    def start(self, sent, received) -> Counted:
        self.bytes += sum(x.nbytes for _, x in sent if x.dtype == torch.bfloat16)
        return self

    def wait(self) -> None:
        pass


class Copies(TorchDispatchMode):
    """Bytes that copies read and write."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.bytes += 2 * found.nbytes
        return found


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ulysses_sends_what_the_package_sends(ranks, causal):
    """As many bytes backward as forward: q, k and v are not exchanged again."""
    call = Call(16 * ranks, heads=8, kv_heads=4, head_dim=16, causal=causal)
    q, k, v = (torch.randn(1, 16, n, 16).bfloat16().transpose(1, 2).requires_grad_() for n in (8, 4, 4))
    params = Params(MaskWindow(None, 0 if causal else None), 0.25, return_lse=True, impl="reference")
    links, rates = Counted(ranks), Cluster((1e9, 1e9), near=1.0, memory=math.inf)
    out, _ = api._between_ranks(q, k, v, params, links, api.Way("ulysses"))
    forward, links.bytes = links.bytes, 0
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for which, sent in (("forward", forward), ("backward", links.bytes)):
        assert estimate(call, ranks, "ulysses", rates, which).seconds == pytest.approx(sent / 1e9)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ulysses_copies_what_the_package_copies(ranks):
    call, links = Call(16 * ranks, heads=8, kv_heads=4, head_dim=16), Counted(ranks)
    parts = tuple(parts_of(rank, ranks, 16, MaskWindow(None, 0)) for rank in range(ranks))
    rows = [torch.randn(1, 16, n, 16).bfloat16().transpose(1, 2) for n in (8, 4, 4)]
    with Copies() as copies:
        _, _, whole = (heads._to_heads(x, links, parts) for x in (*rows[1:], rows[0]))
        heads._to_rows(whole, links, parts)
    rates = Cluster((1e9, 1e9), near=math.inf, memory=1.0)
    for which in ("forward", "backward"):
        assert estimate(call, ranks, "ulysses", rates, which).seconds == pytest.approx(copies.bytes / 1e9)


def test_the_exchange_of_a_call_of_chapter_42():
    """By hand: 65536 tokens on two GPUs, 4 tensors of 134 MB each, half of each sent, each copied one and a
    half times."""
    pair = Cluster((600.0, 500.0), near=137.0, memory=4800.0)
    found = estimate(Call(65536, 16, 16), 2, "ulysses", pair)
    by_hand = 4 * 134.217728e6 * (0.5 / 137e9 + 2 * 1.5 / 4800e9)
    assert found.seconds - found.kernels == pytest.approx(by_hand)
    dense = estimate(Call(65536, 16, 16, causal=False), 2, "ulysses", pair)
    assert dense.kernels == 2 * found.kernels
    assert dense.seconds - dense.kernels == pytest.approx(by_hand)
