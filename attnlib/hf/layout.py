"""Tokens of a batch as the sequences that `attention_varlen` computes: without their padding, cut where a
packed row begins anew."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from attnlib import attention_varlen

MAX_PACKED = 64
"""Packed sequences per row in a graph, where their number must be known beforehand. An unused one costs a few
empty programs and 128 rows of scratch memory in the backward pass."""


class Layout(NamedTuple):
    """Which tokens make which sequence.

    Attributes:
        index_q: (Tq) int64, rows of q as (B * Sq, H, D) in the order of the sequences; None: as they lie.
        index_k: (Tk) int64, the same of k and v.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `attention_varlen`.
    """

    index_q: torch.Tensor | None
    index_k: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, **options
) -> torch.Tensor:
    """Attention within the sequences of `layout`. query (B, H, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv,
    Sk, Dv); returns (B, Sq, H, Dv), 0 for queries of no sequence."""
    q, k, v = (
        _taken(x, index)
        for x, index in ((query, layout.index_q), (key, layout.index_k), (value, layout.index_k))
    )
    out = attention_varlen(q, k, v, *layout[2:], **options)
    rows = query.shape[0], query.shape[2]
    if layout.index_q is not None:
        everywhere = out.new_zeros(rows[0] * rows[1], *out.shape[1:])
        out = everywhere.index_copy(0, layout.index_q, out)
    return out.unflatten(0, rows)


def _taken(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    tokens = x.transpose(1, 2).flatten(0, 1)
    return tokens if index is None else tokens[index]


def values_known(tensor: torch.Tensor) -> bool:
    """Whether Python may ask for the values: no compiler, exporter or CUDA graph records the call."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def require(condition: torch.Tensor, message: str) -> None:
    """ValueError unless a bool tensor of one element holds; in a graph, an error when the graph runs."""
    if not values_known(condition):
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)


# ---------------------------------------------------------------- padding


def without_padding(
    kept: torch.Tensor, q_length: int, queries_are_last_tokens: bool, last_sees: torch.Tensor | None = None
) -> Layout:
    """The tokens that `kept`, bool (B, Sk), keeps: a sequence per row. In a graph, whose shapes are fixed,
    the padding of a row makes a second sequence.

    queries_are_last_tokens: self-attention, so a query may be padding too. Otherwise all queries attend to
    the keys that are kept. last_sees: bool (B, Sk), keys that the last token of a row sees. Where it is
    padding it is computed with them, as a sequence of its own; None: it is left out as other padding."""
    batch, kv_length = kept.shape
    if queries_are_last_tokens:
        kept_q = kept[:, kv_length - q_length :]
    else:
        kept_q = kept.new_ones(batch, q_length)
    if last_sees is not None:
        last_sees = last_sees & ~kept[:, -1:]
    if not values_known(kept):
        return _in_graph(kept_q, kept, last_sees)
    q, k = kept_q[None], kept[None]
    if last_sees is not None and not kept[:, -1].all():
        last = torch.zeros_like(kept_q)
        last[:, -1] = ~kept[:, -1]
        q, k = torch.stack([kept_q, last]), torch.stack([kept, last_sees])
    (index_q, offsets_q), (index_k, offsets_k) = _chosen(q), _chosen(k)
    longest = torch.stack([offsets_q.diff().max(), offsets_k.diff().max()]).tolist()
    return Layout(index_q, index_k, offsets_q, offsets_k, *longest)


def _chosen(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens, and where their sequences begin: one for each row of `tokens`, bool (n, B, S), whose rows
    are those of a batch, n times."""
    number, batch, length = tokens.shape
    index = tokens.flatten().nonzero().squeeze(1)
    sequence = torch.div(index, length, rounding_mode="floor")
    return index % (batch * length), _offsets(sequence, number * batch)


def _in_graph(kept_q: torch.Tensor, kept: torch.Tensor, last_sees: torch.Tensor | None) -> Layout:
    """All tokens, by sequences of which each row has two: what is kept, and its padding. With `last_sees` the
    keys of the second one are those: causal attention ends with the last query and the last key. What neither
    has makes a third one, which nobody asks."""
    batch, kv_length = kept.shape
    row = torch.arange(batch, device=kept.device)[:, None]
    each = 2 if last_sees is None else 3
    of_q, of_k, longest = each * row + ~kept_q, each * row + ~kept, kv_length
    if last_sees is not None:
        of_k = torch.stack([3 * row + 2 * ~kept, 3 * row + torch.where(last_sees, 1, 2)])
        longest = 2 * kv_length
    sides = []
    for numbers, tokens in ((of_q, kept_q), (of_k, kept)):
        sequence, index = numbers.flatten().sort(stable=True)
        sides.append((index % tokens.numel(), _offsets(sequence, each * batch)))
    (index_q, offsets_q), (index_k, offsets_k) = sides
    return Layout(index_q, index_k, offsets_q, offsets_k, kept_q.shape[1], longest)


def without_holes(kept: torch.Tensor) -> torch.Tensor:
    """Whether the tokens kept, bool (B, S), follow each other in every row; a bool tensor of one element."""
    begins = (kept[:, 1:] & ~kept[:, :-1]).sum(1) + kept[:, 0]
    return (begins <= 1).all()


def _offsets(sequence: torch.Tensor, number: int) -> torch.Tensor:
    """(number + 1) int32: where each sequence begins among tokens sorted by the number of theirs."""
    numbers = torch.arange(number + 1, device=sequence.device)
    return torch.searchsorted(sequence.contiguous(), numbers, out_int32=True)


# ---------------------------------------------------------------- packed rows


def packed(sequences: torch.Tensor) -> Layout | None:
    """Rows of packed sequences. sequences: (B, S) integers from 0 on, that go up by one where a sequence of
    the row begins. None if each row is one sequence."""
    batch, length = sequences.shape
    row = torch.arange(batch, device=sequences.device)[:, None]
    if values_known(sequences):
        ends = sequences[:, -1:] + 1
        before = ends.cumsum(0) - ends  # sequences in the rows above
        number = int(ends.sum())
        if number == batch:
            return None
        offsets = _offsets((before + sequences).flatten(), number)
        longest = int(offsets.diff().max())
    else:
        require(
            (sequences < MAX_PACKED).all(),
            f"position_ids: expected at most {MAX_PACKED} packed sequences per row in a compiled graph; "
            "cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k have no such bound",
        )
        offsets = _offsets((MAX_PACKED * row + sequences).flatten(), MAX_PACKED * batch)
        longest = length
    return Layout(None, None, offsets, offsets, longest, longest)


def numbered(position_ids: torch.Tensor) -> torch.Tensor:
    """(B, S) int64: which packed sequence of its row a token belongs to. One begins wherever a position is
    not one more than the position before, as transformers has it."""
    return (position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1).cumsum(1)
