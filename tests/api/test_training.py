"""Gradients of attention() and attention_varlen(): within the error budget; second ones are an error."""

from __future__ import annotations

import math

import pytest
import torch
from cases import INTERPRETER_REMARKS
from differentiated import backward_in  # noqa: F401
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from attnlib import attention, attention_varlen
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels import portable

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.usefixtures("backward_in")]
IMPLEMENTATIONS = ["triton", "reference", None]


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def gradients(inputs, d_out=None, **options):
    """(out, dq, dk, dv)."""
    inputs = leaves(*inputs)
    out = attention(*inputs, **options)
    return out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out) if d_out is None else d_out)


def judge(d_out, inputs, found, name, **options):
    for verdict in GradientOracle(d_out, *inputs, **options).judge(*found).values():
        verdict.raise_if_bad(name)


CALLS = {
    "causal": (Shape(1, 2, 33, 16), {"causal": True}),
    "dense": (Shape(1, 2, 33, 16, seqlen_k=20), {}),
    "grouped": (Shape(2, 4, 17, 24, heads_kv=2, seqlen_k=30), {"causal": True}),
    "empty rows": (Shape(1, 2, 40, 16, seqlen_k=10), {"causal": True}),
    "scale": (Shape(1, 2, 20, 16), {"sm_scale": -0.5}),
    "scale 0": (Shape(1, 2, 20, 16), {"sm_scale": 0.0}),
    "window": (Shape(1, 2, 40, 16), {"window": (5, 3)}),
    "causal window": (Shape(1, 2, 40, 16, seqlen_k=50), {"causal": True, "window": (7, -1)}),
    "bfloat16": (Shape(1, 2, 33, 16, dtype="bfloat16"), {"causal": True}),
    "float32": (Shape(1, 2, 33, 16, dtype="float32"), {"causal": True}),
}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_within_the_error_budget(name, impl, device):
    shape, options = CALLS[name]
    inputs = make_inputs(shape, device=device)
    d_out = torch.randn_like(inputs[0])
    out, *found = gradients(inputs, d_out, impl=impl, **options)
    judge(d_out, inputs, found, name, **options)
    # Asking for gradients does not change the result.
    assert torch.equal(out, attention(*inputs, impl=impl, **options))


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_rows_that_see_nothing_have_no_gradient(impl, device):
    q, k, v = make_inputs(Shape(1, 2, 40, 16, seqlen_k=10), device=device)
    _, dq, dk, dv = gradients((q, k, v), causal=True, impl=impl)
    assert not dq[:, :, :31].any()  # the row that sees one key has no choice either
    assert dq[:, :, 32:].any(-1).all() and dk.any() and dv.any(-1).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize(("seqlen", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_differentiate(seqlen, keys, device):
    q = torch.randn(2, 4, seqlen, 16, device=device)
    k = torch.randn(2, 2, keys, 16, device=device)
    out, *found = gradients((q, k, k))
    assert out.shape == q.shape and not out.any()
    for x, dx in zip((q, k, k), found, strict=True):
        assert dx.shape == x.shape and not dx.any()


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "kv"])
def test_only_what_requires_grad_gets_one(needs, device):
    inputs = dict(zip("qkv", make_inputs(Shape(1, 2, 20, 16), device=device), strict=True))
    _, *every = gradients(inputs.values(), causal=True)
    for name in needs:
        inputs[name] = inputs[name].clone().requires_grad_()
    attention(**inputs, causal=True).sum().backward()
    for (name, x), gradient in zip(inputs.items(), every, strict=True):
        assert x.grad is None if name not in needs else torch.equal(x.grad, gradient)


def test_gradients_add_up_where_a_tensor_is_used_twice(device):
    x, _, _ = make_inputs(Shape(1, 2, 20, 16, dtype="float32"), device=device)
    _, *three = gradients((x, x, x))
    one = x.clone().requires_grad_()
    attention(one, one, one).sum().backward()
    torch.testing.assert_close(one.grad, sum(three))


def test_gradients_go_through_what_comes_before(device):
    """A result of other operations requires grad though nobody marked it."""
    x, _, _ = make_inputs(Shape(1, 2, 20, 16, dtype="float32"), device=device)
    weight = torch.randn(16, 16, device=device, requires_grad=True)
    out = attention(x @ weight, x, x, causal=True)
    (found,) = torch.autograd.grad(out.square().sum(), weight)
    expected = scaled_dot_product_attention(x @ weight, x, x, is_causal=True).square().sum()
    torch.testing.assert_close(found, torch.autograd.grad(expected, weight)[0], rtol=1e-4, atol=1e-4)


def expanded(x):
    return x[:, :1].expand(*x.shape)


def transposed(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def misaligned(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def columns_apart(x):
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize("layout", [expanded, transposed, misaligned, columns_apart])
def test_layouts_of_inputs_and_of_the_gradient_of_the_output(layout, device):
    inputs = [layout(x) for x in make_inputs(Shape(2, 2, 20, 16), device=device)]
    d_out = layout(torch.randn(2, 2, 20, 16, device=device, dtype=torch.float16))
    leaf = [x.detach().requires_grad_() for x in inputs]  # as they lie
    out = attention(*leaf, causal=True, impl="triton")
    found = torch.autograd.grad(out, leaf, d_out)
    judge(d_out.contiguous(), [x.contiguous() for x in inputs], found, layout.__name__, causal=True)


def test_a_gradient_without_memory_of_its_own(device):
    """`sum` sends back one number, expanded."""
    inputs = make_inputs(Shape(1, 2, 20, 16), device=device)
    leaf = leaves(*inputs)
    attention(*leaf, impl="triton").sum().backward()
    judge(torch.ones_like(inputs[0]), inputs, [x.grad for x in leaf], "sum")


# ---------------------------------------------------------------- varlen sequences


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (4, 0)}], ids=str)
def test_varlen_sequences_have_the_gradients_of_each(options, impl, device):
    torch.manual_seed(0)
    lengths_q, lengths_k = [3, 0, 20, 1, 5], [7, 4, 20, 30, 0]
    make = {"device": device, "dtype": torch.float16}
    q, d_out = (torch.randn(sum(lengths_q), 4, 16, **make) for _ in range(2))
    k, v = (torch.randn(sum(lengths_k), 2, 16, **make) for _ in range(2))
    offsets = [
        torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device=device)
        for x in (lengths_q, lengths_k)
    ]
    inputs = leaves(q, k, v)
    out, lse = attention_varlen(*inputs, *offsets, 20, 30, return_lse=True, impl=impl, **options)
    assert out.shape == q.shape and lse.shape == (4, 29) and not lse.requires_grad
    dq, dk, dv = torch.autograd.grad(out, inputs, d_out)
    parts = [x.split(lengths_q) for x in (d_out, q, dq)] + [x.split(lengths_k) for x in (k, v, dk, dv)]
    for d_o, q, dq, k, v, dk, dv in zip(*parts, strict=True):
        if not (len(q) and len(k)):
            assert not any(x.any() for x in (dq, dk, dv))
            continue
        d_o, q, dq, k, v, dk, dv = (x.transpose(0, 1)[None] for x in (d_o, q, dq, k, v, dk, dv))
        judge(d_o, (q, k, v), (dq, dk, dv), f"{q.shape[2]} x {k.shape[2]}", **options)


# ---------------------------------------------------------------- what autograd promises


def test_second_derivatives_are_an_error_with_a_way_out(device):
    inputs = leaves(*make_inputs(Shape(1, 1, 20, 16, dtype="float32"), device=device))
    (dq,) = torch.autograd.grad(attention(*inputs).square().sum(), inputs[0], create_graph=True)
    assert dq.requires_grad  # so that nobody takes it for a constant
    with pytest.raises(RuntimeError, match="^attnlib.attention has no second derivative: .* math backend$"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: attention(q, q, q).sum())(q).sum())(inputs[0])
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.hessian(lambda q: attention(q, *inputs[1:]).square().sum())(inputs[0].detach())


def test_the_lse_is_a_statistic(device):
    inputs = leaves(*make_inputs(Shape(1, 1, 20, 16), device=device))
    out, lse = attention(*inputs, return_lse=True)
    assert out.requires_grad and not lse.requires_grad
    (dq,) = torch.autograd.grad((out * lse[..., None]).sum(), inputs[0])
    assert dq.isfinite().all() and dq.any()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_where_no_gradient_is_wanted(context, monkeypatch, device):
    inputs = leaves(*make_inputs(Shape(1, 1, 20, 16), device=device))
    expected = attention(*inputs).detach()
    asked = []
    forward = portable.forward
    monkeypatch.setattr(portable, "forward", lambda *a: asked.append(a[3].return_lse) or forward(*a))
    with context():
        out = attention(*inputs, impl="triton")
    assert torch.equal(out, expected) and not out.requires_grad and out.grad_fn is None
    assert asked == [False]  # the LSE is for the backward pass


def test_inputs_changed_before_the_backward_pass(device):
    inputs = leaves(*make_inputs(Shape(1, 1, 20, 16), device=device))
    q = inputs[0] * 1
    out = attention(q, *inputs[1:])
    q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hopper_by_name_with_gradients_fails_before_anything_runs():
    inputs = leaves(*make_inputs(Shape(1, 1, 20, 16), device="cpu"))
    with pytest.raises(ValueError, match="^impl: 'hopper' needs CUDA tensors"):
        attention(*inputs, impl="hopper")


def test_the_backward_pass_runs_what_the_forward_pass_ran(monkeypatch, device):
    """impl="triton" never differentiates by the reference, and the reference never by a kernel."""
    inputs = make_inputs(Shape(1, 1, 20, 16), device=device)

    def broken(*args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr("attnlib.kernels.reference.gradients.gradient_fp64", broken)
    gradients(inputs, impl="triton")
    with pytest.raises(RuntimeError, match="broken"):
        gradients(inputs, impl="reference")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant, device):
    inputs = make_inputs(Shape(1, 2, 20, 16), device=device)
    expected = gradients(inputs, causal=True)[1:]
    leaf = leaves(*inputs)
    checkpoint(lambda *x: attention(*x, causal=True), *leaf, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(x.grad, dx) for x, dx in zip(leaf, expected, strict=True))


@pytest.mark.parametrize("switch", ["argument", "torch"])
def test_deterministic_reaches_the_launcher(switch, monkeypatch, device):
    asked = []
    backward = portable.backward
    monkeypatch.setattr(portable, "backward", lambda *a: asked.append(a[6].deterministic) or backward(*a))
    inputs = make_inputs(Shape(1, 1, 20, 16), device=device)
    if switch == "argument":
        gradients(inputs, impl="triton", deterministic=True)
    else:
        torch.use_deterministic_algorithms(True)
        try:
            gradients(inputs, impl="triton")
        finally:
            torch.use_deterministic_algorithms(False)
    gradients(inputs, impl="triton")
    assert asked == [True, False]


# ---------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_as_for_pytorchs_own_attention(dtype, device):
    q, k, v = make_inputs(Shape(1, 2, 20, 16, dtype="float32"), device=device)
    mixed = q, k.to(dtype), v.half()
    with torch.autocast(device, dtype):
        out, like = attention(*mixed), scaled_dot_product_attention(*mixed)
        (dq,) = torch.autograd.grad(attention(x := q.requires_grad_(), *mixed[1:]).sum(), x)
    assert out.dtype == like.dtype == dtype and dq.dtype == torch.float32
    assert torch.equal(out, attention(*(x.detach().to(dtype) for x in mixed)))
    with torch.autocast(device, enabled=False), pytest.raises(TypeError, match="^k: expected dtype"):
        attention(*mixed)
    with torch.autocast(device, dtype), pytest.raises(TypeError, match="^q: expected dtype .*float64"):
        attention(q.double(), k, v)
    with torch.autocast(device, dtype), pytest.raises(TypeError, match="^q: expected a torch.Tensor"):
        attention(None, k, v)


# ---------------------------------------------------------------- torch.func


def test_grad_and_vjp_of_torch_func(device):
    q, k, v = make_inputs(Shape(1, 2, 20, 16), device=device)
    expected = gradients((q, k, v), causal=True)[1:]
    found = torch.func.grad(lambda *x: attention(*x, causal=True).float().sum(), (0, 1, 2))(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    out, pull_back = torch.func.vjp(lambda q: attention(q, k, v, causal=True), q)
    assert torch.equal(pull_back(torch.ones_like(out))[0], expected[0])


def test_vmap_is_a_larger_batch(device):
    q, k, v = make_inputs(Shape(6, 2, 20, 16), device=device)
    expected = attention(q, k, v, causal=True)
    q, k, v = (x.unflatten(0, (3, 2)) for x in (q, k, v))
    found, lse = torch.vmap(lambda *x: attention(*x, causal=True, return_lse=True))(q, k, v)
    assert torch.equal(found, expected.unflatten(0, (3, 2))) and lse.shape == (3, 2, 2, 20)
    # Mapped over another dimension, and with keys that all share.
    found = torch.vmap(lambda q: attention(q, k[0], v[0]), in_dims=2, out_dims=2)(q.movedim(0, 2))
    for n in range(3):
        assert torch.equal(found[:, :, n], attention(q[n], k[0], v[0]))
    empty = torch.vmap(lambda q: attention(q, k[0], v[0]))(q[:, :, :, :0])
    assert empty.shape == (3, 2, 2, 0, 16)


def test_gradients_sample_by_sample(device):
    """vmap of grad."""
    inputs = make_inputs(Shape(3, 2, 20, 16), device=device)
    expected = gradients(inputs)[1:]
    one = torch.func.grad(lambda *x: attention(*(y[None] for y in x)).float().sum(), (0, 1, 2))
    found = torch.vmap(one)(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_torch_func_cannot_do_says_so(device):
    x = torch.randn(3, 8, 2, 16, device=device)
    offsets = torch.tensor([0, 8], dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError, match="^attention_varlen under torch.vmap: not supported"):
        torch.vmap(lambda x: attention_varlen(x, x, x, offsets, offsets, 8, 8))(x)
    with pytest.raises(NotImplementedError, match="^attention_varlen under torch.vmap: not supported"):
        torch.vmap(lambda given: attention_varlen(*x, given, given, 8, 8))(offsets[None])
    q = torch.randn(1, 2, 8, 16, device=device)
    with pytest.raises(RuntimeError, match="no forward-mode derivative .*jvp"):
        torch.func.jvp(lambda q: attention(q, q, q), (q,), (q,))


@pytest.mark.parametrize("needs_grad", [False, True], ids=["constant", "leaf"])
@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
def test_a_tangent_is_never_dropped(context, which, needs_grad, device):
    """Without an error the result would count as a constant."""
    inputs = list(torch.randn(3, 1, 2, 8, 16, device=device))
    offsets = torch.tensor([0, 8], dtype=torch.int32, device=device)
    with forward_ad.dual_level(), context():
        attention(*inputs)  # no tangent, no error
        x = inputs[which].requires_grad_(needs_grad)
        inputs[which] = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            attention(*inputs)
        tokens = [x[0].transpose(0, 1) for x in inputs]
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            attention_varlen(*tokens, offsets, offsets, 8, 8)
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            torch.vmap(lambda x: attention(x, *inputs[1:]))(inputs[0][None])
    with forward_ad.dual_level(), torch.inference_mode():  # which switches tangents off, says PyTorch
        assert forward_ad.unpack_dual(attention(*inputs)).tangent is None


def test_a_tangent_of_the_gradient_of_the_output_is_never_dropped(device):
    q, k, v = leaves(*torch.randn(3, 1, 2, 8, 16, device=device))
    out = attention(q, k, v)
    with forward_ad.dual_level():
        d_out = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            torch.autograd.grad(out, q, d_out)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_sign_that_is_not_in_memory(impl, device):
    """PyTorch negates lazily: `x.conj().imag` has the memory of `x.imag`."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 20, 16, dtype=torch.complex64, device=device).conj().imag for _ in range(3)]
    assert all(x.is_neg() for x in inputs)
    plain = [x.resolve_neg() for x in inputs]
    d_out = torch._neg_view(torch.randn(1, 2, 20, 16, device=device))
    for found, expected in (
        (attention(*inputs, impl=impl), attention(*plain, impl=impl)),
        (torch.vmap(lambda q: attention(q, *plain[1:], impl=impl))(inputs[0][None])[0],
         attention(*plain, impl=impl)),
    ):  # fmt: skip
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    pairs = []
    for x, y in ((inputs, d_out), (plain, d_out.resolve_neg())):
        x = [z.detach().requires_grad_() for z in x]
        pairs.append(torch.autograd.grad(attention(*x, impl=impl), x, y))
    for found, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    tokens = [[x[0].transpose(0, 1) for x in tensors] for tensors in (inputs, plain)]
    offsets = torch.tensor([0, 5, 20], dtype=torch.int32, device=device)
    negated = torch._neg_view(-offsets)
    torch.testing.assert_close(
        attention_varlen(*tokens[0], negated, negated, 15, 15, impl=impl),
        attention_varlen(*tokens[1], offsets, offsets, 15, 15, impl=impl),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


def test_vmap_over_nothing(device):
    k = torch.randn(2, 2, 8, 16, device=device)
    nothing = torch.randn(0, 2, 4, 8, 16, device=device)
    out, lse = torch.vmap(lambda q: attention(q, k, k, return_lse=True))(nothing)
    assert out.shape == (0, 2, 4, 8, 16) and lse.shape == (0, 2, 4, 8)
    dq = torch.vmap(torch.func.grad(lambda q: attention(q, k, k).sum()))(nothing)
    assert dq.shape == nothing.shape
    q = torch.randn(2, 4, 8, 16, device=device)
    jacobian = torch.func.jacrev(lambda q: attention(q, k, k)[:, :, :0])(q)
    assert jacobian.shape == (2, 4, 0, 16, 2, 4, 8, 16)


def test_functionalize(device):
    from torch.func import functionalize, grad

    q, k, v = torch.randn(3, 1, 2, 8, 16, device=device)
    offsets = torch.tensor([0, 8], dtype=torch.int32, device=device)
    expected = attention(q, k, v, causal=True)

    def plain(*x):
        return attention(*x, causal=True)

    call = functionalize(plain)
    assert torch.equal(call(q, k, v), expected)
    assert torch.equal(torch.vmap(call)(q[None], k[None], v[None])[0], expected)
    assert torch.equal(functionalize(torch.vmap(plain))(q[None], k[None], v[None])[0], expected)
    tokens = [x[0].transpose(0, 1) for x in (q, k, v)]
    found = functionalize(lambda *x: attention_varlen(*x, 8, 8, causal=True))(*tokens, offsets, offsets)
    torch.testing.assert_close(found.transpose(0, 1)[None], expected)
    with pytest.raises(NotImplementedError, match="functionalize together with torch.func.grad"):
        functionalize(grad(lambda q: attention(q, k, v).sum()))(q)


def test_a_small_step_goes_downhill(device):
    """The gradient is that of the function which is computed, not of one that resembles it."""
    q, k, v = make_inputs(Shape(1, 2, 30, 16, dtype="float32"), device=device)

    def loss(q, k, v):
        return attention(q, k, v, causal=True).square().sum()

    inputs = leaves(q, k, v)
    before = loss(*inputs)
    found = torch.autograd.grad(before, inputs)
    step = 1e-3 / math.sqrt(sum(x.square().sum().item() for x in found))
    after = loss(*(x.detach() - step * dx for x, dx in zip(inputs, found, strict=True)))
    expected = step * sum(x.square().sum().item() for x in found)
    assert abs((before - after).item() - expected) < 0.1 * expected
