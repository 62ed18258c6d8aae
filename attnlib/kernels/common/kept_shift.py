"""Weights from the shift that is there already: the largest scores are looked at only where one may matter.

The forward kernel reduces exponents by a shift for each row, P = 2**(s * qk_scale - shift). The shift is a
running row maximum that may be behind by LAZY powers of two (`softmax.new_shift`). To know that it is not
behind by more, a step takes the largest score of each row of each block: for 64 keys 32 maxima a thread and
exchanges between the four threads of a row, all of it before the first exponential.

With `keep_shift` a step begins with the exponentials, of the shift as it is. A thread adds up its weights
anyway, and a sum of positive numbers is at least as large as each of them: a sum of at most 2**LAZY proves
that no score is above the shift by more than LAZY. Where a sum is larger, or no number, the warp takes the
slow path: the largest score of each of its rows, a new shift where it is above the old one, and the weights
once more, from the scores, which are still in registers. So the running maximum is not given up; it is looked
up where it can matter. The slow path is a branch of the warp, in assembly: no other warp waits for it.
Chapter 37 measures what the maximum costs.

A row that has seen no key yet, which bits may make, has the lowest number as shift instead of -inf: hidden
scores have weights of 0 then, and the first one that is seen a weight of infinity, which takes the slow path.

Shift and sums lie as [64, 4] here, a value for each row and each of the four threads that share it. Two
weights of neighboring columns lie in a word: [64, N / 8, 4], in the order of wgmma's first operand. Words are
what the loop hands on, because weights of 16 bits would be taken apart and moved in each step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from attnlib.kernels.common import softmax
from attnlib.kernels.common.ring import as_parts, release

LOWEST = gl.constexpr(-3.4028234663852886e38)


@gluon.constexpr_function
def _cvt(dtype):
    return f"cvt.rn.{'f16' if dtype == gl.float16 else 'bf16'}x2.f32"


# For m pairs of scores of a thread, pair i of its row i & 1. Results, m registers each: words of weights;
# numbers, of which the first are shift, sum and alpha of both rows; and flags, of which the first say whether
# a row of the warp has changed. Operands: the scores of the pairs, words, shifts, sums, this block's part of
# them, the scale.
@gluon.constexpr_function
def _asm(m, dtype):
    words, found, flags, left, right, trial, shift, sums, parts, scale = (
        [f"${number * m + i}" for i in range(m)] for number in range(10)
    )
    most = f"0f{(127 + softmax.LAZY.value) << 23:08X}"
    lines = [f"mov.b32 {words[i]}, {trial[i]}" for i in range(m)]
    for row in 0, 1:
        lines += [
            f"mov.b32 {found[row]}, {shift[row]}",
            f"add.f32 {found[2 + row]}, {sums[row]}, {parts[row]}",
            f"mov.b32 {found[4 + row]}, 0f3F800000",
        ]
    lines += [
        f"setp.gtu.f32 q, {parts[0]}, {most}",
        f"setp.gtu.or.f32 q, {parts[1]}, {most}, q",
        "vote.sync.any.pred q, q, 0xffffffff",
        f"selp.b32 {flags[0]}, 1, 0, q",
        f"mov.b32 {flags[1]}, {flags[0]}",
        "@!q bra DONE",
    ]
    for row in 0, 1:
        lines += [f"max.f32 a, {left[row]}, {right[row]}"]
        lines += [f"max.f32 a, a, {score[i]}" for i in range(row + 2, m, 2) for score in (left, right)]
        for lanes in 1, 2:
            lines += [f"shfl.sync.bfly.b32 b, a, {lanes}, 31, 0xffffffff", "max.f32 a, a, b"]
        lines += [
            f"mul.f32 a, a, {scale[0]}",
            f"max.f32 {found[row]}, a, {shift[row]}",
            f"neg.f32 c{row}, {found[row]}",
            f"add.f32 a, {shift[row]}, c{row}",
            f"ex2.approx.ftz.f32 {found[4 + row]}, a",
            f"mul.f32 {found[2 + row]}, {sums[row]}, {found[4 + row]}",
        ]
    for i in range(m):
        total = found[2 + i % 2]
        for weight, score in ("a", left[i]), ("b", right[i]):
            lines += [
                f"fma.rn.f32 {weight}, {score}, {scale[0]}, c{i % 2}",
                f"ex2.approx.ftz.f32 {weight}, {weight}",
                f"add.f32 {total}, {total}, {weight}",
            ]
        lines += [f"{_cvt(dtype)} {words[i]}, b, a"]
    return f"{{ .reg .pred q; .reg .f32 a, b, c0, c1; {'; '.join(lines)}; DONE: }}"


# "&": results are written before the operands were read for the last time. Without it the compiler gives a
# sum and the sum that it replaces one register, and the slow path reads what the fast one has written.
@gluon.constexpr_function
def _constraints(m):
    kinds = "=&r", "=&f", "=&r", "f", "f", "r", "f", "f", "f", "f"
    return ",".join(kind for kind in kinds for _ in range(m))


@gluon.constexpr_function
def _results():
    return gl.int32, gl.float32, gl.int32


@gluon.jit
def _pairs(x):
    """[64, N] -> [64, N / 8, 4] twice: the two elements of each pair of columns that a thread has."""
    return gl.split(x.reshape([64, x.shape[1] // 8, 4, 2]))


@gluon.jit
def _at(x, i: gl.constexpr):
    """[64, n, 4] -> [64, 4]: number i of n."""
    if x.shape[1] == 1:
        return x.reshape([64, 4])
    else:
        even, odd = gl.split(x.reshape([64, x.shape[1] // 2, 2, 4]).permute((0, 1, 3, 2)))
        if i % 2 == 0:
            return _at(even, i // 2)
        else:
            return _at(odd, i // 2)


@gluon.jit
def _over(x, tile):
    """A value for each row and thread [64, 4] over a tile [64, n, 4]."""
    layout: gl.constexpr = gl.SliceLayout(1, tile.type.layout)
    x, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(x, layout, assert_trivial=True), 1), tile)
    return x


@gluon.jit
def _in_words(left, right, dtype: gl.constexpr):
    asm: gl.constexpr = _cvt(dtype)
    return gl.inline_asm_elementwise(
        asm + " $0, $2, $1;", "=r,f,f", [left, right], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def first_operands(weights, shift, sums, dtype: gl.constexpr, MASKED: gl.constexpr):
    """(P, shift) of a tile's first block, as its steps take them, from weights [64, N] and shift [64], which
    is -inf in a row that sees no key of it. Only if MASKED there may be one."""
    if MASKED:
        shift = gl.maximum(shift, LOWEST)
    left, right = _pairs(weights)
    layout: gl.constexpr = sums.type.layout
    rows = gl.expand_dims(gl.convert_layout(shift, gl.SliceLayout(1, layout)), 1)
    return _in_words(left, right, dtype), rows + gl.zeros([64, 4], gl.float32, layout)


@gluon.jit
def unpacked(p, dtype: gl.constexpr, plan: gl.constexpr):
    """P as first operand of a product [64, N], from what steps hand on; takes no instruction."""
    low = (p & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    high = (p >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([64, 8 * p.shape[1]]), plan.p_layout)


@gluon.jit
def shift_of_rows(shift, plan: gl.constexpr):
    """[64], from what steps hand on."""
    if plan.keep_shift:
        shift = gl.convert_layout(gl.max(shift, 1), plan.row_layout)
    return shift


@gluon.jit
def _halves(x):
    """[64, n, 4] -> [64, n / 2, 4] twice."""
    return gl.split(x.reshape([64, 2, x.shape[1] // 2, 4]).permute((0, 2, 3, 1)))


@gluon.jit
def _together(first, second, like):
    whole = gl.join(first, second).permute((0, 3, 1, 2)).reshape([64, 2 * first.shape[1], 4])
    return gl.convert_layout(whole, like.type.layout, assert_trivial=True)


@gluon.jit
def _weights(left, right, shift, qk_scale):
    """P of both scores of pairs [64, n, 4], and their sums [64, 4]."""
    before = _over(shift, left)
    left, right = gl.exp2(left * qk_scale - before), gl.exp2(right * qk_scale - before)
    return left, right, gl.sum(left + right, 1)


@gluon.jit
def _await_output(o_token, mem, c, plan: gl.constexpr):
    """O of the blocks before; slot c is free."""
    acc = warpgroup_mma_wait(0, deps=o_token)  # [64, D]
    release(mem, c, plan)
    return as_parts(acc, len(o_token))


@gluon.jit
def step(s, o_token, shift, sums, qk_scale, mem, c, dtype: gl.constexpr, plan: gl.constexpr):
    """(P in words [64, N / 8, 4], O, shift and sums [64, 4]) from the scores of a block [64, N], the product
    for O that is in flight, and the shift and the sums of the blocks before."""
    m: gl.constexpr = s.shape[1] // 4
    left, right = _pairs(s)
    if plan.pipeline.late_wait:
        left_1, left_2 = _halves(left)
        right_1, right_2 = _halves(right)
        left_1, right_1, parts = _weights(left_1, right_1, shift, qk_scale)
        if plan.pipeline.pin:
            parts = softmax.pin(parts)
        acc = _await_output(o_token, mem, c, plan)
        left_2, right_2, more = _weights(left_2, right_2, shift, qk_scale)
        parts += gl.convert_layout(more, parts.type.layout)
        p_left, p_right = _together(left_1, left_2, left), _together(right_1, right_2, left)
    else:
        acc = _await_output(o_token, mem, c, plan)
        p_left, p_right, parts = _weights(left, right, shift, qk_scale)
    words, found, flags = gl.inline_asm_elementwise(
        _asm(m, dtype), _constraints(m),
        [left, right, _in_words(p_left, p_right, dtype), _over(shift, left), _over(sums, left),
         _over(parts, left), gl.full(left.shape, qk_scale, gl.float32, left.type.layout)],
        dtype=_results(), is_pure=False, pack=m,
    )  # fmt: skip
    layout: gl.constexpr = sums.type.layout
    alpha, changed, rescaled = _at(found, 2), _at(flags, 0), ()
    for i in gl.static_range(len(acc)):
        rescaled = rescaled + (softmax.rescale(acc[i], alpha, changed),)
    shift, sums = gl.convert_layout(_at(found, 0), layout), gl.convert_layout(_at(found, 1), layout)
    return words, rescaled, shift, sums
