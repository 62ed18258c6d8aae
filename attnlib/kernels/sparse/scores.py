"""What becomes of a tile's scores before the softmax (`attnlib.Score`), and the gradient of sinks, in plain
`triton.language`.

`score` is (cap, slope, bias_ptr, bias_m, bias_n, after, i_h, i_b), of one head: the soft cap times log2(e);
the slope of ALiBi times log2(e); the first element of the bias, and its strides along queries and keys; what
scores of the user's own function are multiplied with, log2(e), or one over the soft cap; head and batch
element. What a call does not have is None. A kernel makes the tuple itself: compiled functions can't return a
None. The function and its derivative go beside it: a tuple can't have functions.
"""

import triton
import triton.language as tl

from attnlib.kernels.common.logarithms import LOG2_E


@triton.jit
def tanh(x):
    """By one exponential; next to 0, where that has the absolute error of 1, about 1e-7, by a series. A soft
    cap multiplies the error with the cap, and scores that are far below the cap come from there."""
    e = tl.math.exp2(tl.abs(x) * (-2 * LOG2_E))
    t = (1 - e) / (1 + e)
    y = x * x
    series = 1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
    return tl.where(y < 0.0625, x * series, tl.where(x < 0, -t, t))


@triton.jit
def head_slope(alibi_ptr, i_h):
    """That of `score`."""
    return tl.load(alibi_ptr + i_h) * LOG2_E


@triton.jit
def head_bias(bias_ptr, bias_b, bias_h, i_b, i_h):
    """The first element of a head's bias."""
    return bias_ptr + (i_b.to(tl.int64) * bias_b + i_h.to(tl.int64) * bias_h)


@triton.jit
def unbiased(b_s, o_q, o_k, qk_scale, shift, score, FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr):
    """`scored` but for the bias: score is (cap, slope, after, i_h, i_b), shift is S_k - S_q."""
    cap, slope, after, i_h, i_b = score
    b_s = b_s * qk_scale
    derivative = 1.0
    if FUNCTION is not None:
        if DERIVATIVE is not None:
            derivative = DERIVATIVE(b_s, o_q, o_k, i_h, i_b)
        # One of places alone gives fewer numbers than there are scores.
        b_s = tl.broadcast_to(FUNCTION(b_s, o_q, o_k, i_h, i_b) * after, b_s.shape)
        if DERIVATIVE is not None:  # it may be anything where a key is hidden, whose weight of 0 it meets
            derivative = tl.where(tl.abs(b_s) < float("inf"), derivative, 0.0)
    if cap is not None:
        b_t = tanh(b_s)
        b_s = b_t * cap
        derivative = derivative * (1 - b_t * b_t)
    if slope is not None:
        b_s -= slope * tl.abs(o_k - (o_q + shift)).to(tl.float32)
    return b_s, derivative


@triton.jit
def scored(b_s, o_q, o_k, qk_scale, S_q, S_k, score, FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr):
    """(scores in base 2, their derivative by sm_scale * Q K^T) of the products b_s of queries o_q and keys
    o_k, which broadcast against each other. qk_scale: what Q K^T is multiplied with: sm_scale times log2(e),
    or sm_scale over the soft cap; before a function sm_scale alone."""
    cap, slope, bias_ptr, bias_m, BIAS_N, after, i_h, i_b = score
    own = (cap, slope, after, i_h, i_b)
    b_s, derivative = unbiased(b_s, o_q, o_k, qk_scale, S_k - S_q, own, FUNCTION, DERIVATIVE)
    if bias_ptr is not None:
        inside = (o_q < S_q) & (o_k < S_k)
        b_bias = tl.load(bias_ptr + (o_q.to(tl.int64) * bias_m + o_k.to(tl.int64) * BIAS_N), mask=inside,
                         other=0.0)  # fmt: skip
        b_s += b_bias.to(tl.float32) * LOG2_E
    return b_s, derivative


@triton.jit(do_not_specialize=["H", "B", "padded"])
def attention_sinks_gradient(
    rows_ptr,  # (2, B * H, padded): lse2 and delta, see `common.preprocess`
    sinks_ptr,  # (H)
    dsinks_ptr,  # (H)
    H, B,
    padded,  # a multiple of BLOCK
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dsink = -sum of exp(sink - LSE) * delta over the rows of a head. Grid: (H,)."""
    i_h = tl.program_id(0)
    sink = tl.load(sinks_ptr + i_h) * LOG2_E
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i in range(B * (padded // BLOCK)):
        head = i // (padded // BLOCK) * H + i_h
        o_m = i % (padded // BLOCK) * BLOCK + tl.arange(0, BLOCK)
        place = head.to(tl.int64) * padded + o_m
        b_lse2 = tl.load(rows_ptr + place)  # +inf in rows that there are not
        b_delta = tl.load(rows_ptr + B.to(tl.int64) * H * padded + place)
        b_sum += tl.math.exp2(sink - b_lse2) * b_delta
    tl.store(dsinks_ptr + i_h, -tl.sum(b_sum, 0))
