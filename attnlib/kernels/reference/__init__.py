"""Exact attention in PyTorch, in fp64: what all other kernels are judged by."""

import torch

from attnlib.kernels.common.descriptors import output_like
from attnlib.kernels.reference.dense import attention_fp64, attention_varlen_fp64, sequences
from attnlib.kernels.reference.merge import merge_into
from attnlib.params import MaskWindow, Params

FITS = "runs every call"


def unsupported(q, k, v, params: Params, backward: bool = False) -> None:
    """Nothing is."""


def slower(q, k, params: Params, backward: bool = False) -> None:
    """It is asked last."""


def configuration(q, k, v, params: Params, backward: bool = False) -> None:
    """There is nothing to choose."""


def prepare(call, backward: bool = False) -> None:
    """There is nothing to launch."""


def forward(q, k, v, params: Params) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in the dtype of q, LSE in float32), or those of `params.into`."""
    if params.varlen is None:
        out, lse = attention_fp64(q, k, v, **_options(params))
    else:
        out, lse = attention_varlen_fp64(q, k, v, *params.varlen[:2], **_options(params))
    if params.into is not None:
        return merge_into(params.into, out, lse)
    return output_like(q, v).copy_(out), lse.float()


def backward(d_out, q, k, v, out, lse, params: Params) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) in the dtype of q; with a score the float32 gradients of its sinks and bias, too. Where
    the LSE of a batch is of more keys than k has, the parts of the gradients that k and v have."""
    from attnlib.kernels.reference.gradients import gradient_fp64

    options = _options(params)
    if params.varlen is None:
        given = (out, lse) if params.score is None else None
        dq, dk, dv, *more = gradient_fp64(d_out, q, k, v, given=given, **options)
        own = tuple(torch.empty_like(x).copy_(dx) for x, dx in zip((q, k, v), (dq, dk, dv), strict=True))
        return *own, *(None if x is None else x.float() for x in more)
    results = [torch.zeros_like(x) for x in (q, k, v)]
    for rows, keys, one in sequences(q, k, v, *params.varlen[:2]):
        gradients = gradient_fp64(d_out[rows].transpose(0, 1)[None], *one, **options)
        for result, part, dx in zip(results, (rows, keys, keys), gradients, strict=True):
            result[part] = dx[0].transpose(0, 1)
    return tuple(results)


def _options(params: Params) -> dict:
    """`causal`, `window` and `sm_scale` of the reference."""
    left, right = params.window
    bounds = tuple(-1 if bound is None else bound for bound in params.window)
    plain = params.window in (MaskWindow(None, None), MaskWindow(None, 0))
    found = {"causal": right == 0, "window": None if plain else bounds, "sm_scale": params.sm_scale}
    if params.block_mask is not None:
        found["mask"] = params.block_mask.to_dense()
    return found if params.score is None else found | {"score": params.score}
