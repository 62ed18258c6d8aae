"""What becomes of a tile's scores before the softmax (`attnlib.Score`), in the registers of a warpgroup.

Scores stay in units of which qk_scale makes the exponents of the softmax: with a soft cap
s = tanh(inner * s), and qk_scale is the cap times log2(e).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def tanh(x):
    """By the hardware: a relative error of at most 2**-11, that of a float16, which is what PyTorch's own
    soft cap rounds to in half precision several times."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


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
