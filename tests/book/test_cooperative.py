"""Attention on the CPU to a cache in host memory, and the planner of layers (attnlib/book/cooperative.py)."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnlib.book.cooperative import HostLayer, Plan, host_attention, layer_bytes, plan_layers
from attnlib.kernels.reference.dense import attention_fp64


def drawn(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("batch, group", [(1, 4), (3, 1)])
def test_parts_give_what_the_whole_gives(parts, batch, group):
    cache_k, cache_v = drawn(batch, 2, 50, 16), drawn(batch, 2, 50, 16) + 1
    k, v, q = cache_k[:, :, :37], cache_v[:, :, :37], drawn(batch, 2, group, 16) * 3
    truth = attention_fp64(q, k, v, causal=False)[0]
    assert (host_attention(q, k, v, parts) - truth).abs().max() < 2e-6


def test_nothing_of_the_cache_is_copied(monkeypatch):
    """The keys that PyTorch gets lie where the cache is."""
    from attnlib.book import cooperative

    seen, original = [], cooperative._flash_on_cpu

    def watched(q, k, v):
        seen.append((k, v))
        return original(q, k, v)

    monkeypatch.setattr(cooperative, "_flash_on_cpu", watched)
    k, v = (drawn(2, 2, 64, 8)[:, :, :41] for _ in range(2))
    host_attention(drawn(2, 2, 1, 8), k, v, 4)
    assert [x.untyped_storage().data_ptr() for pair in seen for x in pair] == [
        x.untyped_storage().data_ptr() for x in (k, v)
    ] * 2


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_a_layer_over_several_tokens(dtype, bound):
    layer = HostLayer((2, 2, 20, 16), dtype, parts=3)
    k, v = (drawn(2, 2, 20, 16, dtype=dtype) for _ in range(2))
    layer.append(k[:, :, :15], v[:, :, :15])
    for length in range(16, 21):
        layer.append(k[:, :, length - 1 : length], v[:, :, length - 1 : length])
        q = drawn(2, 6, 1, 16, dtype=dtype)
        truth = attention_fp64(q, k[:, :, :length], v[:, :, :length], causal=False)[0]
        found = layer.attend(q)
        assert found.shape == q.shape and found.dtype == dtype
        assert (found.double() - truth).abs().max() < bound
    with pytest.raises(ValueError, match="at most 0 new tokens, got 1"):
        layer.append(k[:, :, :1], v[:, :, :1])


class Crossings(TorchDispatchMode):
    """Shapes of what goes from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        there = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if len({x.device.type for x in there}) > 1:
            self.shapes.append(tuple(there[-1].shape))
        return out


@pytest.mark.parametrize("length", [1, 15, 400])
def test_only_q_and_the_output_cross_the_bus(length, monkeypatch):
    """With a GPU that is pretended: keys and values come down once, when they are new, and never go up; a
    token brings q down and takes the output, which has q's shape, up, however long the cache is."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.Stream("cpu"))
    staged, original = [], HostLayer._staged
    monkeypatch.setattr(HostLayer, "_staged", lambda self, q: staged.append(q.shape) or original(self, q))
    with FakeTensorMode():
        layer = HostLayer((2, 2, 400, 16), torch.bfloat16, parts=3)
        new = torch.empty(2, 2, length, 16, dtype=torch.bfloat16, device="cuda")
        with Crossings() as crossed:
            layer.append(new, new)
        assert crossed.shapes == [new.shape] * 2  # k and v
        q = torch.empty(2, 6, 1, 16, dtype=torch.bfloat16, device="cuda")
        with Crossings() as crossed:
            out = layer.attend(q)
    assert out.is_cuda and crossed.shapes == [q.shape] * 2 and staged == [q.shape]
    assert layer.k.device.type == layer.v.device.type == "cpu"


def test_mistakes_are_named():
    layer = HostLayer((1, 2, 8, 16), torch.float32)
    with pytest.raises(ValueError, match=r"q: expected keys to attend to, got a cache of length 0"):
        layer.attend(drawn(1, 4, 1, 16))
    with pytest.raises(ValueError, match=r"q: expected \(1, a multiple of 2, 1, 16\), got \(1, 3, 1, 16\)"):
        layer.attend(drawn(1, 3, 1, 16))
    with pytest.raises(ValueError, match=r"k, v: expected \(1, 2, new, 16\), got \(1, 1, 1, 16\)"):
        layer.append(drawn(1, 1, 1, 16), drawn(1, 1, 1, 16))


def test_plan():
    assert layer_bytes(32768, 8, 128) == 134217728
    assert plan_layers(1000, 4, 250) == Plan(4, 0, 1000, 0)
    assert plan_layers(999, 4, 250) == Plan(3, 1, 750, 250)
    assert plan_layers(0, 4, 250, host_free=1000) == Plan(0, 4, 0, 1000)
    assert plan_layers(10**9, 4, 250).gpu_layers == 4
    assert plan_layers(999, 4, 250).step_ms(0.1, 2.0) == pytest.approx(2.3)


@pytest.mark.parametrize(
    "given, error, text",
    [
        ((-1, 4, 250), ValueError, "free: expected at least 0, got -1"),
        ((10, 0, 250), ValueError, "layers: expected at least 1, got 0"),
        ((10, 4, 0), ValueError, "per_layer: expected at least 1, got 0"),
        ((10.0, 4, 250), TypeError, "free: expected an int, got float"),
        ((500, 4, 250, 499), ValueError, "host_free: expected at least 500 bytes for 2 of 4 layers, got 499"),
    ],
)
def test_a_plan_that_makes_no_sense(given, error, text):
    with pytest.raises(error, match=text):
        plan_layers(*given)
