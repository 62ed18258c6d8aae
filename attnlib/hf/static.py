"""Caches of a fixed size, of which a part is filled: their mask is a small tensor, which transformers makes
before a compiled step and hands on to every layer as it would a mask with four dimensions."""

from __future__ import annotations

import torch

from attnlib import attention_decode
from attnlib.arguments.decode import MOST_QUERIES
from attnlib.hf import mask as masks
from attnlib.hf.layout import require, values_known
from attnlib.hf.mask import Mask
from attnlib.hf.remembered import Remembered
from attnlib.hf.score import as_bias

STARTS, LENGTHS, LEFT = range(3)
"""Rows of the tensor, int32 (3, 1, 1, B): the first key of a sequence that is no padding, and how many it
has; then, the same for all of them, the window's left bound, -1 for none. With one query the window is a
part of the first row. The mask is causal."""


def made(mask: Mask, end: int | torch.Tensor, batch: int, device: torch.device) -> torch.Tensor:
    """The tensor that says what a causal mask, whose kept may be None, does of the first `end` of its keys.
    ValueError if a row has padding behind a token."""
    place = torch.arange(mask.kv_length, device=device)
    filled = place < end
    starts = torch.zeros(batch, dtype=torch.int64, device=device)
    if mask.kept is not None:
        starts = (filled & ~mask.kept).sum(1)
        require(
            ((mask.kept == (place >= starts[:, None])) | ~filled).all(),
            "attention_mask: expected padding on the left only beside a cache of a fixed size, got a row "
            "with padding behind a token. Use attn_implementation='sdpa'",
        )
    ends = torch.zeros_like(starts) + end
    # A window that hides nothing is none: several queries in a graph take no other.
    left = -1 if mask.window is None or mask.window[0] >= mask.kv_length - 1 else mask.window[0]
    if mask.q_length == 1 and left >= 0:
        starts, left = torch.maximum(starts, ends - 1 - left), -1
    rows = starts, ends, torch.full_like(starts, left)
    return torch.stack(rows).int()[:, None, None]


def is_made(attention_mask, batch: int) -> bool:
    """Whether it is such a tensor, for a batch of so many sequences."""
    return (
        isinstance(attention_mask, torch.Tensor)
        and attention_mask.dtype == torch.int32
        and attention_mask.shape == (3, 1, 1, batch)
    )


def decode(query, key, value, spans: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Attention of few queries, none of which is differentiated; in a graph, too."""
    if query.shape[2] > 1 and not values_known(spans):
        require(
            (spans[LEFT] == -1).all(),
            "attention_mask: expected a mask without a window for several queries and a cache of a "
            "fixed size in a compiled graph, got another one",
        )
    return attention_decode(
        query, key, value, lengths=spans[LENGTHS, 0, 0], starts=spans[STARTS, 0, 0], sm_scale=scaling
    )


def bias(query: torch.Tensor, spans: torch.Tensor, kv_length: int) -> torch.Tensor:
    """What the tensor says of all keys of the cache, as numbers (B, 1, Sq, Sk) that are added to scores."""
    rows = spans[:, 0, 0, :, None, None]  # (3, B, 1, 1)
    key = torch.arange(kv_length, device=spans.device)
    place = rows[LENGTHS] - query.shape[2] + torch.arange(query.shape[2], device=spans.device)[:, None]
    seen = (key >= rows[STARTS]) & (key < rows[LENGTHS]) & (key <= place)
    seen &= (rows[LEFT] < 0) | (key >= place - rows[LEFT])
    return as_bias(seen.unsqueeze(1), query.dtype)


def kept(spans: torch.Tensor, q_length: int) -> torch.Tensor:
    """Which of the queries, the last of the keys that are there, are no padding: bool (B, Sq)."""
    starts, ends = spans[STARTS, 0, 0], spans[LENGTHS, 0, 0]
    place = ends[:, None] - q_length + torch.arange(q_length, device=spans.device)
    return place >= starts[:, None]


def fits_decode(query: torch.Tensor, spans: torch.Tensor) -> bool:
    """Whether `decode` computes it: one query, or few in a graph, in which nothing is known of the values."""
    queries = query.shape[2]
    return queries == 1 or (not values_known(spans) and queries <= MOST_QUERIES)


_read = Remembered()


def read(module, spans: torch.Tensor, q_length: int) -> Mask:
    """The mask of the keys that are there. Waits for a GPU, once for all layers."""
    return _read.of(module, spans, (q_length,), lambda: _looked_at(spans, q_length))


def _looked_at(spans: torch.Tensor, q_length: int) -> Mask:
    starts, ends, left = spans[:, 0, 0].tolist()
    end = max(ends, default=0)
    kept = None
    if any(starts):
        kept = torch.arange(end, device=spans.device) >= spans[STARTS, 0, 0][:, None]
    window = None if left[0] == -1 else (left[0], 0)
    return masks.settled(Mask(q_length, end, end - q_length, True, window, kept))
