"""Soft caps, attention sinks and biases of a model, and the masks of its padded or packed batches as block
masks: a call with a score takes no varlen sequences."""

from __future__ import annotations

import weakref
from functools import reduce
from typing import NamedTuple

import torch

from attnlib import BlockMask, Score
from attnlib.hf.layout import Layout, values_known
from attnlib.hf.mask import Mask, of_padding


class Asked(NamedTuple):
    """What a layer asks for beside what it sees: a soft cap, sinks, and what is added to the scores, by the
    mask and by the layer, in shapes that broadcast to (B, H, Sq, Sk)."""

    softcap: float | None
    s_aux: torch.Tensor | None
    bias: torch.Tensor | None
    position_bias: torch.Tensor | None

    @property
    def anything(self) -> bool:
        return any(x is not None for x in self)


def scored(
    asked: Asked, mask: Mask, layout: Layout | None, query: torch.Tensor
) -> tuple[Score | None, BlockMask | None]:
    """The score and the block mask of a call, for queries (B, H, Sq, D). The window, and what is causal, is
    not in them. In a graph no block mask can be made, and a bias says what it would."""
    softcap, s_aux, bias, position_bias = asked
    if softcap is not None and (isinstance(softcap, bool) or not isinstance(softcap, int | float)):
        raise ValueError(f"softcap: expected a number or None, got a {type(softcap).__name__}")
    if s_aux is not None and (not isinstance(s_aux, torch.Tensor) or s_aux.numel() != query.shape[1]):
        got = tuple(s_aux.shape) if isinstance(s_aux, torch.Tensor) else type(s_aux).__name__
        raise ValueError(
            f"s_aux: expected a tensor with a value for each of {query.shape[1]} heads, got {got}"
        )
    if position_bias is not None and not isinstance(position_bias, torch.Tensor):
        raise ValueError(f"position_bias: expected a tensor or None, got a {type(position_bias).__name__}")
    blocks, hidden = mask.block_mask, None
    if blocks is None and values_known(query):
        blocks = _block_mask_of(mask, layout, query)
    elif blocks is None:
        hidden = _bias_of(mask, layout, query)
    biases = [x for x in (bias, position_bias, hidden) if x is not None]
    if softcap is None and s_aux is None and not biases:
        return None, blocks
    sinks = None if s_aux is None else s_aux.flatten()
    return Score(softcap, sinks=sinks, bias=reduce(torch.add, biases) if biases else None), blocks


# ---------------------------------------------------------------- padding and packing beside a score

_known: weakref.WeakKeyDictionary[Mask, tuple] = weakref.WeakKeyDictionary()
"""Mask -> (layout, block mask): all layers of a model get the same mask."""


def _block_mask_of(mask: Mask, layout: Layout | None, query: torch.Tensor) -> BlockMask | None:
    """Which keys padding or packing leaves to the queries; None for all."""
    if layout is None and not mask.spans:
        return None
    known = _known.get(mask)
    if known is None or known[0] is not layout:
        known = _known[mask] = layout, _made(mask, layout, query)
    return known[1]


def _made(mask: Mask, layout: Layout | None, query: torch.Tensor) -> BlockMask:
    B, _, S_q, _ = query.shape
    if layout is None or layout.index_k is not None:
        return of_padding(mask.kept, S_q)
    of_q, of_k = _sequences(mask, layout, query)

    def seen(b, h, q, k):
        return of_q[b, q] == of_k[b, k]

    return BlockMask.from_function(seen, S_q, mask.kv_length, B=B, device=query.device)


def _bias_of(mask: Mask, layout: Layout | None, query: torch.Tensor) -> torch.Tensor | None:
    """The same as numbers that are added to the scores: (B, 1, 1, Sk) of padding; of packed rows
    (B, 1, Sq, Sk)."""
    if layout is None and not mask.spans:
        return None
    if layout is None or layout.index_k is not None:
        return as_bias(mask.kept[:, None, None], query.dtype)
    of_q, of_k = _sequences(mask, layout, query)
    return as_bias(of_q[:, None, :, None] == of_k[:, None, None], query.dtype)


def _sequences(mask: Mask, layout: Layout, query: torch.Tensor) -> list[torch.Tensor]:
    """(B, Sq) and (B, Sk), the number of each token's sequence."""
    B, device = query.shape[0], query.device
    return [
        torch.searchsorted(offsets, torch.arange(B * S, device=device), right=True).view(B, S)
        for offsets, S in ((layout.cu_seqlens_q, query.shape[2]), (layout.cu_seqlens_k, mask.kv_length))
    ]


def as_bias(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a bool tensor holds, else -inf."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)
