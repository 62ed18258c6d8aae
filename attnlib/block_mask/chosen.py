"""A causal mask of blocks that were chosen on the device, as by a gate: made without a number that the host
reads. So it can be made anew for every layer of every call, and CUDA graphs can capture that.

What the host has to know of a mask, how many patterns of bits there are, is the same for all choices. A tile
of 128 x 128 has four units of 64 x 64, and off the diagonal each is full or absent: the words of slot s, 1 to
14, are those of the units in the bits of s. On the diagonal the two units there are triangles, and the one
below them is absent or full: slots 15 and 16; in the last tile, which may end early, slots 17 and 18.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch

from attnlib.block_mask import tiles as tiling
from attnlib.block_mask.lists import Lists
from attnlib.block_mask.tiles import FULL, PARTIAL, TILE, UNIT, Grid, Tiles
from attnlib.block_mask.transforms import outside_transforms, unwrapped
from attnlib.kernels import LISTERS

SLOTS = 19
_DIAGONAL, _LAST = 15, 17


class Chosen:
    """Blocks bool (B, H, n, n) of `size` tokens, 64 or 128, of which those on the diagonal always count and
    those above it never. density: of the triangle of blocks about what part is chosen, if that is known."""

    def __init__(self, blocks: torch.Tensor, seqlen: int, size: int, density: float | None = None) -> None:
        self.blocks, self.seqlen, self.size = unwrapped(blocks).contiguous(), seqlen, size
        self.density = density

    @property
    def coarse(self) -> bool:
        """Whether steps of 128 keys cover not much more than those of 64: not where single units are
        chosen."""
        return self.size == TILE

    @property
    def steps(self) -> float:
        """Of 128 keys that a tile of 128 queries takes on average, at most: what either half of it sees."""
        tiles = -(-self.seqlen // TILE)
        return (1.0 if self.density is None else self.density * (TILE // self.size)) * (tiles + 1) / 2

    @property
    def words(self) -> torch.Tensor:
        return _words(self.seqlen % TILE, self.blocks.device)

    @property
    def halves(self) -> torch.Tensor:
        """The words of steps of 64 keys."""
        return _halves(self.seqlen % TILE, self.blocks.device)

    def lists(self, step: int) -> Lists | None:
        """Of queries along keys; None where no kernel can make them."""
        if LISTERS.unsupported(self.blocks.device) is not None:
            return None
        return Lists(*LISTERS.lists_of_chosen(self.blocks, self.seqlen, self.size // UNIT, step))

    @outside_transforms
    def tiles(self) -> Tiles:
        """The mask's tiles, for what goes by them: the backward pass, a window, a look at them."""
        grid = Grid(*self.blocks.shape[:2], self.seqlen, self.seqlen, self.blocks.device)
        *_, down, across = grid.units
        last = -(-self.seqlen // UNIT) - 1
        row = torch.arange(down, device=grid.device).clamp(max=last)[:, None]
        column = torch.arange(across, device=grid.device)[None, :]
        times, size = self.size // UNIT, self.blocks.shape[-1]
        at = row // times, (column // times).clamp(max=size - 1)
        seen = (self.blocks[:, :, at[0], at[1]] | (row // times == column // times)) & (row > column)
        kinds = seen.to(torch.int8) * FULL
        kinds = torch.where(row == column, PARTIAL, kinds).to(torch.int8)
        full = tiling.by_tile(kinds == FULL).flatten(4).int()  # (B, H, down, across, 4)
        code = (full << torch.arange(4, device=grid.device)).sum(4)
        tile = torch.arange(down // 2, device=grid.device)
        own = torch.where(tile == tile[-1], _LAST, _DIAGONAL) + (code.diagonal(dim1=2, dim2=3) >> 2 & 1)
        slots = torch.where((code == 0) | (code == 15), -1, code)
        slots.diagonal(dim1=2, dim2=3).copy_(own)
        return Tiles(kinds, slots.int(), self.words)


_made: dict[tuple[Callable, int, torch.device], torch.Tensor] = {}


def _kept(make: Callable) -> Callable:
    """The function, whose results stay: a captured graph has their addresses."""

    @wraps(make)
    def found(tail: int, device: torch.device) -> torch.Tensor:
        key = make, tail, device
        words = _made.get(key)
        if words is None:
            words = make(tail, device)
            if tiling.settled(device):
                _made[key] = words
        return words

    return found


@_kept
def _words(tail: int, device: torch.device) -> torch.Tensor:
    """The words of all slots, for a sequence whose last tile has so many rows, 0 for 128."""
    with torch.no_grad():
        along = torch.arange(TILE, device=device)
        unit = torch.arange(4, device=device)
        codes = torch.arange(_DIAGONAL, device=device)
        full = ((codes[:, None] >> unit) & 1).bool().unflatten(1, (2, 2))
        shared = full.repeat_interleave(UNIT, 1).repeat_interleave(UNIT, 2)
        ends = along, along.clamp(max=(tail or TILE) - 1)  # rows past the end are as the last one
        below = along[None, :] < UNIT
        own = []
        for row in (x[:, None] for x in ends):
            triangles = (row >= along) & (row // UNIT == along // UNIT)
            own += [triangles, triangles | (below & (row >= UNIT))]
        return tiling.pack(torch.cat([shared, torch.stack(own)]))


@_kept
def _halves(tail: int, device: torch.device) -> torch.Tensor:
    """Those of the left and the right half of each slot."""
    return tiling.halves(_words(tail, device))
