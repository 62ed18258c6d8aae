"""SeerAttention's parts on a CUDA GPU: pooled maps and chosen masks in random draws, graphs, no wait."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from draws import SLACK, raise_if_bad
from families import fresh_launches  # noqa: F401  (a fixture)
from pooled_cases import CASES, PooledCase, check

from attnlib import BlockMask, attention, attention_pooled
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Oracle
from attnlib.block_mask.lists import lists_of
from attnlib.kernels import hopper as kernels_hopper
from attnlib.kernels.hopper.configs import M128N128, M192N128, M256N64
from attnlib.seer import SeerGate, decode_chosen, mask_of, top

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
FORMS = [  # D, dtype, causal, query heads of a key head, implementation
    (64, "float16", True, 1, "hopper"), (64, "bfloat16", False, 2, "hopper"),
    (128, "float16", True, 2, "hopper"),
    (128, "bfloat16", True, 1, "hopper"), (128, "float16", False, 1, "hopper"),
    (256, "bfloat16", True, 1, "hopper"),
    (80, "float16", True, 1, "hopper"), (64, "float16", True, 2, "triton"),
    (128, "bfloat16", False, 1, "triton"),
    (32, "float32", True, 1, "triton"),
]  # fmt: skip
EACH = 30
LN2 = 0.6931471805599453


def hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize("name", CASES)
def test_case(name, device):
    check(CASES[name], device)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form)))
def test_pooled_draws(form, device):
    head_dim, dtype, causal, group, impl = form
    if impl == "hopper" and not hopper():
        pytest.skip("needs compute capability 9.x")
    for seed in range(EACH):
        draw = random.Random(seed)
        kv_heads = draw.choice([1, 2, 3])
        S, keys = (draw.choice([1, 63, 64, 65, 128, 129, draw.randrange(1, 1500)]) for _ in range(2))
        check(PooledCase(
            S, draw.choice([keys, S]), head_dim, causal, draw.choice([64, 128]), kv_heads * group, kv_heads,
            draw.choice([1, 2]), dtype, draw.choice([None, None, -0.2]),
            draw.choice(["normal", "normal", "sink", "large", "outlier"]), impl,
        ), device)  # fmt: skip


TILES = {"64": (64, None), "M256N64": (64, M256N64), "M192N128": (64, M192N128), "M128N128": (64, M128N128),
         "128": (128, None), "256": (256, None)}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tile", TILES)
def test_keeping_maxima_changes_no_bit(tile, dtype, device, monkeypatch, fresh_launches):
    """And the map is that of another kernel. In the order of the visit scores rise over four times 64 keys
    and fall back, by less or more than a look-up needs, or than a float32 has room for."""
    if not hopper():
        pytest.skip("needs compute capability 9.x")
    D, config = TILES[tile]
    if config is not None:
        monkeypatch.setattr(kernels_hopper, "hopper_config", lambda *call: config)
    case = PooledCase(5000, D=D, heads=8, kv_heads=4, dtype=dtype)
    for step, causal in ((0.0, True), (3.0, True), (-3.0, False), (160.0, True), (-160.0, True)):
        q, k, v = case.tensors(device)
        if step:  # in powers of two
            q[..., 0], k[..., 0] = 4, torch.arange(5000, device=device) // 64 % 4 * -step * D**0.5 * LN2 / 4
        out, pooled = attention_pooled(q, k, v, causal=causal, impl="hopper")
        assert torch.equal(out, attention(q, k, v, causal=causal, impl="hopper")), step
        other = attention_pooled(q, k, v, causal=causal, impl="triton")[1]
        torch.testing.assert_close(pooled, other, rtol=2e-3, atol=1e-6)
        for _ in range(10):
            assert torch.equal(attention_pooled(q, k, v, causal=causal)[1], pooled)


def drawn_blocks(B: int, H: int, S: int, size: int, share: float, device) -> torch.Tensor:
    n = -(-S // size)
    return torch.rand(B, H, n, n, generator=torch.Generator().manual_seed(S)).to(device) < share


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("size", [64, 128])
def test_chosen_draws(size, head_dim, device):
    """Forward and backward."""
    for seed in range(EACH):
        draw = random.Random(seed)
        S, heads, batch = draw.randrange(1, 2000), draw.choice([1, 2, 4]), draw.choice([1, 2])
        shared = draw.choice([1, heads])
        blocks = drawn_blocks(batch, shared, S, size, draw.choice([0.0, 0.1, 0.3, 0.9]), device)
        q, k, v = PooledCase(S, D=head_dim, heads=heads, batch=batch).tensors(device)
        mask = BlockMask.from_chosen(blocks, S, block_size=size)
        place = torch.arange(S, device=device)
        i, j = place[:, None] // size, place // size
        seen = (blocks[:, :, i, j] | (i == j)) & (place[:, None] >= place)
        seen = seen.expand(batch, heads, -1, -1)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, block_mask=mask)
        Oracle(q, k, v, mask=seen).judge(out.detach()).raise_if_bad(f"draw {seed}")
        d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)).to(q)
        gradients = torch.autograd.grad(out, leaves, d_out)
        for verdict in GradientOracle(d_out, q, k, v, mask=seen).judge(*gradients).values():
            raise_if_bad(verdict, SLACK, f"draw {seed}")


@pytest.mark.parametrize("step", [64, 128])
@pytest.mark.parametrize("size", [64, 128])
def test_lists_of_a_large_mask(size, step, device):
    """Those of any mask with these elements, up to how words are numbered."""
    mask = BlockMask.from_chosen(drawn_blocks(1, 4, 33000, size, 0.2, device), 33000, block_size=size)
    found, wanted = mask.lists(step), lists_of(mask._tiles, step, columns=False)
    n = int(wanted.starts[-1])
    for name in ("starts", "middles", "order"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))
    assert torch.equal(found.steps[:n], wanted.steps) and torch.equal(found.bits[:n], wanted.bits)


@torch.no_grad()
def test_no_wait_and_a_graph(device):
    """Gate, choice, mask and engine: nothing is read by the host, and a captured call is right for other
    queries and keys, whose blocks are others."""
    S, H, D = 4000, 4, 128
    torch.manual_seed(0)
    gate = SeerGate(H, H, D).to(device, torch.float16)
    q, k, v = PooledCase(S, D=D, heads=H, kv_heads=H).tensors(device)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        blocks = top(gate(q, k), 6)
        return attention(q, k, v, block_mask=mask_of(blocks, S, 128)), blocks

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, blocks = call()
    place, before = torch.arange(S, device=device), None
    for seed in (1, 2):
        torch.manual_seed(seed)
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert before is None or not torch.equal(blocks, before)
        before = blocks.clone()
        seen = blocks[:, :, place[:, None] // 128, place // 128] & (place[:, None] >= place)
        Oracle(q, k, v, mask=seen).judge(out).raise_if_bad(f"graph, seed {seed}")


@torch.no_grad()
def test_decode_chosen(device):
    for seed in range(EACH):
        draw = random.Random(seed)
        B, heads, group, size = draw.choice([1, 3]), draw.choice([1, 2, 8]), draw.choice([1, 4]), 64
        n = draw.choice([1, 5, 64, 300])
        case = replace(CASES["causal"], S=1, keys=n * size, D=draw.choice([64, 128]), heads=heads * group,
                       kv_heads=heads, batch=B)  # fmt: skip
        q, k, v = case.tensors(device)
        scores, count = torch.rand(B, heads, n, device=device), draw.choice([1, 2, 7, n])
        lengths = torch.tensor([draw.randrange(1, n * size + 1) for _ in range(B)], dtype=torch.int32).to(
            device
        )
        out = decode_chosen(q, k, v, scores, count, lengths=lengths)
        newest = (lengths - 1)[:, None, None] // size
        place = torch.arange(n, device=device)
        ranked = scores.masked_fill(place >= newest, -1.0)
        rank = ranked.argsort(-1, descending=True).argsort(-1)
        kept = ((rank < count - 1) & (place < newest)) | (place == newest)
        seen = kept.repeat_interleave(size, -1) & (
            torch.arange(n * size, device=device) < lengths[:, None, None]
        )
        mask = seen.repeat_interleave(group, 1)[:, :, None]
        Oracle(q, k, v, mask=mask).judge(out).raise_if_bad(f"draw {seed}")
