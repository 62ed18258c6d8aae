"""Configurations of the Monarch kernels: frozen dataclasses, chosen by a pure function."""

import math
from dataclasses import dataclass

from attnlib.kernels.common.tiles import block_d

SMALLEST = 16
"""Rows and columns of the smallest product on tensor cores."""


@dataclass(frozen=True)
class Tile:
    """How one kernel is compiled: scores of one tile, warps of a program, tiles in flight and in use."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class MonarchConfig:
    """How the kernels of `monarch_kernels` are compiled: a tile for each."""

    r_step: Tile
    l_step: Tile
    center_step: Tile


def default_block(tokens: int) -> int:
    """Keys of a block where the caller names none: the largest power of two up to sqrt(tokens). Blocks and
    columns then have about as many tokens, and tiles are full."""
    return 1 << (max(1, math.isqrt(tokens)).bit_length() - 1)


def monarch_config(block: int, blocks: int, head_dim: int, itemsize: int) -> MonarchConfig:
    """For `blocks` blocks of `block` tokens each."""
    width, full = block_d(head_dim), itemsize == 4
    most = 32 if full else 64 if width > 64 else 128
    r_step = _tile(min(_tile_of(block), 32 if full else 64), min(_tile_of(block), most), full)
    l_step = _tile(min(_tile_of(blocks), 32 if full else 64), min(_tile_of(blocks), most), full)
    whole = min(_tile_of(blocks), 64 if full or width > 128 else 128 if width > 64 else 256)
    center_step = _tile(whole, min(_tile_of(blocks), 32 if full else 64), full)
    return MonarchConfig(r_step, l_step, center_step)


def _tile_of(size: int) -> int:
    return max(SMALLEST, 1 << (size - 1).bit_length())


def _tile(rows: int, columns: int, full: bool) -> Tile:
    num_warps = 8 if rows > 128 or (full and rows * columns > 1024) else 4
    return Tile(rows, columns, num_warps, 2)
