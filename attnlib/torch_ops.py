"""Attention as operators of PyTorch: what `torch.compile`, `torch.export`, checkpointing policies, fake
tensors and FLOP counters see. Plain eager calls do not come here, except those of `attention_entmax`.

    torch.ops.attnlib.attention_forward    -> out, lse
    torch.ops.attnlib.attention_backward   -> dq, dk, dv
    torch.ops.attnlib.attention_scored             -> out, lse
    torch.ops.attnlib.attention_scored_backward    -> dq, dk, dv, dsinks, dbias
    torch.ops.attnlib.attention_decode     -> out, lse
    torch.ops.attnlib.attention_bsfa       -> out, lse, kept
    torch.ops.attnlib.attention_entmax             -> out, tau, flags
    torch.ops.attnlib.attention_entmax_backward    -> dq, dk, dv

They take checked arguments and do what `dispatch` does. `lse` is empty where it is not needed, and so are the
gradients of sinks and bias where there are none.
"""

from __future__ import annotations

import torch
from torch._library.autograd import make_autograd_impl

from attnlib import dispatch, flops
from attnlib.arguments.offsets import check_longest, check_offsets
from attnlib.arguments.tangents import check_tangents
from attnlib.autograd import no_second_derivative
from attnlib.block_mask.mask import BlockMask, by_handle
from attnlib.dispatch import Saved, SavedEntmax
from attnlib.kernels.common.counters import own_counters
from attnlib.kernels.common.descriptors import output_like
from attnlib.params import BsfaParams, DecodeParams, EntmaxParams, MaskWindow, Params, Varlen
from attnlib.scored_call import masked
from attnlib.scores import ScoreParts, by_number

_OPTIONS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, "
    "SymInt? left=None, SymInt? right=None, float? sm_scale=None, SymInt? block_mask=None"
)
"""`block_mask` is the `handle` of a BlockMask: operators take numbers and tensors only."""


def _varlen(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> Varlen | None:
    if cu_seqlens_q is None:
        return None
    check_longest("max_seqlen_q", max_seqlen_q)  # the graph may have computed it
    check_longest("max_seqlen_k", max_seqlen_k)
    varlen = Varlen(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), max_seqlen_q, max_seqlen_k)
    if not cu_seqlens_q.is_cuda:  # those on a GPU can't be read while a CUDA graph is captured
        check_offsets(q, k, varlen)
    return varlen


def _scale(q, sm_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if sm_scale is None else sm_scale


def _masked(params: Params, handle: int | None) -> Params:
    """The params with the block mask that a handle names, within the window of the call."""
    if handle is None:
        return params
    mask = by_handle(handle).within(params.window)
    return params._replace(window=MaskWindow(None, None), block_mask=mask)


def _alive(handle: int | None) -> BlockMask | None:
    """The mask that a handle names, for the backward pass to find it there; a graph under trace may have a
    symbol, and keeps nothing."""
    return by_handle(handle) if isinstance(handle, int) else None


def _refuse_exported(mask: object | None, functions: object | None = None) -> None:
    """NotImplementedError for a mask, or functions of the user's own, in a program that is exported. A graph
    has their number in this process; another one that loads it may have something else of that number."""
    if not torch.compiler.is_exporting():
        return
    if mask is not None:
        raise NotImplementedError("block_mask: expected None under torch.export, got a BlockMask")
    if functions is not None:
        raise NotImplementedError("score: expected no function under torch.export, got one")


def _like(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The result in the layout that the fake operator has, that of `torch.empty_like(tensor)`; nearly always
    it is in that layout already."""
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
    left=None, right=None, sm_scale=None, block_mask=None, lse=True, deterministic=False, impl=None,
):  # fmt: skip
    """(out, lse). `deterministic` says how the backward pass is to be computed."""
    varlen = _varlen(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    params = Params(MaskWindow(left, right), _scale(q, sm_scale), varlen, lse, deterministic, impl)
    params = _masked(params, block_mask)
    with own_counters():
        out, found = dispatch.forward(q, k, v, params)
    if v.shape[-1] == q.shape[-1]:
        out = _like(q, out)
    elif out.stride() != output_like(q, v, "meta").stride():
        out = output_like(q, v).copy_(out)
    return out, found if lse else q.new_empty(0, dtype=torch.float32)


@attention_forward.register_fake
def _forward_fake(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0,
    left=None, right=None, sm_scale=None, block_mask=None, lse=True, deterministic=False, impl=None,
):  # fmt: skip
    _refuse_exported(block_mask)
    shape = dispatch.lse_shape(q) if lse else (0,)
    return output_like(q, v), q.new_empty(shape, dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *options = inputs
    ctx.max_seqlens, ctx.bounds = options[:2], options[2:6]
    ctx.has_lse, *ctx.choice = options[6:]
    ctx.mask = _alive(ctx.bounds[-1])
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
    ctx.mark_non_differentiable(lse)


def _differentiate(ctx, d_out, _):
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    options = (cu_seqlens_q, cu_seqlens_k, *ctx.max_seqlens, *ctx.bounds)
    if not ctx.has_lse:  # a graph made where no gradient was wanted
        _, lse = attention_forward(q, k, v, *options, True, *ctx.choice)
    gradients = attention_backward(d_out, q, k, v, out, lse, *options, *ctx.choice)
    return *gradients, *(None,) * 11


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
    left=None, right=None, sm_scale=None, block_mask=None, deterministic=False, impl=None,
):  # fmt: skip
    """(dq, dk, dv)."""
    varlen = _varlen(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    params = Params(MaskWindow(left, right), _scale(q, sm_scale), varlen, True, deterministic, impl)
    params = _masked(params, block_mask)
    gradients = dispatch.backward(d_out, Saved(q, k, v, out, lse), params)
    return tuple(_like(x, dx) for x, dx in zip((q, k, v), gradients, strict=True))


@attention_backward.register_fake
def _backward_fake(d_out, q, k, v, *_, **__):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


attention_backward.register_autograd(lambda ctx, *_: no_second_derivative())


# ---------------------------------------------------------------- with a score

_SCORE = (
    "Tensor? alibi=None, Tensor? sinks=None, Tensor? bias=None, float? soft_cap=None, bool diagonal=False, "
    "SymInt? functions=None, SymInt? left=None, SymInt? right=None, float? sm_scale=None, "
    "SymInt? block_mask=None"
)
"""The parts of an `attnlib.Score`, a bias as in `ScoreParts`, and what else a call with one asks for."""


def _scored(q, k, score: tuple, options: tuple, bias_gradient: bool = False) -> Params:
    """score: (alibi, sinks, bias, soft_cap, diagonal, functions). options: (left, right, sm_scale,
    block_mask, lse, deterministic, impl)."""
    alibi, sinks, bias, soft_cap, diagonal, functions = score
    left, right, sm_scale, handle, lse, deterministic, impl = options
    mask = masked(None if handle is None else by_handle(handle), MaskWindow(left, right), q, k)
    own = by_number(functions)
    parts = ScoreParts(soft_cap, alibi, sinks, bias, None, bias_gradient, diagonal, *own).prepared(q, k)
    everything = MaskWindow(None, None)
    return Params(everything, _scale(q, sm_scale), None, lse, deterministic, impl, None, None, mask, parts)


@torch.library.custom_op(
    "attnlib::attention_scored",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SCORE}, bool lse=True, bool deterministic=False, "
    "str? impl=None) -> (Tensor, Tensor)",
)
def attention_scored(
    q, k, v, alibi=None, sinks=None, bias=None, soft_cap=None, diagonal=False, functions=None,
    left=None, right=None, sm_scale=None, block_mask=None, lse=True, deterministic=False, impl=None,
):  # fmt: skip
    """(out, lse)."""
    options = left, right, sm_scale, block_mask, lse, deterministic, impl
    params = _scored(q, k, (alibi, sinks, bias, soft_cap, diagonal, functions), options)
    with own_counters():
        out, found = dispatch.forward(q, k, v, params)
    return _like(q, out), found if lse else q.new_empty(0, dtype=torch.float32)


@attention_scored.register_fake
def _scored_fake(
    q, k, v, alibi=None, sinks=None, bias=None, soft_cap=None, diagonal=False, functions=None,
    left=None, right=None, sm_scale=None, block_mask=None, lse=True, deterministic=False, impl=None,
):  # fmt: skip
    _refuse_exported(block_mask, functions)
    return torch.empty_like(q), q.new_empty(q.shape[:3] if lse else (0,), dtype=torch.float32)


def _save_scored(ctx, inputs, output) -> None:
    q, k, v, alibi, sinks, bias, *options = inputs
    ctx.form, ctx.bounds, ctx.has_lse, ctx.choice = options[:3], options[3:7], options[7], options[8:]
    ctx.bias_gradient, ctx.mask = bias is not None and bias.requires_grad, _alive(ctx.bounds[-1])
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, alibi, sinks, bias)
    ctx.mark_non_differentiable(lse)


def _differentiate_scored(ctx, d_out, _):
    q, k, v, out, lse, *score = ctx.saved_tensors
    score = *score, *ctx.form
    if not ctx.has_lse:  # a graph made where no gradient was wanted
        _, lse = attention_scored(q, k, v, *score, *ctx.bounds, True, *ctx.choice)
    gradients = attention_scored_backward(
        d_out, q, k, v, out, lse, *score, *ctx.bounds, ctx.bias_gradient, *ctx.choice
    )
    *gradients, dsinks, dbias = gradients
    dsinks = None if score[1] is None else dsinks
    return *gradients, None, dsinks, dbias if ctx.bias_gradient else None, *(None,) * 10


attention_scored.register_autograd(_differentiate_scored, setup_context=_save_scored)


@torch.library.custom_op(
    "attnlib::attention_scored_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SCORE}, "
    "bool bias_gradient=False, bool deterministic=False, str? impl=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attention_scored_backward(
    d_out, q, k, v, out, lse, alibi=None, sinks=None, bias=None, soft_cap=None, diagonal=False,
    functions=None, left=None, right=None, sm_scale=None, block_mask=None, bias_gradient=False,
    deterministic=False, impl=None,
):  # fmt: skip
    """(dq, dk, dv, dsinks, dbias)."""
    options = left, right, sm_scale, block_mask, True, deterministic, impl
    params = _scored(q, k, (alibi, sinks, bias, soft_cap, diagonal, functions), options, bias_gradient)
    *gradients, dsinks, dbias = dispatch.backward(d_out, Saved(q, k, v, out, lse), params)
    gradients = [_like(x, dx) for x, dx in zip((q, k, v), gradients, strict=True)]
    none = q.new_empty(0, dtype=torch.float32)
    dsinks = none if sinks is None else _like(sinks, dsinks.to(sinks.dtype))
    dbias = _like(bias, dbias.to(bias.dtype).reshape(bias.shape)) if bias_gradient else none.clone()
    return *gradients, dsinks, dbias


@attention_scored_backward.register_fake
def _scored_backward_fake(
    d_out, q, k, v, out, lse, alibi=None, sinks=None, bias=None, soft_cap=None, diagonal=False,
    functions=None, left=None, right=None, sm_scale=None, block_mask=None, bias_gradient=False,
    deterministic=False, impl=None,
):  # fmt: skip
    dsinks, dbias = (
        q.new_empty(0, dtype=torch.float32) if x is None else torch.empty_like(x)
        for x in (sinks, bias if bias_gradient else None)
    )
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks, dbias


attention_scored_backward.register_autograd(lambda ctx, *_: no_second_derivative())


# ---------------------------------------------------------------- decoding


@torch.library.custom_op(
    "attnlib::attention_decode",
    mutates_args=(),
    schema="(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? lengths=None, Tensor? page_table=None, "
    "SymInt? left=None, SymInt? right=None, float? sm_scale=None, bool lse=False, str? split=None, "
    "Tensor? starts=None, Tensor? k_scale=None, Tensor? v_scale=None) -> (Tensor, Tensor)",
)
def attention_decode(
    q, k_cache, v_cache, lengths=None, page_table=None,
    left=None, right=None, sm_scale=None, lse=False, split=None, starts=None, k_scale=None, v_scale=None,
):  # fmt: skip
    """(out, lse). `split`: as `attention_decode` has it, a number as a string."""
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    shared = int(split) if split is not None and split.isdecimal() else split
    params = DecodeParams(
        MaskWindow(left, right), scale, lengths, page_table, lse, shared, None, starts, k_scale, v_scale
    )
    with own_counters():
        out, found = dispatch.decode(q, k_cache, v_cache, params)
    return _like(q, out), found if lse else q.new_empty(0, dtype=torch.float32)


@attention_decode.register_fake
def _decode_fake(
    q, k_cache, v_cache, lengths=None, page_table=None,
    left=None, right=None, sm_scale=None, lse=False, split=None, starts=None, k_scale=None, v_scale=None,
):  # fmt: skip
    return torch.empty_like(q), q.new_empty(q.shape[:3] if lse else (0,), dtype=torch.float32)


def _no_gradient(function: str):
    """The backward pass of an operator that has none: an error."""

    def refuse(ctx, *_):
        raise RuntimeError(f"{function} has no gradient; attention has one")

    return refuse


attention_decode.register_autograd(_no_gradient("attention_decode"))


# ---------------------------------------------------------------- Block-Sparse FlashAttention


@torch.library.custom_op(
    "attnlib::attention_bsfa",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor threshold, bool causal=True, float? sm_scale=None, "
    "bool lse=False, bool kept=False, str? impl=None) -> (Tensor, Tensor, Tensor)",
)
def attention_bsfa(q, k, v, threshold, causal=True, sm_scale=None, lse=False, kept=False, impl=None):
    """(out, lse, kept). threshold: (B or 1, H or 1, N)."""
    params = BsfaParams(threshold, causal, _scale(q, sm_scale), lse, kept)
    with own_counters():
        out, found, blocks = dispatch.bsfa(q, k, v, params, impl)
    empty = q.new_empty(0, dtype=torch.float32)
    return _like(q, out), found if lse else empty, blocks if kept else empty.bool()


@attention_bsfa.register_fake
def _bsfa_fake(q, k, v, threshold, causal=True, sm_scale=None, lse=False, kept=False, impl=None):
    shape = dispatch.bsfa_blocks(q, k) if kept else (0,)
    found = q.new_empty(q.shape[:3] if lse else (0,), dtype=torch.float32)
    return torch.empty_like(q), found, q.new_empty(shape, dtype=torch.bool)


attention_bsfa.register_autograd(_no_gradient("attention_bsfa"))


# ---------------------------------------------------------------- entmax

_ENTMAX = "float alpha, bool causal=False, float? sm_scale=None"
_ENTMAX_VARLEN = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0"
)


@torch.library.custom_op(
    "attnlib::attention_entmax",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_ENTMAX}, bool flags=False, str? impl=None, "
    f"{_ENTMAX_VARLEN}) -> (Tensor, Tensor, Tensor)",
)
def attention_entmax(
    q, k, v, alpha, causal=False, sm_scale=None, flags=False, impl=None,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0,
):  # fmt: skip
    """(out, tau, flags), the flags those that the backward pass wants, or none."""
    varlen = _varlen(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    params = EntmaxParams(alpha, causal, _scale(q, sm_scale), flags, impl, varlen=varlen)
    out, tau, found = dispatch.entmax(q, k, v, params)
    return _like(q, out), tau, found if flags else q.new_empty(0, dtype=torch.int32)


@attention_entmax.register_fake
def _entmax_fake(
    q, k, v, alpha, causal=False, sm_scale=None, flags=False, impl=None,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0,
):  # fmt: skip
    tau = q.new_empty(dispatch.lse_shape(q), dtype=torch.float32)
    varlen = None if cu_seqlens_q is None else Varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    words = dispatch.entmax_flags(q, k, impl, varlen) if flags else 0
    return torch.empty_like(q), tau, q.new_empty(words, dtype=torch.int32)


def _save_entmax(ctx, inputs, output) -> None:
    q, k, v, *options = inputs
    ctx.asked, (ctx.has_flags, ctx.impl, cu_seqlens_q, cu_seqlens_k), ctx.max_seqlens = (
        options[:3], options[3:7], options[7:]
    )  # fmt: skip
    out, tau, flags = output
    ctx.save_for_backward(q, k, v, out, tau, flags, cu_seqlens_q, cu_seqlens_k)
    ctx.mark_non_differentiable(tau, flags)
    ctx.set_materialize_grads(False)


def _differentiate_entmax(ctx, d_out, *_):
    if d_out is None:
        return (None,) * 12
    q, k, v, out, tau, flags, *offsets = ctx.saved_tensors
    varlen = *offsets, *ctx.max_seqlens
    if not ctx.has_flags:  # a graph made where no gradient was wanted
        _, tau, flags = attention_entmax(q, k, v, *ctx.asked, True, ctx.impl, *varlen)
    gradients = attention_entmax_backward(d_out, q, k, v, out, tau, flags, *ctx.asked, ctx.impl, *varlen)
    return *gradients, *(None,) * 9


attention_entmax.register_autograd(_differentiate_entmax, setup_context=_save_entmax)


@torch.library.custom_op(
    "attnlib::attention_entmax_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor tau, Tensor flags, "
    f"{_ENTMAX}, str? impl=None, {_ENTMAX_VARLEN}) -> (Tensor, Tensor, Tensor)",
)
def attention_entmax_backward(
    d_out, q, k, v, out, tau, flags, alpha, causal=False, sm_scale=None, impl=None,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0,
):  # fmt: skip
    """(dq, dk, dv)."""
    varlen = _varlen(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    params = EntmaxParams(alpha, causal, _scale(q, sm_scale), True, impl, varlen=varlen)
    gradients = dispatch.entmax_backward(d_out, SavedEntmax(q, k, v, out, tau, flags), params)
    return tuple(_like(x, dx) for x, dx in zip((q, k, v), gradients, strict=True))


@attention_entmax_backward.register_fake
def _entmax_backward_fake(d_out, q, k, v, *_, **__):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


attention_entmax_backward.register_autograd(lambda ctx, *_: no_second_derivative("attention_entmax"))


# ---------------------------------------------------------------- transformations

_library = torch.library.Library("attnlib", "IMPL")
_DEVICES = "CPU", "CUDA", "Meta", "XPU", "MPS", "HPU", "PrivateUse1"


def _refuse_transforms(operator, function: str) -> None:
    """Make tangents of the operator's arguments an error: PyTorch drops them silently. And its gradients by
    torch.func, which PyTorch's own error does not name. The checks come before the function that PyTorch has
    made of `register_autograd`."""
    differentiable = make_autograd_impl(operator._opoverload, operator)

    def refuse(keys, *args, **options):
        given = [x for x in args if isinstance(x, torch.Tensor)]
        check_tangents(function, *given)
        if torch._C._are_functorch_transforms_active() and torch._C._any_requires_grad(*given):
            raise RuntimeError(  # after a NotImplementedError dynamo would trace the launches
                f"{function} under torch.func.grad or vjp within torch.compile, make_fx or a dispatch mode: "
                "not supported; use torch.autograd.grad there"
            )
        return differentiable(keys, *args, **options)

    for device in _DEVICES:
        _library.impl(operator._opoverload, refuse, f"Autograd{device}", with_keyset=True)


for _operator in (attention_forward, attention_backward, attention_scored, attention_scored_backward):
    _refuse_transforms(_operator, "attention")
for _operator in (attention_entmax, attention_entmax_backward):
    _refuse_transforms(_operator, "attention_entmax")
_refuse_transforms(attention_decode, "attention_decode")
_refuse_transforms(attention_bsfa, "attention_bsfa")


flops.register_when_counted()
