"""`attention_pooled()`: attention, and with it the largest weight of each block of queries and keys."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch

from attnlib import dispatch
from attnlib.api.inference import refuse_derivatives, refuse_transformations
from attnlib.arguments.pooled import PooledOptions, check_pooled
from attnlib.kernels import KEEPS_MAXIMA, POOLERS
from attnlib.kernels.common.coarser import coarser
from attnlib.params import Params, mask_window

__all__ = ["attention_pooled"]
MOST_BYTES = 2 << 30
"""Bytes of maxima that are held at once; a call with more is computed in parts."""


def attention_pooled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block: Literal[64, 128] = 64,
    causal: bool = False,
    sm_scale: float | None = None,
    impl: Literal["hopper", "triton", "reference"] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention`, and a map of where its weights are: of each block of queries and keys the largest.

    pooled[b, h, I, J] = max of softmax(sm_scale * Q K^T)[i, j] over the queries i of block I and the keys j
    of block J. It is what the gate of SeerAttention (arXiv 2410.13276) learns from. On Hopper the forward
    kernel keeps the largest score of each row and 64 keys, 4 bytes for 64 scores, up to 2 GiB at once, or
    those of one head, and a second, short kernel pools them; elsewhere Q K^T is computed a second time.

    No gradient, no torch.compile, no torch.func. `torch.autocast` has no effect.

    Args:
        q: (B, H, Sq, D), float16, bfloat16 or float32; D a multiple of 8 up to 256.
        k, v: (B, Hkv, Sk, D). Hkv divides H: query heads h*H/Hkv ... share key head h.
        block: queries and keys of a block.
        causal, sm_scale: as in `attention`.
        impl: "hopper" (half precision, compute capability 9.x, triton 3.6 to 3.9), "triton", "reference"
            (PyTorch in float64, any device), or None for the first of them that can run the call. An explicit
            choice never falls back to another.

    Returns:
        out, (B, H, Sq, D), as `attention` gives it; and pooled, (B, H, ceil(Sq / block), ceil(Sk / block))
        float32, from 0 to 1 up to rounding; 0 where no query of a block sees a key of the other. A weight
        that is NaN, from NaN or infinity in q or k, is left out or makes its block NaN. Kernels compute
        weights from the LSE in float32, with a relative error of about 1e-7 times the magnitude of the
        scores: beyond 1e4 it begins to matter, and beyond some 1e7 weights mean nothing and may be infinite.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or options do not fit, or `impl` can't run the call.
        RuntimeError: a derivative was asked for.
        NotImplementedError: it is called under a compiler, a dispatch mode or a transformation of torch.func.

    Example:
        >>> q, k, v = (torch.randn(1, 16, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        >>> out, pooled = attention_pooled(q, k, v, causal=True)
    """
    refuse_transformations("attention_pooled")
    check_pooled(q, k, v, PooledOptions(block, causal, sm_scale, impl))
    refuse_derivatives("attention_pooled", q=q, k=k, v=v)
    q, k, v = (x.detach().resolve_neg() for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    params = Params(mask_window(causal, None), scale, return_lse=True)
    name = _implementation(q, k, v, params, impl)
    if dispatch.nothing_to_do(q, k):
        out, found = torch.zeros_like(q), q.new_zeros(*_units(q, k), dtype=torch.float32)
    elif name in KEEPS_MAXIMA:
        out, found = _by_maxima(KEEPS_MAXIMA[name], q, k, v, params)
    else:
        out, lse = dispatch.forward(q, k, v, params._replace(impl=impl))
        found = POOLERS[name].of_scores(q, k, lse, causal, scale)
    return out, coarser(found, block // 64)


def _implementation(q, k, v, params: Params, impl: str | None) -> str:
    """The first that can run a call, or the one that was asked for. ValueError if that can't."""
    pooler, keys = next(iter(POOLERS.values())), k.shape[2]
    lacks = {
        name: family.unsupported(q, k, v, params) or pooler.too_many_keys(keys)
        for name, family in KEEPS_MAXIMA.items()
    }
    lacks |= {name: pooler.unsupported(q.device) for name, pooler in POOLERS.items()}
    if impl is None:
        return next(name for name, missing in lacks.items() if missing is None)
    if lacks[impl] is not None:
        raise ValueError(f"impl: {impl!r} {lacks[impl]}")
    return impl


def _units(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int, int, int]:
    return q.shape[0], q.shape[1], -(-q.shape[2] // 64), -(-k.shape[2] // 64)


def _by_maxima(family: ModuleType, q, k, v, params: Params) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, map of units of 64); in parts of the batch elements, then of the key heads, then of the query
    heads of one, where memory is short."""
    kept = family.bytes_kept(q, k, v, params)
    for dim, number in ((0, k.shape[0]), (1, k.shape[1]), (1, q.shape[1])):
        at_once = max(1, MOST_BYTES * number // kept)
        if at_once < number:
            rows = q.split(at_once * (q.shape[dim] // number), dim)
            shared = k.shape[dim] < number  # by all query heads: one key head is left
            keys, values = ([x] * len(rows) if shared else x.split(at_once, dim) for x in (k, v))
            parts = [_by_maxima(family, *one, params) for one in zip(rows, keys, values, strict=True)]
            return tuple(torch.cat(both, dim) for both in zip(*parts, strict=True))
    out, lse, maxima = family.forward(q, k, v, params)
    causal = params.window.right is not None
    return out, next(iter(POOLERS.values())).of_maxima(maxima, lse, k.shape[2], causal)
