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
