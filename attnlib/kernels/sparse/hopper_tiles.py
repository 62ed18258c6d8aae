"""Which tile the producer of the Hopper forward kernel works on, and what its list has. Chapter 30 explains
the kernel."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.block_mask import lists
from attnlib.kernels.common import tile_scheduler as tiling

FIRST_ALONE, SECOND_ALONE = gl.constexpr(lists.FIRST_ALONE), gl.constexpr(lists.SECOND_ALONE)
ROWS = gl.constexpr(128)  # of a tile


class Work(NamedTuple):
    """The problem and its lists; see the kernel's arguments."""

    S_q: gl.tensor
    H: gl.tensor
    GROUP: gl.tensor
    HEADS: gl.tensor
    SECTION: gl.tensor
    num_m: gl.tensor
    tiles: gl.tensor
    mask_b: gl.tensor
    mask_h: gl.tensor
    starts: gl.tensor
    middles: gl.tensor
    steps: gl.tensor
    bits: gl.tensor
    order: gl.tensor


class Tile(NamedTuple):
    """What the producer works on: rows and head, and the entries of its list."""

    row: gl.tensor
    i_b: gl.tensor
    i_h: gl.tensor
    i_kv: gl.tensor
    first: gl.tensor
    middle: gl.tensor
    end: gl.tensor
    alone: gl.tensor  # 1 if the step at `middle` is copied first, plus 2 if the first consumer leaves out the
    # last one


@gluon.jit
def _alone(middle, end, work):
    """Which marks a list has, see `Tile`."""
    first, last = gl.load(work.bits + gl.minimum(middle, end - 1)), gl.load(work.bits + (end - 1))
    marks = gl.where(first & FIRST_ALONE != 0, 1, 0) + gl.where(last & SECOND_ALONE != 0, 2, 0)
    return gl.where(middle < end, marks, 0)  # what has no bits is -1


@gluon.jit
def entry_of(tile, i, plan: gl.constexpr):
    """The entry of the lists of a tile's step i."""
    return _moved(tile, tile.first + i, plan)


@gluon.jit
def entry_after(tile, i, plan: gl.constexpr):
    """That of step i + 1, of the last one where there is none."""
    return _moved(tile, gl.minimum(tile.first + i + 1, tile.end - 1), plan)


@gluon.jit
def _moved(tile, j, plan: gl.constexpr):
    """The j-th entry in the order in which a tile's steps are copied."""
    if plan.leaves_out:
        if (tile.alone & 1) == 1:
            j = gl.where(j == tile.first, tile.middle, gl.where(j <= tile.middle, j - 1, j))
    return j


@gluon.jit
def whole_until(tile, plan: gl.constexpr):
    """The entry from which on steps have bits."""
    if plan.leaves_out:
        return tile.middle + (tile.alone & 1)
    else:
        return tile.middle


@gluon.jit
def locate(number, work, plan: gl.constexpr):
    """The tile of a number, any where there are none left."""
    number = gl.minimum(number, work.tiles - 1)
    rank, head = tiling.by_sections(number, work.num_m, work.HEADS, work.SECTION)
    i_b, i_h = tiling.divide(head, work.H)
    i_kv, _ = tiling.divide(i_h, work.GROUP)
    mask = (i_b * work.mask_b + i_h * work.mask_h) * work.num_m
    i_m = gl.load(work.order + mask + rank)
    first, end = gl.load(work.starts + mask + i_m), gl.load(work.starts + mask + i_m + 1)
    middle, alone = gl.load(work.middles + mask + i_m), 0
    if plan.leaves_out:
        alone = _alone(middle, end, work)
    return Tile(i_m * ROWS, i_b, i_h, i_kv, first, middle, end, alone)
