"""Dense attention in PyTorch: in fp64, the truth of every test, and in the dtype of the inputs, the yardstick
of the error budget."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from attnlib.kernels.reference.scores import scored, with_sinks
from attnlib.params import MaskWindow, mask_window
from attnlib.scores import ScoreParts

_BLOCK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
Seen = MaskWindow | torch.Tensor
"""Which keys a query sees: by its place, or by a mask, bool (B, H, S_q, S_k), B and H or 1."""


class _Shape(NamedTuple):
    """q is (batch, heads, seqlen, head_dim), k (batch, kv_heads, keys, head_dim), v as k with value_dim
    columns."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    kv_heads: int
    keys: int
    value_dim: int

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the output."""
        return self.batch, self.heads, self.seqlen, self.value_dim


def _shape_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> _Shape:
    """Validate q, k and v, and tell their sizes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name}: expected 4 dimensions (B, H, S, D), got shape {tuple(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name}: expected {q.dtype} on {q.device} like q, got {x.dtype} on {x.device}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"v: expected the shape of k {tuple(k.shape[:3])}, got {tuple(v.shape)}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k: expected batch {q.shape[0]} and head_dim {q.shape[3]} like q, got shape {tuple(k.shape)}"
        )
    if min(q.shape) < 1 or min(k.shape) < 1 or v.shape[3] < 1:
        raise ValueError(f"q, k: expected no empty dimension, got {tuple(q.shape)} and {tuple(k.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k: expected a number of heads that divides {q.shape[1]}, got {k.shape[1]}")
    return _Shape(*q.shape, k.shape[1], k.shape[2], v.shape[3])


def _row_blocks(
    shape: _Shape, seen: Seen, device: torch.device, itemsize: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, end row, first key, end key): blocks of query rows whose scores fit in a fixed number
    of bytes, and the keys that some row of a block sees.

    Rows that see no key are not yielded: with a bound on the right, the first S_q - S_k - right. Of a mask
    all are.
    """
    if isinstance(seen, torch.Tensor):
        seen = MaskWindow(None, None)
    shift = shape.keys - shape.seqlen
    first = 0 if seen.right is None else max(0, -(shift + seen.right))
    row_bytes = shape.batch * shape.heads * shape.keys * itemsize
    rows = max(1, min(shape.seqlen, _BLOCK_BYTES.get(device.type, _BLOCK_BYTES["cpu"]) // row_bytes))
    for start in range(first, shape.seqlen, rows):
        end = min(start + rows, shape.seqlen)
        left = 0 if seen.left is None else max(0, start + shift - seen.left)
        right = shape.keys if seen.right is None else min(shape.keys, end + shift + seen.right)
        yield start, end, left, right


def _grouped(x: torch.Tensor, shape: _Shape) -> torch.Tensor:
    """(B, H, rows, D) -> (B, H_kv, H/H_kv * rows, D): heads that share a kv head become one matrix."""
    return x.reshape(shape.batch, shape.kv_heads, -1, shape.head_dim)


def _hide(
    scores: torch.Tensor, shape: _Shape, seen: Seen, start: int, end: int, left: int
) -> torch.Tensor | None:
    """Write -inf to the scores [B, H_kv, H/H_kv * rows, keys] of rows start..end-1 and keys from `left` on
    wherever a row does not see a key. Returns what they see, [H/H_kv * rows, keys] bool, of a mask [B, H_kv,
    H/H_kv * rows, keys]; None for all."""
    if isinstance(seen, torch.Tensor):
        visible = seen[:, :, start:end].expand(shape.batch, shape.heads, -1, -1).reshape(scores.shape)
        scores.masked_fill_(~visible, -math.inf)
        return visible
    if seen == MaskWindow(None, None):
        return None
    place = torch.arange(start, end, device=scores.device)[:, None] + (shape.keys - shape.seqlen)
    keys = torch.arange(left, left + scores.shape[-1], device=scores.device)[None, :]
    visible = torch.ones(end - start, scores.shape[-1], dtype=torch.bool, device=scores.device)
    if seen.right is not None:
        visible &= keys <= place + seen.right
    if seen.left is not None:
        visible &= keys >= place - seen.left
    visible = visible.repeat(shape.heads // shape.kv_heads, 1)
    scores.masked_fill_(~visible, -math.inf)
    return visible


def _scored(scores: torch.Tensor, shape: _Shape, score: ScoreParts | None, start: int, end: int):
    """Scores [B, H_kv, H/H_kv * rows, keys] as the softmax takes them; and the sinks of their rows, [B, H_kv,
    H/H_kv * rows, 1], None for none."""
    if score is None:
        return scores, None
    own = scores.view(shape.batch, shape.heads, end - start, shape.keys)
    changed, _ = scored(own, score, start, (shape.seqlen, shape.keys), derivative=False)
    found = with_sinks(changed, score)
    sinks = found[..., shape.keys :].reshape(*scores.shape[:3], -1)
    return changed.reshape(scores.shape), sinks if score.sinks is not None else None


def _weighted(p: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """P V, [B, H_kv, rows, keys] x [B, H_kv, keys, D], to which values that a row does not see add nothing:
    not even those that are infinite or NaN, of which 0 times as much would be NaN.
    """
    if visible is None or bool(v.isfinite().all()):
        return p @ v
    out = p @ v.masked_fill(~v.isfinite(), 0.0)

    def meet(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Where a row of `rows` has a key in common with a column of `values`, both bool."""
        return rows.to(p.dtype) @ values.to(p.dtype) > 0

    some = p > 0
    out = out.masked_fill(meet(some, v == math.inf), math.inf)
    out = out + torch.zeros_like(out).masked_fill_(meet(some, v == -math.inf), -math.inf)
    undefined = meet(visible, v.isnan()) | meet(visible & (p == 0), v.isinf())
    return out.masked_fill(undefined, math.nan)


@torch.no_grad()
def attention_fp64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: torch.Tensor | None = None,
    sm_scale: float | None = None,
    score: ScoreParts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention in fp64, the truth of every test.

    q is (B, H, Sq, D), k (B, H_kv, Sk, D), v (B, H_kv, Sk, Dv), H a multiple of H_kv; any dtype. `sm_scale`
    defaults to 1/sqrt(D). Query i stands at p = i + Sk - Sq and sees, with window=(left, right), the keys
    p - left .. p + right; -1 is no bound, and `causal` bounds the right at 0. `mask`: bool (B, H, Sq, Sk), B
    and H or 1, instead of these. `score`: what becomes of scores, beside a mask only.
    Returns out (B, H, Sq, Dv) and the natural-log LSE (B, H, Sq), both fp64. A row that sees no key has out 0
    and LSE -inf, or that of its sink, and what a row does not see does not reach it, not even NaN. Works over
    blocks of query rows: about 1 GiB of scratch on a GPU.
    """
    shape, seen = _shape_of(q, k, v), mask_window(causal, window) if mask is None else mask
    scale = shape.head_dim**-0.5 if sm_scale is None else sm_scale
    k64, v64 = k.double(), v.double()
    out = torch.zeros(shape.out, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64, device=q.device)
    for start, end, left, right in _row_blocks(shape, seen, q.device, 8):
        b_q = _grouped(q[:, :, start:end].double() * scale, shape)
        scores = b_q @ k64[:, :, left:right].transpose(-1, -2)  # [B, H_kv, H/H_kv * rows, keys]
        scores, sinks = _scored(scores, shape, score, start, end)
        visible = _hide(scores, shape, seen, start, end, left)
        m = scores.amax(-1, keepdim=True)
        if sinks is not None:
            m = torch.maximum(m, sinks)
        if mask is not None:  # rows that see nothing
            m = m.masked_fill(m == -math.inf, 0.0)
        p = scores.sub_(m).exp_()
        l = p.sum(-1, keepdim=True)  # noqa: E741  (m and l are the names used through the book)
        if sinks is not None:
            l = l + (sinks - m).exp()  # noqa: E741
        rows = (shape.batch, shape.heads, end - start)
        b_out = _weighted(p, v64[:, :, left:right], visible) / l.masked_fill(l == 0, 1.0)
        out[:, :, start:end] = b_out.view(*rows, shape.value_dim)
        lse[:, :, start:end] = (m + l.log()).view(rows)
    return out, lse


@torch.no_grad()
def attention_math(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: torch.Tensor | None = None,
    sm_scale: float | None = None,
    score: ScoreParts | None = None,
) -> torch.Tensor:
    """Dense attention as plain PyTorch computes it in the dtype of the inputs: the yardstick of the error
    budget.

    Scores, softmax and the product with V are each rounded to the input dtype, as eager code does. (SDPA's
    own math backend works in fp32 inside since torch 2.5, which would make the budget a single rounding.)
    Arguments as `attention_fp64`; returns out (B, H, Sq, D) in the input dtype. Works over blocks of query
    rows, which changes no result because rows are independent.
    """
    shape, seen = _shape_of(q, k, v), mask_window(causal, window) if mask is None else mask
    scale = shape.head_dim**-0.5 if sm_scale is None else sm_scale
    out = torch.zeros(shape.out, dtype=q.dtype, device=q.device)
    for start, end, left, right in _row_blocks(shape, seen, q.device, 4):
        b_q = _grouped(q[:, :, start:end] * scale, shape)
        scores = b_q @ k[:, :, left:right].transpose(-1, -2)
        scores, sinks = _scored(scores, shape, score, start, end)
        visible = _hide(scores, shape, seen, start, end, left)
        if sinks is not None:
            scores = torch.cat([scores, sinks], -1)
        p = torch.softmax(scores, -1)[..., : right - left]
        if mask is not None:
            p = p.masked_fill(~visible.any(-1, keepdim=True), 0.0)  # rows that see nothing
        b_out = _weighted(p, v[:, :, left:right], visible)
        out[:, :, start:end] = b_out.view(shape.batch, shape.heads, end - start, shape.value_dim)
    return out


def sequences(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> Iterator[tuple[slice, slice, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Yield (rows, keys, (q, k, v)) of each of the varlen sequences that has queries and keys: q as (1, H,
    Sq, D), k and v as (1, H_kv, Sk, D)."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for rows, keys in zip(*(map(slice, ends, ends[1:]) for ends in (ends_q, ends_k)), strict=True):
        if rows.start < rows.stop and keys.start < keys.stop:
            parts = (x[part].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys)))
            yield rows, keys, tuple(parts)


@torch.no_grad()
def attention_varlen_fp64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_fp64` of varlen sequences, one after the other.

    q is (Tq, H, D), k (Tk, H_kv, D), v (Tk, H_kv, Dv); rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of q
    belong to sequence b, and likewise keys. Returns out (Tq, H, Dv) and LSE (H, Tq), both fp64. Rows of a
    sequence without keys have out 0 and LSE -inf.
    """
    out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64, device=q.device)
    for rows, _, parts in sequences(q, k, v, cu_seqlens_q, cu_seqlens_k):
        b_out, b_lse = attention_fp64(*parts, causal=causal, window=window, sm_scale=sm_scale)
        out[rows], lse[:, rows] = b_out[0].transpose(0, 1), b_lse[0]
    return out, lse


def attention_varlen_math(q, k, v, cu_seqlens_q, cu_seqlens_k, **arguments) -> torch.Tensor:
    """`attention_math` of varlen sequences."""
    out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
    for rows, _, parts in sequences(q, k, v, cu_seqlens_q, cu_seqlens_k):
        out[rows] = attention_math(*parts, **arguments)[0].transpose(0, 1)
    return out
