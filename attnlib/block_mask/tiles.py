"""A mask as tiles of 128 x 128 elements, made on the device of the mask in pieces of bounded memory.

A tile has four units of 64 x 64 elements, and each unit a kind: absent, partial or full. A tile whose units
are not all full and not all absent is mixed, and has words: for each row four words of 32 bits, in which
bit 2 i + e of word c is that of column 8 i + 2 c + e. So the columns of a word, two neighbors and then two at
every distance of 8, are those that one thread holds of a product of tensor cores on Hopper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

TILE, UNIT = 128, 64
ABSENT, PARTIAL, FULL = 0, 1, 2

Seen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch [n], head [n], queries [n, 128], keys [n, 128]) -> bool [n, 128, 128]: who sees which key."""

_PIECE = {"cuda": 1 << 13, "cpu": 1 << 8}
"""Tiles whose elements are held at once: 128 MiB of bool on a GPU, and eight times that of a function's
integers."""


class Grid(NamedTuple):
    """The shape of a mask. B and H are 1 where it is the same for all batch elements, or heads."""

    B: int
    H: int
    S_q: int
    S_k: int
    device: torch.device

    @property
    def tiles(self) -> tuple[int, int]:
        """Of a head, downwards and across."""
        return -(-self.S_q // TILE), -(-self.S_k // TILE)

    @property
    def units(self) -> tuple[int, int, int, int]:
        down, across = self.tiles
        return self.B, self.H, 2 * down, 2 * across


class Tiles(NamedTuple):
    """kinds: int8 (B, H, units down, units across). slots: int32 (B, H, tiles down, tiles across), where the
    words of a mixed tile are, -1 for others. words: int32 (n, 128, 4); those of slot 0 are 0, of a tile that
    nobody sees. Mixed tiles without a partial unit share the words of those with the same units."""

    kinds: torch.Tensor
    slots: torch.Tensor
    words: torch.Tensor


def build(kinds: torch.Tensor, seen: Seen | None, grid: Grid) -> Tiles:
    """From the kinds of units, int8 (B, H, units down, units across), of which those of partial units are
    looked for in their elements, by `seen`. Keys past S_k are seen by nobody; rows past S_q are as the last
    one."""
    S_k, device = grid.S_k, grid.device
    kinds = kinds.clone()
    whole = by_tile(kinds)  # (B, H, tiles down, tiles across, 2, 2)
    uniform = (whole == whole[..., :1, :1]).all(-1).all(-1) & (whole[..., 0, 0] != PARTIAL)
    if S_k % TILE:
        uniform[..., -1] &= whole[..., -1, 0, 0] == ABSENT
    known = ~uniform & (whole != PARTIAL).all(-1).all(-1)
    if S_k % TILE:
        known[..., -1] = False
    slots = torch.full(whole.shape[:4], -1, dtype=torch.int32, device=device)
    words = [torch.zeros(1, TILE, 4, dtype=torch.int32, device=device)]
    if bool(known.any()):
        words.append(_shared(whole, known, slots))
    found = sum(map(len, words))
    places = (~uniform & ~known).nonzero()
    piece = _PIECE.get(device.type, _PIECE["cpu"])
    for start in range(0, len(places), piece):
        b, h, down, across = place = places[start : start + piece].T
        own = pack(_elements(whole[tuple(place)], seen, place, grid))
        given = kinds_of(own)
        whole[tuple(place)] = given
        some = (given != given[:, :1, :1]).any(-1).any(-1) | (given[:, 0, 0] == PARTIAL)
        own, here = own[some], places[start : start + piece][some]
        slots[tuple(here.T)] = torch.arange(found, found + len(own), dtype=torch.int32, device=device)
        words.append(own)
        found += len(own)
    return Tiles(kinds, slots, torch.cat(words))


def _shared(whole: torch.Tensor, known: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The words of tiles that are `known`, whose units are full or absent: of each kind of such a tile once,
    so that there are at most 14. Their slots, from 1 on, are written to `slots`."""
    unit = torch.arange(4, device=whole.device)
    codes, numbers = ((whole[known].flatten(1) == FULL) << unit).sum(1).unique(return_inverse=True)
    slots[known] = numbers.int() + 1
    full = ((codes[:, None] >> unit) & 1).bool().unflatten(1, (2, 2))
    return pack(full.repeat_interleave(UNIT, 1).repeat_interleave(UNIT, 2))


def by_tile(kinds: torch.Tensor) -> torch.Tensor:
    """A view (B, H, tiles down, tiles across, 2, 2) of (B, H, units down, units across)."""
    return kinds.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).transpose(3, 4)


def _elements(kinds: torch.Tensor, seen: Seen | None, place: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Bool (n, 128, 128) of the tiles at `place`, whose units are of these kinds (n, 2, 2)."""
    b, h, down, across = place
    along = torch.arange(TILE, device=grid.device)
    queries, keys = down[:, None] * TILE + along, across[:, None] * TILE + along
    inside = keys < grid.S_k
    if seen is not None:
        found = seen(b, h, queries.clamp(max=grid.S_q - 1), keys.clamp(max=grid.S_k - 1))
        if bool((kinds != PARTIAL).any()):
            kind = kinds.repeat_interleave(UNIT, 1).repeat_interleave(UNIT, 2)
            found = (kind == FULL) | (found & (kind == PARTIAL))
    else:
        found = (kinds == FULL).repeat_interleave(UNIT, 1).repeat_interleave(UNIT, 2)
    return found & inside[:, None, :] if grid.S_k % TILE else found


# ---------------------------------------------------------------- bits

_GATHER = 0x0102040810204080
"""Eight bytes of 0 or 1 times this have their bits in the highest byte, the first one lowest."""


def pack(seen: torch.Tensor) -> torch.Tensor:
    """Bool (n, 128, 128) -> words (n, 128, 4) int32."""
    pairs = seen.contiguous().view(torch.int16).unflatten(2, (16, 4))  # (n, 128, i, c), e in its two bytes
    bytes_of_bits = pairs.transpose(2, 3).contiguous().view(torch.int64)  # (n, 128, c, 4)
    packed = ((bytes_of_bits * _GATHER) >> 56) & 255
    return packed.to(torch.uint8).view(torch.int32).squeeze(-1)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Words (n, 128, 4) -> bool (n, 128, 128)."""
    bits = (words[..., None] >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
    return bits.bool().unflatten(3, (16, 2)).transpose(2, 3).flatten(2)


def transposed(words: torch.Tensor) -> torch.Tensor:
    """The words of the transposed tiles, made in pieces."""
    piece = _PIECE.get(words.device.type, _PIECE["cpu"])
    return torch.cat([pack(unpack(part).mT) for part in words.split(piece)])


def halves(words: torch.Tensor) -> torch.Tensor:
    """Words (n, 128, 4) -> those of each tile's left and right columns, (2 n, 128, 4) of 16 bits."""
    return torch.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], 1).flatten(0, 1)


def kinds_of(words: torch.Tensor) -> torch.Tensor:
    """The kinds of the units of tiles: words (n, 128, 4) -> int8 (n, 2, 2)."""
    rows = words.unflatten(1, (2, UNIT))  # (n, 2, 64, 4): half of a word is half of the columns
    halves = torch.stack([rows & 0xFFFF, (rows >> 16) & 0xFFFF], 2).flatten(3)  # (n, 2, 2, 256)
    return (halves != 0).any(-1).to(torch.int8) + (halves == 0xFFFF).all(-1).to(torch.int8)
