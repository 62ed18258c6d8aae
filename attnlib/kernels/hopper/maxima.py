"""The largest score of each row and 64 keys, kept by the forward Hopper kernel while it goes over them
(`PooledPlan`): all that a pooled map of the weights needs, as soon as the LSE of the rows is known (chapter
32).

It goes to memory in float32, times `qk_scale`: 64 rows of a warpgroup side by side, 4 bytes for each 64
scores. There are two ways to it. In both the output has the bits that it has without.

Where a step takes the largest score of each row for its softmax, it takes that of the left 64 keys and that
of the right 64; the larger one goes on to the softmax (`top_of_rows`).

A step that keeps its shift has no such maximum (`kept_shift`), but all weights, 2**(score - shift). The
largest weight is that of the largest score, so the score is log2(weight) + shift. Weights are positive, and
positive floats are in the order of their bits: as integers, three of which the hardware compares in one
instruction. A step hands the largest weights of each thread on with the shift that they were made with. What
is left to do, exchanges between the four threads of a row, logarithm and store, the next step does while its
products run (`keep`). A weight of 0 makes -inf of a score that is more than 126 powers of two below another
of its row; in a map it is 0, too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common import softmax, tiles
from attnlib.kernels.hopper.told import HEAD, word

UNIT = gl.constexpr(tiles.UNIT)  # keys


@gluon.jit
def place_of_maxima(mem, number, row, work, plan: gl.constexpr):
    """Where the maxima of a warpgroup's rows begin, those from `row` on of the tile with this number: (heads,
    blocks of keys, rows), rows padded to whole tiles and blocks of keys to an even number. Within a head
    there are fewer than 2^31."""
    if plan.pooled:
        head = word(mem, number, plan.words + HEAD, plan)
        blocks = 2 * ((work.S_k + 2 * UNIT - 1) // (2 * UNIT))
        return work.maxima + head.to(gl.int64) * blocks * (work.num_m * plan.block_m) + row
    else:
        return 0


@gluon.jit
def top_of_rows(s, first, qk_scale, tile, plan: gl.constexpr):
    """The largest score of each row [64] of a block s [64, BLOCK_N], whose first key is `first`."""
    if plan.pooled and plan.units == 0:
        rows = tile.work.num_m * plan.block_m
        at = tile.maxima + first // UNIT * rows + gl.arange(0, 64, layout=plan.row_layout)  # [64]
        if plan.block_n == 2 * UNIT:
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


@gluon.jit
def _rows_of_threads(x):
    """[64, 4], a value for each row and each of its four threads -> those of the upper and of the lower row
    of each thread, [128] twice."""
    return gl.split(x.reshape([4, 2, 8, 4]).permute((0, 2, 3, 1)).reshape([128, 2]))


@gluon.jit
def _exchanged(x, LANES: gl.constexpr):
    """[128], from the thread whose number differs in these bits."""
    asm: gl.constexpr = f"shfl.sync.bfly.b32 $0, $1, {LANES}, 31, 0xffffffff;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _log2(x):
    """By the unit for exponentials, in one instruction; Triton's own is a polynomial of thirty."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _of_two(a, b, second, LANES: gl.constexpr):
    """The larger one of this thread and its partner: of b in a thread where `second`, of a in the other."""
    return gl.maximum(gl.where(second, b, a), _exchanged(gl.where(second, a, b), LANES))


@gluon.jit
def pending(tops, first, tile, plan: gl.constexpr):
    """What `keep` takes for a tile's first block, whose first key is `first`: where the scores go, of which
    each thread stores one [128], and the largest weights. () where no step hands any on."""
    if plan.units == 0:
        return ()
    else:
        upper, _ = _rows_of_threads(tops[0])
        thread = gl.arange(0, 128, layout=upper.type.layout)
        unit = first // UNIT
        if plan.units == 2:
            unit += thread // 2 % 2
        row = thread // 32 * 16 + thread % 32 // 4 + thread % 2 * 8
        at = tile.maxima + (unit * (tile.work.num_m * plan.block_m) + row)
        return (at,) + tops


@gluon.jit
def keep(pending, shift, tile, plan: gl.constexpr):
    """Store the largest scores of a block, from its largest weights and their shift [64, 4]; returns where
    those of the next one go. Of a row and 64 keys each of four threads has a part, and a thread has parts of
    two rows and one or two units. After two exchanges it has the whole of one of them."""
    if plan.units == 0:
        return ()
    else:
        upper, lower = _rows_of_threads(pending[1].to(gl.int32, bitcast=True))
        thread = gl.arange(0, 128, layout=upper.type.layout)
        odd, second = thread % 2 != 0, thread // 2 % 2 != 0
        top = _of_two(upper, lower, odd, 1)
        if plan.units == 2:
            upper, lower = _rows_of_threads(pending[2].to(gl.int32, bitcast=True))
            top = _of_two(top, _of_two(upper, lower, odd, 1), second, 2)
        else:
            top = gl.maximum(top, _exchanged(top, 2))
        upper, lower = _rows_of_threads(shift)
        score = _log2(top.to(gl.float32, bitcast=True)) + gl.where(odd, lower, upper)
        if plan.units == 2:
            gl.store(pending[0], score)
        else:
            gl.store(pending[0], score, mask=thread // 2 % 2 == 0)
        rows = tile.work.num_m * plan.block_m
        return (pending[0] + -plan.units * rows,)
