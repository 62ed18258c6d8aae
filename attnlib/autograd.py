"""Attention for PyTorch's autograd: the backward pass, `torch.func`, and an error for second derivatives."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnlib import dispatch
from attnlib.arguments.offsets import refuse_vmap
from attnlib.arguments.tangents import no_forward_derivative
from attnlib.dispatch import Saved
from attnlib.params import Params, Varlen


class Asked(NamedTuple):
    """What a call asks for besides its tensors. The offsets of a varlen call are tensors that PyTorch has to
    see, so `params` lacks them. max_seqlens: the longest lengths of queries and keys; None for a batch."""

    params: Params
    max_seqlens: tuple[int, int] | None = None

    def of(self, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None) -> Params:
        if self.max_seqlens is None:
            return self.params
        return self.params._replace(varlen=Varlen(cu_seqlens_q, cu_seqlens_k, *self.max_seqlens))


class Function(torch.autograd.Function):
    """A function whose `apply` is given all arguments by position. PyTorch's own inspects the signature of
    `forward` at each call, which takes longer than everything else that autograd does."""

    @classmethod
    def apply(cls, *args):
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*torch._functorch.utils.unwrap_dead_wrappers(args))


class Attention(Function):
    """(out, LSE) of q, k, v. The LSE is a statistic: no gradient flows through it."""

    @staticmethod
    def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, asked: Asked):
        return dispatch.forward(q, k, v, asked.of(cu_seqlens_q, cu_seqlens_k))

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        q, k, v, cu_seqlens_q, cu_seqlens_k, ctx.asked = inputs
        out, lse = output
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # no zeros for the LSE

    @staticmethod
    def backward(ctx, d_out, *_):
        if d_out is None:  # undefined: nothing flows back
            return (None,) * 6
        found = AttentionGradient.within_backward(d_out, *ctx.saved_tensors, ctx.asked)
        return *found, None, None, None

    @staticmethod
    def jvp(ctx, *_):
        no_forward_derivative("attention")

    @staticmethod
    def vmap(info, in_dims, q, k, v, cu_seqlens_q, cu_seqlens_k, asked: Asked):
        size = info.batch_size
        batch, (q, k, v) = _folded(size, in_dims[:3], (q, k, v), asked)
        return _unfolded(size, batch, Attention.apply(q, k, v, None, None, asked)), (0, 0)


_is_legacy_batch = torch._C._functorch.is_legacy_batchedtensor


class Gradient(Function):
    """A function that is itself a gradient, and can't be differentiated."""

    @classmethod
    def within_backward(cls, *args) -> tuple[torch.Tensor | None, ...]:
        """What `forward` gives, within a backward pass. With create_graph=True autograd has to see a
        function, whose derivative is the error."""
        if any(isinstance(x, torch.Tensor) and _is_legacy_batch(x) for x in args):
            raise NotImplementedError(
                "attnlib: a batch of gradients (is_grads_batched=True, vectorize=True) is not supported; "
                "torch.func.jacrev and torch.vmap of torch.func.vjp are"
            )
        return (cls.apply if torch.is_grad_enabled() else cls.forward)(*args)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *_):
        no_second_derivative()

    @staticmethod
    def jvp(ctx, *_):
        no_second_derivative()


def watched() -> bool:
    """Whether a dispatch mode is on, as FLOP counters are: it sees the operators of `attnlib.torch_ops`, and
    nothing of a call that does not go through one."""
    return torch._C._len_torch_dispatch_stack() > 0


def options_of(params: Params) -> tuple:
    """left, right, sm_scale and block_mask, as the operators take them."""
    mask = params.block_mask
    return *params.window, params.sm_scale, None if mask is None else mask.handle


class AttentionGradient(Gradient):
    """(dq, dk, dv)."""

    @staticmethod
    def forward(d_out, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, asked: Asked):
        if watched():
            params, longest = asked.params, asked.max_seqlens or (0, 0)
            given = d_out, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *longest, *options_of(params)
            return torch.ops.attnlib.attention_backward(*given, params.deterministic, params.impl)
        return dispatch.backward(d_out, Saved(q, k, v, out, lse), asked.of(cu_seqlens_q, cu_seqlens_k))

    @staticmethod
    def vmap(info, in_dims, d_out, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, asked: Asked):
        size = info.batch_size
        batch, tensors = _folded(size, in_dims[:6], (d_out, q, k, v, out, lse), asked)
        return _unfolded(size, batch, AttentionGradient.apply(*tensors, None, None, asked)), (0, 0, 0)


class Computed(Gradient):
    """The gradients that a function computes from tensors."""

    @staticmethod
    def forward(compute, *tensors):
        return compute(*tensors)


def no_second_derivative(function: str = "attention") -> None:
    """Raise the error of a second derivative."""
    other = ""
    if function == "attention":
        other = (
            ". For one (gradient penalties, Hessians) use torch.nn.functional.scaled_dot_product_attention "
            "with the math backend"
        )
    raise RuntimeError(
        f"attnlib.{function} has no second derivative: its gradient can't be differentiated{other}"
    )


def _folded(size: int, in_dims: tuple, tensors: tuple, asked: Asked) -> tuple[int, list[torch.Tensor]]:
    """Make the dimension that `torch.vmap` maps a part of the batch: (batch size, tensors)."""
    if asked.max_seqlens is not None:
        refuse_vmap()
    mask = asked.params.block_mask
    if mask is not None and mask.shape[0] > 1:
        raise NotImplementedError(
            "attention under torch.vmap with a block mask for each batch element: not supported; use one "
            "with B of 1"
        )
    moved = [
        x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, in_dims, strict=True)
    ]
    return moved[0].shape[1], [x.flatten(0, 1) for x in moved]


def _unfolded(size: int, batch: int, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    # Not -1: there may be no element to divide, or nothing mapped.
    return tuple(x.unflatten(0, (size, batch)) for x in tensors)
