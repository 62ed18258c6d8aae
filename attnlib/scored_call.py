"""A call of `attention` with a score: its mask, its derivatives, and what is refused."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from attnlib import dispatch
from attnlib.arguments.scores import check_functions
from attnlib.arguments.tangents import check_tangents, no_forward_derivative
from attnlib.autograd import Function, Gradient, options_of, watched
from attnlib.block_mask import BlockMask
from attnlib.block_mask.transforms import outside_transforms
from attnlib.dispatch import Saved
from attnlib.params import MaskWindow, Params
from attnlib.scores import Score, ScoreParts, given_parts


class Scored(NamedTuple):
    """What a call asks for besides q, k, v, alibi, sinks and bias. score: its other parts. functions: the
    number of its functions, as operators take them."""

    params: Params
    score: ScoreParts
    functions: int | None

    def of(self, q: torch.Tensor, k: torch.Tensor, alibi, sinks, bias, bias_gradient: bool = False) -> Params:
        """The params of a call with these tensors, as kernels take them: under torch.func those of the score
        are not the ones that were given."""
        own = self.score._replace(alibi=alibi, sinks=sinks, bias=bias, bias_gradient=bias_gradient)
        return self.params._replace(score=own.prepared(q, k))


def _not_mapped(info, in_dims, *args):
    raise NotImplementedError("attention under torch.vmap with a score: not supported")


class ScoredAttention(Function):
    """(out, LSE) of q, k, v, and the tensors of a score. No gradient flows through the LSE, and none to
    alibi, which is among them so that autograd sees whether it changes before the backward pass."""

    @staticmethod
    def forward(q, k, v, alibi, sinks, bias, asked: Scored):
        return dispatch.forward(q, k, v, asked.of(q, k, alibi, sinks, bias))

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        q, k, v, alibi, sinks, bias, ctx.asked = inputs
        out, lse = output
        ctx.save_for_backward(q, k, v, out, lse, alibi, sinks, bias)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d_out, *_):
        if d_out is None:
            return (None,) * 7
        wanted = ctx.needs_input_grad[5]
        found = ScoredGradient.within_backward(d_out, *ctx.saved_tensors, wanted, ctx.asked)
        dq, dk, dv, dsinks, dbias = found
        return dq, dk, dv, None, dsinks, dbias, None

    @staticmethod
    def jvp(ctx, *_):
        no_forward_derivative("attention")

    vmap = staticmethod(_not_mapped)


class ScoredGradient(Gradient):
    """(dq, dk, dv, dsinks, dbias), the last two None where there is none."""

    @staticmethod
    def forward(d_out, q, k, v, out, lse, alibi, sinks, bias, wanted: bool, asked: Scored):
        if watched():
            (params, score, functions), given = asked, (d_out, q, k, v, out, lse, alibi, sinks, bias)
            options = score.soft_cap, score.diagonal, functions, *options_of(params), wanted
            *found, dsinks, dbias = torch.ops.attnlib.attention_scored_backward(
                *given, *options, params.deterministic, params.impl
            )
            return *found, None if sinks is None else dsinks, dbias if wanted else None
        params = asked.of(q, k, alibi, sinks, bias, wanted)
        dq, dk, dv, dsinks, dbias = dispatch.backward(d_out, Saved(q, k, v, out, lse), params)
        dsinks = None if dsinks is None else dsinks.to(sinks.dtype)
        return dq, dk, dv, dsinks, None if dbias is None else dbias.to(bias.dtype).reshape(bias.shape)

    vmap = staticmethod(_not_mapped)


def refuse_functions(score: Score) -> None:
    """NotImplementedError for a function without a number: operators take numbers and tensors only."""
    if score.function is not None and score.functions is None:
        raise NotImplementedError(
            "score.function: expected None in a score that is made inside of a compiled function, got one; "
            "make the score outside"
        )


def masked(mask: BlockMask | None, window: MaskWindow, q: torch.Tensor, k: torch.Tensor) -> BlockMask:
    """The block mask of a call with a score: the given one, or one that shows all keys, within the window."""
    if mask is None:
        mask = _everything(max(1, q.shape[2]), max(1, k.shape[2]), q.device)
    return mask.within(window)


@lru_cache(64)
@outside_transforms
def _everything(S_q: int, S_k: int, device: torch.device) -> BlockMask:
    blocks = torch.ones(-(-S_q // 128), -(-S_k // 128), dtype=torch.bool, device=device)
    return BlockMask.from_blocks(blocks, S_q, S_k)


def run(q, k, v, score: Score, params: Params) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, LSE), differentiable. `params` has a block mask."""
    parts = given_parts(score, q, k)
    tensors = parts.alibi, parts.sinks, parts.bias
    args, asked = (q, k, v, *tensors), Scored(params, parts, score.functions)
    functorch = torch._C._are_functorch_transforms_active()
    given = [x for x in args if x is not None]
    if forward_ad._current_level >= 0:
        check_tangents("attention", *given)
    if not (functorch or (torch.is_grad_enabled() and any(x.requires_grad for x in given))):
        return dispatch.forward(q, k, v, asked.of(q, k, *tensors))
    check_functions(score, True, params.impl)
    asked = asked._replace(params=params._replace(return_lse=True))
    if params.impl is not None and not functorch:  # an error now rather than in the backward pass
        wanted = parts.bias is not None and parts.bias.requires_grad
        dispatch.resolve(q, k, v, asked.of(q, k, *tensors, wanted), backward=True)
    return ScoredAttention.apply(*args, asked)
