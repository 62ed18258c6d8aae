"""A call of attention without its addresses and numbers: what the choice of a kernel, its configuration and
its launches depend on."""

from typing import Any, NamedTuple

import torch

from attnlib.params import ExistingForm, MaskWindow, Params

LOG2_E, LN2 = 1.4426950408889634, 0.6931471805599453
SMALLEST_SCALE = 2.0**-126  # normal in float32
VARLEN_ROWS = 1 << 30  # rows of varlen sequences, at most; see `descriptors.varlen_window`
PREPARED = 1024
"""How many signatures have launches that stay prepared: lengths may change from call to call without end."""


class Lengths(NamedTuple):
    """All of varlen sequences that a launch depends on: their number, and the longest lengths."""

    sequences: int
    max_q: int
    max_k: int


class Signature(NamedTuple):
    """Shapes, strides, dtype, device and options of a call.

    q, k: the shapes (B, H, S_q, D) and (B, H_kv, S_k, D), varlen (T_q, H, D) and (T_k, H_kv, D). strides: of
    q, k and v; of the backward pass those of d_out and out as well. device: a CUDA device's index, -1 for a
    CPU. mask, score: what launches depend on of a block mask (`block_mask.mask.Form`) and of a score
    (`scores.ScoreForm`). own_value_dim: columns of v and of the output, None for as many as q and k have.
    into: of the result that the call is merged into, None for one of its own. spare: multiprocessors that the
    forward pass leaves to other kernels; the backward pass takes all.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: int
    window: MaskWindow
    sm_scale: float
    lengths: Lengths | None
    return_lse: bool
    config: Any
    mask: Any = None
    score: Any = None
    own_value_dim: int | None = None
    into: ExistingForm | None = None
    spare: int = 0

    @property
    def varlen(self) -> bool:
        return self.lengths is not None

    @property
    def head_dim(self) -> int:
        return self.q[-1]

    @property
    def value_dim(self) -> int:
        return self.q[-1] if self.own_value_dim is None else self.own_value_dim

    @property
    def widest(self) -> int:
        """Columns of queries or of values, whichever are more."""
        return max(self.head_dim, self.value_dim)

    @property
    def v(self) -> tuple[int, ...]:
        """The shape of v."""
        return self.k if self.own_value_dim is None else (*self.k[:-1], self.own_value_dim)

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the output."""
        return self.q if self.own_value_dim is None else (*self.q[:-1], self.own_value_dim)

    def mean_lengths(self) -> tuple[int, int]:
        """(S_q, S_k); of varlen sequences the mean lengths."""
        if self.lengths is None:
            return self.q[2], self.k[2]
        sequences = max(self.lengths.sequences, 1)
        return self.q[0] // sequences, self.k[0] // sequences

    def dimensions(self) -> tuple[int, int, int, int, int]:
        """(B, H, H_kv, S_q, S_k); of varlen sequences their number and the longest lengths."""
        if self.lengths is None:
            return self.q[0], self.q[1], self.k[1], self.q[2], self.k[2]
        if max(self.q[0], self.k[0]) > VARLEN_ROWS:
            raise ValueError(
                f"q, k: expected at most 2^30 rows and keys of varlen sequences, got {self.q[0]} and "
                f"{self.k[0]}"
            )
        return self.lengths.sequences, self.q[1], self.k[1], self.lengths.max_q, self.lengths.max_k


def signature(params: Params, q: torch.Tensor, k: torch.Tensor, *strided: torch.Tensor) -> Signature:
    """The signature of a call. strided: the tensors whose strides it has, of which the last one is v or the
    output; none where strides and columns of values do not matter."""
    window, sm_scale, varlen, return_lse, _, _, config, _, mask, score, into, spare = params
    lengths = None
    if varlen is not None:
        lengths = Lengths(varlen.cu_seqlens_q.shape[0] - 1, *varlen.longest(q, k))
    strides = tuple([x.stride() for x in strided])
    own = strided[-1].shape[-1] if strided else q.shape[-1]
    return Signature(
        q.shape, k.shape, strides, q.dtype, q.get_device(), window, sm_scale, lengths, return_lse, config,
        None if mask is None else mask.form, None if score is None else score.form,
        None if own == q.shape[-1] else own, None if into is None else into.form,
        spare,
    )  # fmt: skip


def mean_keys(S_q: int, S_k: int, window: MaskWindow) -> int:
    """Keys that a query sees on average, of those that see any, about: to within half a key for dense and
    causal calls; with a right bound above 0 too few, with a left bound and no right one too many."""
    left, right = window
    seen = S_k
    if right is not None:
        seen -= max(0, min(S_q, S_k) - right) // 2
    return seen if left is None else min(seen, left + 1 + (seen if right is None else right))


def mean_rows(S_q: int, S_k: int, window: MaskWindow) -> float:
    """Queries of a head that see a key on average, about."""
    rows = S_q if window.right is None else min(S_q, S_k + window.right)  # the others see no key
    return mean_keys(S_q, S_k, window) * rows / max(S_k, 1)


def exp2_scale(sm_scale: float) -> float:
    """What the kernels multiply scores with before exp2: |sm_scale| * log2(e), positive. Zero would turn a
    masked score, -inf, into NaN; SMALLEST_SCALE leaves every weight at 1 as long as products of queries and
    keys are below 2^100."""
    return max(abs(sm_scale) * LOG2_E, SMALLEST_SCALE)
