"""The largest score of each row and 64 keys, kept by the forward Hopper kernel while it goes over them
(`PooledPlan`): all that a pooled map of the weights needs, as soon as the LSE of the rows is known (chapter
32).

A block of scores lies in registers, and the softmax needs its largest one in each row anyway. Of 128 keys the
kernel takes that of the left half and that of the right half; the larger one goes on to the softmax, so that
the output has the bits that it has without. Both go to memory in float32, times `qk_scale`: 64 rows of a
warpgroup side by side, 4 bytes for each 64 scores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common import softmax
from attnlib.kernels.hopper.told import HEAD, word

POOL = gl.constexpr(64)  # keys


@gluon.jit
def place_of_maxima(mem, number, row, work, plan: gl.constexpr):
    """Where the maxima of a warpgroup's rows begin, those from `row` on of the tile with this number: (heads,
    blocks of keys, rows), rows padded to whole tiles and blocks of keys to an even number. Within a head
    there are fewer than 2^31."""
    if plan.pooled:
        head = word(mem, number, plan.words + HEAD, plan)
        blocks = 2 * ((work.S_k + 2 * POOL - 1) // (2 * POOL))
        return work.maxima + head.to(gl.int64) * blocks * (work.num_m * plan.block_m) + row
    else:
        return 0


@gluon.jit
def top_of_rows(s, first, qk_scale, tile, plan: gl.constexpr):
    """The largest score of each row [64] of a block s [64, BLOCK_N], whose first key is `first`."""
    if plan.pooled:
        rows = tile.work.num_m * plan.block_m
        at = tile.maxima + first // POOL * rows + gl.arange(0, 64, layout=plan.row_layout)  # [64]
        if plan.block_n == 2 * POOL:
            left, right = softmax.halves(s)  # [64, 64] twice
            left = gl.convert_layout(softmax.row_max(left), plan.row_layout)
            right = gl.convert_layout(softmax.row_max(right), plan.row_layout)
            gl.store(at, left * qk_scale)
            gl.store(at + rows, right * qk_scale)
            return gl.maximum(left, right)
        else:
            top = softmax.row_max(s)
            gl.store(at, top * qk_scale)
            return top
    else:
        return softmax.row_max(s)
