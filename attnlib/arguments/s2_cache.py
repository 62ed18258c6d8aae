"""The arguments of `S2Cache`, checked."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.arguments.common import (
    DTYPES,
    check_dense,
    check_head_dim,
    check_int,
    check_scale,
    refuse_trace,
    type_name,
)  # fmt: skip
from attnlib.arguments.decode import MOST_QUERIES


def check_new(pattern, batch, head_dim, room, dtype) -> None:
    """What a cache is made with, besides its device."""
    if type_name(pattern) != "attnlib.block_mask.s2.S2Pattern":  # which is above this file
        raise TypeError(f"pattern: expected an attnlib.S2Pattern, got {type_name(pattern)}")
    check_int("batch", batch, 1)
    check_int("head_dim", head_dim, 8)
    check_head_dim("head_dim", head_dim)
    check_int("room", room, 1)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype, got {type_name(dtype)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected float16, bfloat16 or float32, got {dtype}")


def check_append(cache, k, v, counts) -> list[int]:
    """How many tokens each sequence gets."""
    _check_counted(cache)
    _check_whole(cache)
    heads = cache.pattern.key_heads
    _check_like("k", k, cache, heads)
    _check_like("v", v, cache, heads)
    n = k.shape[2]
    if v.shape != k.shape:
        raise ValueError(f"v: expected shape {tuple(k.shape)} as k has, got {tuple(v.shape)}")
    if counts is None:
        counts = [n] * cache.batch
    elif not isinstance(counts, list | tuple):
        raise TypeError(f"counts: expected a list of ints or None, got {type_name(counts)}")
    if len(counts) != cache.batch:
        raise ValueError(f"counts: expected a number for each of {cache.batch} sequences, got {len(counts)}")
    for count in counts:
        check_int("counts", count, 0, n, f"ints from 0 to {n}, the tokens of k")
    for sequence, (have, count) in enumerate(zip(cache.tokens, counts, strict=True)):
        if have + count > cache.room:
            raise ValueError(
                f"k: expected at most {cache.room - have} more tokens of sequence {sequence}, for which the "
                f"cache has room, got {count}"
            )
    return list(counts)


def check_attend(cache, q) -> None:
    """Queries of the newest tokens, which have to be in one block: older ones see what is gone."""
    _check_whole(cache)
    _check_queries(cache, q)
    n, size = q.shape[2], cache.pattern.block_size
    if n > MOST_QUERIES:
        raise ValueError(f"q: expected 1 to {MOST_QUERIES} queries of each sequence, got {n}")
    there = min((have - 1) % size + 1 if have else 0 for have in cache.tokens)
    if n > there:
        raise ValueError(
            f"q: expected at most {there} queries, as many tokens as the newest block of every sequence has, "
            f"got {n}; decode takes tokens of several blocks"
        )


def _check_queries(cache, q) -> None:
    _check_like("q", q, cache, cache.pattern.heads)


def check_decode(cache, q, k, v, sm_scale) -> None:
    """One query for each new token; and what `attention_decode` would refuse when tokens are in already."""
    check_append(cache, k, v, None)
    _check_queries(cache, q)
    if sm_scale is not None:
        check_scale(sm_scale, False)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q: expected {k.shape[2]} queries, one for each token of k, got {q.shape[2]}")


def _check_counted(cache) -> None:
    """That a call is one call of the host, which counts its tokens."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("S2Cache under torch.func: not supported")
    if cache.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "S2Cache: expected no CUDA graph under capture: the host would not count the tokens of a replay"
        )


def _check_whole(cache) -> None:
    if not cache.whole:
        raise RuntimeError(
            "S2Cache: expected a cache that has all tokens it counted; an earlier call failed half way, so "
            "make another"
        )


def _check_like(name: str, x: Any, cache, heads: int) -> None:
    """A tensor (batch, heads, n, D) as the cache has them, without a gradient."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type_name(x)}")
    check_dense(name, x)
    refuse_trace("S2Cache", x.numel())
    if x.dim() != 4 or (*x.shape[:2], x.shape[3]) != (cache.batch, heads, cache.head_dim) or not x.numel():
        raise ValueError(
            f"{name}: expected shape ({cache.batch}, {heads}, n, {cache.head_dim}), n at least 1, got "
            f"{tuple(x.shape)}"
        )
    if x.dtype != cache.dtype:
        raise TypeError(f"{name}: expected dtype {cache.dtype} as the cache has, got {x.dtype}")
    if x.device != cache.device:
        raise ValueError(f"{name}: expected device {cache.device} as the cache has, got {x.device}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(
            f"{name}: expected a tensor that does not require grad, or torch.no_grad(), got one that does: a "
            "cache has no gradient"
        )
