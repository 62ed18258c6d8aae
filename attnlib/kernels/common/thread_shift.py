"""The shift of a row, where each of its four threads knows the largest of its own scores.

`softmax.new_shift` wants the largest score of a row, which takes two exchanges between the threads that share
it, one after the other, in each block. But the shift follows that score only where it has grown by LAZY
powers of two, and a thread sees without the others whether one of its own scores has. If none has in a warp,
nothing is exchanged. In assembly, because the branch is that of a warp.

Shift and tops lie as [64, 4], a value for each row and thread. A row that has seen no key yet has the lowest
number as shift, as in `kept_shift`. Chapter 31 uses it.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common import softmax

LOWEST = gl.constexpr(-3.4028234663852886e38)


def bits_of(number: float) -> str:
    """Of a float32, in hexadecimal digits."""
    return f"{struct.unpack('<I', struct.pack('<f', number))[0]:08X}"


MOST = gl.constexpr(bits_of(softmax.LAZY.value))


# Results: the new shift, alpha and whether a row of the warp has changed, of both rows of a thread. Operands:
# the largest scores that the thread has of them, times the scale, and the shift.
@gluon.constexpr_function
def _asm():
    shift, alpha, changed, top, before = ([f"${2 * n}", f"${2 * n + 1}"] for n in range(5))
    lines = [f"mov.b32 {shift[row]}, {before[row]}; mov.b32 {alpha[row]}, 0f3F800000" for row in (0, 1)]
    lines += [
        f"sub.f32 a, {top[0]}, {before[0]}", f"setp.gtu.f32 q, a, 0f{MOST.value}",
        f"sub.f32 a, {top[1]}, {before[1]}", f"setp.gtu.or.f32 q, a, 0f{MOST.value}, q",
        "vote.sync.any.pred q, q, 0xffffffff",
        f"selp.b32 {changed[0]}, 1, 0, q", f"mov.b32 {changed[1]}, {changed[0]}",
        "@!q bra DONE",
    ]  # fmt: skip
    for row in 0, 1:
        lines += [f"mov.b32 a, {top[row]}"]
        for lanes in 1, 2:
            lines += [f"shfl.sync.bfly.b32 b, a, {lanes}, 31, 0xffffffff", "max.f32 a, a, b"]
        lines += [
            f"max.f32 {shift[row]}, a, {before[row]}", f"sub.f32 a, {before[row]}, {shift[row]}",
            f"ex2.approx.ftz.f32 {alpha[row]}, a",
        ]  # fmt: skip
    return f"{{ .reg .pred q; .reg .f32 a, b; {'; '.join(lines)}; DONE: }}"


@gluon.constexpr_function
def _results():
    return gl.float32, gl.float32, gl.int32


@gluon.jit
def of_threads(x, like):
    """A value for each row [64] for each of its four threads [64, 4], as `like` lies."""
    layout: gl.constexpr = like.type.layout
    rows = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout)), 1)
    return rows + gl.zeros([64, 4], gl.float32, layout)


@gluon.jit
def new_shift(tops, shift, qk_scale):
    """(new shift, alpha = 2**(old - new), whether a row of the warp changed), from the largest scores of a
    block that each thread has, `tops`; all [64, 4]. As `softmax.new_shift`, but where one row of a warp has
    grown by more than LAZY, the others follow, too."""
    tops = gl.convert_layout(tops, shift.type.layout, assert_trivial=True)
    asm: gl.constexpr = _asm()
    return gl.inline_asm_elementwise(
        asm, "=&f,=&f,=&f,=&f,=&r,=&r,f,f,f,f", [tops * qk_scale, shift], dtype=_results(), is_pure=False,
        pack=2,
    )  # fmt: skip


@gluon.jit
def weights(s, shift, qk_scale):
    """P = 2**(s * qk_scale - shift) [64, N]; 0 where a score is -inf."""
    return gl.exp2(s * qk_scale - softmax.quads_of_o(shift, s))
