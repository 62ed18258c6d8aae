"""What a kernel walks along: for each row of tiles of a mask, the steps that it takes across."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnlib.block_mask.tiles import FULL, TILE, UNIT, Tiles
from attnlib.kernels.common.launcher import LIMIT

FIRST_ALONE, SECOND_ALONE = 1 << 30, 1 << 29
"""Marks of `Lists.bits`, see `lists_of`; slots are below the half of the smaller one."""


class Lists(NamedTuple):
    """Steps of `step` columns each, 64 or 128, that rows of 128 elements, or of 64, take, over all masks of a
    batch.

    Row r of mask m, m = b * H + h, has number m * rows + r. Its steps are those from starts[number] to
    starts[number + 1] - 1, in ascending order: first those that all its elements see, up to
    middles[number], then those that have bits. A row that sees nothing takes one step, which it sees nothing
    of, so that no kernel has to do without one.

    Attributes:
        starts, middles: int32 (masks * rows + 1), (masks * rows).
        steps: int32 (n), the number of a step's columns, in units of `step`.
        bits: int32 (n), -1 where all is seen; else twice the slot of the words, plus 1 for the right half of
            their columns.
        order: int32 (masks * rows), the rows of each mask, the longest first.
    """

    starts: torch.Tensor
    middles: torch.Tensor
    steps: torch.Tensor
    bits: torch.Tensor
    order: torch.Tensor


def lists_of(tiles: Tiles, step: int, columns: bool, rows_of: int = TILE, marked: bool = False) -> Lists:
    """Of queries along keys, or with `columns` of keys along queries; of so many of them, 64 or 128.

    marked: of rows of 128 in steps of 64. The first of a row's steps with bits is one that its first 64
    elements see whole and the others not at all, with the mark FIRST_ALONE, and the last one is one that the
    second 64 see alone, with SECOND_ALONE, if there are such steps, and another one beside them.

    ValueError if there are 2^31 steps.
    """
    kinds, slots = (x.mT if columns else x for x in (tiles.kinds, tiles.slots))
    kinds, slots = kinds.flatten(0, 1), slots.flatten(0, 1)
    pairs = kinds.unflatten(1, (-1, rows_of // UNIT))
    full, some = (pairs == FULL).all(2), (pairs != 0).any(2)  # (masks, rows, units across)
    if step == TILE:
        full, some = (x.unflatten(2, (-1, 2)) for x in (full, some))
        full, some = full.all(3), some.any(3)
    partial = some & ~full
    masks, rows, _ = full.shape
    fulls, partials = full.sum(2, dtype=torch.int32), partial.sum(2, dtype=torch.int32)
    empty = fulls + partials == 0
    counts = (fulls + partials + empty).flatten()
    ends = counts.cumsum(0)
    total = int(ends[-1])
    if total >= LIMIT:
        raise ValueError(
            f"block_mask: expected fewer than 2^31 steps of {step} over all heads, got {total}; use fewer "
            "batch elements or heads in one call"
        )
    starts = torch.cat([torch.zeros_like(ends[:1]), ends]).int()
    middles = starts[:-1] + fulls.flatten()
    steps = torch.zeros(total, dtype=torch.int32, device=kinds.device)
    bits = torch.zeros_like(steps)  # words without a bit, for rows that take no other step
    for chosen, first in ((full, starts[:-1]), (partial, middles)):
        m, row, column = chosen.nonzero(as_tuple=True)
        rank = chosen.cumsum(2, dtype=torch.int32)[m, row, column] - 1
        if marked and chosen is partial:
            rank, marks = _alone_at_the_ends(pairs, rank, m, row, column, counts)
        place = (first[m * rows + row] + rank).long()
        steps[place] = column.int()
        if chosen is full:
            bits[place] = -1
        else:
            bits[place] = 2 * slots[m, row * rows_of // TILE, column * step // TILE]
            bits[place] += (column % 2).int() if step == UNIT else 0
            bits[place] += marks if marked else 0
    order = counts.view(masks, rows).sort(dim=1, descending=True, stable=True).indices
    return Lists(starts, middles, steps, bits, order.int().flatten())


def _alone_at_the_ends(
    pairs: torch.Tensor, rank: torch.Tensor, m, row, column, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the steps with bits, each with its rank among those of its row: new ranks, and marks. pairs: kinds
    (masks, rows, 2, units across); counts: steps of each row."""
    upper, lower = pairs.unbind(2)
    lone = torch.stack([(upper == FULL) & (lower == 0), (upper == 0) & (lower != 0)])
    exists = lone.any(3)  # (2, masks, rows)
    exists &= counts.view(exists.shape[1:]) > exists.sum(0)
    # The first of one kind, the last of the other.
    where = torch.stack([lone[0].int().argmax(2), lone.shape[3] - 1 - lone[1].flip(2).int().argmax(2)])
    is_first, is_last = (exists[i, m, row] & (where[i, m, row] == column) for i in (0, 1))
    ranks = torch.zeros_like(exists, dtype=torch.int32)
    for i, chosen in enumerate((is_first, is_last)):
        ranks[i, m[chosen], row[chosen]] = rank[chosen]
    has_first, has_last = exists[:, m, row]
    moved = rank + (has_first & (rank < ranks[0, m, row])) - (has_last & (rank > ranks[1, m, row])).int()
    last = torch.zeros_like(counts).view(exists.shape[1:])
    last.index_put_((m, row), torch.ones_like(rank, dtype=last.dtype), accumulate=True)
    moved = torch.where(is_first, 0, torch.where(is_last, last[m, row].int() - 1, moved))
    return moved, FIRST_ALONE * is_first.int() + SECOND_ALONE * is_last.int()


def last_first(lists: Lists) -> Lists:
    """The same with the steps of a row in descending order, those with bits among the others; `middles` are
    `starts`. Of rows that end at the same column, whatever they begin with, programs that start together are
    at the same columns then, so that one reads what another has brought to the L2."""
    lengths = lists.starts.diff()
    row = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    order = ((row << 32) - lists.steps).argsort()
    return lists._replace(middles=lists.starts[:-1], steps=lists.steps[order], bits=lists.bits[order])
