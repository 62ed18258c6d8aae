"""Attention to some keys after others, and gradients over parts of the heads, rows or keys: how they become
one."""

from itertools import pairwise
from types import ModuleType

import torch

from attnlib.dispatch import first_of
from attnlib.kernels import ADDERS
from attnlib.params import Existing


def adder(device: torch.device) -> ModuleType:
    """What adds two parts of a gradient there."""
    return first_of(ADDERS, None, device)


def nothing_seen(q: torch.Tensor, several: bool) -> Existing:
    """The result of q (B, H, S, D) before the first key: uninitialized memory, and LSEs of -inf.
    Laid out like q. several: a row may be merged into more than twice, which float32 is for; else it has q's
    dtype."""
    dtype = torch.float32 if several else q.dtype
    out = torch.empty_like(q, dtype=dtype)
    if out.stride(-1) != 1:
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
    return Existing(out, torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device))


def part_of(result: Existing, heads: slice, rows: slice = slice(None)) -> Existing:
    """These heads and rows of it."""
    return Existing(result.out[:, heads, rows], result.lse[:, heads, rows])


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
    add = adder(like.device).add
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
