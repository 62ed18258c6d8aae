"""A mask as tiles of 128 x 128 elements, made on the device of the mask in pieces of bounded memory.

A tile has four units of 64 x 64 elements, and each unit a kind: absent, partial or full. A tile whose units
are not all full and not all absent is mixed, and has words: for each row four words of 32 bits, in which
bit 2 i + e of word c is that of column 8 i + 2 c + e. So the columns of a word, two neighbors and then two at
every distance of 8, are those that one thread holds of a product of tensor cores on Hopper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from attnlib.kernels.common.device import capturing

TILE, UNIT = 128, 64
ABSENT, PARTIAL, FULL = 0, 1, 2

Seen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch [n], head [n], queries [n, 128], keys [n, 128]) -> bool [n, 128, 128]: who sees which key."""

_PIECE = {"cuda": 1 << 13, "cpu": 1 << 8}
"""Tiles whose elements are held at once: 128 MiB of bool on a GPU, and eight times that of a function's
integers."""


def under_capture(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded on the current stream."""
    return device.type == "cuda" and capturing(device.index)


def settled(device: torch.device) -> bool:
    """Whether what was just made may be kept, for every stream: waits until it is there. False under capture,
    where nothing may wait: it has no values before that graph runs, and is for it alone."""
    if under_capture(device):
        return False
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return True


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
    one. Elements are looked at twice: of all tiles for their kinds, and again of those that are mixed, for
    their words. Most masks have few of these, and only then is it known how many."""
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
    places = (~uniform & ~known).nonzero()
    asked = whole[tuple(places.T)]
    for here, elements in _pieces(places, asked, seen, grid):  # the host waits for none of them
        whole[tuple(here.T)] = kinds_of(elements)
    given = whole[tuple(places.T)]
    some = (given != given[:, :1, :1]).any(-1).any(-1) | (given[:, 0, 0] == PARTIAL)
    places, asked = places[some], asked[some]
    first = sum(map(len, words))
    slots[tuple(places.T)] = torch.arange(first, first + len(places), dtype=torch.int32, device=device)
    words += [pack(elements) for _, elements in _pieces(places, asked, seen, grid)]
    return Tiles(kinds, slots, torch.cat(words))


def _pieces(
    places: torch.Tensor, asked: torch.Tensor, seen: Seen | None, grid: Grid
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(places of tiles, their elements), a piece of those at `places`, of which these units are asked for,
    after the other."""
    if seen is not None and bool((asked == PARTIAL).all()):
        asked = None
    piece = _PIECE.get(grid.device.type, _PIECE["cpu"])
    for start in range(0, len(places), piece):
        here = places[start : start + piece]
        own = None if asked is None else asked[start : start + piece]
        yield here, _elements(own, seen, here.T, grid)


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


def _elements(
    kinds: torch.Tensor | None, seen: Seen | None, place: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """Bool (n, 128, 128) of the tiles at `place`, whose units are of these kinds (n, 2, 2), None where all
    are partial."""
    b, h, down, across = place
    along = torch.arange(TILE, device=grid.device)
    queries, keys = down[:, None] * TILE + along, across[:, None] * TILE + along
    inside = keys < grid.S_k
    if seen is not None:
        found = seen(b, h, queries.clamp(max=grid.S_q - 1), keys.clamp(max=grid.S_k - 1))
        if kinds is not None:
            kind = kinds.repeat_interleave(UNIT, 1).repeat_interleave(UNIT, 2)
            found = (kind == FULL) | (found & (kind == PARTIAL))
    else:
        found = (kinds == FULL).repeat_interleave(UNIT, 1).repeat_interleave(UNIT, 2)
    return found & inside[:, None, :] if grid.S_k % TILE else found


def kinds_of(elements: torch.Tensor) -> torch.Tensor:
    """The kinds of the units of tiles: bool (n, 128, 128) -> int8 (n, 2, 2)."""
    eights = elements.contiguous().view(torch.int64).unflatten(2, (2, 8)).unflatten(1, (2, UNIT))
    some, all_ = eights.amax((2, 4)) != 0, eights.amin((2, 4)) == _ONES
    return some.to(torch.int8) + all_.to(torch.int8)


_ONES = 0x0101010101010101
"""Eight elements that are seen."""


# ---------------------------------------------------------------- bits


def pack(seen: torch.Tensor) -> torch.Tensor:
    """Bool (n, 128, 128) -> words (n, 128, 4) int32.

    Eight columns are eight bytes of 0 or 1 here, one number of 64 bits. All adding is of whole numbers, so
    that little more than the elements themselves is read or written.
    """
    eights = seen.contiguous().view(torch.int64)  # (n, 128, 16): of eight i, bytes 2 c + e
    twos = torch.add(eights[..., 0::2], eights[..., 1::2], alpha=4)  # the second i at bit 2 of each byte
    fours = torch.add(twos[..., 0::2], twos[..., 1::2], alpha=16)  # (n, 128, 4): bits 2 i, of four i
    both = fours | (fours >> 7)  # byte 2 c: with those of e = 1 at bits 2 i + 1, byte `part` of word c
    bytes_of_words = both.view(torch.uint8)[..., 0::2].unflatten(2, (4, 4))  # (n, 128, part, c)
    return bytes_of_words.transpose(2, 3).contiguous().view(torch.int32).squeeze(-1)


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
