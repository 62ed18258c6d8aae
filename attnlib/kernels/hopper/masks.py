"""What is done to a block of scores before its softmax: the sign, and the mask where one is needed; which
blocks need one, and with which block a window begins. The mask itself is in `common.softmax`. Chapter 15 has
what is here for a diagonal.

Keys are visited from the last block in sight down. Under a diagonal the first block needs a mask, and where
the diagonal misses the corners of the blocks, 64 rows may cross it in two of them, and the second needs one
too. Without a diagonal the first block needs one where it has keys beyond the last. All others do without.
But with a left bound those blocks need one, too, that begin before the first key that the last of the rows
sees.

With a left bound a tile ends at the first block that one of its rows sees. All its warpgroups visit all
blocks down to that one, some of which may be hidden from all their rows, so that the protocol of
`forward_kernel` stays the same.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common import softmax
from attnlib.kernels.common import tile_scheduler as tiling


@gluon.jit
def first_block(row, seq, work, plan: gl.constexpr):
    """The first block that a row of the tile from `row` on sees, which the tile visits last."""
    if plan.mask.left:
        return gl.maximum(row + seq.S_k - seq.S_q - work.left, 0) // plan.block_n
    else:
        return 0


@gluon.jit
def first_scores(s, row, first, seq, work, plan: gl.constexpr):
    """The first block that 64 rows from `row` on visit, [64, BLOCK_N]; `first` is its first key."""
    if plan.flip:
        s = -s
    if plan.mask.causal or plan.mask.left:
        s = softmax.mask(s, row, first, seq, work, plan)
    elif plan.mask.blocks:
        if first + plan.block_n > seq.S_k:
            s = softmax.mask(s, row, first, seq, work, plan)
    return s


@gluon.jit
def later_scores(s, first, masked, tile, plan: gl.constexpr):
    """A block after it, `masked` or not."""
    if plan.flip:
        s = -s
    if plan.mask.blocks == 2 or plan.mask.left:
        if masked:
            s = softmax.mask(s, tile.row, first, tile.seq, tile.work, plan)
    return s


@gluon.jit
def second_is_cut(first, tile, plan: gl.constexpr):
    """Whether the diagonal crosses the block after the one whose first key is `first`."""
    return tiling.on_diagonal(tile.row, tile.seq, tile.work, plan) < first - 1


@gluon.jit
def later_block(i, start, end, first, cut, tile, plan: gl.constexpr):
    """(first key, whether a mask is needed) of a block after the first: that in slot i, of `start` to `end`.

    first: first key of the first block; cut: what `second_is_cut` found. Where no left bound, no scales and
    no maxima need the key, the one of the second block is returned for all: only that block may have a mask.
    """
    key = first - plan.block_n
    masked = (i == start) & cut
    if plan.mask.left or plan.fp8 or (plan.pooled and plan.units == 0):
        key = (tile.low + end - 1 - i) * plan.block_n
    if plan.mask.left:
        seq = tile.seq
        masked = key < tile.row + 63 + seq.S_k - seq.S_q - tile.work.left
        if plan.mask.blocks == 2:
            masked = masked | ((i == start) & cut)
    return key, masked
