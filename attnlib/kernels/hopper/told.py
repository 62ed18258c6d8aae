"""What the producer of the forward kernel tells its consumers of a tile, word by word. Chapter 15 teaches it.

Each option that a consumer has to know a number of appends its words, so that a plain call has four. How a
word is told is in `common.words`; when its places are used again, in `forward_kernel`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common import tile_scheduler as tiling
from attnlib.kernels.common import words as common
from attnlib.kernels.hopper import coordinates

# Word 0 is the first row, -1 after the last tile.
BLOCKS = gl.constexpr(1)  # of keys, up to the last one in sight
OUTPUT = gl.constexpr(2)  # and the word after: two coordinates of the output of the tile before
LENGTH_Q = gl.constexpr(4)  # of a varlen sequence
LENGTH_K = gl.constexpr(5)
SCALES = gl.constexpr(-3)  # the last three: where those of Q, K and V begin, if these are e4m3
HEAD = gl.constexpr(-1)  # the last, of `PooledPlan`: batch and head as one number
MEAN = gl.constexpr(-4)  # if V is without its mean: whose mean the output of the tile before gets


@gluon.jit
def tell(mem, number, last, row, i_b, i_h, top, before, work, plan: gl.constexpr):
    """Consumers read which tile has this number, and where the output of the one before goes."""
    b = number & 1
    words = gl.where(last, -1, row), top, before[0], before[1]  # in the order of their names
    if plan.varlen:
        seq = tiling.sequence(i_b, work, plan)
        words = words + (seq.S_q, seq.S_k)
    if plan.fp8:
        if plan.centered:
            words = words + (before[2],)
        words = words + coordinates.of_scales(row, i_b, i_h, work, plan)
    if plan.pooled:
        words = words + (i_b * work.H + i_h,)
    common.tell(mem, b, words, plan.words)


@gluon.jit
def first_row(mem, number, plan: gl.constexpr):
    """Wait for the producer to tell of a tile: its first row, -1 after the last tile."""
    return common.await_tile(mem, number, plan.words)


@gluon.jit
def word(mem, number, w, plan: gl.constexpr):
    """Word w of what the producer told."""
    return common.told(mem, number, w, plan.words)


@gluon.jit
def sequence(mem, number, work, plan: gl.constexpr):
    """The lengths of a tile's sequence."""
    if plan.varlen:
        return tiling.Sequence(word(mem, number, LENGTH_Q, plan), word(mem, number, LENGTH_K, plan), 0, 0)
    else:
        return tiling.Sequence(work.S_q, work.S_k, 0, 0)


@gluon.jit
def output(mem, number, seq, plan: gl.constexpr):
    """Where the output of the tile before this number goes, which is of the sequence `seq`."""
    at = word(mem, number, OUTPUT, plan), word(mem, number, OUTPUT + 1, plan)
    if plan.varlen:
        at = at + (tiling.VARLEN_ROWS - seq.S_q,)
    return at
