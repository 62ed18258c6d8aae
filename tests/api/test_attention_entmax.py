"""attention_entmax as autograd, compilers, exporters, fake tensors and torch.func see it."""

from __future__ import annotations

import pytest
import torch
from cases import INTERPRETER_REMARKS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from attnlib import attention_entmax, attention_entmax_varlen

pytestmark = INTERPRETER_REMARKS
FORWARD = torch.ops.attnlib.attention_entmax
BACKWARD = torch.ops.attnlib.attention_entmax_backward


@pytest.fixture(autouse=True)
def _reset():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tensors(device, queries=10, keys=20, heads=2, grad=False):
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, queries), (1, keys), (1, keys)
    found = [torch.randn(1, h, n, 16, generator=generator).to(device) for h, n in sizes]
    return [x.requires_grad_(grad) for x in found]


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_opcheck(impl, device):
    q, k, v = tensors(device, grad=True)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if impl == "reference":  # the same traced graph; test_in_one_graph runs one with the kernels
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(FORWARD.default, (q, k, v, 1.5, True, None, True, impl), test_utils=tests)
    with torch.no_grad():
        out, tau, flags = FORWARD(q, k, v, 1.5, True, 0.3, True, impl)
        torch.library.opcheck(
            BACKWARD.default, (out, q, k, v, out, tau, flags, 1.5, True, 0.3, impl),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def packed(device, grad=False):
    """Two sequences: (q, k, v) and (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)."""
    q, k, v = tensors(device, queries=14)
    q, k, v = (x[0].transpose(0, 1).contiguous().requires_grad_(grad) for x in (q, k, v))
    offsets = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 4, 14], [0, 9, 20]))
    return (q, k, v), (*offsets, 10, 11)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_opcheck_varlen(impl, device):
    inputs, varlen = packed(device, grad=True)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(FORWARD.default, (*inputs, 1.5, True, None, True, impl, *varlen), test_utils=tests)
    with torch.no_grad():
        out, tau, flags = FORWARD(*inputs, 1.5, True, 0.3, True, impl, *varlen)
        torch.library.opcheck(
            BACKWARD.default, (out, *inputs, out, tau, flags, 1.5, True, 0.3, impl, *varlen),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def test_varlen_in_one_graph(device):
    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def compiled(q, k, v, cu_q, cu_k, longest_q, longest_k):
        return attention_entmax_varlen(
            q, k, v, cu_q, cu_k, longest_q, longest_k, causal=True, return_tau=True
        )

    inputs, varlen = packed(device, grad=True)
    found = compiled(*inputs, *varlen)
    expected = attention_entmax_varlen(*inputs, *varlen, causal=True, return_tau=True)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    gradients = [torch.autograd.grad(x[0].sum(), inputs) for x in (found, expected)]
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def test_fake_varlen():
    with FakeTensorMode():
        inputs, varlen = packed("cpu", grad=True)
        out, tau = attention_entmax_varlen(*inputs, *varlen, return_tau=True)
        assert out.shape == inputs[0].shape and tau.shape == (2, 14) and tau.dtype == torch.float32
        assert torch.autograd.grad(out.sum(), inputs[1])[0].shape == inputs[1].shape


def test_varlen_flops_are_those_of_the_sequences(device):
    inputs, varlen = packed(device, grad=True)
    with FlopCounterMode(display=False) as counter:
        attention_entmax_varlen(*inputs, *varlen).sum().backward()
    assert counter.get_total_flops() == 4 * 2 * (4 * 9 + 10 * 11) * 16 * 7 // 2


def test_varlen_under_torch_func_is_refused(device):
    (q, k, v), varlen = packed(device)
    with pytest.raises(NotImplementedError, match="attention_entmax_varlen under torch.func"):
        torch.func.grad(lambda q: attention_entmax_varlen(q, k, v, *varlen).sum())(q)


def test_wrong_offsets_are_named(device):
    inputs, (cu_q, cu_k, *longest) = packed(device)
    wrong = torch.tensor([0, 15, 14], dtype=torch.int32, device=device)
    with pytest.raises(
        ValueError, match="^cu_seqlens_q: expected values that never go down, got 14 after 15"
    ):
        attention_entmax_varlen(*inputs, wrong, cu_k, *longest)
    with pytest.raises(ValueError, match="^max_seqlen_k: expected at least 11, the longest sequence"):
        attention_entmax_varlen(*inputs, cu_q, cu_k, 10, 10)


def test_in_one_graph(device):
    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def compiled(q, k, v):
        return attention_entmax(q, k, v, causal=True, return_tau=True)

    for queries in (10, 14):
        q, k, v = tensors(device, queries, grad=True)
        found, expected = compiled(q, k, v), attention_entmax(q, k, v, causal=True, return_tau=True)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        d_out = torch.ones_like(q)
        gradients = [torch.autograd.grad(out, (q, k, v), d_out) for out in (found[0], expected[0])]
        assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def test_a_graph_without_gradients_has_no_flags(device):
    q, k, v = tensors(device)
    assert FORWARD(q, k, v, 1.5, False, None, False, "triton")[2].numel() == 0


def test_gradients_of_a_forward_pass_without_flags(device):
    """As of a graph that was made where no gradient was wanted."""
    q, k, v = tensors(device, grad=True)
    plain = FORWARD(q, k, v, 1.5, False, None, False, None)[0]
    usual = attention_entmax(q, k, v)
    gradients = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (plain, usual)]
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_fake_tensors():
    with FakeTensorMode():
        q, k, v = tensors("cpu", grad=True)
        out, tau = attention_entmax(q, k, v, return_tau=True)
        assert out.shape == q.shape and tau.shape == q.shape[:3] and tau.dtype == torch.float32
        assert not tau.requires_grad
        assert torch.autograd.grad(out.sum(), k)[0].shape == k.shape


def test_torch_func_is_refused(device):
    q, k, v = tensors(device)
    with pytest.raises(NotImplementedError, match="attention_entmax under torch.func"):
        torch.func.grad(lambda q: attention_entmax(q, k, v).sum())(q)


def test_flops_are_counted_as_if_every_key_had_weight(device):
    q, k, v = tensors(device, grad=True)
    with FlopCounterMode(display=False) as counter:
        attention_entmax(q, k, v).sum().backward()
    assert counter.get_total_flops() == 4 * 2 * 10 * 20 * 16 * 7 // 2


def test_no_second_derivative(device):
    q, k, v = tensors(device, grad=True)
    (dq,) = torch.autograd.grad(attention_entmax(q, k, v).sum(), q, create_graph=True)
    only = "^attnlib.attention_entmax has no second derivative: .* differentiated$"
    with pytest.raises(RuntimeError, match=only):
        torch.autograd.grad(dq.sum(), k)


def test_no_forward_derivative(device):
    q, k, v = tensors(device)
    has = r"has no forward-mode derivative .*it has a backward pass \(torch.autograd.grad\)$"
    with pytest.raises(RuntimeError, match=f"^attnlib.attention_entmax {has}"):
        with torch.autograd.forward_ad.dual_level():
            attention_entmax(torch.autograd.forward_ad.make_dual(q, q), k, v)


def test_only_what_is_needed_is_differentiated(device):
    q, k, v = tensors(device)
    v.requires_grad_()
    (dv,) = torch.autograd.grad(attention_entmax(q, k, v).sum(), v)
    assert dv.shape == v.shape and bool(dv.any())
