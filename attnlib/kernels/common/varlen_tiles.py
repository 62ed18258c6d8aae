"""Where tiles of varlen sequences lie: a Hopper kernel's producer counts their blocks of rows, or of keys in
the backward pass, once, and finds the tile of a drawn number by counting on from the one before, 32 sequences
at a time. `tile_scheduler` and `hopper.backward_tiles` call it where `plan.varlen`. Chapter 13 has the order
of tiles, without varlen sequences.

Sequences lie one after the other in tensors (T, H, D), whose descriptors check bounds at the end of any
sequence (`descriptors.varlen_window`).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common.tile_order import by_sections, lanes


class Sequence(NamedTuple):
    """What a tile belongs to: its lengths, and where its rows and keys end if it is varlen."""

    S_q: gl.tensor
    S_k: gl.tensor
    end_q: gl.tensor
    end_k: gl.tensor


@gluon.jit
def sequence(i_b, work):
    """The sequence of this number."""
    end_q = gl.load(work.cu_q + i_b + 1)
    end_k = gl.load(work.cu_k + i_b + 1)
    S_q = end_q - gl.load(work.cu_q + i_b)
    S_k = end_k - gl.load(work.cu_k + i_b)
    return Sequence(S_q, S_k, end_q, end_k)


@gluon.jit
def _blocks_of(group, cu, B, BLOCK: gl.constexpr):
    """How many blocks 32 sequences have [32]: groups and lanes count from the last sequence on."""
    i_b = B - 1 - 32 * group - lanes()
    at = cu + gl.maximum(i_b, 0)
    rows = gl.load(at + 1) - gl.load(at)
    return gl.where(i_b >= 0, (rows + (BLOCK - 1)) // BLOCK, 0)


@gluon.jit
def count_blocks(cu, B, BLOCK: gl.constexpr):
    """Blocks of a head, in all sequences together: of rows or of keys, as `cu` has where they begin."""
    blocks = 0
    for group in range(gl.cdiv(B, 32)):
        blocks += gl.sum(_blocks_of(group, cu, B, BLOCK), 0)
    return blocks


@gluon.jit
def find(place, cursor, cu, B, BLOCK: gl.constexpr):
    """(sequence, blocks behind this one in its sequence, blocks before it, cursor) of block number `place` of
    a head. The cursor is where the next one is looked for: a group of sequences, and how many blocks there
    are before it; (0, 0) at first. The numbers that a program draws grow, so it goes on from where it was,
    but for a new section of heads."""
    group, before = cursor
    group, before = gl.where(place < before, 0, group), gl.where(place < before, 0, before)
    own = _blocks_of(group, cu, B, BLOCK)
    inside = gl.sum(own, 0)
    while (before + inside <= place) & (32 * group + 32 < B):
        before += inside
        group += 1
        own = _blocks_of(group, cu, B, BLOCK)
        inside = gl.sum(own, 0)
    lane = 0  # by bisection: the last one before which there are no more than `place` blocks
    for i in gl.static_range(5):
        half = lane + (16 >> i)
        lane = gl.where(before + gl.sum(gl.where(lanes() < half, own, 0), 0) <= place, half, lane)
    last = before + gl.sum(gl.where(lanes() <= lane, own, 0), 0) - 1
    first = before + gl.sum(gl.where(lanes() < lane, own, 0), 0)
    return B - 1 - 32 * group - lane, last - place, place - first, (group, before)


@gluon.jit
def locate(number, blocks, cursor, work, plan: gl.constexpr):
    """(first row, sequence, query head, cursor) of a tile; `blocks` are all row blocks of a head. The cursor
    is that of `find`."""
    place, i_h = by_sections(number, gl.maximum(blocks, 1), work.H, work.SECTION)
    # The last rows first, as of other tiles.
    i_b, behind, _, cursor = find(place, cursor, work.cu_q, work.B, plan.block_m)
    return behind * plan.block_m, i_b, i_h, cursor
