"""Solutions of chapter 22; a kernel is given as functions that take the place of the chapter's own."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


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


@gluon.jit
def softmax_tile(b_s, b_m, b_l, scale, OFFSET: gl.constexpr):
    LAG: gl.constexpr = 2.8  # with the offset of 6 below, P is at most 2^8.8 = 446
    b_top = gl.max(b_s, 1) * scale  # [64]
    b_m_new = gl.where(b_top - b_m > LAG, b_top, b_m)  # [64] a shift: a maximum, or one that was
    b_p = gl.exp2(b_s * scale - (b_m_new - 6.0)[:, None])  # [64, BLOCK_N] OFFSET leaves no room to lag
    b_alpha = gl.exp2(b_m - b_m_new)  # [64] 1 where the shift stays
    return b_p, b_alpha, b_m_new, b_l * b_alpha + gl.sum(b_p, 1)


@gluon.jit
def rescale(b_o, b_alpha):  # a warp branches around the multiplication if no shift of its rows has moved
    n: gl.constexpr = b_o.shape[1] // 2  # elements of b_o in a thread
    moved = fourteen.any_in_warp((b_alpha < 1.0).to(gl.int32))  # [64]
    return gl.inline_asm_elementwise(
        fourteen.branch_asm(n), fourteen.branch_constraints(n),
        [b_o, fourteen.everywhere(b_alpha, b_o), fourteen.everywhere(moved, b_o)],
        dtype=gl.float32, is_pure=False, pack=n)


@gluon.jit
def consume(o_desc, mem, o_tiles, scales, S, qk_scale, i_m, i_h, W: gl.constexpr, CAUSAL: gl.constexpr,
            OFFSET: gl.constexpr):
    CONSUMERS: gl.constexpr = mem.q.shape[0]
    BLOCK_N: gl.constexpr = mem.k.shape[2]
    D: gl.constexpr = mem.q.shape[3]
    s_layout: gl.constexpr = accumulator(BLOCK_N)
    o_layout: gl.constexpr = accumulator(D)
    EDGE: gl.constexpr = (64 * CONSUMERS + BLOCK_N - 1) // BLOCK_N  # tiles that may need a mask
    tiles = eleven.tiles_of(i_m, S, 64 * CONSUMERS, BLOCK_N, CAUSAL)
    row = (i_m * CONSUMERS + W) * 64
    q_scale_ptr, k_scale_ptr, v_scale_ptr = scales  # (heads, blocks of 64), (heads, blocks of 128), (heads)
    block = gl.minimum(row, S - 1) // 64  # rows past the end have no scale of their own
    scale_q = gl.load(q_scale_ptr + i_h * gl.cdiv(S, 64) + block) * qk_scale
    k_scale_ptr = k_scale_ptr + i_h * gl.cdiv(S, 128)
    b_m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))  # [64] finite: nothing may be seen
    b_l = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))  # [64]
    b_o = gl.zeros([64, D], gl.float32, o_layout)  # [64, D]
    b_zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)  # [64, BLOCK_N]
    mbarrier.wait(mem.q_full.index(W), 0)
    scale = gl.load(k_scale_ptr + (tiles - 1) * BLOCK_N // 128) * scale_q
    b_s = twelve.finish(twelve.start_scores(mem, 0, W, b_zero), mem.k_free, 0, 0)  # [64, BLOCK_N]
    b_s = ten.mask(b_s, row, (tiles - 1) * BLOCK_N, S, CAUSAL)
    b_p, b_alpha, b_m, b_l = softmax_tile(b_s, b_m, b_l, scale, OFFSET)  # [64, BLOCK_N], [64]
    b_p = words_of(b_p)
    for i in range(1, tiles):
        scores = twelve.start_scores(mem, i, W, b_zero)
        values = start_values(mem, i - 1, b_p, b_o)
        scale = gl.load(k_scale_ptr + (tiles - 1 - i) * BLOCK_N // 128) * scale_q  # under the products
        b_s = twelve.finish(scores, mem.k_free, i, 1)
        if i < EDGE:
            b_s = ten.mask(b_s, row, (tiles - 1 - i) * BLOCK_N, S, CAUSAL)
        b_p, b_alpha, b_m, b_l = softmax_tile(b_s, b_m, b_l, scale, OFFSET)
        b_o = twelve.finish(values, mem.v_free, i - 1, 0)
        b_p = words_of(b_p)
        b_o = rescale(b_o, b_alpha)
    b_o = twelve.finish(start_values(mem, tiles - 1, b_p, b_o), mem.v_free, tiles - 1, 0)
    b_o = b_o * ten.rows_of(gl.load(v_scale_ptr + i_h) / b_l, b_o)
    ten.matrix(o_tiles.index(W)).store(b_o.to(o_desc.dtype))  # two bytes a number: Q's buffer is too small
    fence_async_shared()  # what threads wrote becomes visible to the copy engine
    tma.async_copy_shared_to_global(o_desc, [i_h, row, 0], o_tiles.index(W))
    tma.store_wait(0)


lagging = [softmax_tile, rescale, consume]
