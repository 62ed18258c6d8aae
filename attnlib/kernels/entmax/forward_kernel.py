"""alpha-entmax attention, forward: the threshold of each row, and the weighted values, over listed keys.

A program has 64 query rows of one head, or a part of them, and the list of the keys that can have weight for
one of them. It gathers these keys, a tile at a time, and solves F(tau) = 1 by Halley's method between two
bounds: each step is a walk along the list. The last walk adds up the values.
"""

import triton
import triton.language as tl

from attnlib.kernels.common.program_order import downwards
from attnlib.kernels.common.tile_access import load_tile, store_tile
from attnlib.kernels.entmax.list_kernels import newton
from attnlib.kernels.entmax.walk import (
    ROWS,
    THREE_HALVES,
    blocks_of,
    gather,
    head_of,
    last_visible,
    list_of,
    positive,
    powers,
    query_block,
    rows_of,
)

MOST_STEPS = tl.constexpr(24)
NO_KEY = tl.constexpr(2**31 - 1)  # behind all keys


@triton.jit
def index_of(list_ptr, at, count, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Elements at .. at + BLOCK - 1 of a list [BLOCK], past its end the first one."""
    o = at + tl.arange(0, BLOCK)  # [BLOCK]
    return tl.load(list_ptr + (tl.where(o < count, o, 0) if MASKED else o))


@triton.jit
def excess(b_s, b_t, at, count, b_index, last_key, scale, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """[s - t]_+ from products of queries and listed keys, 0 where a row does not see the key."""
    b_x = tl.maximum(b_s * scale - b_t[:, None], 0.0)
    if MASKED:
        b_key = tl.where(at + tl.arange(0, BLOCK) < count, b_index, NO_KEY)  # [BLOCK]
        b_x = tl.where(b_key[None, :] <= last_key[:, None], b_x, 0.0)
    return b_x


@triton.jit
def _sums(b_0, b_1, b_2, b_q, b_t, k_ptr, list_ptr, stride_k, scale, exponent, first, end, count, last_key,
          MASKED: tl.constexpr, KIND: tl.constexpr, HALLEY: tl.constexpr, UNIT: tl.constexpr,
          NUM_STAGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """Add sum x^p, sum x^(p - 1) and, for Halley's method, sum x^(p - 2) of a part of a list, [BLOCK_M]."""
    for at in tl.range(first, end, BLOCK_N, num_stages=NUM_STAGES):
        b_index = index_of(list_ptr, at, count, MASKED, BLOCK_N)  # [BLOCK_N]
        b_k = gather(k_ptr, b_index, stride_k, UNIT, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        b_x = excess(b_s, b_t, at, count, b_index, last_key, scale, MASKED, BLOCK_N)
        b_p, b_u = powers(b_x, exponent, KIND)
        b_0 += tl.sum(b_p, 1)
        b_1 += tl.sum(b_u, 1)
        if HALLEY and KIND == THREE_HALVES:
            b_2 += tl.sum(positive(b_x), 1)
        elif HALLEY:
            b_2 += tl.sum(tl.math.exp2(tl.math.log2(b_x) * (exponent - 2.0)), 1)
    return b_0, b_1, b_2


@triton.jit
def _values(b_acc, b_l, b_q, b_t, k_ptr, v_ptr, list_ptr, stride_k, stride_v, scale, exponent, first, end,
            count, last_key, MASKED: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr,
            NUM_STAGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """Add the weighted values of a part of a list, and the weights."""
    for at in tl.range(first, end, BLOCK_N, num_stages=NUM_STAGES):
        b_index = index_of(list_ptr, at, count, MASKED, BLOCK_N)  # [BLOCK_N]
        b_k = gather(k_ptr, b_index, stride_k, UNIT, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_v = gather(v_ptr, b_index, stride_v, UNIT, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        b_x = excess(b_s, b_t, at, count, b_index, last_key, scale, MASKED, BLOCK_N)
        b_p, _ = powers(b_x, exponent, KIND)
        b_l += tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_l


@triton.jit(
    do_not_specialize="S_q S_k H HEADS B room identity k_b k_h k_s v_b v_h v_s".split(),
    do_not_specialize_on_alignment=["cu_q", "cu_k"],
)
def attention_entmax_forward(
    desc_q, desc_o,  # (B, H, S_q, D)
    k_ptr, v_ptr,  # (B, H_kv, S_k, D)
    rows_ptr,  # (2, HEADS, S_q): a lower bound of the threshold, and the highest score
    lists_ptr, records_ptr, room, identity,  # see `entmax_lists`
    tau_ptr,  # (HEADS, S_q)
    scale,  # (alpha - 1) * sm_scale
    exponent,  # 1 / (alpha - 1)
    enough,  # an error of sum p after which one more step leaves one that does not matter
    S_q, S_k,  # of varlen sequences all together
    H,  # query heads
    HEADS,  # B * H, of varlen sequences H
    cu_q, cu_k, B,  # of varlen sequences: where they begin and end [B + 1]; None for a batch
    k_b, k_h, k_s, v_b, v_h, v_s,  # strides in units of UNIT elements
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    HALLEY: tl.constexpr,  # alpha <= 1.5: the second derivative has no pole
    CAUSAL: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    SECTION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out = entmax(sm_scale * Q K^T) V, and tau. Grid: (blocks of BLOCK_M rows * HEADS,)."""
    T_q = S_q
    i_m, head = downwards(blocks_of(T_q, cu_q, B, BLOCK_M), HEADS, SECTION)
    start, S_q, S_k, at_q, at_k, _ = query_block(i_m * BLOCK_M, head, S_q, S_k, H, cu_q, cu_k, B, GROUP)
    if cu_q is not None:
        if start >= S_q:
            return
    k_ptr = head_of(k_ptr, at_k, S_k, k_b, k_h, k_s, UNIT)
    v_ptr = head_of(v_ptr, at_k, S_k, v_b, v_h, v_s, UNIT)
    o_m = start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    last_key = last_visible(o_m, S_q, S_k, CAUSAL)
    sees = (o_m < S_q) & (last_key >= 0)
    own = head.to(tl.int64) * blocks_of(T_q, cu_q, B, ROWS) + i_m * BLOCK_M // ROWS
    list_ptr, count, middle = list_of(lists_ptr, records_ptr, own, room, identity)
    whole = middle // BLOCK_N * BLOCK_N  # tiles up to here need no mask
    b_q = load_tile(desc_q, at_q, start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    row = rows_of(at_q, head, S_q, T_q) + o_m
    b_low = tl.load(rows_ptr + row, mask=sees, other=0.0)  # [BLOCK_M] F >= 1 here
    b_high = tl.load(rows_ptr + HEADS.to(tl.int64) * T_q + row, mask=sees, other=0.0)  # F = 0 here
    b_t = b_low
    error = 1.0
    steps = 0
    while (steps < MOST_STEPS) & (error > enough):
        b_f = tl.zeros([BLOCK_M], tl.float32)
        b_d = tl.zeros([BLOCK_M], tl.float32)
        b_dd = tl.zeros([BLOCK_M], tl.float32)
        b_f, b_d, b_dd = _sums(
            b_f, b_d, b_dd, b_q, b_t, k_ptr, list_ptr, k_s, scale, exponent, 0, whole, count, last_key, False,
            KIND, HALLEY, UNIT, NUM_STAGES, BLOCK_N, BLOCK_D, HEAD_DIM, PRECISION,
        )  # fmt: skip
        b_f, b_d, b_dd = _sums(
            b_f, b_d, b_dd, b_q, b_t, k_ptr, list_ptr, k_s, scale, exponent, whole, count, count, last_key,
            True, KIND, HALLEY, UNIT, 1, BLOCK_N, BLOCK_D, HEAD_DIM, PRECISION,
        )  # fmt: skip
        above = b_f >= 1.0
        b_low, b_high = tl.where(above, b_t, b_low), tl.where(above, b_high, b_t)
        any_above = b_d > 0.0
        if HALLEY:
            b_f1 = -exponent * b_d
            b_f2 = exponent * (exponent - 1.0) * b_dd
            b_slope = 2.0 * b_f1 * b_f1 - (b_f - 1.0) * b_f2
            b_new = b_t - 2.0 * (b_f - 1.0) * b_f1 / tl.where(b_slope == 0.0, 1.0, b_slope)
        else:
            b_new = b_t + newton(b_f, tl.where(any_above, b_d, 1.0), exponent, KIND)
        between = any_above & (b_new >= b_low) & (b_new <= b_high)
        b_t = tl.where(between, b_new, 0.5 * (b_low + b_high))
        # A row that has NaN among its scores does not end the walks of the others.
        error = tl.max(tl.where(sees & (b_f == b_f), tl.abs(b_f - 1.0), 0.0), 0)
        steps += 1
    b_l = tl.zeros([BLOCK_M], tl.float32)  # sum of the weights, 1 but for what the last step left
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_acc, b_l = _values(
        b_acc, b_l, b_q, b_t, k_ptr, v_ptr, list_ptr, k_s, v_s, scale, exponent, 0, whole, count, last_key,
        False, KIND, UNIT, NUM_STAGES, BLOCK_N, BLOCK_D, HEAD_DIM, PRECISION,
    )  # fmt: skip
    b_acc, b_l = _values(
        b_acc, b_l, b_q, b_t, k_ptr, v_ptr, list_ptr, k_s, v_s, scale, exponent, whole, count, count,
        last_key, True, KIND, UNIT, 1, BLOCK_N, BLOCK_D, HEAD_DIM, PRECISION,
    )  # fmt: skip
    tl.store(tau_ptr + row, tl.where(sees, b_t, float("inf")), mask=o_m < S_q)
    # NaN where no key has weight: scores are NaN, or so high that float32 has no threshold 1 below.
    b_o = b_acc / tl.where(sees, b_l, 1.0)[:, None]  # [BLOCK_M, BLOCK_D]
    store_tile(desc_o, b_o, at_q, start, BLOCK_M, BLOCK_D)
