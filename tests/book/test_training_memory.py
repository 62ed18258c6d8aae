"""The formulas of memory and time of a training step (attnlib/book/training.py) against PyTorch on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnlib.book.llama import Llama, LoraLinear, MasterAdamW
from attnlib.book.training import SHAPES, LlamaShape, Machine, Training, exchange_ms, kept, memory, step_ms

TINY = LlamaShape(2, 32, 4, 4, 8, 96, 64)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def count(model: nn.Module, trained: bool = False) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


@pytest.mark.parametrize("shape", [TINY, LlamaShape(3, 24, 6, 2, 8, 40, 50, True)])
@pytest.mark.parametrize("rank", [None, 16])
def test_parameters(shape, rank):
    model = Llama(shape, attend, False)
    assert count(model) == shape.parameters
    if rank:
        model.adapt(rank)
    assert count(model, trained=True) == Training(1, lora=rank).trained(shape)


def test_published_sizes():
    """Llama 3.1 8B and 3.2 1B have 8.03 and 1.24 billion parameters."""
    assert SHAPES["8B"].parameters == 8_030_261_248
    assert SHAPES["1B"].parameters == 1_235_814_400


def saved_bytes(model: nn.Module, call) -> int:
    """Of all that a forward pass saves, parameters and what does not depend on the tokens apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call()
    total = sum(storage.nbytes() for storage in seen.values())
    del out
    return total


@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("rank", [None, 8])
def test_what_a_layer_keeps(tokens, rank):
    """Without norms, which PyTorch's CPU saves in another way than its kernel on a GPU. The rest of the bytes
    is exact but for the angles of the rotary embedding, which all layers share."""
    model = Llama(TINY, attend, False).to(torch.bfloat16)
    if rank:
        model.adapt(rank)
    layer = model.layers[0]
    layer.norm_1, layer.norm_2 = nn.Identity(), nn.Identity()
    x = torch.randn(1, tokens, TINY.width, dtype=torch.bfloat16, requires_grad=True)
    turn = model.angles(tokens, x)
    angles = sum(each.nbytes for each in turn)
    parts = kept(TINY, Training(tokens, attention="sdpa", lora=rank))
    expected = sum(parts.values()) - parts["norms"]
    assert abs(saved_bytes(layer, lambda: layer(x, turn)) - expected) <= angles + 64


def test_a_step_learns():
    """Both ways give the same gradients, LoRA trains its adapters alone, and the loss falls."""
    tokens = torch.randint(0, TINY.vocab, (2, 20), generator=torch.Generator().manual_seed(0))
    losses, gradients = {}, {}
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = Llama(TINY, attend, checkpointing, loss_rows=7)
        loss = model(tokens)
        loss.backward()
        losses[checkpointing], gradients[checkpointing] = loss.item(), model.layers[0].q.weight.grad.clone()
    whole = F.cross_entropy(model.head(trunk(model, tokens))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert losses[True] == pytest.approx(whole.item(), rel=1e-5) == losses[False]
    assert torch.allclose(gradients[False], gradients[True], rtol=1e-4, atol=1e-6)
    model.zero_grad(set_to_none=True)
    model.adapt(4)
    frozen = model.layers[0].q.base.weight.clone()
    adam, seen = MasterAdamW(list(model.parameters()), 1e-2), []
    for _ in range(8):
        loss = model(tokens)
        loss.backward()
        adam.step()
        seen.append(loss.item())
    assert isinstance(model.layers[0].q, LoraLinear) and torch.equal(frozen, model.layers[0].q.base.weight)
    assert seen[-1] < seen[0] - 0.1


def trunk(model, tokens):
    x = model.tokens(tokens)
    for layer in model.layers:
        x = layer(x, model.angles(tokens.shape[1], x))
    return model.norm(x)


def test_adam_is_pytorchs():
    p, q = (nn.Parameter(torch.linspace(-1, 1, 12)) for _ in range(2))
    ours, theirs = MasterAdamW([p], 1e-3), torch.optim.AdamW([q], 1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for i in range(5):
        p.grad, q.grad = (torch.sin(torch.arange(12.0) + i) for _ in range(2))
        ours.step()
        theirs.step()
    assert torch.allclose(p, q, atol=1e-6)


def test_memory_orders_what_it_should():
    shape, base = SHAPES["1B"], Training(4096)
    assert memory(shape, base).parameters + memory(shape, base).states == 14 * shape.parameters
    peaks = [memory(shape, replace(base, **change)).peak for change in (
        {"attention": "math"}, {}, {"checkpointing": "layer"}, {"checkpointing": "layer", "lora": 16})]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4
    spread = [memory(SHAPES["8B"], Training(1024, checkpointing="layer", zero=zero, gpus=8)).peak
              for zero in range(4)]  # fmt: skip
    assert spread == sorted(spread, reverse=True) and len(set(spread)) == 4
    twice = [kept(shape, replace(base, context=n, attention="math"))["scores"] for n in (2048, 4096)]
    assert 3.5 < twice[1] / twice[0] < 4


def test_time_orders_what_it_should():
    shape, machine, base = SHAPES["1B"], Machine(), Training(8192)
    ms = [step_ms(shape, replace(base, **change), machine) for change in (
        {"attention": "math"}, {"checkpointing": "layer"}, {}, {"lora": 16})]
    assert ms == sorted(ms, reverse=True)
    ideal = 6 * shape.multiplied * base.tokens / machine.products / 1e9
    assert ideal < step_ms(shape, base, machine) < 2 * ideal
    assert exchange_ms(shape, base, machine) == 0
    sent = [exchange_ms(shape, Training(8192, zero=zero, gpus=2), machine) for zero in (1, 2, 3)]
    assert sent[0] == sent[1] < sent[2] == pytest.approx(1.5 * sent[0])


@pytest.mark.parametrize(
    "given, error, text",
    [
        ({"context": 0}, ValueError, "context: expected at least 1, got 0"),
        ({"context": 8, "lora": 0}, ValueError, "lora: expected at least 1, got 0"),
        ({"context": 8, "batch": 1.5}, TypeError, "batch: expected an int, got float"),
        ({"context": 8, "zero": 4}, ValueError, r"zero: expected one of \(0, 1, 2, 3\), got 4"),
        ({"context": 8, "attention": "flash"}, ValueError, "attention: expected one of"),
    ],
)
def test_mistakes_are_named(given, error, text):
    with pytest.raises(error, match=text):
        Training(**given)
