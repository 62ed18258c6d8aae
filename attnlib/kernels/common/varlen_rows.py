"""Where varlen sequences have their rows in memory that is padded to whole tiles: LSE and delta of the
backward pass, and the sums of dQ."""

import triton
import triton.language as tl

WIDTH = tl.constexpr(128)  # sequences that one step of a search looks at


@triton.jit
def sequence(cu, i_b):
    """(end, length) of a varlen sequence."""
    end = tl.load(cu + i_b + 1)
    return end, end - tl.load(cu + i_b)


@triton.jit
def padded_start(start, i_b, PADDING: tl.constexpr):
    """The first row in desc_rows of the varlen sequence that starts at `start`: a multiple of PADDING, and
    far enough from that of the one before it whatever the lengths are."""
    return (start // PADDING + i_b) * PADDING


@triton.jit
def sequence_of(row, cu, B, PADDING: tl.constexpr):
    """The number of the varlen sequence that row `row` of all padded ones belongs to; it may be past its end.

    `hopper.backward_tiles.owner` has the same search in Gluon: neither language can call the other's
    functions.
    """
    # A search with WIDTH branches: among that many sequences it waits for one load, where a bisection waits
    # for many, one after the other.
    stride = 1
    while stride * WIDTH < B:
        stride *= WIDTH
    i_b = 0
    while stride > 0:
        o_b = i_b + stride * tl.arange(0, WIDTH)  # [WIDTH]
        start = padded_start(tl.load(cu + tl.minimum(o_b, B)), o_b, PADDING)  # [WIDTH], from B on past all
        i_b = tl.max(tl.where(start <= row, o_b, 0), 0)
        stride //= WIDTH
    return i_b


@triton.jit
def row_of(row, cu, B, PADDING: tl.constexpr):
    """Row `row` of all that lie in desc_rows: (its place in its sequence, the end of that, its length)."""
    i_b = sequence_of(row, cu, B, PADDING)
    end, S_q = sequence(cu, i_b)
    return row - padded_start(end - S_q, i_b, PADDING), end, S_q


@triton.jit
def first_sums(row, start, S_q, head, H, PADDING: tl.constexpr):
    """Where the sums of dQ of row `row` of a varlen sequence are, as the number of a row: those of its heads
    follow each other, padded to whole tiles. `start` is its first row in desc_rows."""
    return start.to(tl.int64) * H + head.to(tl.int64) * (tl.cdiv(S_q, PADDING) * PADDING) + row
