"""Solutions of chapter 12."""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from attnlib.book import lesson

twelve = lesson.load_kernel("12_overlap")
ten, eleven = twelve.ten, twelve.eleven


def overlaps(listing):
    """True if something is in flight when the first exponential starts."""
    in_flight = False
    for line in listing:
        if "HGMMA" in line:
            in_flight = True
        elif "WARPGROUP.DEPBAR.LE gsb0, 0x0" in line:
            in_flight = False
        elif "MUFU.EX2" in line:
            return in_flight
    return False


def turns(w, trips):
    """Wait for my turn, start the products, hand the turn on; consumer 1 gives consumer 0 the first turn."""
    mine, other = 8 + w, 9 - w
    first = [("arrive", 8)] if w == 1 else []
    return first + [("sync", mine), ("products", w), ("arrive", other)] * trips


def utilization(qk, pv, softmax, late, consumers):
    """Work of the tensor cores over the time of a trip. At D = 64 (256, 256, 528) the second consumer takes
    0.49 to 0.97, the late product alone only to 0.65, and both together to no more than the first."""
    chain = qk + max(pv, softmax) if late else qk + pv + softmax
    products = consumers * (qk + pv)
    return products / max(chain, products, consumers * softmax)


@gluon.jit
def early_consume(o_desc, mem, S, qk_scale, i_m, i_h, W: gl.constexpr):
    BLOCK_N: gl.constexpr = mem.k.shape[2]
    D: gl.constexpr = mem.q.shape[3]
    s_layout: gl.constexpr = ten.accumulator(BLOCK_N)
    o_layout: gl.constexpr = ten.accumulator(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)  # P: first operand, in registers
    tiles, row = gl.cdiv(S, BLOCK_N), (i_m * 2 + W) * 64
    b_m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))  # [64]
    b_l = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))  # [64]
    b_o = gl.zeros([64, D], gl.float32, o_layout)  # [64, D]
    b_zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)  # [64, BLOCK_N]
    mbarrier.wait(mem.q_full.index(W), 0)
    b_s = twelve.finish(twelve.start_scores(mem, 0, W, b_zero), mem.k_free, 0, 0)  # [64, BLOCK_N]
    for i in range(tiles - 1):
        scores = twelve.start_scores(mem, i + 1, W, b_zero)  # in flight during the softmax of tile i
        b_s = ten.mask(b_s, row, (tiles - 1 - i) * BLOCK_N, S, False)
        b_p, b_alpha, b_m, b_l = ten.softmax_tile(b_s, b_m, b_l, qk_scale)  # [64, BLOCK_N], [64]
        b_o = b_o * ten.rows_of(b_alpha, b_o)
        b_p = gl.convert_layout(b_p.to(mem.v.dtype), p_layout)
        values = twelve.start_values(mem, i, b_p, b_o)
        b_s = twelve.finish(scores, mem.k_free, i + 1, 1)
        b_o = twelve.finish(values, mem.v_free, i, 0)
    b_s = ten.mask(b_s, row, 0, S, False)
    b_p, b_alpha, b_m, b_l = ten.softmax_tile(b_s, b_m, b_l, qk_scale)
    b_o = b_o * ten.rows_of(b_alpha, b_o)
    b_p = gl.convert_layout(b_p.to(mem.v.dtype), p_layout)
    b_o = twelve.finish(twelve.start_values(mem, tiles - 1, b_p, b_o), mem.v_free, tiles - 1, 0)
    b_o = b_o / ten.rows_of(b_l, b_o)
    ten.matrix(mem.q.index(W)).store(b_o.to(o_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [i_h, row, 0], mem.q.index(W))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["S"])
def early_forward(q_desc, k_desc, v_desc, o_desc, S, qk_scale, STAGES: gl.constexpr):
    mem = eleven.SharedStorage(
        gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_shape, q_desc.layout),
        gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout),
        gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout),
        eleven.barriers(2, 1), eleven.barriers(STAGES, 1), eleven.barriers(STAGES, 1),
        eleven.barriers(STAGES, 2), eleven.barriers(STAGES, 2))
    fence_async_shared()
    i_m, i_h = gl.program_id(0), gl.program_id(1)
    gl.warp_specialize([
        (early_consume, (o_desc, mem, S, qk_scale, i_m, i_h, 0)),
        (early_consume, (o_desc, mem, S, qk_scale, i_m, i_h, 1)),
        (eleven.produce, (q_desc, k_desc, v_desc, mem, S, i_m, i_h, False)),
    ], [4, 1], [240, 24])


def early_attention(q, k, v, causal=False):
    (B, H, S, D), o, (n, stages) = q.shape, torch.empty_like(q), eleven.TILES[q.shape[3]]
    early_forward[(triton.cdiv(S, 128), B * H)](
        ten.windows(q, 64), ten.windows(k, n), ten.windows(v, n), ten.windows(o, 64), S,
        ten.LOG2_E * D**-0.5, stages, num_warps=4, maxnreg=168)
    return o
