"""What the forward kernel does differently with operands in e4m3: P's range, P as an operand, scales, V's
mean. Chapter 22 builds it.

P is rounded to e4m3, whose largest number is 448 and whose smallest is 2**-9. Under a new shift a row's
largest weight is 2**OFFSET; the shift moves before a weight exceeds 2**ROOM. Sums are of weights before
they are rounded, so that the LSE is that of the scores. docs/lab/fp8.md has what other choices cost.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common.softmax import rows_of_o, whole

OFFSET = gl.constexpr(6)
ROOM = gl.constexpr(8.8)  # 448 = 2**8.807


@gluon.jit
def tile_scales(qk_scale, of_q, before, of_k, of_v, scales):
    """(what `block_scale` takes, V's scale) of 64 rows; their tile's scales begin at of_q, of_k and of_v.
    before: rows of the tile before these."""
    of_queries = qk_scale * gl.load(scales.q + of_q + (before >> 6) * scales.q_n)
    return (of_queries, scales.k + of_k, scales.k_n), gl.load(scales.v + of_v)


@gluon.jit
def block_scale(scale, first):
    """What scores of the block that begins with key `first` are multiplied with before exp2."""
    of_queries, of_keys, stride = scale
    return of_queries * gl.load(of_keys + (first >> 7) * stride)


@gluon.jit
def mean_of_values(head, scales, plan: gl.constexpr):
    """What was subtracted from the values of a head before they were quantized: [D], as columns of the
    output."""
    o_d = gl.arange(0, plan.d, layout=gl.SliceLayout(0, plan.o_layout))  # [D]
    return gl.load(scales.mean + head.to(gl.int64) * plan.d + o_d)


@gluon.jit
def with_mean(o, mean, row_sums):
    """The output with the mean of the values, where a row has seen a key: its weights sum to 1."""
    empty = rows_of_o(row_sums, o) == 0.0  # [64, D]
    return o + gl.where(empty, 0.0, mean[None, :])


@gluon.jit
def _words(p):
    """[64, N] -> int32 [64, N / 4], four weights in e4m3 each, without moving anything between threads.

    In each 16 columns of an accumulator a thread has 2t, 2t + 1, 8 + 2t and 9 + 2t, as first operand of a
    product it gives four neighbors. They become neighbors here, and keys of V lie in the same order. Words
    and not bytes are what a loop hands on from step to step: bytes would be taken apart and put together.
    """
    N: gl.constexpr = p.shape[1]
    even, odd = gl.split(p.reshape([64, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)))  # [64, N / 16, 4, 2]
    a, c = gl.split(even)
    b, d = gl.split(odd)
    asm: gl.constexpr = """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
    }"""
    packed = gl.inline_asm_elementwise(asm, "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)
    return packed.reshape([64, N // 4])


@gluon.jit
def operand(left, right, dtype: gl.constexpr, plan: gl.constexpr):
    """P [64, N], in two halves or one, as a step hands it to the next one: as first operand of a product, or
    in words of it."""
    if plan.fp8:
        p = _words(left)
        if right is not None:
            p = whole(p, _words(right))
        return gl.convert_layout(p, plan.word_layout, assert_trivial=True)
    else:
        p = left.to(dtype)
        if right is not None:
            p = whole(p, right.to(dtype))
        return gl.convert_layout(p, plan.p_layout)


@gluon.jit
def unpacked(words, plan: gl.constexpr):
    """[64, N / 4] -> the same as first operand of a product [64, N]; takes no instruction."""
    N: gl.constexpr = 4 * words.shape[1]
    a, b, c, d = _byte(words, 0), _byte(words, 1), _byte(words, 2), _byte(words, 3)
    p = gl.join(gl.join(a, c), gl.join(b, d)).reshape([64, N])
    return gl.convert_layout(p, plan.p_layout, assert_trivial=True)


@gluon.jit
def _byte(words, i: gl.constexpr):
    return (words >> (8 * i)).to(gl.int8).to(gl.float8e4nv, bitcast=True)
