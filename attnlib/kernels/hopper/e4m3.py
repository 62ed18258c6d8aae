"""What the forward kernel does differently with operands in e4m3: P's range, P as an operand, scales, V's
mean. Chapter 22 builds it.

P is rounded to e4m3, whose largest number is 448 and whose smallest is 2**-9. Under a new shift a row's
largest weight is 2**OFFSET; the shift moves before a weight exceeds 2**ROOM. Sums are of weights before
they are rounded, so that the LSE is that of the scores. docs/lab/fp8.md has what other choices cost. With
`keep_shift` steps are those of `common.kept_shift`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from attnlib.kernels.common import fp8, kept_shift, signature, softmax
from attnlib.kernels.common.memory import matrix
from attnlib.kernels.common.softmax import rows_of_o, whole
from attnlib.kernels.hopper.column_parts import scaled
from attnlib.kernels.hopper.told import MEAN, SCALES, word

OFFSET = gl.constexpr(fp8.OFFSET)
ROOM = gl.constexpr(8.8)  # 448 = 2**8.807
SMALLEST_SCALE = gl.constexpr(signature.SMALLEST_SCALE)


class Scales(NamedTuple):
    """Of operands: pointers, and strides of a batch, a head, a block of rows or keys."""

    q: gl.tensor
    q_b: gl.tensor
    q_h: gl.tensor
    q_n: gl.tensor
    k: gl.tensor
    k_b: gl.tensor
    k_h: gl.tensor
    k_n: gl.tensor
    v: gl.tensor
    v_b: gl.tensor
    v_h: gl.tensor
    mean: gl.tensor  # of V
    mean_b: gl.tensor  # heads of a batch


@gluon.jit
def new_shift(top, shift, qk_scale, MASKED: gl.constexpr):
    """`softmax.new_shift` for the range of P in e4m3."""
    return softmax.new_shift(top, shift, qk_scale, MASKED, ROOM, OFFSET)


# ---------------------------------------------------------------- scales


@gluon.jit
def tile_scales(qk_scale, mem, number, first_row, row, seq, work, plan: gl.constexpr):
    """(what `block_scale` takes, V's scale) of the 64 rows from `row` on of the tile with this number."""
    if plan.fp8:
        of_q = word(mem, number, plan.words + SCALES, plan)
        of_k = word(mem, number, plan.words + SCALES + 1, plan)
        of_v = word(mem, number, plan.words + SCALES + 2, plan)
        before = gl.minimum(row, seq.S_q - 1) - first_row  # rows of the tile
        scales = work.scales
        of_queries = qk_scale  # where the kernel quantizes queries, `queries.quantized` finds their scale
        if not plan.quantizes:
            of_queries *= gl.load(scales.q + of_q + (before >> 6) * scales.q_n)
        return (of_queries, scales.k + of_k, scales.k_n), gl.load(scales.v + of_v)
    else:
        return qk_scale, 1.0


@gluon.jit
def block_scale(scale, first, plan: gl.constexpr):
    """What scores of the block that begins with key `first` are multiplied with before exp2. It has to be
    positive, as `signature.exp2_scale` is, and a product of scales may be too small for float32. What is
    added is lost in any other product, and takes no instruction of its own."""
    if plan.fp8:
        of_queries, of_keys, stride = scale
        return of_queries * gl.load(of_keys + (first >> 7) * stride) + SMALLEST_SCALE
    else:
        return scale


# ---------------------------------------------------------------- the output


@gluon.jit
def early_mean(mem, number, work, plan: gl.constexpr):
    """The mean of the values of the tile before this number, [D], where it is loaded beside the last
    product."""
    if plan.early_mean:
        return _mean(mem, number, work, plan)
    else:
        return 0


@gluon.jit
def _mean(mem, number, work, plan: gl.constexpr):
    """What was subtracted from the values of a head before they were quantized: [D], as columns of the
    output."""
    head = word(mem, number, plan.words + MEAN, plan)
    o_d = gl.arange(0, plan.d, layout=gl.SliceLayout(0, plan.o_layout))  # [D]
    return gl.load(work.scales.mean + head.to(gl.int64) * plan.d + o_d)


@gluon.jit
def output(acc, factor, v_scale, mean, row_sums, mem, number, work, plan: gl.constexpr):
    """The output of the tile before this number, from an accumulator and a factor for each row [64]."""
    factor *= v_scale
    o = scaled(acc, factor)  # [64, D]
    if plan.early_mean:
        o = (_with_mean(o[0], mean, row_sums),)
    if plan.late_mean:
        o = (_with_mean(o[0], _mean(mem, number, work, plan), row_sums),)
    return o


@gluon.jit
def _with_mean(o, mean, row_sums):
    """The output with the mean of the values, where a row has seen a key: its weights sum to 1."""
    empty = rows_of_o(row_sums, o) == 0.0  # [64, D]
    return o + gl.where(empty, 0.0, mean[None, :])


# ---------------------------------------------------------------- P


@gluon.jit
def _words(p):
    """[64, N] -> int32 [64, N / 4], four weights in e4m3 each, without moving anything between threads.

    In each 16 columns of an accumulator a thread has 2t, 2t + 1, 8 + 2t and 9 + 2t, as first operand of a
    product it gives four neighbors. They become neighbors here, and keys of V lie in the same order. Words
    and not bytes are what a loop hands on from step to step: bytes would be taken apart and put together.
    """
    dtype: gl.constexpr = gl.float8e4nv
    words = kept_shift.in_words(kept_shift.elements_of_words(p, dtype), dtype)  # [64, N / 16, 4]
    return words.reshape([64, p.shape[1] // 4])


@gluon.jit
def operand(left, right, plan: gl.constexpr):
    """P [64, N], in two halves or one, in words as a step hands them to the next one."""
    p = _words(left)
    if right is not None:
        p = whole(p, _words(right))
    return gl.convert_layout(p, plan.word_layout, assert_trivial=True)


@gluon.jit
def start_output(p, acc, mem, b, plan: gl.constexpr):
    """Start acc += P V, P in words, V^T in buffer b: [64, BLOCK_N] x [BLOCK_N, D]."""
    v = matrix(mem.v[0], b).permute((1, 0))
    return (warpgroup_mma(unpacked(p, plan.p_layout), v, acc[0], is_async=True),)


@gluon.jit
def unpacked(words, layout: gl.constexpr):
    """[64, N / 4] -> the same as first operand of a product [64, N], which has this layout; takes no
    instruction."""
    N: gl.constexpr = 4 * words.shape[1]
    a, b, c, d = _byte(words, 0), _byte(words, 1), _byte(words, 2), _byte(words, 3)
    p = gl.join(gl.join(a, c), gl.join(b, d)).reshape([64, N])
    return gl.convert_layout(p, layout, assert_trivial=True)


@gluon.jit
def _byte(words, i: gl.constexpr):
    return (words >> (8 * i)).to(gl.int8).to(gl.float8e4nv, bitcast=True)
