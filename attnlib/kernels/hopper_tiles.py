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
def sequence(i_b, work, plan: gl.constexpr):
    """The sequence of a batch, or the packed one of this number."""
    if plan.packed:
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
def divide(n, d):
    """(n // d, n % d), neither of them negative: a division without a sign is shorter."""
    quotient = (n.to(gl.uint32) // d.to(gl.uint32)).to(gl.int32)
    return quotient, n - quotient * d


@gluon.jit
def by_sections(number, blocks, HEADS, SECTION):
    """(block, head) of a number: section of heads by section, so that what they share stays in L2, and within
    one the first block of each, then the second."""
    section, rest = divide(number, blocks * SECTION)
    heads = gl.minimum(SECTION, HEADS - section * SECTION)
    block, head = divide(rest, heads)
    return block, section * SECTION + head


@gluon.jit
def _place(number, num_m, HEADS, SECTION):
    """(row block, head) of what is drawn: the last, longest rows first."""
    block, head = by_sections(number, num_m, HEADS, SECTION)
    return num_m - 1 - block, head


@gluon.jit
def owner(block, cu, B, BLOCK: gl.constexpr):
    """The packed sequence that a block is of. The blocks of all are counted through: the first one of
    sequence b is cu[b] // BLOCK + b, far enough from that of b - 1 whatever the lengths are."""
    i_b = 0
    n = B
    while n > 1:  # bisection, in as many steps wherever it leads
        half = n // 2
        reached = gl.load(cu + i_b + half) // BLOCK + i_b + half <= block
        i_b += gl.where(reached, half, 0)
        n -= half
    return i_b


@gluon.jit
def draws(work, plan: gl.constexpr):
    """How often all programs draw; of packed sequences once for each of their row blocks, see `owner`."""
    if plan.packed:
        return (work.T_q // plan.block_m + work.HEADS // work.H) * work.H
    else:
        return work.tiles


@gluon.jit
def tile_of(number, work, plan: gl.constexpr):
    """The tile of a draw: `work.tiles` or more where none is left, less than 0 where it has no rows."""
    if plan.packed:
        end = draws(work, plan)
        blocks, _ = divide(end, work.H)
        block, i_h = _place(gl.minimum(number, end - 1), blocks, work.H, work.SECTION)
        i_b = owner(block, work.cu_q, work.HEADS // work.H, plan.block_m)
        start = gl.load(work.cu_q + i_b)
        rows = gl.load(work.cu_q + i_b + 1) - start
        i_m = block - start // plan.block_m - i_b
        tile = gl.where(i_m * plan.block_m < rows, (i_b * work.H + i_h) * work.num_m + i_m, -1)
        return gl.where(number < end, tile, work.tiles)
    else:
        return number


@gluon.jit
def locate(tile, work, plan: gl.constexpr):
    """(first row, batch or packed sequence, query head, blocks up to the last one in sight) of a tile."""
    tile = gl.minimum(tile, work.tiles - 1)  # a program without a tile reads no memory that is not there
    if plan.packed:
        i_bh, i_m = divide(tile, work.num_m)
    else:
        i_m, i_bh = _place(tile, work.num_m, work.HEADS, work.SECTION)
    i_b, i_h = divide(i_bh, work.H)
    row = i_m * plan.block_m
    return row, i_b, i_h, top(row + plan.block_m, sequence(i_b, work, plan), work, plan)


@gluon.jit
def first_block(row, seq, work, plan: gl.constexpr):
    """The first block that a row of the tile from `row` on sees."""
    if plan.left:
        return gl.maximum(row + seq.S_k - seq.S_q - work.left, 0) // plan.block_n
    else:
        return 0


@gluon.jit
def of_keys(i_b, i_h, work, plan: gl.constexpr):
    """Where a descriptor finds the keys of a query head; see `coordinates`."""
    i_kv, _ = divide(i_h, work.GROUP)
    if plan.packed:
        seq = sequence(i_b, work, plan)
        return seq.end_k, i_kv, RAGGED - seq.S_k
    else:
        return i_b, i_kv


@gluon.jit
def of_queries(i_b, i_h, seq, plan: gl.constexpr):
    """Where a descriptor finds the rows of a head, or its output."""
    if plan.packed:
        return seq.end_q, i_h, RAGGED - seq.S_q
    else:
        return i_b, i_h


@gluon.jit
def coordinates(at, row, column):
    """Of a row, which is counted from the beginning of its sequence."""
    if len(at) == 2:
        return at[0], at[1], row, column
    else:
        return RAGGED, at[0], at[1], at[2] + row, column
