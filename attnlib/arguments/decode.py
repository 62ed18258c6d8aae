"""The arguments of `attention_decode`, checked."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attnlib.arguments.common import (
    check_common,
    check_dense,
    check_forms,
    check_groups,
    check_head_dim,
    check_int32,
    check_tensors,
    refuse_trace,
    type_name,
)  # fmt: skip
from attnlib.params import DecodeParams

MOST_QUERIES = 16
PAGE_UNIT = 16
SPLITS = "none", "fixed", "stream_k"
RANK = "4 dimensions (B, H, S, D)"
FP8 = torch.float8_e4m3fn


class DecodeOptions(NamedTuple):
    """The options of `attention_decode`, as they were given."""

    lengths: Any = None
    page_table: Any = None
    causal: Any = True
    window: Any = None
    sm_scale: Any = None
    return_lse: Any = False
    split: Any = None
    starts: Any = None
    k_scale: Any = None
    v_scale: Any = None


def check_decode(q, k, v, options: DecodeOptions, symbols: bool = False) -> None:
    """Arguments of `attention_decode`, except for the values in lengths, starts and pages: see
    `check_decode_values`. TypeError or ValueError if one is wrong. symbols: sizes may be no numbers."""
    lengths, table, causal, window, sm_scale, return_lse, split, starts, k_scale, v_scale = options
    if isinstance(k, torch.Tensor) and k.dtype is FP8:
        _check_fp8_caches(q, k, v)
    else:
        check_tensors(q, k, v, RANK, 4, ("k_cache", "v_cache"))
    check_shapes = _check_decode_shapes if symbols else _check_decode_shapes_once
    check_shapes(q.shape, k.shape, v.shape, table is not None)
    if table is not None:
        _check_integers("page_table", table, q, "2 dimensions (B, pages)", 2)
    if lengths is not None:
        _check_integers("lengths", lengths, q, "1 dimension (B)", 1)
    if starts is not None:
        _check_integers("starts", starts, q, "1 dimension (B)", 1)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            _check_scales(name, scale, q, k, table is not None)
    check_common(causal, window, sm_scale, return_lse, symbols)
    _check_split(split)


def _check_decode_shapes(q: torch.Size, k: torch.Size, v: torch.Size, paged: bool) -> None:
    (batch, heads, queries, head_dim), (first, kv_heads, size, width) = q, k
    refuse_trace("attention_decode", head_dim)
    if not 1 <= queries <= MOST_QUERIES:
        raise ValueError(f"q: expected 1 to {MOST_QUERIES} queries of each sequence, got {queries}")
    check_head_dim("q", head_dim)
    if not paged and first != batch:
        raise ValueError(f"k_cache: expected batch size {batch} as q has, got {first}")
    if width != head_dim:
        raise ValueError(f"k_cache: expected head dimension {head_dim} as q has, got {width}")
    check_groups("k_cache", heads, kv_heads)
    if paged and (size < PAGE_UNIT or size % PAGE_UNIT):
        expected = f"pages of a multiple of {PAGE_UNIT} keys (dimension 2)"
        raise ValueError(f"k_cache: expected {expected}, got {size}")
    if v != k:
        raise ValueError(f"v_cache: expected shape {tuple(k)} as k_cache has, got {tuple(v)}")


_check_decode_shapes_once = lru_cache(1024)(_check_decode_shapes)


def _check_fp8_caches(q, k, v) -> None:
    """What `check_tensors` checks, of caches in FP8."""
    check_forms({"q": q, "k_cache": k, "v_cache": v}, RANK, 4)
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"q: expected dtype float16 or bfloat16 beside a k_cache in {FP8}, got {q.dtype}")
    if v.dtype is not FP8:
        raise TypeError(f"v_cache: expected dtype {FP8} as k_cache has, got {v.dtype}")
    for name, tensor in (("k_cache", k), ("v_cache", v)):
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} as q has, got {tensor.device}")


def _check_scales(name: str, scale, q: torch.Tensor, k: torch.Tensor, paged: bool) -> None:
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor or None, got {type_name(scale)}")
    if k.dtype is not FP8:
        raise ValueError(f"{name}: expected None beside a k_cache in {k.dtype}, got a torch.Tensor")
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: expected dtype float32, got {scale.dtype}")
    check_dense(name, scale)
    if scale.dim() and scale.shape != k.shape[:2]:
        each = "(pages, Hkv)" if paged else "(B, Hkv)"
        raise ValueError(
            f"{name}: expected shape () or {each}, {tuple(k.shape[:2])}, got {tuple(scale.shape)}"
        )
    if scale.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} as q has, got {scale.device}")


def _check_integers(name: str, given, q: torch.Tensor, rank: str, dims: int) -> None:
    if type(given) is torch.Tensor and given.dtype is torch.int32 and given.layout is torch.strided:
        if given.dim() == dims and given.shape[0] == q.shape[0] and given.device == q.device:
            return  # nearly always
    check_int32(name, given, "a torch.Tensor or None")
    if given.dim() != dims:
        raise ValueError(f"{name}: expected {rank}, got shape {tuple(given.shape)}")
    if given.shape[0] != q.shape[0]:  # `len` would make a number of a symbol
        raise ValueError(f"{name}: expected batch size {q.shape[0]} as q has, got {given.shape[0]}")
    if given.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} as q has, got {given.device}")


def _check_split(split) -> None:
    expected = "expected 'none', 'fixed', 'stream_k', a number of splits or None"
    if split is None:
        return
    if isinstance(split, bool) or not isinstance(split, str | int):
        raise TypeError(f"split: {expected}, got {type_name(split)}")
    if split not in SPLITS and (isinstance(split, str) or split < 1):
        raise ValueError(f"split: {expected}, got {split!r}")


def check_decode_values(k: torch.Tensor, params: DecodeParams) -> None:
    """The values in lengths, starts and pages, which a compiled graph and a dispatch mode bring only when the
    call runs. ValueError if one is wrong. Not on a GPU: it would have to be waited for."""
    if k.is_cuda or k.device.type != "cpu":
        return
    lengths, starts, table, cache = params.lengths, params.starts, params.page_table, k.shape
    room = cache[2] if table is None else table.shape[1] * cache[2]
    counts = None if lengths is None else lengths.tolist()
    for name, given in (("lengths", counts), ("starts", None if starts is None else starts.tolist())):
        for count in given or ():
            if not 0 <= count <= room:
                raise ValueError(f"{name}: expected 0 to {room}, which the cache has room for, got {count}")
    if table is None:
        return
    for row, pages in enumerate(table.tolist()):
        used = len(pages) if counts is None else -(-counts[row] // cache[2])
        for page in pages[:used]:
            if not 0 <= page < cache[0]:
                raise ValueError(f"page_table: expected pages from 0 to {cache[0] - 1}, got {page}")
