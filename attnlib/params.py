"""Which keys a query sees: a band around the diagonal; and which rows belong together: packed sequences."""

from functools import lru_cache
from typing import NamedTuple

import torch


class Band(NamedTuple):
    """Query i, at position p = i + Sk - Sq among the keys, sees the keys p - left .. p + right.

    None is no bound. Causal is Band(None, 0), dense Band(None, None). Positions are aligned at the bottom
    right: the last query stands at the last key.
    """

    left: int | None
    right: int | None


def band(causal: bool, window: tuple[int, int] | None) -> Band:
    """The band that `attention(causal=, window=)` asks for. In `window` -1 is no bound, as in FlashAttention;
    `causal` bounds the right at 0."""
    return _band(causal, None if window is None else tuple(window))


@lru_cache
def _band(causal: bool, window: tuple[int, int] | None) -> Band:
    left, right = (None if bound == -1 else bound for bound in window or (-1, -1))
    return Band(left, 0 if causal else right)


class Packed(NamedTuple):
    """Sequences of different lengths, one after the other in one tensor (tokens, H, D).

    Rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of q are sequence b, and likewise keys. Both are int32
    (B + 1) on the device of q, from 0 up to the number of tokens.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
