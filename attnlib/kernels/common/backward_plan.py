"""What the backward passes of all families of kernels have in common: a plan of prepared launches, and how
it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from attnlib.kernels.common.descriptors import Made, made_like, readable
from attnlib.kernels.common.launcher import Launches
from attnlib.kernels.common.signature import Signature, signature
from attnlib.params import Params

TENSORS = tuple("d_out q k v out lse buffer none dq dk dv cu_q cu_k".split())
"""The names of tensors in launches of a backward pass; `none` stands for one that a kernel does without."""


class BackwardPlan(NamedTuple):
    """The launches of a call, the elements of the float32 buffer that they share, and the layouts of the
    gradients."""

    launches: Launches
    elements: int
    dq: Made
    dk: Made
    dv: Made


def gradients_like(call: Signature) -> tuple[Made, Made, Made]:
    """dq, dk and dv, laid out like q, k and v where a descriptor can express that."""
    _, q, k, v, _ = call.strides
    return made_like(call, call.q, q), made_like(call, call.k, k), made_like(call, call.v, v)


def run(
    prepare: Callable[[Signature], BackwardPlan | None],
    tensors: tuple[torch.Tensor, ...],
    lse: torch.Tensor,
    params: Params,
    more: tuple[torch.Tensor, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) by the plan of `params`, or by what `prepare` gives. tensors: d_out, q, k, v, out, of
    which those that a descriptor can't express are copied. more: tensors whose names follow `TENSORS`."""
    plan = params.plan
    if plan is None:
        tensors = tuple(map(readable, tensors))
        plan = prepare(signature(params, tensors[1], tensors[2], *tensors))
    _, q, k, v, _ = tensors
    dq, dk, dv = plan.dq.like(q), plan.dk.like(k), plan.dv.like(v)
    buffer = torch.empty(plan.elements, dtype=torch.float32, device=q.device)
    cu_q, cu_k = (None, None) if params.varlen is None else params.varlen[:2]
    plan.launches(*tensors, lse, buffer, None, dq, dk, dv, cu_q, cu_k, *more)
    return dq, dk, dv
