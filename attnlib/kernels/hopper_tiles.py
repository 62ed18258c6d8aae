"""What a tile of the Hopper kernel is: its rows and head, the sequence that these belong to, the blocks of
keys that they see, and where descriptors find them. `plan` is `hopper.Plan`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

RAGGED = gl.constexpr(1 << 30)  # as in `launch`


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


class Sequence(NamedTuple):
    """What a tile belongs to: its lengths, and where its rows and keys end if it is packed."""

    S_q: gl.tensor
    S_k: gl.tensor
    end_q: gl.tensor
    end_k: gl.tensor


@gluon.jit
def on_diagonal(i, seq, work, plan: gl.constexpr):
    """The key at which the diagonal ends the keys of query i."""
    place = i + seq.S_k - seq.S_q
    if plan.shifted:
        place += work.right
    return place


@gluon.jit
def sequence(i_bh, work, plan: gl.constexpr):
    """The sequence of a batch * H + head."""
    if plan.packed:
        i_b = i_bh // work.H
        end_q = gl.load(work.cu_q + i_b + 1)
        end_k = gl.load(work.cu_k + i_b + 1)
        S_q = end_q - gl.load(work.cu_q + i_b)
        S_k = end_k - gl.load(work.cu_k + i_b)
        return Sequence(S_q, S_k, end_q, end_k)
    else:
        return Sequence(work.S_q, work.S_k, 0, 0)


@gluon.jit
def top(end, seq, work, plan: gl.constexpr):
    """Blocks up to the last one that the rows before `end` see; one, all masked, where they see none."""
    visible = seq.S_k
    if plan.causal:
        visible = gl.minimum(gl.maximum(on_diagonal(end, seq, work, plan), 0), seq.S_k)
    return gl.maximum(gl.cdiv(visible, plan.block_n), 1)


@gluon.jit
def place(tile, work):
    """(row block, batch * H + head) of a tile: section of heads by section, so that their keys and values
    stay in L2, and within one the last, longest rows first."""
    section = tile // (work.num_m * work.SECTION)
    rest = tile % (work.num_m * work.SECTION)
    heads = gl.minimum(work.SECTION, work.HEADS - section * work.SECTION)
    return work.num_m - 1 - rest // heads, section * work.SECTION + rest % heads


@gluon.jit
def locate(tile, work, plan: gl.constexpr):
    """(row block, batch * H + head, blocks up to the last one in sight) of a tile."""
    if plan.packed:
        tile = gl.minimum(tile, work.tiles - 1)  # read no memory for a program without a tile
    i_m, i_bh = place(tile, work)
    return i_m, i_bh, top((i_m + 1) * plan.block_m, sequence(i_bh, work, plan), work, plan)


@gluon.jit
def without_rows(tile, work, plan: gl.constexpr):
    """Whether a tile of packed sequences lies beyond the end of its own."""
    i_m, i_bh = place(gl.minimum(tile, work.tiles - 1), work)
    i_b = i_bh // work.H
    rows = gl.load(work.cu_q + i_b + 1) - gl.load(work.cu_q + i_b)
    return (tile < work.tiles) & (i_m * plan.block_m >= rows)


@gluon.jit
def first_block(i_m, seq, work, plan: gl.constexpr):
    """The first block that a row of a tile sees."""
    if plan.left:
        return gl.maximum(i_m * plan.block_m + seq.S_k - seq.S_q - work.left, 0) // plan.block_n
    else:
        return 0


@gluon.jit
def of_keys(i_bh, work, plan: gl.constexpr):
    """Where a descriptor finds the keys of a head; see `coordinates`."""
    if plan.packed:
        seq = sequence(i_bh, work, plan)
        return seq.end_k, i_bh % work.H // work.GROUP, RAGGED - seq.S_k
    else:
        return i_bh // work.H, i_bh % work.H // work.GROUP


@gluon.jit
def of_queries(i_b, i_bh, seq, work, plan: gl.constexpr):
    """Where a descriptor finds the rows of a head, or its output."""
    if plan.packed:
        return seq.end_q, i_bh % work.H, RAGGED - seq.S_q
    else:
        return i_b, i_bh % work.H


@gluon.jit
def coordinates(at, row, column):
    """Of a row, which is counted from the beginning of its sequence."""
    if len(at) == 2:
        return at[0], at[1], row, column
    else:
        return RAGGED, at[0], at[1], at[2] + row, column
