"""What becomes of a tile's scores before the softmax (`attnlib.Score`, chapter 30), in the registers of a
warpgroup.

Scores stay in units of which qk_scale makes the exponents of the softmax: with a soft cap
s = tanh(inner * s), and qk_scale is the cap times log2(e). A function of the caller's own gets inner * s, and
what it gives is multiplied with `after` for the cap. `plan` is a `plan.SparsePlan`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common import softmax
from attnlib.kernels.common.logarithms import LOG2_E


class Score(NamedTuple):
    """What a score has for all tiles; see the kernel's arguments."""

    inner: gl.tensor
    after: gl.tensor
    place: gl.tensor
    alibi: gl.tensor
    sinks: gl.tensor
    bias: gl.tensor
    bias_b: gl.tensor
    bias_h: gl.tensor
    bias_m: gl.tensor
    S_k: gl.tensor


class OfTile(NamedTuple):
    """What a score has for the 64 rows of a tile that a consumer has; 0 for what it does not have."""

    place: gl.tensor  # of the first among the keys
    slope: gl.tensor
    bias: gl.tensor  # of the head
    rows: gl.tensor  # [64], from there
    unit: gl.tensor  # what a bias is multiplied with
    query: gl.tensor  # the first row's number, the head's and the batch element's, for a function
    head: gl.tensor
    batch: gl.tensor


@gluon.jit
def of_tile(head, batch, row, score, qk_scale, S_q, plan: gl.constexpr):
    """The `OfTile` of rows from `row` on."""
    place, slope, bias, rows, unit = 0, 0.0, 0, 0, 0.0
    if plan.alibi:
        place = row + score.place
        slope = gl.load(score.alibi + head) * (LOG2_E / qk_scale)
        if plan.flip:
            slope = -slope
    if plan.bias:
        unit = LOG2_E / qk_scale
        if plan.flip:
            unit = -unit
    if plan.loads_bias:
        bias = score.bias + (batch.to(gl.int64) * score.bias_b + head.to(gl.int64) * score.bias_h)
        # Rows behind the last one have its bias.
        o_m = gl.minimum(row + gl.arange(0, 64, layout=plan.row_layout), S_q - 1)
        rows = o_m.to(gl.int64) * score.bias_m
    query, i_h, i_b = 0, 0, 0
    if plan.function:
        query, i_h, i_b = row, head, batch
    return OfTile(place, slope, bias, rows, unit, query, i_h, i_b)


@gluon.jit
def scored(s, first, copied, score, own, FUNCTION: gl.constexpr, plan: gl.constexpr):
    """(scores of keys from `first` on as a score makes them, not yet flipped, and what else is to be added to
    those that are, see `alibi`). copied: their bias, where the kernel copies one; own: an `OfTile`."""
    rest = 0.0
    if plan.function:
        o_m = own.query + gl.arange(0, 64, layout=gl.SliceLayout(1, s.type.layout))[:, None]  # [64, 1]
        o_n = first + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]  # [1, N]
        # A function of places alone gives fewer numbers than there are scores.
        s, _ = gl.broadcast(FUNCTION(s * score.inner, o_m, o_n, own.head, own.batch), s)
    if plan.soft_cap:
        if plan.function:
            s = tanh(s * score.after)
        else:
            s = tanh(s * score.inner)
    if plan.alibi:
        s, rest = alibi(s, own.slope, own.place - first)
        if plan.flip:
            rest = -rest
    if plan.copies_bias:
        s = s + copied.to(gl.float32) * own.unit
    elif plan.bias:
        s = biased(s, own.bias, own.rows, first, score.S_k - first, own.unit, plan)
    return s, rest


@gluon.jit
def top_of_rows(s, rest, plan: gl.constexpr):
    """The largest score of each row [64]."""
    if plan.alibi:
        return tops(s, rest, plan.row_layout)
    else:
        return softmax.row_max(s)


@gluon.jit
def weights_of(s, rest, shift, qk_scale, plan: gl.constexpr):
    """P of all N columns or a part of them."""
    if plan.alibi:
        return exponentials(s, rest, shift, qk_scale, plan.hides)
    else:
        return softmax.weights(s, shift, qk_scale, plan.hides)


@gluon.jit
def tanh(x):
    """By the hardware: a relative error of at most 2**-11, that of a float16, which is what PyTorch's own
    soft cap rounds to in half precision several times."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def biased(s, bias_ptr, rows, first_key, keys, unit, plan: gl.constexpr):
    """s [64, N] and a bias, times unit. bias_ptr: of a head, for query 0 and key 0; rows: int64 [64], where
    the bias of each row is from there; keys: how many there are from first_key on."""
    layout: gl.constexpr = s.type.layout
    bias_ptr += first_key * plan.bias_n
    if plan.bias_n == 0:
        return s + (gl.load(bias_ptr + rows).to(gl.float32) * unit)[:, None]
    else:
        o_n = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))[None, :]  # [1, N]
        # A thread's part of its columns goes to its rows; what is left the compiler knows.
        places = bias_ptr + (rows[:, None] + (o_n & 6)) + (o_n & -7)  # [64, N]
        if plan.bias_edge:
            values = gl.load(places, mask=o_n < keys, other=0.0)
        else:
            values = gl.load(places)
        return s + values.to(gl.float32) * unit


@gluon.jit
def bias_of_keys(bias_ptr, first_key, queries, keys, bias_m, plan: gl.constexpr):
    """A bias for keys and queries [64, BLOCK_M], in float32. bias_ptr: for the first query and key 0;
    queries: how many there are from the first one on; keys: how many there are in all. What is behind the
    last ones has the last one's bias, or 0. The strides of a bias of diagonals are -1 and 1."""
    o_n = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, plan.s_layout))  # [64]
    o_m = gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, plan.s_layout))[None, :]  # [1, BLOCK_M]
    rows = (gl.minimum(o_n, keys - 1).to(gl.int64) * plan.bias_n)[:, None]  # [64, 1]
    if plan.diagonal:
        # A thread's part of its columns goes to its rows; what is left the compiler knows.
        values = gl.load(bias_ptr + (rows - (o_m & 6)) + -(o_m & -7), mask=o_m < queries, other=0.0)
    else:
        values = gl.load(bias_ptr + rows + gl.minimum(o_m, queries - 1).to(gl.int64) * bias_m)
    return values.to(gl.float32)


@gluon.jit
def alibi(s, slope, place):
    """(s', rest), of which s' + rest are the scores s [64, N] less slope times the distance of query and key.
    place: that of the first row, counted from the first column; rest: [64, 4], a number for each row and each
    of the threads that share it.

    Where all keys of the block are on one side of all rows, the distance is a difference of places, and its
    part that belongs to the row and the thread is left to the maximum and the exponent. Then a score costs
    one multiplication and addition with a number that the compiler knows. Only where rows and keys meet,
    keys behind their query have gone the wrong way, and are taken back by twice their distance.
    """
    layout: gl.constexpr = s.type.layout
    N: gl.constexpr = s.shape[1]
    by_thread: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, s.reshape([64, N // 8, 4, 2]).type.layout))
    o_n = (gl.arange(0, N, layout=gl.SliceLayout(0, layout))[None, :] & -7).to(gl.float32)  # [1, N]
    if (place > -63) & (place < N - 1):
        o_m = place + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]  # [64, 1]
        of_thread = gl.arange(0, N, layout=gl.SliceLayout(0, layout))[None, :] & 6
        distance = (o_m - of_thread).to(gl.float32) - o_n  # [64, N]
        s = s + 2 * slope * gl.minimum(distance, 0.0)
    slope = gl.where(place > -63, slope, -slope)  # what a score grows by with each key
    o_m = place + gl.arange(0, 64, layout=gl.SliceLayout(1, by_thread))[:, None]  # [64, 1]
    pair = 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, by_thread))[None, :]  # [1, 4]
    return s + slope * o_n, slope * (pair - o_m).to(gl.float32)


@gluon.jit
def tops(s, rest, row_layout: gl.constexpr):
    """The largest scores of rows [64], of what `alibi` returns."""
    of_threads = gl.max(gl.max(s.reshape([64, s.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(gl.max(of_threads + rest, 1), row_layout)


@gluon.jit
def exponentials(s, rest, shift, qk_scale, MASKED: gl.constexpr):
    """`softmax.weights` of what `alibi` returns, all N columns or a part of them."""
    if MASKED:
        shift = gl.where(shift == float("-inf"), 0.0, shift)
    shift = gl.convert_layout(shift, gl.SliceLayout(1, rest.type.layout))  # [64]
    shift = shift[:, None] - rest * qk_scale  # [64, 4]
    parts = s.reshape([64, s.shape[1] // 8, 4, 2])
    shift = gl.convert_layout(shift, gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout)))
    weights = gl.exp2(parts * qk_scale - shift[:, None, :, None])
    return gl.convert_layout(weights.reshape([64, s.shape[1]]), s.type.layout)


@gluon.jit
def away(s, slope, place):
    """s [64, N], of queries and keys or of keys and queries, less slope times their distance. place: that of
    the first row, counted from the first column."""
    layout: gl.constexpr = s.type.layout
    o_n = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))[None, :]  # [1, N]
    o_m = place + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))  # [64]
    # As in `softmax.mask`: what of a column is the thread's goes to the other side of the difference.
    of_thread, o_n = o_n & 6, o_n & -7
    distance = (o_m[:, None] - of_thread).to(gl.float32) - o_n.to(gl.float32)  # [64, N]
    return s - slope * gl.maximum(distance, -distance)
