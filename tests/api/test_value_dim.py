"""Values with a head dimension of their own: every way of a call, and what it gives, against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import INTERPRETER_REMARKS
from draws import Draw, check
from torch.utils.flop_counter import FlopCounterMode

from attnlib import (
    attention,
    attention_bsfa,
    attention_decode,
    attention_distr,
    attention_entmax,
    attention_fp8,
    attention_monarch,
    attention_pooled,
    attention_varlen,
    dispatch,
    explain,
)
from attnlib.arguments.distributed import check_distributed, check_row_parallel
from attnlib.arguments.exact import Options
from attnlib.kernels.common.descriptors import output_like
from attnlib.params import Params, mask_window

pytestmark = INTERPRETER_REMARKS
CALL = Draw(((50, 70),), False, 2, 2, 2, 24, "float16", True, None, None, (0, 0, 0, 0), 3, 16)
CALLS = {
    "192 and 128": replace(CALL, head_dim=192, value_dim=128),
    "128 and 64, dense": replace(CALL, head_dim=128, value_dim=64, causal=False),
    "64 and 128, a window": replace(CALL, head_dim=64, value_dim=128, causal=False, window=(20, 9)),
    "64 and 256": replace(CALL, head_dim=64, value_dim=256),
    "16 and 8, bfloat16": replace(CALL, head_dim=16, value_dim=8, dtype="bfloat16"),
    "24 and 200, float32": replace(CALL, value_dim=200, dtype="float32", group=1),
    "a negative scale": replace(CALL, sm_scale=-0.3),
    "rows that see nothing": replace(CALL, lengths=((70, 50),)),
    "rows before heads": replace(CALL, layouts=(1, 1, 1, 1)),
    "what no descriptor can express": replace(CALL, layouts=(4, 3, 4, 4)),
    "values that share their memory": replace(CALL, layouts=(2, 6, 5, 2)),
    "varlen": replace(CALL, lengths=((20, 30), (0, 5), (33, 9), (7, 0)), varlen=True, batch=1),
    "varlen, 192 and 128, a window": replace(
        CALL, head_dim=192, value_dim=128, lengths=((20, 70), (33, 40)), varlen=True, batch=1, window=(15, -1)
    ),
}


def tensors(queries=20, keys=30, batch=2, own=24, values=16, dtype=torch.float32, device="cpu"):
    made = torch.Generator(device).manual_seed(0)
    sizes = (4, queries, own), (2, keys, own), (2, keys, values)
    return [torch.randn(batch, *size, generator=made, device=device).to(dtype) for size in sizes]


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients(name, impl, device):
    check(CALLS[name], device, impl)


def test_long_values_of_one_key_are_told_apart(device):
    """Each column of the output has to do with its own column of values alone."""
    q, k, v = tensors(values=40, device=device)
    whole = attention(q, k, v, causal=True)
    for first in range(0, 40, 8):
        part = attention(q, k, v[..., first : first + 8], causal=True)
        torch.testing.assert_close(part, whole[..., first : first + 8], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("values", [16, 40])
def test_the_output_has_the_order_of_q(values, impl, order, device):
    """As with values of the head dimension of q: nobody who puts heads side by side has to copy it."""
    q, k, v = tensors(values=values, device=device)
    q = q.permute(order).contiguous().permute(*(order.index(dim) for dim in range(4)))
    out = attention(q, k, v, impl=impl)
    assert out.shape == (2, 4, 20, values) and out.permute(order).is_contiguous()
    assert out.stride() == output_like(q, v).stride()


def test_nothing_to_do(device):
    q, k, v = tensors(device=device)
    out, lse = attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert out.shape == (2, 4, 20, 16) and not out.any() and bool((lse == -torch.inf).all())
    assert attention(q[:, :, :0], k, v).shape == (2, 4, 0, 16)
    q, k, v = (x.requires_grad_() for x in (q, k[:, :, :0], v[:, :, :0]))
    found = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]
    offsets = torch.zeros(2, dtype=torch.int32, device=device)
    out = attention_varlen(*(x.new_empty(0, 2, x.shape[-1]) for x in (q, k, v)), offsets, offsets, 0, 0)
    assert out.shape == (0, 2, 16)


# ---------------------------------------------------------------- PyTorch's ways


def test_the_operator(device):
    """Schema, fake tensors with sizes that are no numbers, autograd."""
    inputs = [x.requires_grad_() for x in tensors(device=device)]
    torch.library.opcheck(torch.ops.attnlib.attention_forward, inputs)
    q, k, v = (x.detach()[0].transpose(0, 1) for x in inputs)
    cu_q, cu_k = (torch.tensor([0, 7, n], dtype=torch.int32, device=device) for n in (20, 30))
    torch.library.opcheck(torch.ops.attnlib.attention_forward, (q, k, v, cu_q, cu_k, 13, 23))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(dynamic, device):
    def block(q, k, v):
        out, lse = attention(q.transpose(1, 2), k, v, causal=True, return_lse=True)
        return out.transpose(1, 2).flatten(2), lse

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for queries, keys in ((20, 30), (33, 33)):
        q, k, v = tensors(queries, keys, device=device)
        results = []
        for function in (compiled, block):
            inputs = [x.detach().clone().requires_grad_() for x in (q.transpose(1, 2).contiguous(), k, v)]
            out, lse = function(*inputs)
            out.square().sum().backward()
            results.append([out, lse, *(x.grad for x in inputs)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)
    torch.compiler.reset()


def test_exported(device):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True)

    inputs = tensors(device=device)
    rows, keys = torch.export.Dim("rows", min=2, max=99), torch.export.Dim("keys", min=2, max=99)
    program = torch.export.export(
        Layer(), tuple(inputs), dynamic_shapes=({2: rows}, {2: keys}, {2: keys}), strict=False
    )
    others = tensors(17, 55, device=device)
    assert torch.equal(program.module()(*others), attention(*others, causal=True))


def test_meta_tensors_have_the_shape():
    q, k, v = (x.to("meta") for x in tensors())
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == (2, 4, 20, 16) and lse.shape == (2, 4, 20)


def test_transformations_of_functions(device):
    q, k, v = (x.unflatten(0, (2, 1)) for x in tensors(device=device))
    found = torch.vmap(lambda *x: attention(*x, causal=True))(q, k, v)
    torch.testing.assert_close(found, attention(*(x.flatten(0, 1) for x in (q, k, v)), causal=True)[:, None])
    gradients = torch.func.grad(lambda *x: attention(*x).square().sum(), (0, 1, 2))(q[0], k[0], v[0])
    inputs = [x[0].detach().clone().requires_grad_() for x in (q, k, v)]
    attention(*inputs).square().sum().backward()
    for found, x in zip(gradients, inputs, strict=True):
        torch.testing.assert_close(found, x.grad)


def test_autocast(device):
    q, k, v = tensors(device=device)
    with torch.autocast(device, torch.bfloat16):
        out = attention(q, k, v)
    assert out.dtype == torch.bfloat16 and out.shape == (2, 4, 20, 16)


def test_flops_count_both():
    """Q K^T has D columns and P V those of the values; the backward pass three and two of them."""
    q, k, v = (x.requires_grad_() for x in tensors())
    with FlopCounterMode(display=False) as counter:
        out = attention(q, k, v, impl="reference")
    pairs = 2 * 4 * 20 * 30
    assert counter.get_total_flops() == 2 * pairs * (24 + 16)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * 24 + 2 * 16)


# ---------------------------------------------------------------- what takes values of one width alone


def one_width(function, **options):
    def call(q, k, v):
        function(q, k, v, **options)

    return call


def row_parallel(q, k, v):
    check_row_parallel(q, k, v, torch.zeros(5, q.shape[1] * q.shape[3]), Options())


OTHERS = {
    "attention_bsfa": one_width(attention_bsfa, threshold=1.0),
    "attention_decode": one_width(attention_decode),
    "attention_distr": one_width(attention_distr, group=2),
    "attention_entmax": one_width(attention_entmax),
    "attention_fp8": one_width(attention_fp8, impl="reference"),
    "attention_monarch": one_width(attention_monarch, block=4),
    "attention_pooled": one_width(attention_pooled),
    "distributed.attention": lambda q, k, v: check_distributed(q, k, v, Options(), 1),
    "distributed.row_parallel_output": row_parallel,
}


@pytest.mark.parametrize("values", [32, 128])
@pytest.mark.parametrize("name", OTHERS)
def test_others_refuse_by_name(name, values):
    q = torch.zeros(1, 2, 16, 64).half()
    with pytest.raises(ValueError, match=f"^v(_cache)?: expected .*64.*, got .*{values}"):
        OTHERS[name](q, q, torch.zeros(1, 2, 16, values).half())


# ---------------------------------------------------------------- what runs


def test_what_the_decoding_kernels_do_not_take(device):
    q, k, v = tensors(1, 4000, 1, device=device)
    with pytest.raises(ValueError, match="^impl: 'decode' needs values of head dimension 24 as q has; v has"):
        attention(q, k, v, impl="decode")
    assert explain(q, k, v).kernel == "triton"


def test_an_explicit_choice_is_no_other(device):
    """With a configuration for the wider of both."""
    q, k, v = tensors(values=128, dtype=torch.float16, device=device)
    params = Params(mask_window(True, None), 1.0, impl="triton")
    for backward in (False, True):
        choice = dispatch.resolve(q, k, v, params, backward)
        assert choice.kernel == "triton" and choice.reason == "asked for"
        wide = dispatch.resolve(v[:, [0, 0, 1, 1]], v, v, params, backward)
        assert choice.configuration == wide.configuration
