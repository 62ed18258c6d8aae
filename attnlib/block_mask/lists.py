"""What a kernel walks along: for each row of tiles of a mask, the steps that it takes across."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnlib.block_mask.tiles import ABSENT, FULL, TILE, UNIT, Tiles
from attnlib.kernels.common.launcher import LIMIT

FIRST_ALONE, SECOND_ALONE = 1 << 30, 1 << 29
"""Marks of `Lists.bits`, see `marked`; slots are below the half of the smaller one."""


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


def lists_of(tiles: Tiles, step: int, columns: bool, rows_of: int = TILE) -> Lists:
    """Of queries along keys, or with `columns` of keys along queries; of so many of them, 64 or 128.
    ValueError if there are 2^31 steps."""
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
        place = (first[m * rows + row] + rank).long()
        steps[place] = column.int()
        if chosen is full:
            bits[place] = -1
        else:
            bits[place] = 2 * slots[m, row * rows_of // TILE, column * step // TILE]
            bits[place] += (column % 2).int() if step == UNIT else 0
    order = counts.view(masks, rows).sort(dim=1, descending=True, stable=True).indices
    return Lists(starts, middles, steps, bits, order.int().flatten())


def marked(lists: Lists, kinds: torch.Tensor) -> Lists:
    """Of rows of 128 in steps of 64, the same with the steps with bits in another order: the first one is one
    that the row's first 64 elements see whole and the others not at all, with the mark FIRST_ALONE in its
    bits, and the last one is one that the second 64 see alone, with SECOND_ALONE; where there are such steps,
    and another one beside them. kinds: as of `Tiles`."""
    lengths = lists.starts.diff()
    row = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    upper, lower = kinds.flatten(0, 2).unflatten(0, (-1, 2))[row, :, lists.steps.long()].unbind(1)
    alone = (upper == FULL) & (lower == ABSENT), (upper == ABSENT) & (lower != ABSENT)
    place = torch.arange(len(row), device=row.device)
    ends = torch.full((2, len(lengths)), -1, device=row.device)  # first of one kind, last of the other
    for end, chosen, reduce in zip(ends, alone, ("amin", "amax"), strict=True):
        end.scatter_reduce_(0, row[chosen], place[chosen], reduce, include_self=False)
    ends = torch.where(lengths > (ends >= 0).sum(0), ends, -1)
    first, second = (ends[:, row] == place).int()
    group = 2 * (lists.bits >= 0).int() - first + second
    order = ((row << 34) + (group.long() << 32) + lists.steps).argsort()
    bits = lists.bits + FIRST_ALONE * first + SECOND_ALONE * second
    return lists._replace(steps=lists.steps[order], bits=bits[order])


def leading(tiles: Tiles) -> int:
    """How many tiles of 128 keys of a head take more than twice as many steps of 64 queries as the average
    one; of heads that differ, their mean. A backward program computes such a tile, and one that begins late
    leaves other SMs without work at the end."""
    steps = (tiles.kinds != ABSENT).unflatten(3, (-1, TILE // UNIT)).any(4).sum(2, dtype=torch.float32)
    masks = steps.shape[0] * steps.shape[1]
    return round((steps > 2 * steps.mean()).sum().item() / masks) if masks else 0


def last_first(lists: Lists) -> Lists:
    """The same with the steps of a row in descending order, those with bits among the others; `middles` are
    `starts`. Of rows that end at the same column, whatever they begin with, programs that start together are
    at the same columns then, so that one reads what another has brought to the L2."""
    lengths = lists.starts.diff()
    row = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    order = ((row << 32) - lists.steps).argsort()
    return lists._replace(middles=lists.starts[:-1], steps=lists.steps[order], bits=lists.bits[order])
