"""Results over parts of the heads, rows or keys, and how they become one."""

from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import torch

from attnlib.kernels import MERGERS


class Result(NamedTuple):
    """Attention to some keys: out (B, H, S, D), LSE (B, H, S) float32."""

    out: torch.Tensor
    lse: torch.Tensor

    def part(self, heads: slice, rows: slice) -> "Result":
        return Result(self.out[:, heads, rows], self.lse[:, heads, rows])


Heads = list[tuple[slice, Result]]
"""A rank's attention to its own keys, by groups of heads."""


def merger(device: torch.device) -> ModuleType:
    """What joins two parts of a result there."""
    for family in MERGERS.values():
        if family.unsupported(device) is None:
            return family
    raise AssertionError("the last family runs every call")


class Remote:
    """Attention to the keys of other ranks, for rows as they come: kept apart while each row comes once, else
    merged into float32."""

    def __init__(self, q: torch.Tensor, several: bool) -> None:
        self.parts: list[tuple[range, Result]] = []
        self._sum = None
        if several:
            lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
            self._sum = Result(torch.zeros(q.shape, dtype=torch.float32, device=q.device), lse)
            self.parts.append((range(q.shape[2]), self._sum))

    def add(self, rows: range, result: Result) -> None:
        if self._sum is None:
            self.parts.append((rows, result))
        else:
            here = self._sum.part(slice(None), as_slice(rows))
            merger(here.out.device).merge(here, result, here)


def joined(q: torch.Tensor, own: Heads, remote: Remote) -> Result:
    """Attention to all keys."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    whole, merge = Result(out, lse), merger(q.device).merge
    for heads, result in own:
        for rows, other, start in _covering(remote.parts, q.shape[2]):
            here, mine = whole.part(heads, rows), result.part(slice(None), rows)
            if other is None:
                here.out.copy_(mine.out)
                here.lse.copy_(mine.lse)
            else:
                merge(mine, other.part(heads, slice(None)), here, start)
    return whole


def summed(
    like: torch.Tensor,
    own: list[tuple[slice, torch.Tensor]],
    others: list[tuple[range, torch.Tensor]],
) -> torch.Tensor:
    """A gradient (B, H, S, D): a rank's own part, by groups of heads, plus what other ranks or their keys
    give for some rows, in one pass over a group. Where a row gets more than one of these they are added in
    float32."""
    apart = not overlap([rows for rows, _ in others])
    found = torch.empty_like(like) if apart else torch.empty_like(like, dtype=torch.float32)
    add = merger(like.device).add
    for heads, part in own:
        for rows, other, start in _covering(others if apart else [], like.shape[2]):
            here, mine = found[:, heads, rows], part[:, :, rows]
            if other is None:
                here.copy_(mine)
            else:
                add(mine, other[:, heads], here, start)
    if not apart:
        for rows, other in others:
            found[:, :, as_slice(rows)] += other
    return found.to(like.dtype)


def as_slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def overlap(ranges: list[range]) -> bool:
    """Whether two of them have a number in common."""
    ordered = sorted(ranges, key=lambda rows: rows.start)
    return any(a.stop > b.start for a, b in zip(ordered, ordered[1:], strict=False))


def _covering(parts: list, length: int) -> list[tuple[slice, object, int]]:
    """All rows, cut so that each slice has one of `parts` in it: (rows, what belongs to the part, the part's
    first row in the slice). Without parts one slice and None."""
    if not parts:
        return [(slice(0, length), None, 0)]
    ordered = sorted(parts, key=lambda part: part[0].start)
    cuts = [0, *(rows.start for rows, _ in ordered[1:]), length]
    return [
        (slice(begin, end), what, rows.start - begin)
        for (rows, what), (begin, end) in zip(ordered, pairwise(cuts), strict=True)
    ]
