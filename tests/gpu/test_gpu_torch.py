"""attention() in PyTorch's world on a CUDA GPU: streams, graphs, compilers, autocast, memory, no waiting."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from captured import captured, side_by_side
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from attnlib import attention, attention_varlen, dispatch, explain, node
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SHAPE = Shape(2, 8, 1000, 128, heads_kv=4)


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def step(inputs, d_out, **options):
    """(out, dq, dk, dv)."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attention(*inputs, causal=True, **options)
    return out.detach(), *torch.autograd.grad(out, inputs, d_out)


def make(seed=0, shape=SHAPE):
    inputs = make_inputs(shape, seed=seed, device="cuda")
    return inputs, make_inputs(shape, seed=seed + 100, device="cuda")[0]


def judge(inputs, d_out, results, name):
    out, *gradients = results
    Oracle(*inputs, True).judge(out).raise_if_bad(name)
    for verdict in GradientOracle(d_out, *inputs, True).judge(*gradients).values():
        verdict.raise_if_bad(name)


@pytest.mark.parametrize("impl", [None, "triton"])
def test_a_training_step(impl):
    for dtype in ("float16", "bfloat16"):
        for head_dim in (64, 128, 256):
            inputs, d_out = make(shape=Shape(2, 8, 1000, head_dim, dtype=dtype, heads_kv=4))
            judge(inputs, d_out, step(inputs, d_out, impl=impl), f"{impl} {dtype} D {head_dim}")


@pytest.mark.parametrize("impl", [None, "triton"])
def test_cpp_does_what_python_does(impl, monkeypatch):
    assert node.wait() is not None
    inputs, d_out = make()
    node.forget()
    turned = d_out.transpose(1, 2).contiguous().transpose(1, 2)
    for layout in (d_out, turned, d_out[:, :1, :1].expand(d_out.shape), d_out.double()):
        layout = layout.to(d_out.dtype)
        found = [step(inputs, layout, impl=impl) for _ in range(3)]  # the first goes through Python
        with monkeypatch.context() as patch:
            patch.setattr(node, "recorder", lambda: None)
            patch.setattr(node, "shortcut", lambda *args: None)
            found.append(step(inputs, layout, impl=impl))
        for results in found:
            judge(inputs, layout, results, f"{impl}, strides {layout.stride()}")
            for number in (0, 2, 3):  # out, dk and dv are the same in every run
                assert torch.equal(results[number], found[0][number])
            assert [x.stride() for x in results] == [x.stride() for x in found[0]]


@pytest.mark.parametrize("impl", [None, "triton"])
def test_a_known_kind_never_comes_to_python(impl, monkeypatch):
    """Forward and backward, on any stream, under autocast to the tensors' dtype, without gradients."""
    assert node.wait() is not None
    inputs, d_out = make()
    expected = step(inputs, d_out, deterministic=True, impl=impl)
    attention(*inputs, impl=impl)

    def broken(*args):
        raise AssertionError("a call or a backward pass came to Python")

    torch.cuda.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "forward", broken)
        patch.setattr(dispatch, "backward", broken)
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream), torch.autocast("cuda", torch.float16):
                found = step(inputs, d_out, deterministic=True, impl=impl)
            stream.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        with torch.inference_mode():
            assert attention(*inputs, impl=impl).is_inference()
        with pytest.raises(AssertionError, match="came to Python"):
            attention(*(x[:, :, 1:] for x in inputs), impl=impl)


def test_deterministic_gradients_have_the_same_bits_in_a_hundred_runs():
    inputs, d_out = make()
    first = step(inputs, d_out, deterministic=True)
    for _ in range(99):
        again = step(inputs, d_out, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_streams_side_by_side():
    """Eight streams at once, each with its own inputs; the backward pass follows on the forward's stream."""
    cases = [make(seed) for seed in range(8)]
    alone = [step(*case, deterministic=True) for case in cases]
    calls = [partial(step, *case, deterministic=True) for case in cases]
    for found in side_by_side(calls, 3):
        for expected, results in zip(alone, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))


def test_a_graph_of_forward_and_backward():
    inputs, d_out = make()
    static = [x.clone() for x in (*inputs, d_out)]
    graph, results = captured(lambda: step(static[:3], static[3], deterministic=True))
    for seed in range(1, 4):
        inputs, d_out = make(seed)
        for place, x in zip(static, (*inputs, d_out), strict=True):
            place.copy_(x)
        graph.replay()
        expected = step(inputs, d_out, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_a_graph_of_packed_sequences():
    """Lengths may change between replays: the longest allowed ones are what is captured."""
    q = torch.randn(1000, 8, 64, device="cuda", dtype=torch.float16)
    k, v = torch.randn(2, 1000, 4, 64, device="cuda", dtype=torch.float16)
    ends = torch.tensor([0, 300, 1000], dtype=torch.int32, device="cuda")
    graph, out = captured(lambda: attention_varlen(q, k, v, ends, ends, 1000, 1000, causal=True))
    for middle in (300, 0, 999):
        ends[1] = middle
        graph.replay()
        Oracle(q, k, v, True, cu_seqlens=(ends, ends)).judge(out).raise_if_bad(f"middle {middle}")


def test_offsets_are_looked_at_once():
    """A look waits for the GPU, which this mode makes an error."""
    q = torch.randn(1000, 8, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    ends = torch.tensor([0, 300, 1000], dtype=torch.int32, device="cuda")

    def train():
        out = attention_varlen(q, q, q, ends, ends, 700, 700, causal=True)
        out.backward(torch.ones_like(out))

    train()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train()
        fresh = ends.clone()
        with pytest.raises(RuntimeError, match="synchroniz"):
            attention_varlen(q, q, q, fresh, fresh, 700, 700)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ValueError, match="^cu_seqlens_q: expected values that never go down"):
        ends[1] = 2000
        attention_varlen(q, q, q, ends, ends, 700, 700)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(mode):
    torch.compiler.reset()
    weight = torch.randn(512, 3 * 512, device="cuda", dtype=torch.bfloat16) / 20

    def block(x, weight):
        q, k, v = (x @ weight).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
        return attention(q, k, v, causal=True).transpose(1, 2).flatten(2).float().sin()

    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for length in (512, 512, 777):
        x = torch.randn(2, length, 512, device="cuda", dtype=torch.bfloat16)
        gradients = []
        for function in (compiled, block):
            weights = weight.clone().requires_grad_()
            torch.compiler.cudagraph_mark_step_begin()
            out = function(x, weights)
            out.square().sum().backward()
            gradients.append((out.detach().clone(), weights.grad.clone()))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())
    torch.compiler.reset()


def test_autocast():
    inputs, _ = make(shape=Shape(1, 4, 500, 64, dtype="float32"))
    with torch.autocast("cuda", torch.bfloat16):
        found, like = leaves(*inputs), leaves(*inputs)
        out = attention(*found, causal=True)
        own = scaled_dot_product_attention(*like, is_causal=True)
    assert out.dtype == own.dtype == torch.bfloat16
    for result in (out, own):
        result.float().square().sum().backward()
    for a, b in zip(found, like, strict=True):
        assert a.grad.dtype == torch.float32
        torch.testing.assert_close(a.grad, b.grad, rtol=5e-2, atol=5e-2)


def test_checkpoint():
    inputs, d_out = make()
    expected = step(inputs, d_out, deterministic=True)[1:]
    leaf = leaves(*inputs)
    out = checkpoint(lambda *x: attention(*x, causal=True, deterministic=True), *leaf, use_reentrant=False)
    out.backward(d_out)
    assert all(torch.equal(x.grad, dx) for x, dx in zip(leaf, expected, strict=True))


def peak_bytes(call) -> int:
    """The most memory allocated at a time during a call, above what was there before."""
    call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("impl", [None, "triton"])
def test_memory_of_a_training_step_grows_with_the_length(impl):
    def peak(seqlen):
        inputs, d_out = make(shape=Shape(1, 8, seqlen, 128))
        return peak_bytes(lambda: step(inputs, d_out, impl=impl)), d_out.numel() * d_out.element_size()

    short, _ = peak(4096)
    long, size = peak(16384)
    assert long < 4.2 * short, f"4 times the length takes {long / short:.1f} times the memory"
    # out, dq, dk, dv, and dq's sum in float32 of the kernel that has one; P alone would be 128 sizes.
    assert long < 9 * size, f"{long / size:.1f} times the size of q"


def test_explain_names_what_runs():
    inputs, d_out = make()
    kernel = explain(*inputs, causal=True).kernel
    assert kernel == ("hopper" if torch.cuda.get_device_capability()[0] == 9 else "triton")
    out = attention(*inputs, causal=True)
    assert torch.equal(out, attention(*inputs, causal=True, impl=kernel))
    assert torch.equal(step(inputs, d_out)[0], out)  # the same forward pass where gradients are wanted
