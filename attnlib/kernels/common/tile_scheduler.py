"""What a tile of the forward Hopper kernel is: its rows and head, and the blocks of keys that they see, up to
the diagonal. Chapter 13 teaches it. `plan` is a `plan.ForwardPlan`; what is different for varlen sequences is
in `varlen_tiles`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common import signature, varlen_tiles
from attnlib.kernels.common.tile_order import by_sections, divide, lanes
from attnlib.kernels.common.varlen_tiles import Sequence

VARLEN_ROWS = gl.constexpr(signature.VARLEN_ROWS)


class Work(NamedTuple):
    """The problem and its division into tiles; see the kernel's arguments."""

    S_q: gl.tensor
    S_k: gl.tensor
    H: gl.tensor
    GROUP: gl.tensor
    HEADS: gl.tensor
    SECTION: gl.tensor
    num_m: gl.tensor
    tiles: gl.tensor
    right: gl.tensor
    left: gl.tensor
    cu_q: gl.tensor
    cu_k: gl.tensor
    T_q: gl.tensor
    B: gl.tensor
    scales: tuple  # `hopper.e4m3.Scales`
    shared_rows: gl.tensor = None
    key_blocks: gl.tensor = None
    maxima: gl.tensor = None
    LAST: gl.tensor = None


@gluon.jit
def on_diagonal(i, seq, work, plan: gl.constexpr):
    """The key at which the diagonal ends the keys of query i."""
    place = i + seq.S_k - seq.S_q
    if plan.mask.shifted:
        place += work.right
    return place


@gluon.jit
def sequence(i_b, work, plan: gl.constexpr):
    """The sequence of a batch, or the varlen one of this number."""
    if plan.varlen:
        return varlen_tiles.sequence(i_b, work)
    else:
        return Sequence(work.S_q, work.S_k, 0, 0)


@gluon.jit
def top(end, seq, work, plan: gl.constexpr):
    """Blocks up to the last one that the rows before `end` see; one, all masked, where they see none."""
    visible = seq.S_k
    if plan.mask.causal:
        visible = gl.minimum(gl.maximum(on_diagonal(end, seq, work, plan), 0), seq.S_k)
    return gl.maximum(gl.cdiv(visible, plan.block_n), 1)


@gluon.jit
def _place(number, num_m, HEADS, SECTION, LAST):
    """(row block, head) of what is drawn: the last, longest rows first."""
    block, head = by_sections(number, num_m, HEADS, SECTION, LAST)
    return num_m - 1 - block, head


@gluon.jit
def draw(counter_ptr):
    """Start to draw a number from the counter; `drawn` waits for it."""
    lane = lanes()
    return gl.atomic_add(counter_ptr + lane, 0 * lane + 1, mask=lane == 0, sem="relaxed")


@gluon.jit
def drawn(asked, counter_ptr, end, producers: gl.constexpr):
    """The number of the next tile; there are `end` tiles, and `producers` warps of each program draw. Each
    takes its own number as its first tile, without a draw, and its last draw finds no tile. So there are as
    many draws as tiles, and the last draw sets the counter back to 0."""
    number = gl.max(gl.where(lanes() == 0, asked, 0), 0)
    if number == end - 1:
        gl.store(counter_ptr, 0)
    return number + producers * gl.num_programs(0)


@gluon.jit
def row_blocks(work, plan: gl.constexpr):
    """Row blocks of a head, in all varlen sequences together."""
    if plan.varlen:
        return varlen_tiles.count_blocks(work.cu_q, work.B, plan.block_m)
    else:
        return work.num_m


@gluon.jit
def tiles(blocks, work, plan: gl.constexpr):
    """How many there are; `blocks` is what `row_blocks` found."""
    return blocks * work.H if plan.varlen else work.tiles


@gluon.jit
def locate(number, blocks, cursor, work, plan: gl.constexpr):
    """(first row, batch or varlen sequence, query head, blocks of keys up to the last one in sight, cursor)
    of a tile. The cursor is where `varlen_tiles.locate` goes on, (0, 0) at first."""
    number = gl.maximum(gl.minimum(number, tiles(blocks, work, plan) - 1), 0)  # none left: any
    if plan.varlen:
        row, i_b, i_h, cursor = varlen_tiles.locate(number, blocks, cursor, work, plan)
    else:
        i_m, i_bh = _place(number, blocks, work.HEADS, work.SECTION, work.LAST)
        i_b, i_h = divide(i_bh, work.H)
        row = i_m * plan.block_m
    return row, i_b, i_h, top(row + plan.block_m, sequence(i_b, work, plan), work, plan), cursor


@gluon.jit
def coordinates(at, row, column):
    """Of a row, which is counted from the beginning of its sequence."""
    if len(at) == 2:
        return at[0], at[1], row, column
    else:
        return VARLEN_ROWS, at[0], at[1], at[2] + row, column
