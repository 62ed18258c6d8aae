"""Which positions of a sequence each rank holds, and in which order."""

import torch

from attnlib.params import MaskWindow

Parts = tuple[range, ...]
"""Positions, part after part, ascending."""


def is_zigzag(window: MaskWindow) -> bool:
    """Whether a rank holds one part of the first half of the sequence and its mirror image of the second: so
    for causal attention, where late rows see more keys. Without a mask, and with a bound on the left, rows
    cost the same wherever they stand, and a rank holds one piece."""
    return window == MaskWindow(None, 0)


def pieces_of(ranks: int, rows: int) -> tuple[Parts, ...]:
    """The positions of each rank where rows lie in order."""
    return tuple((range(rank * rows, (rank + 1) * rows),) for rank in range(ranks))


def parts_of(rank: int, ranks: int, rows: int, window: MaskWindow) -> Parts:
    """The positions of a rank that holds so many rows."""
    if not is_zigzag(window) or ranks == 1:
        return (range(rank * rows, (rank + 1) * rows),)
    half, mirrored = rows // 2, 2 * ranks - 1 - rank
    return range(rank * half, (rank + 1) * half), range(mirrored * half, (mirrored + 1) * half)


def rows_divisor(ranks: int, shares: int, window: MaskWindow) -> int:
    """What the rows of each rank have to be a multiple of, where `shares` ranks next to each other hold a
    piece each of what one of `ranks` has otherwise."""
    return 2 if is_zigzag(window) and ranks > 1 and shares % 2 else 1


def divisor(ranks: int, window: MaskWindow) -> int:
    """What the length of a sequence has to be a multiple of."""
    return 2 * ranks if is_zigzag(window) and ranks > 1 else ranks


def local_rows(parts: Parts) -> list[tuple[range, range]]:
    """(rows of the rank, positions) of each part."""
    found, start = [], 0
    for part in parts:
        found.append((range(start, start + len(part)), part))
        start += len(part)
    return found


def take(x: torch.Tensor, parts: Parts, dim: int) -> torch.Tensor:
    """These positions of `x`: a view where they are one piece."""
    pieces = [x.narrow(dim, part.start, len(part)) for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
