"""What a call of attention asks for besides its tensors: one object that goes from `attention` to the
launcher."""

import math
from typing import Any, Literal, NamedTuple

import torch

Implementation = Literal["decode", "hopper", "triton", "reference"]


class MaskWindow(NamedTuple):
    """Query i, at position p = i + Sk - Sq among the keys, sees the keys p - left .. p + right.

    None is no bound. Causal is MaskWindow(None, 0), dense MaskWindow(None, None). Positions are aligned at
    the bottom right: the last query stands at the last key.
    """

    left: int | None
    right: int | None

    def tightened(self, rows: int, keys: int) -> "MaskWindow":
        """The same without bounds that no row reaches: no mask for them, and no sum with them beyond
        int32."""
        left, right = self
        if left is None and not right:  # dense or causal
            return self
        return MaskWindow(
            None if left is None or left >= keys - 1 else left,
            None if right is None or right >= rows - 1 else right,
        )

    def clipped(self, rows: int, keys: int) -> "MaskWindow":
        """The same keys in bounds whose sums with a length are int32: beyond a length they bound nothing."""
        left, right = self
        return MaskWindow(
            None if left is None else min(left, keys), None if right is None else min(right, rows)
        )


def mask_window(causal: bool, window: tuple[int, int] | None) -> MaskWindow:
    """The window that `attention(causal=, window=)` asks for. In `window` -1 is no bound, as in
    FlashAttention; `causal` bounds the right at 0."""
    left, right = (-1, -1) if window is None else window
    if causal:
        right = 0
    return MaskWindow(None if left == -1 else left, None if right == -1 else right)


class Varlen(NamedTuple):
    """Sequences of different lengths, one after the other in one tensor (tokens, H, D).

    Rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of q are sequence b, and likewise keys. Both are int32
    (B + 1) on the device of q, from 0 up to the number of tokens.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    def longest(self, q: Any, k: Any) -> tuple[int, int]:
        """Rows of q and of k that a sequence has at most: not more than all have, whatever was given."""
        return min(self.max_seqlen_q, q.shape[0]), min(self.max_seqlen_k, k.shape[0])


class DecodeParams(NamedTuple):
    """What a call of `attention_decode` asks for besides q and the caches.

    Attributes:
        window: the keys that a query sees; the last query stands at the last key.
        sm_scale: factor on the scores.
        lengths: (B) int32, the keys of each sequence; None where the caches are full.
        page_table: (B, pages) int32, which pages have the keys of each sequence, in order; None where they
            lie in one piece.
        return_lse: whether the LSE is returned.
        split: how the keys are shared out: "none", "fixed", "stream_k", a number of splits, or None for the
            family's choice.
        config: how the kernels are compiled and launched, of the class of the family; None for its choice.
        starts: (B) int32, the first key of each sequence that counts; None where all do.
        k_scale, v_scale: what elements of the caches in FP8 are multiplied with, float32: (), (B, Hkv), or
            (pages, Hkv) with a page table; None for 1.
    """

    window: MaskWindow
    sm_scale: float
    lengths: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    return_lse: bool = False
    split: str | int | None = None
    config: Any = None
    starts: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class MonarchParams(NamedTuple):
    """What a call of `attention_monarch` asks for besides its tensors.

    Attributes:
        block: tokens of a block.
        steps: rounds of the fit, at least 1.
        first: the place of token 0 among the blocks: what is missing in the last block, or 0 where the
            last block may be short.
        sm_scale: factor on the scores.
        key_mask: (B, N) bool, which tokens count; None where all do.
        config: how the kernels are compiled, of the class of the family; None for its choice.
    """

    block: int
    steps: int
    first: int
    sm_scale: float
    key_mask: torch.Tensor | None = None
    config: Any = None

    def blocks(self, tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-tokens // self.block)


def default_block(tokens: int) -> int:
    """Keys of a block where the caller names none: the largest power of two up to sqrt(tokens). Blocks and
    columns then have about as many tokens, and tiles are full."""
    return 1 << (max(1, math.isqrt(tokens)).bit_length() - 1)


UNIT = 8
"""Strides of an existing output are multiples of so many elements, as all are where the head dimension is
one: rows are read and written 8 or 16 bytes at a time."""


class Existing(NamedTuple):
    """Attention to other keys, into which a call merges its own, in place.

    out: (B, H, Sq, D) in the dtype of q or float32. lse: (B, H, Sq) float32, -inf in a row that has seen no
    key so far, whatever `out` has there. Both may be slices: see `arguments.existing`.
    """

    out: torch.Tensor
    lse: torch.Tensor

    @property
    def form(self) -> "ExistingForm":
        return ExistingForm(self.out.stride(), self.lse.stride(), self.out.dtype)


class ExistingForm(NamedTuple):
    """What launches depend on of an `Existing`: strides, and the dtype of the output."""

    out: tuple[int, ...]
    lse: tuple[int, ...]
    dtype: torch.dtype


class Params(NamedTuple):
    """What a call asks for besides its tensors.

    Attributes:
        window: the keys that a query sees.
        sm_scale: factor on the scores.
        varlen: where the sequences of a varlen call begin and end; None for a batch.
        return_lse: whether the forward pass returns the LSE.
        deterministic: gradients that are equal bit by bit from run to run.
        impl: the implementation asked for; None for the first that can run the call.
        config: how the kernel is compiled and launched, of the class of its family; None for what the
            family's `configuration` chooses.
        plan: the launches that the family prepared for such a call; None where it has yet to.
        block_mask: an `attnlib.BlockMask`, which keys each query sees; None where the window alone says it.
            With a mask the window is in the mask (`BlockMask.within`), and is empty here.
        score: what becomes of scores, an `attnlib.scores.ScoreParts`; None for nothing. A call with one has a
            block mask, too.
        into: the `Existing` result that the call is merged into; None for a result of its own.
        spare: multiprocessors that a forward kernel with a program for each leaves to what runs beside it.
    """

    window: MaskWindow
    sm_scale: float
    varlen: Varlen | None = None
    return_lse: bool = False
    deterministic: bool = False
    impl: Implementation | None = None
    config: Any = None
    plan: Any = None
    block_mask: Any = None
    score: Any = None
    into: Existing | None = None
    spare: int = 0


class EntmaxParams(NamedTuple):
    """What a call of `attention_entmax` asks for besides its tensors.

    Attributes:
        alpha: of the entmax, above 1 up to 2, which is sparsemax.
        causal: the last query stands at the last key, and none sees a key after its own place.
        sm_scale: factor on the scores.
        columns: whether the forward pass leaves what the backward pass wants.
        impl: the implementation asked for; None for the first that can run the call.
        config: how the kernels are compiled and launched; None for the family's choice.
        varlen: the sequences of tensors (tokens, H, D); None for tensors (B, H, S, D).
    """

    alpha: float
    causal: bool
    sm_scale: float
    columns: bool = False
    impl: str | None = None
    config: Any = None
    varlen: Varlen | None = None


class BsfaParams(NamedTuple):
    """What a call of `attention_bsfa` asks for besides its tensors.

    Attributes:
        threshold: (B or 1, H or 1, N) float32: of each block of query rows, the last one for all after it.
        causal: the last query stands at the last key, and none sees a key after its own place.
        sm_scale: factor on the scores.
        return_lse, return_kept: whether the forward pass returns the LSE, and which blocks it kept.
        config: how the kernel is compiled and launched, of the class of its family; None for the family's
            choice.
    """

    threshold: torch.Tensor
    causal: bool
    sm_scale: float
    return_lse: bool = False
    return_kept: bool = False
    config: Any = None
