"""Attention to a KV cache in PyTorch, in fp64: sequence by sequence, from what the cache holds of each."""

import math

import torch

from attnlib.kernels.reference.dense import attention_fp64
from attnlib.params import DecodeParams


def unsupported(q, params: DecodeParams) -> None:
    """Nothing is."""


def forward(q, k, v, params: DecodeParams) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in the dtype of q, LSE in float32). Waits for the GPU: it reads the lengths."""
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
    for i_b, (keys, values) in enumerate(held(k, v, params, len(q))):
        if keys.shape[1] and q[i_b].numel():
            window = params.window.clipped(q.shape[2], keys.shape[1])
            bounds = tuple(-1 if bound is None else bound for bound in window)
            one = q[i_b][None].to(keys.dtype), keys[None], values[None]
            b_out, b_lse = attention_fp64(*one, window=bounds, sm_scale=params.sm_scale)
            out[i_b], lse[i_b] = b_out[0], b_lse[0]
    return out, lse


def prepared(q, k, v, params: DecodeParams) -> None:
    """Nothing is launched."""


def held(k, v, params: DecodeParams, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each sequence that count, (Hkv, n, D), in the dtype of the caches; of caches in FP8
    in fp64 with their scales. A length beyond what a cache has room for ends there, and one below 0 is 0, as
    in the kernels; starts likewise."""
    found, table = [], params.page_table
    counts = [None] * batch if params.lengths is None else params.lengths.tolist()
    starts = [0] * batch if params.starts is None else params.starts.tolist()
    for i_b, (count, start) in enumerate(zip(counts, starts, strict=True)):
        if table is None:
            parts = (_scaled(x[i_b], s, i_b) for x, s in ((k, params.k_scale), (v, params.v_scale)))
        else:  # (pages, Hkv, page size, D) -> (Hkv, keys, D)
            used = -(-max(0, count) // k.shape[2]) if count is not None else table.shape[1]
            pages = table[i_b, :used].long()  # those beyond may be anything
            some = (_scaled(x[pages], s, pages) for x, s in ((k, params.k_scale), (v, params.v_scale)))
            parts = tuple(x.transpose(0, 1).flatten(1, 2) for x in some)
        end = None if count is None else max(0, count)
        found.append(tuple(x[:, :end][:, max(0, start) :] for x in parts))
    return found


def _scaled(x: torch.Tensor, scales: torch.Tensor | None, which) -> torch.Tensor:
    """Keys or values (..., Hkv, n, D) in FP8 as numbers; others as they are. which: the sequence, or pages,
    that they are of."""
    if x.dtype != torch.float8_e4m3fn:
        return x
    x = x.double()
    if scales is None:
        return x
    return x * (scales[which][..., None, None] if scales.dim() else scales)
