"""Soft caps and attention sinks of a model, and the masks of its padded or packed batches as block masks: a
call with a score takes no varlen sequences."""

from __future__ import annotations

import weakref

import torch

from attnlib import BlockMask, Score
from attnlib.hf.layout import Layout, values_known
from attnlib.hf.mask import Mask, of_padding


def score_of(
    softcap: float | None, s_aux: torch.Tensor | None, biases: tuple, query: torch.Tensor
) -> Score | None:
    """What a layer asks for beside the mask; None for nothing. biases: of the mask and of the layer, each a
    tensor that broadcasts to (B, H, Sq, Sk), or None. ValueError in a graph, which can't have it."""
    given = {"softcap": softcap, "s_aux": s_aux, "attention_mask": biases[0], "position_bias": biases[1]}
    names = [name for name, value in given.items() if value is not None]
    if not names:
        return None
    if not values_known(query):
        raise ValueError(
            f"{names[0]}: expected None under torch.compile, torch.export and in a CUDA graph, where attnlib "
            "does not support it. Use attn_implementation='eager'"
        )
    if softcap is not None and (isinstance(softcap, bool) or not isinstance(softcap, int | float)):
        raise ValueError(f"softcap: expected a number or None, got a {type(softcap).__name__}")
    if s_aux is not None and (not isinstance(s_aux, torch.Tensor) or s_aux.numel() != query.shape[1]):
        got = tuple(s_aux.shape) if isinstance(s_aux, torch.Tensor) else type(s_aux).__name__
        raise ValueError(
            f"s_aux: expected a tensor with a value for each of {query.shape[1]} heads, got {got}"
        )
    position_bias = biases[1]
    if position_bias is not None and not isinstance(position_bias, torch.Tensor):
        raise ValueError(f"position_bias: expected a tensor or None, got a {type(position_bias).__name__}")
    bias = _sum(biases)
    return Score(softcap, sinks=None if s_aux is None else s_aux.flatten(), bias=bias)


def _sum(biases: tuple) -> torch.Tensor | None:
    given = [x for x in biases if x is not None]
    return given[0] + given[1] if len(given) == 2 else (given or [None])[0]


_known: weakref.WeakKeyDictionary[Mask, tuple] = weakref.WeakKeyDictionary()
"""Mask -> (layout, block mask): all layers of a model get the same mask."""


def block_mask_of(mask: Mask, layout: Layout | None, query: torch.Tensor) -> BlockMask | None:
    """Which keys padding or packing leaves to the queries (B, H, Sq, D); None for all. The window, and what
    is causal, is not in it."""
    if mask.block_mask is not None:
        return mask.block_mask
    if layout is None and not mask.spans:
        return None
    known = _known.get(mask)
    if known is None or known[0] is not layout:
        known = _known[mask] = layout, _made(mask, layout, query)
    return known[1]


def _made(mask: Mask, layout: Layout | None, query: torch.Tensor) -> BlockMask:
    B, _, S_q, _ = query.shape
    if layout is None or layout.index_k is not None:  # padding
        return of_padding(mask.kept, S_q)
    of_q, of_k = (
        torch.searchsorted(offsets, torch.arange(B * S, device=query.device), right=True).view(B, S)
        for offsets, S in ((layout.cu_seqlens_q, S_q), (layout.cu_seqlens_k, mask.kv_length))
    )

    def seen(b, h, q, k):
        return of_q[b, q] == of_k[b, k]

    return BlockMask.from_function(seen, S_q, mask.kv_length, B=B, device=query.device)
