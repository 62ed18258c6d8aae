"""Gradients of alpha-entmax attention, over listed keys and listed queries.

With x = [s - tau]_+, p = x^(1 / (alpha - 1)) and u = p^(2 - alpha), the derivative of p by the scores
z = sm_scale * q k^T is diag(u) - u u^T / sum(u). So with dP = dO V^T

    delta = sum_j u_j dP_j / sum_j u_j,  dZ = u * (dP - delta)

and dV = P^T dO, dK = sm_scale * dZ^T Q, dQ = sm_scale * dZ K. A key without weight has u = 0 and no part in
any of them: `attention_entmax_dq` walks along the list of its block of queries, `attention_entmax_dkdv` along
the list of queries of its block of keys. No atomics, so that the same inputs give the same bits.

delta is known at the end of the first walk only. So that walk takes a guess in its place, the mean of dP by
the weights p, which is dO O^T; and as dZ is linear in delta,

    dQ = sm_scale * (sum_j u_j (dP_j - guess) K_j - rest * sum_j u_j K_j)
    rest = delta - guess = sum_j u_j (dP_j - guess) / sum_j u_j

With a guess of 0 the two sums would be large where all values have a common part, and cancel.
"""

import triton
import triton.language as tl

from attnlib.kernels.common.program_order import downwards
from attnlib.kernels.common.tile_access import VARLEN_ROWS, load_tile, store_tile
from attnlib.kernels.entmax.forward_kernel import excess, index_of
from attnlib.kernels.entmax.walk import (
    ROWS,
    blocks_of,
    gather,
    head_of,
    last_visible,
    list_of,
    powers,
    query_block,
    rows_of,
    varlen_block,
)


@triton.jit
def _dq(b_dq, b_u_k, b_dz_sum, b_u_sum, b_q, b_do, b_t, b_guess, k_ptr, v_ptr, list_ptr, k_s, v_s, scale,
        exponent, first, end, count, last_key, MASKED: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr,
        NUM_STAGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
        PRECISION: tl.constexpr):  # fmt: skip
    """Add what a part of a list gives to dQ as the guess has it (not yet scaled) and to sum(u K)
    [BLOCK_M, BLOCK_D], and to sum(u (dP - guess)) and sum(u) [BLOCK_M]."""
    for at in tl.range(first, end, BLOCK_N, num_stages=NUM_STAGES, disable_licm=MASKED):
        b_index = index_of(list_ptr, at, count, MASKED, BLOCK_N)  # [BLOCK_N]
        b_k = gather(k_ptr, b_index, k_s, UNIT, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_v = gather(v_ptr, b_index, v_s, UNIT, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        b_dp = tl.dot(b_do, b_v.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        b_x = excess(b_s, b_t, at, count, b_index, last_key, scale, MASKED, BLOCK_N)
        _, b_u = powers(b_x, exponent, KIND)  # [BLOCK_M, BLOCK_N]
        b_dz = b_u * (b_dp - b_guess[:, None])
        b_dz_sum += tl.sum(b_dz, 1)
        b_u_sum += tl.sum(b_u, 1)
        b_u_k = tl.dot(b_u.to(b_k.dtype), b_k, b_u_k, input_precision=PRECISION)
        b_dq = tl.dot(b_dz.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    return b_dq, b_u_k, b_dz_sum, b_u_sum


@triton.jit
def _dkdv(b_dk, b_dv, b_k, b_v, q_ptr, do_ptr, rows_ptr, list_ptr, q_s, do_s, scale, exponent,
          first, end, gap, skipped, count, diagonal, o_n, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
          KIND: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, UNIT: tl.constexpr,
          NUM_STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """Add what a part of a list of queries gives to dK (not yet scaled) and dV: elements first .. end - 1, of
    which those from `gap` on stand `skipped` further on."""
    for i in tl.range(first, end, BLOCK_M, num_stages=NUM_STAGES):
        at = i
        if MASKED:
            at += tl.where(i < gap, 0, skipped)
        b_index = index_of(list_ptr, at, count, MASKED, BLOCK_M)  # [BLOCK_M]
        b_q = gather(q_ptr, b_index, q_s, UNIT, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        b_do = gather(do_ptr, b_index, do_s, UNIT, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        at_row = b_index.to(tl.int64)[:, None] * 2 + tl.arange(0, 2)[None, :]
        b_t, b_delta = tl.split(tl.load(rows_ptr + at_row))  # [BLOCK_M] each
        b_st = tl.dot(b_k, b_q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        b_dpt = tl.dot(b_v, b_do.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        b_x = tl.maximum(b_st * scale - b_t[None, :], 0.0)
        if MASKED:
            seen = (at + tl.arange(0, BLOCK_M) < count)[None, :]
            if CAUSAL:
                seen = seen & (o_n[:, None] <= (b_index + diagonal)[None, :])
            b_x = tl.where(seen, b_x, 0.0)
        b_pt, b_ut = powers(b_x, exponent, KIND)  # [BLOCK_N, BLOCK_M]
        if WANT_DV:
            b_dv = tl.dot(b_pt.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        if WANT_DK:
            b_dzt = b_ut * (b_dpt - b_delta[None, :])
            b_dk = tl.dot(b_dzt.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    return b_dk, b_dv


@triton.jit(
    do_not_specialize="S_q S_k H HEADS B room identity k_b k_h k_s v_b v_h v_s".split(),
    do_not_specialize_on_alignment=["cu_q", "cu_k"],
)
def attention_entmax_dq(
    desc_q, desc_o, desc_do, desc_dq,  # (B, H, S_q, D)
    k_ptr, v_ptr,  # (B, H_kv, S_k, D)
    tau_ptr,  # (HEADS, S_q)
    rows_ptr,  # (HEADS, S_q, 2): tau, delta
    lists_ptr, records_ptr, room, identity,  # keys of each block of 64 rows, see `entmax_lists`
    scale,  # (alpha - 1) * sm_scale
    sm_scale,
    exponent,  # 1 / (alpha - 1)
    S_q, S_k,  # of varlen sequences all together
    H,  # query heads
    HEADS,  # B * H, of varlen sequences H
    cu_q, cu_k, B,  # of varlen sequences: where they begin and end [B + 1]; None for a batch
    k_b, k_h, k_s, v_b, v_h, v_s,  # strides in units of UNIT elements
    GROUP: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    SECTION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """delta and dQ of a block of queries. Grid: (blocks of BLOCK_M rows * HEADS,)."""
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
    own = head.to(tl.int64) * blocks_of(T_q, cu_q, B, ROWS) + i_m * BLOCK_M // ROWS
    list_ptr, count, middle = list_of(lists_ptr, records_ptr, own, room, identity)
    whole = middle // BLOCK_N * BLOCK_N  # tiles up to here need no mask
    b_q = load_tile(desc_q, at_q, start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    b_do = load_tile(desc_do, at_q, start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    row = rows_of(at_q, head, S_q, T_q) + o_m
    b_t = tl.load(tau_ptr + row, mask=o_m < S_q, other=float("inf"))  # [BLOCK_M]
    b_o = load_tile(desc_o, at_q, start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    b_guess = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)  # [BLOCK_M]
    b_dz_sum = tl.zeros([BLOCK_M], tl.float32)
    b_u_sum = tl.zeros([BLOCK_M], tl.float32)
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_u_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_dq, b_u_k, b_dz_sum, b_u_sum = _dq(
        b_dq, b_u_k, b_dz_sum, b_u_sum, b_q, b_do, b_t, b_guess, k_ptr, v_ptr, list_ptr, k_s, v_s, scale,
        exponent, 0, whole, count, last_key, False, KIND, UNIT, NUM_STAGES, BLOCK_N, BLOCK_D, HEAD_DIM,
        PRECISION,
    )  # fmt: skip
    b_dq, b_u_k, b_dz_sum, b_u_sum = _dq(
        b_dq, b_u_k, b_dz_sum, b_u_sum, b_q, b_do, b_t, b_guess, k_ptr, v_ptr, list_ptr, k_s, v_s, scale,
        exponent, whole, count, count, last_key, True, KIND, UNIT, 1, BLOCK_N, BLOCK_D, HEAD_DIM, PRECISION,
    )  # fmt: skip
    b_rest = b_dz_sum / tl.where(b_t == float("inf"), 1.0, b_u_sum)  # [BLOCK_M] NaN where the output is
    tl.store(rows_ptr + 2 * row, b_t, mask=o_m < S_q)
    tl.store(rows_ptr + 2 * row + 1, b_guess + b_rest, mask=o_m < S_q)
    b_dq -= b_rest[:, None] * b_u_k
    store_tile(desc_dq, b_dq * sm_scale, at_q, start, BLOCK_M, BLOCK_D)


@triton.jit(
    do_not_specialize="S_q S_k H H_kv KV_HEADS B blocks room identity q_b q_h q_s do_b do_h do_s".split(),
    do_not_specialize_on_alignment=["cu_q", "cu_k"],
)
def attention_entmax_dkdv(
    q_ptr, do_ptr,  # (B, H, S_q, D)
    desc_k, desc_v, desc_dk, desc_dv,  # (B, H_kv, S_k, D)
    rows_ptr,  # (B * H, S_q, 2): tau, delta
    lists_ptr, records_ptr, room, identity,  # queries of each block of 64 keys, for each query head
    scale, sm_scale, exponent, S_q, S_k,  # as in `attention_entmax_dq`
    H, H_kv,
    KV_HEADS,  # B * H_kv, of varlen sequences H_kv
    cu_q, cu_k, B,  # as in `attention_entmax_dq`
    blocks,  # lists of a head
    q_b, q_h, q_s, do_b, do_h, do_s,  # strides in units of UNIT elements
    GROUP: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,  # which of the two to compute
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    SECTION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys. Grid: (blocks of BLOCK_N keys * KV_HEADS,)."""
    T_q = S_q
    num_n = blocks_of(S_k, cu_k, B, BLOCK_N)
    i_n, head = downwards(num_n, KV_HEADS, SECTION)
    start = (num_n - 1 - i_n) * BLOCK_N  # causal, the first keys have the longest lists
    if cu_k is None:
        i_b, i_kv = head // H_kv, head % H_kv
        at_k = (i_b, i_kv)
    else:
        i_b, i_kv = 0, head
        block = start // ROWS  # among all of a head
        _, start, end_k, S_k, end_q, S_q = varlen_block(start, cu_k, cu_q, B)
        if start >= S_k:
            return
        at_k = end_k, i_kv, tl.sub(VARLEN_ROWS, S_k)
    b_k = load_tile(desc_k, at_k, start, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    b_v = load_tile(desc_v, at_k, start, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    o_n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if cu_k is None:
        q_ptr += i_b.to(tl.int64) * q_b * UNIT
        do_ptr += i_b.to(tl.int64) * do_b * UNIT
    else:
        q_ptr += (end_q - S_q).to(tl.int64) * q_s * UNIT
        do_ptr += (end_q - S_q).to(tl.int64) * do_s * UNIT
        rows_ptr += 2 * (end_q - S_q).to(tl.int64)
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for g in range(GROUP):
        i_h = i_kv * GROUP + g
        own = (i_b * H + i_h).to(tl.int64) * blocks + (start // ROWS if cu_k is None else block)
        list_ptr, count, middle = list_of(lists_ptr, records_ptr, own, room, identity)
        # A mask is needed where the diagonal passes, and in the last tile, which the list may not fill.
        full = tl.minimum(tl.cdiv(middle, BLOCK_M) * BLOCK_M, count // BLOCK_M * BLOCK_M)
        rows = (i_b * H + i_h).to(tl.int64) * T_q
        head_q = q_ptr + i_h.to(tl.int64) * q_h * UNIT
        head_do = do_ptr + i_h.to(tl.int64) * do_h * UNIT
        part = count // BLOCK_M * BLOCK_M
        b_dk, b_dv = _dkdv(
            b_dk, b_dv, b_k, b_v, head_q, head_do, rows_ptr + 2 * rows, list_ptr, q_s, do_s,
            scale, exponent, full, part, 0, 0, count, S_k - S_q, o_n, False, CAUSAL, KIND, WANT_DK, WANT_DV,
            UNIT, NUM_STAGES, BLOCK_M, BLOCK_D, HEAD_DIM, PRECISION,
        )  # fmt: skip
        b_dk, b_dv = _dkdv(
            b_dk, b_dv, b_k, b_v, head_q, head_do, rows_ptr + 2 * rows, list_ptr, q_s, do_s,
            scale, exponent, 0, count - (part - full), full, part - full, count, S_k - S_q, o_n, True, CAUSAL,
            KIND, WANT_DK, WANT_DV, UNIT, 1, BLOCK_M, BLOCK_D, HEAD_DIM, PRECISION,
        )  # fmt: skip
    if WANT_DK:
        store_tile(desc_dk, b_dk * sm_scale, at_k, start, BLOCK_N, BLOCK_D)
    if WANT_DV:
        store_tile(desc_dv, b_dv, at_k, start, BLOCK_N, BLOCK_D)
