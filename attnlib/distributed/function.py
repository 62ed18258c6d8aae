"""Attention of a rank's rows for PyTorch's autograd, whatever way the keys of other ranks reach them."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch

from attnlib import dispatch
from attnlib.autograd import Computed


class Attention(torch.autograd.Function):
    """(out, LSE) of a rank's rows. The LSE is a statistic: no gradient flows through it.

    way: a module with `forward(q, k, v, job)` and `backward(d_out, saved, job)`. job: what it wants besides
    tensors, with the `links` of the ranks and the `number` of the call among theirs."""

    @staticmethod
    def forward(ctx, q, k, v, job, way: ModuleType):
        out, lse = way.forward(q, k, v, job)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.job, ctx.way = job, way
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, _):
        job, saved = ctx.job, ctx.saved_tensors
        if d_out is None:  # the other ranks' rows still need this rank's keys, and theirs its gradient
            d_out = torch.zeros_like(saved[3])
        job.links.agree({"step": f"backward of call {job.number}"})
        return *Computed.within_backward(partial(_gradients, ctx.way, job), d_out, *saved), None, None


def _gradients(way: ModuleType, job, d_out: torch.Tensor, *saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
    given = dispatch.Saved(*saved)
    if 0 in d_out.stride() or d_out.stride(-1) != 1:
        d_out = torch.empty_like(given.out).copy_(d_out)
    return way.backward(d_out, given, job)
