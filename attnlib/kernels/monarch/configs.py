"""Configurations of the Monarch kernels: frozen dataclasses, chosen by a pure function."""

from dataclasses import dataclass

from attnlib.kernels.common.tiles import tile_width

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


LARGEST = {
    (2, 64): MonarchConfig(Tile(64, 128, 4, 2), Tile(64, 128, 4, 2), Tile(256, 64, 8, 2)),
    (2, 128): MonarchConfig(Tile(64, 64, 8, 2), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2)),
    (2, 256): MonarchConfig(Tile(64, 32, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    (4, 64): MonarchConfig(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(64, 32, 8, 2)),
    (4, 128): MonarchConfig(Tile(16, 32, 8, 2), Tile(16, 32, 8, 2), Tile(16, 32, 8, 2)),
    (4, 256): MonarchConfig(Tile(16, 32, 8, 2), Tile(16, 32, 8, 2), Tile(16, 32, 8, 2)),
}
"""Bytes of an element, tile width -> the largest tiles. They compile for sm_90 without spills, except float32
in blocks of up to 16 tokens of 256 columns."""


def monarch_config(block: int, blocks: int, head_dim: int, itemsize: int) -> MonarchConfig:
    """For `blocks` blocks of `block` tokens each: the largest tiles, or what holds the scores if that is
    smaller."""
    width = tile_width(head_dim)
    largest = LARGEST[itemsize, width]
    return MonarchConfig(
        _clipped(largest.r_step, block, width, itemsize),
        _clipped(largest.l_step, blocks, width, itemsize),
        _clipped(largest.center_step, blocks, width, itemsize),
    )


def _clipped(tile: Tile, size: int, width: int, itemsize: int) -> Tile:
    """Of a matrix of `size` rows and columns. Four warps where its rows of `width` columns fit into their
    registers."""
    whole = max(SMALLEST, 1 << (size - 1).bit_length())
    rows, columns = min(tile.rows, whole), min(tile.columns, whole)
    few = itemsize == 2 and rows * width <= 4096
    return Tile(rows, columns, 4 if few else tile.num_warps, tile.num_stages)
