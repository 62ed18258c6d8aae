"""attention_entmax() on a CUDA GPU: random draws and full size against fp64, CUDA graphs, no wait."""

from __future__ import annotations

import pytest
import torch
from beyond_draws import ENTMAX, entmax_of
from entmax_cases import CASES, EntmaxCase, check, make, offsets_of

from attnlib import attention_entmax, attention_entmax_varlen
from attnlib.bench.entmax_oracle import EntmaxOracle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
EACH = 40


@pytest.mark.parametrize("name", CASES)
def test_case(name, device):
    check(CASES[name], device)


@pytest.mark.parametrize("form", ENTMAX, ids=lambda form: "-".join(map(str, form)))
def test_draws(form, device):
    for seed in range(EACH):
        check(entmax_of(form, seed), device, seed)


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long(head_dim, causal, spread, device):
    check(
        EntmaxCase("long", 4096, 4096, heads=2, head_dim=head_dim, causal=causal, spread=spread,
                   dtype="bfloat16"),
        device,
    )  # fmt: skip


def test_more_keys_than_a_list_has_room_for(device):
    check(EntmaxCase("many", 200, 9000, spread=0.01, dtype="bfloat16", head_dim=64), device)
    check(EntmaxCase("many", 9000, 200, spread=0.01, dtype="bfloat16", head_dim=64, causal=True), device)


def test_twenty_runs_agree_bit_by_bit(device):
    q, k, v, d_out = make(EntmaxCase("bits", 3000, 3000, heads=4, head_dim=64, causal=True), device)
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    first = None
    for _ in range(20):
        out, tau = attention_entmax(q, k, v, causal=True, return_tau=True)
        found = out, tau, *torch.autograd.grad(out, (q, k, v), d_out)
        first = first or found
        assert all(torch.equal(x, y) for x, y in zip(found, first, strict=True))


def test_a_graph_is_right_for_other_numbers(device):
    """Lists of other lengths: a captured call must not depend on what it saw when it was captured."""
    case = EntmaxCase("graph", 2000, 2000, heads=2, head_dim=64, causal=True)
    q, k, v, d_out = make(case, device)
    for x in (q, k, v):
        x.requires_grad_()

    def call():
        out = attention_entmax(q, k, v, causal=True)
        return out, *torch.autograd.grad(out, (q, k, v), d_out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for seed, spread in ((1, 0.1), (2, 5.0), (3, 1.0)):
        other = make(EntmaxCase("other", 2000, 2000, heads=2, head_dim=64, spread=spread), device, seed)
        with torch.no_grad():
            for to, new in zip((q, k, v, d_out), other, strict=True):
                to.copy_(new)
        graph.replay()
        oracle = EntmaxOracle(q.detach(), k.detach(), v.detach(), case.params, d_out)
        for name, tensor in zip(("out", "dq", "dk", "dv"), found, strict=True):
            oracle.judge(name, tensor).raise_if_bad(f"graph, spread {spread}")


def test_long_sequences(device):
    lengths = ((4096, 4096), (1, 3000), (100, 0), (3000, 700), (0, 64), (513, 2000))
    check(
        EntmaxCase("long, varlen", 0, 0, heads=4, kv_heads=2, head_dim=64, causal=True, dtype="bfloat16",
                   lengths=lengths),
        device,
    )  # fmt: skip


def test_a_graph_is_right_for_other_lengths(device):
    """A captured call reads where sequences begin when it is replayed."""
    q, k, v = (torch.randn(1000, 2, 64, device=device, dtype=torch.float16) for _ in range(3))
    q.requires_grad_()
    offsets = offsets_of([300, 700], device)

    def call():
        out = attention_entmax_varlen(q, k, v, offsets, offsets, 1000, 1000, causal=True)
        return out, *torch.autograd.grad(out.sum(), q)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for lengths in ([1, 999], [1000, 0], [500, 500]):
        offsets.copy_(offsets_of(lengths, device))
        graph.replay()
        replayed = [x.clone() for x in found]
        assert all(torch.equal(x, y) for x, y in zip(replayed, call(), strict=True))


def test_no_wait(device):
    q, k, v, d_out = make(EntmaxCase("wait", 1000, 1000, heads=2, head_dim=64), device)
    q.requires_grad_()
    torch.autograd.grad(attention_entmax(q, k, v), q, d_out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(attention_entmax(q, k, v), q, d_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
