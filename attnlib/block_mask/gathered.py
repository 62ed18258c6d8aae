"""A mask whose tiles take their keys from two places.

The Hopper backward kernel computes scores of 128 keys at a time, and of a pattern that keeps one block of 64
in so many, half of such a tile is seen by nobody. So the keys of a head get another order, in which units of
64 that the same queries see are neighbors; the kernel copies the two units of a tile from where they are.
Attention does not depend on the order of keys, so nothing else changes. Chapter 33 has what it brings.
"""

from __future__ import annotations

import torch

from attnlib.block_mask.tiles import ABSENT, FULL, UNIT, Tiles

MOST_KEYS = UNIT << 16
"""The numbers of two units are one of 32 bits."""


def gathered_tiles(tiles: Tiles, order: torch.Tensor) -> Tiles:
    """The tiles with their columns in another order. order: int64 (H, units across), of each place the unit
    that comes there."""
    kinds, slots, words = tiles
    B, H, down, across = kinds.shape
    kinds = kinds.gather(3, order[None, :, None].expand(B, H, down, across))
    # Of a unit of keys, for the 128 queries of a tile: the half of the words that are its bits. Where all is
    # seen, or nothing, that half is not looked at, so that equal tiles share their words.
    source = (order // 2)[None, :, None].expand(B, H, down // 2, across)
    half = slots.gather(3, source) * 2 + (order % 2).int()[:, None]
    both = kinds.unflatten(2, (-1, 2))
    half[(both == FULL).all(3)] = -1
    half[(both == ABSENT).all(3)] = -2
    pairs = half.unflatten(3, (-1, 2))  # (B, H, tiles down, tiles across, 2)
    mixed = (pairs >= 0).any(4) | (pairs[..., 0] != pairs[..., 1])
    found, numbers = pairs[mixed].unique(dim=0, return_inverse=True)
    slots = torch.full(pairs.shape[:4], -1, dtype=torch.int32, device=kinds.device)
    slots[mixed] = numbers.int() + 1
    left, right = _half_words(words, found[:, 0]), _half_words(words, found[:, 1])
    return Tiles(kinds, slots, torch.cat([torch.zeros_like(words[:1]), left | (right << 16)]))


def _half_words(words: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """int32 (n, 128, 4), the 16 bits of a unit of keys in each, from its number as above."""
    taken = words[half.clamp(min=0) // 2]
    taken = torch.where((half % 2 == 1)[:, None, None], taken >> 16, taken) & 0xFFFF
    seen = torch.where(half == -1, 0xFFFF, 0).int()[:, None, None]
    return torch.where((half < 0)[:, None, None], seen, taken)


def units_of_tiles(order: torch.Tensor) -> torch.Tensor:
    """int32 (H, tiles across): the numbers of the two units of a tile, the second 16 bits further up."""
    left, right = order.int().unflatten(1, (-1, 2)).unbind(2)
    return left | (right << 16)
