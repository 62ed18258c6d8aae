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

In e4m3 a word has four weights: [64, N / 16, 4]. A weight of more than 448 would be cut off there, and under
a new shift a row's largest is 2**6 (`fp8`), so that the sum of a thread's 32 weights says too little: where
scores differ little it would send every step the slow way. A sum of four is no more than 2**8 while no score
is above the row's largest so far, and one of at most 448 proves that none of the four is cut off. These sums
are taken anyway; the largest of them is found as integers, which for positive numbers have the same order,
and three of which the hardware compares in one instruction.

A plan with `units` wants to know the largest weight of each row and 64 keys, too (`hopper.maxima`). It is
found likewise: on the fast path among the weights that are there, on the slow path among the new ones. So it
is finite, and under the shift that the step hands on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from attnlib.kernels.common import fp8, softmax
from attnlib.kernels.common.ring import as_parts, release
from attnlib.kernels.common.thread_shift import LOWEST, bits_of, of_threads

LARGEST = gl.constexpr(bits_of(fp8.LARGEST))
OFFSET = gl.constexpr(bits_of(fp8.OFFSET))


@gluon.constexpr_function
def _in_a_word(dtype):
    """Weights."""
    return 4 if dtype == gl.float8e4nv else 2


@gluon.constexpr_function
def _pack(dtype, word, weights):
    """Instructions that round weights to a word."""
    if dtype == gl.float8e4nv:
        a, b, c, d = weights
        cvt = "cvt.rn.satfinite.e4m3x2.f32"
        return f"{cvt} low, {b}, {a}; {cvt} high, {d}, {c}; mov.b32 {word}, {{low, high}}"
    left, right = weights
    return f"cvt.rn.{'f16' if dtype == gl.float16 else 'bf16'}x2.f32 {word}, {right}, {left}"


@gluon.constexpr_function
def _vote(dtype, parts, largest=None):
    """Instructions: is a weight of one of both rows perhaps too large?"""
    if dtype == gl.float8e4nv:
        return [f"max.s32 both, {largest[0]}, {largest[1]}", f"setp.gt.s32 q, both, 0x{LARGEST.value}"]
    most = f"0f{(127 + softmax.LAZY.value) << 23:08X}"
    return [f"setp.gtu.f32 q, {parts[0]}, {most}", f"setp.gtu.or.f32 q, {parts[1]}, {most}, q"]


# For m words of weights of a thread, word i of its row i & 1. Results, m registers each: words of weights;
# numbers, of which the first are shift, sum and alpha of both rows, and the largest weights of both rows in
# each of so many units; and flags, of which the first say whether a row of the warp has changed. Operands:
# the scores of the words, words, shifts, sums, this block's part of them, in e4m3 the largest sum of four as
# an integer, the largest weight of each unit, the scale.
@gluon.constexpr_function
def _asm(m, dtype, units):
    n, wide = _in_a_word(dtype), dtype == gl.float8e4nv
    words, found, flags, *operands = (
        [f"${number * m + i}" for i in range(m)] for number in range(8 + n + wide + units)
    )
    scores = operands[:n]
    trial, shift, sums, parts, *others, scale = operands[n:]
    largest, tops = others[:wide], others[wide:]
    found_tops = [found[6 + 2 * unit : 8 + 2 * unit] for unit in range(units)]
    lines = [f"mov.b32 {words[i]}, {trial[i]}" for i in range(m)]
    for row in 0, 1:
        lines += [
            f"mov.b32 {found[row]}, {shift[row]}",
            f"add.f32 {found[2 + row]}, {sums[row]}, {parts[row]}",
            f"mov.b32 {found[4 + row]}, 0f3F800000",
            *(f"mov.b32 {new[row]}, {top[row]}" for new, top in zip(found_tops, tops, strict=True)),
        ]
    lines += [
        *_vote(dtype, parts, *largest),
        "vote.sync.any.pred q, q, 0xffffffff",
        f"selp.b32 {flags[0]}, 1, 0, q",
        f"mov.b32 {flags[1]}, {flags[0]}",
        "@!q bra DONE",
    ]
    for row in 0, 1:
        lines += [f"max.f32 a, {scores[0][row]}, {scores[1][row]}"]
        lines += [f"max.f32 a, a, {score[row]}" for score in scores[2:]]
        lines += [f"max.f32 a, a, {score[i]}" for i in range(row + 2, m, 2) for score in scores]
        for lanes in 1, 2:
            lines += [f"shfl.sync.bfly.b32 b, a, {lanes}, 31, 0xffffffff", "max.f32 a, a, b"]
        lines += [f"mul.f32 a, a, {scale[row]}"]
        lines += [f"sub.f32 a, a, 0f{OFFSET.value}"] if wide else []
        lines += [
            f"max.f32 {found[row]}, a, {shift[row]}",
            f"neg.f32 c{row}, {found[row]}",
            f"add.f32 a, {shift[row]}, c{row}",
            f"ex2.approx.ftz.f32 {found[4 + row]}, a",
            f"mul.f32 {found[2 + row]}, {sums[row]}, {found[4 + row]}",
            *(f"mov.b32 {new[row]}, 0f00000000" for new in found_tops),
        ]
    names = "abcd"[:n]
    for i in range(m):
        total = found[2 + i % 2]
        for weight, score in zip(names, scores, strict=True):
            lines += [
                f"fma.rn.f32 {weight}, {score[i]}, {scale[i % 2]}, c{i % 2}",
                f"ex2.approx.ftz.f32 {weight}, {weight}",
                f"add.f32 {total}, {total}, {weight}",
            ]
            for top in found_tops[i * units // m :][:1]:  # of its unit, if there are any
                lines += [f"max.f32 {top[i % 2]}, {top[i % 2]}, {weight}"]
        lines += [_pack(dtype, words[i], names)]
    registers = f".reg .pred q; .reg .f32 {', '.join(names)}, c0, c1"
    registers += "; .reg .b32 both; .reg .b16 low, high" * wide
    return f"{{ {registers}; {'; '.join(lines)}; DONE: }}"


# "&": results are written before the operands were read for the last time. Without it the compiler gives a
# sum and the sum that it replaces one register, and the slow path reads what the fast one has written.
@gluon.constexpr_function
def _constraints(m, dtype, units):
    n, wide = _in_a_word(dtype), dtype == gl.float8e4nv
    kinds = "=&r", "=&f", "=&r", *"f" * n, "r", "f", "f", "f", *"r" * wide, *"f" * units, "f"
    return ",".join(kind for kind in kinds for _ in range(m))


@gluon.constexpr_function
def _results():
    return gl.int32, gl.float32, gl.int32


@gluon.jit
def elements_of_words(x, dtype: gl.constexpr):
    """[64, N] -> the elements that a thread has in a word: of 16 bits two of [64, N / 8, 4], neighbors; of 8
    four of [64, N / 16, 4], of which the last two are 8 columns further on (see `common.fp8.Fp8`)."""
    if dtype == gl.float8e4nv:
        even, odd = gl.split(x.reshape([64, x.shape[1] // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        return a, b, c, d
    else:
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


@gluon.constexpr_function
def _words_asm(dtype):
    """(assembly, constraints) of `in_words`."""
    n = _in_a_word(dtype)
    packing = f"{_pack(dtype, '$0', [f'${i}' for i in range(1, n + 1)])};"
    if dtype == gl.float8e4nv:
        packing = f"{{ .reg .b16 low, high; {packing} }}"
    return packing, "=r" + ",f" * n


@gluon.jit
def in_words(weights, dtype: gl.constexpr):
    asm: gl.constexpr = _words_asm(dtype)
    return gl.inline_asm_elementwise(asm[0], asm[1], weights, dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def first_operands(weights, shift, sums, dtype: gl.constexpr, MASKED: gl.constexpr, plan: gl.constexpr):
    """(P, shift, largest weights of units) of a tile's first block, as its steps take them, from weights
    [64, N] and shift [64], which is -inf in a row that sees no key of it. Only if MASKED there may be one."""
    if MASKED:
        shift = gl.maximum(shift, LOWEST)
    of_words = elements_of_words(weights, dtype)
    tops, own = _tops(of_words, plan), ()
    for unit in gl.static_range(len(tops)):
        own = own + (gl.convert_layout(tops[unit], sums.type.layout),)
    return in_words(of_words, dtype), of_threads(shift, sums), own


@gluon.jit
def unpacked(p, dtype: gl.constexpr, plan: gl.constexpr):
    """P as first operand of a product [64, N], from what steps hand on; in e4m3 as `e4m3.start_output` takes
    it. Takes no instruction."""
    if dtype == gl.float8e4nv:
        words = p.reshape([64, 4 * p.shape[1]])
        return gl.convert_layout(words, plan.word_layout, assert_trivial=True)
    else:
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
def _both_halves(tiles):
    """Of each of some tiles."""
    first, second = (), ()
    for i in gl.static_range(len(tiles)):
        left, right = _halves(tiles[i])
        first, second = first + (left,), second + (right,)
    return first, second


@gluon.jit
def _together(first, second, like):
    whole = gl.join(first, second).permute((0, 3, 1, 2)).reshape([64, 2 * first.shape[1], 4])
    return gl.convert_layout(whole, like.type.layout, assert_trivial=True)


@gluon.jit
def _weights(scores, shift, qk_scale, BY_ROW: gl.constexpr):
    """(P of the scores of words [64, n, 4], its sums [64, 4], of sums of four the largest, as integer)."""
    before, weights = _over(shift, scores[0]), ()
    if BY_ROW:
        qk_scale = _over(qk_scale, scores[0])
    for i in gl.static_range(len(scores)):
        weights = weights + (gl.exp2(scores[i] * qk_scale - before),)
    if len(weights) == 2:
        return weights, gl.sum(weights[0] + weights[1], 1), 0
    else:
        of_words = (weights[0] + weights[1]) + (weights[2] + weights[3])  # [64, n, 4]
        return weights, gl.sum(of_words, 1), gl.max(of_words.to(gl.int32, bitcast=True), 1)


@gluon.jit
def _top(weights, plan: gl.constexpr):
    """The largest weight of each row and thread [64, 4], of words of two [64, n, 4], as a tuple of one; ()
    where `plan` has no units. Compared as integers, as above."""
    if plan.units == 0:
        return ()
    else:
        bits = gl.maximum(weights[0].to(gl.int32, bitcast=True), weights[1].to(gl.int32, bitcast=True))
        return (gl.max(bits, 1).to(gl.float32, bitcast=True),)


@gluon.jit
def _of_units(left, right, plan: gl.constexpr):
    """The largest weights of each unit, from those of both halves of a block."""
    if plan.units == 1:
        return (gl.maximum(left[0], gl.convert_layout(right[0], left[0].type.layout)),)
    else:
        return left + right


@gluon.jit
def _tops(weights, plan: gl.constexpr):
    """The same from the weights of a block."""
    if plan.units == 2:
        left, right = _both_halves(weights)
        return _top(left, plan) + _top(right, plan)
    else:
        return _top(weights, plan)


@gluon.jit
def _after(x, y):
    """x, but not before y is known; y if one of them is NaN. ptxas has no order of its own here: it would
    compute all weights of a block before it compares and packs the first ones, and spill."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred q; setp.nan.f32 q, $1, $2; selp.b32 $0, $2, $1, q; }", "=f,f,f",
        [x, gl.convert_layout(y, x.type.layout)], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _weights_at_once(scores, shift, qk_scale, plan: gl.constexpr, BY_ROW: gl.constexpr):
    """`_weights` of a block, and the largest of each unit. The sums are those without units, bit by bit."""
    if plan.units == 2:
        left, right = _both_halves(scores)
        left, _, _ = _weights(left, shift, qk_scale, BY_ROW)
        top = _top(left, plan)
        right, _, _ = _weights(right, _after(shift, top[0]), qk_scale, BY_ROW)
        p = _together(left[0], right[0], scores[0]), _together(left[1], right[1], scores[1])
        return p, gl.sum(p[0] + p[1], 1), 0, top + _top(right, plan)
    else:
        p, parts, largest = _weights(scores, shift, qk_scale, BY_ROW)
        return p, parts, largest, _tops(p, plan)


@gluon.jit
def _await_output(o_token, mem, c, plan: gl.constexpr):
    """O of the blocks before; slot c is free."""
    acc = warpgroup_mma_wait(0, deps=o_token)  # [64, D]
    release(mem, c, plan)
    return as_parts(acc, len(o_token))


@gluon.jit
def step(
    s, o_token, shift, sums, qk_scale, mem, c, dtype: gl.constexpr, plan: gl.constexpr,
    BY_ROW: gl.constexpr = False,
):
    """(P in words [64, n, 4], O, shift and sums [64, 4], largest weights of units) from the scores of a block
    [64, N], the product for O that is in flight, and the shift and the sums of the blocks before. qk_scale: a
    number, or BY_ROW [64]."""
    scores = elements_of_words(s, dtype)
    if BY_ROW:
        qk_scale = of_threads(qk_scale, sums)
    like = scores[0]
    m: gl.constexpr = like.shape[1] * 2
    if plan.pipeline.late_wait:
        first, second = _both_halves(scores)
        first, parts, largest = _weights(first, shift, qk_scale, BY_ROW)
        top = _top(first, plan)
        if plan.pipeline.pin:
            if plan.units > 0:
                parts = softmax.pin_both(parts, top[0])
            else:
                parts = softmax.pin(parts)
        acc = _await_output(o_token, mem, c, plan)
        second, more, larger = _weights(second, shift, qk_scale, BY_ROW)
        tops = _of_units(top, _top(second, plan), plan)
        parts += gl.convert_layout(more, parts.type.layout)
        if len(scores) == 4:
            largest = gl.maximum(largest, gl.convert_layout(larger, largest.type.layout))
        p = ()
        for i in gl.static_range(len(scores)):
            p = p + (_together(first[i], second[i], like),)
    else:
        acc = _await_output(o_token, mem, c, plan)
        p, parts, largest, tops = _weights_at_once(scores, shift, qk_scale, plan, BY_ROW)
    trial = in_words(p, dtype)
    given = scores + (trial, _over(shift, like), _over(sums, like), _over(parts, like))
    if len(scores) == 4:
        given = given + (_over(largest, like),)
    for unit in gl.static_range(plan.units):
        given = given + (_over(tops[unit], like),)
    if BY_ROW:
        given = given + (_over(qk_scale, like),)
    else:
        given = given + (gl.full(like.shape, qk_scale, gl.float32, like.type.layout),)
    asm: gl.constexpr = _asm(m, dtype, plan.units)
    constraints: gl.constexpr = _constraints(m, dtype, plan.units)
    words, found, flags = gl.inline_asm_elementwise(
        asm, constraints, given, dtype=_results(), is_pure=False, pack=m
    )
    layout: gl.constexpr = sums.type.layout
    alpha, changed, rescaled = _at(found, 2), _at(flags, 0), ()
    for i in gl.static_range(len(acc)):
        rescaled = rescaled + (softmax.rescale(acc[i], alpha, changed),)
    shift, sums = gl.convert_layout(_at(found, 0), layout), gl.convert_layout(_at(found, 1), layout)
    found_tops = ()
    for unit in gl.static_range(plan.units):
        found_tops = found_tops + (gl.convert_layout(_at(found, 3 + unit), layout),)
    return words, rescaled, shift, sums, found_tops
