"""Solutions of chapter 22."""

import triton
import triton.language as tl


@triton.jit
def rotate_and_scale(x_ptr, signs_ptr, matrix_ptr, y_ptr, scale_ptr, S, D: tl.constexpr, ROWS: tl.constexpr):
    """One block of rows. Rows beyond S are zero, before the product and after it."""
    i = tl.program_id(0)
    o_m, o_d = i * ROWS + tl.arange(0, ROWS), tl.arange(0, D)  # [ROWS], [D]
    o_md = o_m[:, None] * D + o_d[None, :]  # [ROWS, D]
    b_x = tl.load(x_ptr + o_md, mask=o_m[:, None] < S, other=0.0)  # [ROWS, D]
    b_x = b_x * tl.load(signs_ptr + o_d)[None, :]
    b_h = tl.load(matrix_ptr + o_d[:, None] * D + o_d[None, :])  # [D, D]
    b_y = tl.dot(b_x, b_h, input_precision="ieee")  # [ROWS, D]
    amax = tl.max(tl.max(tl.abs(b_y), 1), 0)
    scale = tl.where(amax > 0, amax / 448.0, 1.0)
    tl.store(y_ptr + o_md, b_y / scale, mask=o_m[:, None] < S)
    tl.store(scale_ptr + i, scale)


def fraction_bits(add_ones):
    """The sum stops at 2^(F + 1): there the last bit is worth 2. A Hopper GPU: 13, if it does as reported."""
    bits, stops = 0, add_ones(1 << 20)
    while 2 ** (bits + 1) < stops:
        bits += 1
    return bits


def centered(attend, q, k, v):
    """The tensor core's sum then grows like the root of the number of keys and not like the number; V's
    rounding error shrinks with the size of what is rounded. Where the mean wanders along the keys, or early
    rows of a causal call see only keys of another mean, what is left of it still adds up."""
    mean = v.mean(0)
    return attend(q, k, v - mean) + mean
