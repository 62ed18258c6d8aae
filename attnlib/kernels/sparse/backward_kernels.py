"""Gradients of exact attention under a block mask, in plain `triton.language`.

As `kernels.portable.backward_kernels` does it for windows: P is computed again from Q, K and the LSE, dK and
dV by programs that own keys, dQ by programs that own queries; no atomics, so that the same inputs give the
same bits. Rows of tiles have lists, and so have columns of tiles, with bits of their own, transposed.
"""

import triton
import triton.language as tl

from attnlib.kernels.common.preprocess import DELTA, LSE2
from attnlib.kernels.common.program_order import upwards
from attnlib.kernels.common.tile_access import load_tile, store_tile
from attnlib.kernels.sparse.scores import head_bias, head_slope, scored
from attnlib.kernels.sparse.walk import TILE, row_of_rank, seen

NUMBERS = "S_q S_k H HEADS num_tiles mask_b mask_h bias_b bias_h bias_m".split()


@triton.jit
def _load_rows(desc_rows, which, head, row, BLOCK_M: tl.constexpr):
    return desc_rows.load([which, head, row]).reshape([BLOCK_M])  # [BLOCK_M]


@triton.jit
def _key_steps(b_dq, b_q, b_do, b_lse2, b_delta, desc_k, desc_v, at, first, end, row, steps_ptr, bits_ptr,
               words_ptr, qk_scale, start, S_q, S_k, score, SCORED: tl.constexpr,
               FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr, PARTIAL: tl.constexpr, FLIP: tl.constexpr,
               STEP: tl.constexpr, NUM_STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add what steps first .. end - 1 of the lists give to dQ (not yet scaled)."""
    pieces: tl.constexpr = STEP // BLOCK_N
    for j in tl.range(first * pieces, end * pieces, num_stages=NUM_STAGES):
        column = j % pieces * BLOCK_N
        key = tl.load(steps_ptr + j // pieces) * STEP + column
        b_k = load_tile(desc_k, at, key, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        b_v = load_tile(desc_v, at, key, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_dp = tl.dot(b_do, b_v.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if FLIP:
            b_s = -b_s
        if SCORED:
            o_q, o_k = start + tl.arange(0, BLOCK_M), key + tl.arange(0, BLOCK_N)
            b_s, slope = scored(b_s, o_q[:, None], o_k[None, :], qk_scale, S_q, S_k, score, FUNCTION,
                                DERIVATIVE)  # fmt: skip
            b_p = tl.math.exp2(b_s - b_lse2[:, None])  # [BLOCK_M, BLOCK_N]
        else:
            b_p = tl.math.exp2(b_s * qk_scale - b_lse2[:, None])  # [BLOCK_M, BLOCK_N]
        if PARTIAL:
            bits = tl.load(bits_ptr + j // pieces)
            b_p = tl.where(seen(words_ptr, bits, row, column, BLOCK_M, BLOCK_N), b_p, 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None])  # [BLOCK_M, BLOCK_N]
        if SCORED:
            b_ds = b_ds * slope
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return b_dq


@triton.jit(do_not_specialize=NUMBERS)
def attention_sparse_backward_dq(
    desc_q, desc_do, desc_dq,  # (B, H, S_q, D)
    desc_k, desc_v,  # (B, H_kv, S_k, D)
    desc_rows,  # (2, B * H, padded): lse2 and delta
    starts_ptr, middles_ptr, steps_ptr, bits_ptr, order_ptr, words_ptr,  # as in the forward kernel
    alibi_ptr, bias_ptr,  # likewise
    qk_scale, cap, after,  # as in the forward kernel
    sm_scale,
    S_q, S_k,
    H,  # query heads
    HEADS,  # B * H
    num_tiles,  # rows of tiles of a mask
    mask_b, mask_h,
    bias_b, bias_h, bias_m,
    GROUP: tl.constexpr,
    SCORED: tl.constexpr, BIAS_N: tl.constexpr,
    FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTIAL: tl.constexpr, FLIP: tl.constexpr,
    SECTION: tl.constexpr,  # heads that advance together
    STEP: tl.constexpr,  # elements across of a step of the lists
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of a block of queries. Grid: (row blocks * HEADS,)."""
    rank, head = upwards(num_tiles * (TILE // BLOCK_M), HEADS, SECTION)
    i_b, i_h = head // H, head % H
    mask = i_b * mask_b + i_h * mask_h
    tile, start = row_of_rank(rank, mask, order_ptr, num_tiles, BLOCK_M)
    if start >= S_q:
        return
    number = mask * num_tiles + tile
    first, middle, end = (
        tl.load(starts_ptr + number), tl.load(middles_ptr + number), tl.load(starts_ptr + number + 1)
    )  # fmt: skip
    at_k = (i_b, i_h // GROUP)
    row = start - tile * TILE
    b_q = load_tile(desc_q, (i_b, i_h), start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    b_do = load_tile(desc_do, (i_b, i_h), start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    b_lse2 = _load_rows(desc_rows, LSE2, head, start, BLOCK_M)  # [BLOCK_M]
    b_delta = _load_rows(desc_rows, DELTA, head, start, BLOCK_M)  # [BLOCK_M]
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    slope, bias = alibi_ptr, bias_ptr
    if alibi_ptr is not None:
        slope = head_slope(alibi_ptr, i_h)
    if bias_ptr is not None:
        bias = head_bias(bias_ptr, bias_b, bias_h, i_b, i_h)
    score = (cap, slope, bias, bias_m, BIAS_N, after, i_h, i_b)
    b_dq = _key_steps(
        b_dq, b_q, b_do, b_lse2, b_delta, desc_k, desc_v, at_k, first, middle, row, steps_ptr, bits_ptr,
        words_ptr, qk_scale, start, S_q, S_k, score, SCORED, FUNCTION, DERIVATIVE, False, FLIP, STEP,
        NUM_STAGES, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    if PARTIAL:
        b_dq = _key_steps(
            b_dq, b_q, b_do, b_lse2, b_delta, desc_k, desc_v, at_k, middle, end, row, steps_ptr, bits_ptr,
            words_ptr, qk_scale, start, S_q, S_k, score, SCORED, FUNCTION, DERIVATIVE, True, FLIP, STEP, 1,
            BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    store_tile(desc_dq, b_dq * sm_scale, (i_b, i_h), start, BLOCK_M, BLOCK_D)


@triton.jit
def _query_steps(b_dk, b_dv, b_k, b_v, desc_q, desc_do, desc_rows, at, head, first, end, row, steps_ptr,
                 bits_ptr, words_ptr, qk_scale, start, S_q, S_k, score, SCORED: tl.constexpr,
                 FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr, PARTIAL: tl.constexpr, FLIP: tl.constexpr,
                 WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, STEP: tl.constexpr, NUM_STAGES: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Add what steps first .. end - 1 of a column's list give to dK (not yet scaled) and dV."""
    pieces: tl.constexpr = STEP // BLOCK_M
    for j in tl.range(first * pieces, end * pieces, num_stages=NUM_STAGES):
        column = j % pieces * BLOCK_M
        query = tl.load(steps_ptr + j // pieces) * STEP + column
        b_q = load_tile(desc_q, at, query, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        b_lse2 = _load_rows(desc_rows, LSE2, head, query, BLOCK_M)  # [BLOCK_M]
        b_delta = _load_rows(desc_rows, DELTA, head, query, BLOCK_M)  # [BLOCK_M]
        b_st = tl.dot(b_k, b_q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        b_do = load_tile(desc_do, at, query, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        if WANT_DK:
            b_dpt = tl.dot(b_v, b_do.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        if FLIP:
            b_st = -b_st
        if SCORED:
            o_q, o_k = query + tl.arange(0, BLOCK_M), start + tl.arange(0, BLOCK_N)
            b_st, slope = scored(b_st, o_q[None, :], o_k[:, None], qk_scale, S_q, S_k, score, FUNCTION,
                                 DERIVATIVE)  # fmt: skip
            b_pt = tl.math.exp2(b_st - b_lse2[None, :])  # [BLOCK_N, BLOCK_M]
            if FUNCTION is not None:  # which may be NaN for a query that does not exist
                b_pt = tl.where(o_q[None, :] < S_q, b_pt, 0.0)
        else:
            b_pt = tl.math.exp2(b_st * qk_scale - b_lse2[None, :])  # [BLOCK_N, BLOCK_M]
        if PARTIAL:
            bits = tl.load(bits_ptr + j // pieces)
            b_pt = tl.where(seen(words_ptr, bits, row, column, BLOCK_N, BLOCK_M), b_pt, 0.0)
        if WANT_DV:
            b_dv = tl.dot(b_pt.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
        if WANT_DK:
            b_dst = b_pt * (b_dpt - b_delta[None, :])  # [BLOCK_N, BLOCK_M]
            if SCORED:
                b_dst = b_dst * slope
            b_dk = tl.dot(b_dst.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
    return b_dk, b_dv


@triton.jit(do_not_specialize=NUMBERS)
def attention_sparse_backward_dkdv(
    desc_q, desc_do,  # (B, H, S_q, D)
    desc_k, desc_v, desc_dk, desc_dv,  # (B, H_kv, S_k, D)
    desc_rows,  # (2, B * H, padded): lse2 and delta
    starts_ptr, middles_ptr, steps_ptr, bits_ptr, order_ptr, words_ptr,  # of columns: of keys along queries
    alibi_ptr, bias_ptr,
    qk_scale, cap, after,  # as in the forward kernel
    sm_scale,
    S_q, S_k,
    H,  # key/value heads
    HEADS,  # B * H_kv
    num_tiles,  # columns of tiles of a mask
    mask_b, mask_h,
    bias_b, bias_h, bias_m,
    SCORED: tl.constexpr, BIAS_N: tl.constexpr,
    FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share one key/value head
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTIAL: tl.constexpr, FLIP: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,  # which of the two to compute
    SECTION: tl.constexpr,  # heads that advance together
    STEP: tl.constexpr,  # elements across of a step of the lists
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys. Grid: (key blocks * HEADS,)."""
    rank, head_kv = upwards(num_tiles * (TILE // BLOCK_N), HEADS, SECTION)
    i_b, i_kv = head_kv // H, head_kv % H
    mask = i_b * mask_b + i_kv * GROUP * mask_h
    tile, start = row_of_rank(rank, mask, order_ptr, num_tiles, BLOCK_N)
    if start >= S_k:
        return
    row = start - tile * TILE
    b_k = load_tile(desc_k, (i_b, i_kv), start, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    b_v = load_tile(desc_v, (i_b, i_kv), start, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for g in range(GROUP):
        i_h = i_kv * GROUP + g
        at, head = (i_b, i_h), head_kv * GROUP + g
        slope, bias = alibi_ptr, bias_ptr
        if alibi_ptr is not None:
            slope = head_slope(alibi_ptr, i_h)
        if bias_ptr is not None:
            bias = head_bias(bias_ptr, bias_b, bias_h, i_b, i_h)
        score = (cap, slope, bias, bias_m, BIAS_N, after, i_h, i_b)
        number = (mask + g * mask_h) * num_tiles + tile
        first, middle, end = (
            tl.load(starts_ptr + number), tl.load(middles_ptr + number), tl.load(starts_ptr + number + 1)
        )  # fmt: skip
        b_dk, b_dv = _query_steps(
            b_dk, b_dv, b_k, b_v, desc_q, desc_do, desc_rows, at, head, first, middle, row, steps_ptr,
            bits_ptr, words_ptr, qk_scale, start, S_q, S_k, score, SCORED, FUNCTION, DERIVATIVE, False,
            FLIP, WANT_DK, WANT_DV, STEP, NUM_STAGES, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        if PARTIAL:
            b_dk, b_dv = _query_steps(
                b_dk, b_dv, b_k, b_v, desc_q, desc_do, desc_rows, at, head, middle, end, row, steps_ptr,
                bits_ptr, words_ptr, qk_scale, start, S_q, S_k, score, SCORED, FUNCTION, DERIVATIVE, True,
                FLIP, WANT_DK, WANT_DV, STEP, 1, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
    if WANT_DK:
        store_tile(desc_dk, b_dk * sm_scale, (i_b, i_kv), start, BLOCK_N, BLOCK_D)
    if WANT_DV:
        store_tile(desc_dv, b_dv, (i_b, i_kv), start, BLOCK_N, BLOCK_D)
