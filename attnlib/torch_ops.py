"""Attention as operators of PyTorch: what `torch.compile`, `torch.export`, checkpointing policies, fake
tensors and FLOP counters see. Calls that none of them looks at go past this file.

    torch.ops.attnlib.attention_forward    -> out, lse
    torch.ops.attnlib.attention_backward   -> dq, dk, dv

Both take checked arguments and do what `dispatch` does. `lse` is empty where it is not needed.
"""

from __future__ import annotations

import torch

from attnlib import dispatch, flops
from attnlib.autograd import no_second_derivative
from attnlib.kernels.hopper import launch as launch_hopper
from attnlib.params import Band, Packed

_OPTIONS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, "
    "SymInt? left=None, SymInt? right=None, float? sm_scale=None"
)


def _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> Packed | None:
    if cu_seqlens_q is None:
        return None
    return Packed(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), max_seqlen_q, max_seqlen_k)


def _like(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The result in the layout that was announced for it, `torch.empty_like(tensor)`. Nearly always it is."""
    if result.stride() == tensor.stride() and tensor.is_contiguous():
        return result
    if result.stride() == torch.empty_like(tensor, device="meta").stride():
        return result
    return torch.empty_like(tensor).copy_(result)


# ---------------------------------------------------------------- forward


@torch.library.custom_op(
    "attnlib::attention_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool lse=True, bool deterministic=False, "
    "str? impl=None) -> (Tensor, Tensor)",
)
def attention_forward(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0,
    left=None, right=None, sm_scale=None, lse=True, deterministic=False, impl=None,
):  # fmt: skip
    """(out, lse). `deterministic` says how the backward pass is to be computed."""
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    with launch_hopper.own_counters():
        out, found = dispatch.forward(q, k, v, Band(left, right), scale, lse, packed, impl)
    return _like(q, out), found if lse else q.new_empty(0, dtype=torch.float32)


@attention_forward.register_fake
def _forward_fake(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0,
    left=None, right=None, sm_scale=None, lse=True, deterministic=False, impl=None,
):  # fmt: skip
    shape = dispatch.lse_shape(q) if lse else (0,)
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *options = inputs
    ctx.max_seqlens, ctx.bounds = options[:2], options[2:5]
    ctx.has_lse, *ctx.choice = options[5:]
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
    ctx.mark_non_differentiable(lse)


def _differentiate(ctx, d_out, _):
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    options = (cu_seqlens_q, cu_seqlens_k, *ctx.max_seqlens, *ctx.bounds)
    if not ctx.has_lse:  # a graph made where no gradient was wanted
        _, lse = attention_forward(q, k, v, *options, True, *ctx.choice)
    gradients = attention_backward(d_out, q, k, v, out, lse, *options, *ctx.choice)
    return *gradients, *(None,) * 10


attention_forward.register_autograd(_differentiate, setup_context=_save)


# ---------------------------------------------------------------- backward


@torch.library.custom_op(
    "attnlib::attention_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS}, "
    "bool deterministic=False, str? impl=None) -> (Tensor, Tensor, Tensor)",
)
def attention_backward(
    d_out, q, k, v, out, lse, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0,
    left=None, right=None, sm_scale=None, deterministic=False, impl=None,
):  # fmt: skip
    """(dq, dk, dv)."""
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    gradients = dispatch.backward(
        d_out, q, k, v, out, lse, Band(left, right), scale, packed, deterministic, impl
    )
    return tuple(_like(x, dx) for x, dx in zip((q, k, v), gradients, strict=True))


@attention_backward.register_fake
def _backward_fake(d_out, q, k, v, *_, **__):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


attention_backward.register_autograd(lambda ctx, *_: no_second_derivative())


flops.register_when_counted()
