"""Gradients of alpha-entmax attention, over listed keys and listed queries.

With x = [s - tau]_+, p = x^(1 / (alpha - 1)) and u = p^(2 - alpha), the derivative of p by the scores
z = sm_scale * q k^T is diag(u) - u u^T / sum(u). So with dP = dO V^T

    delta = sum_j u_j dP_j / sum_j u_j,  dZ = u * (dP - delta)

and dV = P^T dO, dK = sm_scale * dZ^T Q, dQ = sm_scale * dZ K. A key without weight has u = 0 and no part in
any of them: `attention_entmax_dq` walks along the list of its block of queries, twice, as delta has to be
known first; `attention_entmax_dkdv` walks along the list of queries of its block of keys. No atomics, so that
the same inputs give the same bits.
"""

import triton
import triton.language as tl

from attnlib.kernels.common.tile_access import load_tile, store_tile
from attnlib.kernels.entmax.forward_kernel import excess
from attnlib.kernels.entmax.walk import ROWS, gather, last_visible, listed, place, powers


@triton.jit
def _weights(b_q, b_do, b_t, k_ptr, v_ptr, list_ptr, k_s, v_s, scale, exponent, start, count, room, S_k, last_key,
             KIND: tl.constexpr, UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """(u, dP, keys) of a tile of a list: [BLOCK_M, BLOCK_N] twice, [BLOCK_N, BLOCK_D]."""
    b_index = listed(list_ptr, start, count, 0, S_k, room, BLOCK_N)  # [BLOCK_N]
    b_k = gather(k_ptr, b_index, S_k, k_s, UNIT, HEAD_DIM, BLOCK_D)
    b_v = gather(v_ptr, b_index, S_k, v_s, UNIT, HEAD_DIM, BLOCK_D)
    b_x = excess(b_q, b_k, b_t, scale, last_key, b_index, PRECISION)
    b_dp = tl.dot(b_do, b_v.T, input_precision=PRECISION)
    _, b_u = powers(b_x, exponent, KIND)
    return b_u, b_dp, b_k


@triton.jit(do_not_specialize=["S_q", "S_k", "H", "HEADS", "room", "k_b", "k_h", "k_s", "v_b", "v_h", "v_s"])
def attention_entmax_dq(
    desc_q, desc_do, desc_dq,  # (B, H, S_q, D)
    k_ptr, v_ptr,  # (B, H_kv, S_k, D)
    tau_ptr, delta_ptr,  # (HEADS, S_q)
    lists_ptr, counts_ptr, room,  # keys of each block of 64 rows, see `entmax_lists`
    scale,  # (alpha - 1) * sm_scale
    sm_scale,
    exponent,  # 1 / (alpha - 1)
    S_q, S_k,
    H,  # query heads
    HEADS,  # B * H
    k_b, k_h, k_s, v_b, v_h, v_s,  # strides in units of UNIT elements
    GROUP: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    SECTION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """delta and dQ of a block of queries. Grid: (blocks of BLOCK_M rows * HEADS,)."""
    i_m, head = place(tl.cdiv(S_q, BLOCK_M), HEADS, SECTION)
    start = i_m * BLOCK_M
    i_b, i_h = head // H, head % H
    k_ptr += (i_b.to(tl.int64) * k_b + (i_h // GROUP).to(tl.int64) * k_h) * UNIT
    v_ptr += (i_b.to(tl.int64) * v_b + (i_h // GROUP).to(tl.int64) * v_h) * UNIT
    o_m = start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    last_key = last_visible(o_m, S_q, S_k, CAUSAL)
    own = head.to(tl.int64) * tl.cdiv(S_q, ROWS) + start // ROWS
    lists_ptr += own * room
    count = tl.load(counts_ptr + own)
    walked = count
    if count > room:
        walked = S_k
        if CAUSAL:
            walked = tl.maximum(tl.minimum(start + BLOCK_M + S_k - S_q, S_k), 0)
    b_q = load_tile(desc_q, (i_b, i_h), start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    b_do = load_tile(desc_do, (i_b, i_h), start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    row = head.to(tl.int64) * S_q + o_m
    b_t = tl.load(tau_ptr + row, mask=o_m < S_q, other=float("inf"))  # [BLOCK_M]
    b_u_dp = tl.zeros([BLOCK_M], tl.float32)
    b_u_sum = tl.zeros([BLOCK_M], tl.float32)
    for at in tl.range(0, walked, BLOCK_N, num_stages=NUM_STAGES):
        b_u, b_dp, _ = _weights(
            b_q, b_do, b_t, k_ptr, v_ptr, lists_ptr, k_s, v_s, scale, exponent, at, count, room, S_k, last_key,
            KIND, UNIT, BLOCK_N, BLOCK_D, HEAD_DIM, PRECISION,
        )  # fmt: skip
        b_u_dp += tl.sum(b_u * b_dp, 1)
        b_u_sum += tl.sum(b_u, 1)
    b_delta = b_u_dp / tl.where(b_u_sum > 0.0, b_u_sum, 1.0)  # [BLOCK_M]
    tl.store(delta_ptr + row, b_delta, mask=o_m < S_q)
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for at in tl.range(0, walked, BLOCK_N, num_stages=NUM_STAGES):
        b_u, b_dp, b_k = _weights(
            b_q, b_do, b_t, k_ptr, v_ptr, lists_ptr, k_s, v_s, scale, exponent, at, count, room, S_k, last_key,
            KIND, UNIT, BLOCK_N, BLOCK_D, HEAD_DIM, PRECISION,
        )  # fmt: skip
        b_dz = b_u * (b_dp - b_delta[:, None])  # [BLOCK_M, BLOCK_N]
        b_dq = tl.dot(b_dz.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    store_tile(desc_dq, b_dq * sm_scale, (i_b, i_h), start, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize="S_q S_k H H_kv KV_HEADS blocks room q_b q_h q_s do_b do_h do_s".split())
def attention_entmax_dkdv(
    q_ptr, do_ptr,  # (B, H, S_q, D)
    desc_k, desc_v, desc_dk, desc_dv,  # (B, H_kv, S_k, D)
    tau_ptr, delta_ptr,  # (B * H, S_q)
    lists_ptr, counts_ptr, room,  # queries of each block of 64 keys, for each query head
    scale, sm_scale, exponent, S_q, S_k,  # as in `attention_entmax_dq`
    H, H_kv,
    KV_HEADS,  # B * H_kv
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
    num_n = tl.cdiv(S_k, BLOCK_N)
    i_n, head = place(num_n, KV_HEADS, SECTION)
    start = (num_n - 1 - i_n) * BLOCK_N  # causal, the first keys have the longest lists
    i_b, i_kv = head // H_kv, head % H_kv
    b_k = load_tile(desc_k, (i_b, i_kv), start, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    b_v = load_tile(desc_v, (i_b, i_kv), start, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    o_n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    q_ptr += i_b.to(tl.int64) * q_b * UNIT
    do_ptr += i_b.to(tl.int64) * do_b * UNIT
    first = 0
    if CAUSAL:
        first = tl.minimum(tl.maximum(start - (S_k - S_q), 0), S_q)  # the first query that sees a key
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for g in range(GROUP):
        i_h = i_kv * GROUP + g
        own = (i_b * H + i_h).to(tl.int64) * blocks + start // ROWS
        rows = (i_b * H + i_h).to(tl.int64) * S_q
        head_q = q_ptr + i_h.to(tl.int64) * q_h * UNIT
        head_do = do_ptr + i_h.to(tl.int64) * do_h * UNIT
        count = tl.load(counts_ptr + own)
        walked = tl.where(count > room, S_q - first, count)
        for at in tl.range(0, walked, BLOCK_M, num_stages=NUM_STAGES):
            b_index = listed(lists_ptr + own * room, at, count, first, S_q, room, BLOCK_M)  # [BLOCK_M]
            b_q = gather(head_q, b_index, S_q, q_s, UNIT, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
            b_do = gather(head_do, b_index, S_q, do_s, UNIT, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
            b_t = tl.load(tau_ptr + rows + b_index, mask=b_index < S_q, other=float("inf"))  # [BLOCK_M]
            b_st = tl.dot(b_k, b_q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
            b_x = tl.maximum(b_st * scale - b_t[None, :], 0.0)
            if CAUSAL:
                last_key = last_visible(b_index, S_q, S_k, True)
                b_x = tl.where(o_n[:, None] <= last_key[None, :], b_x, 0.0)
            b_pt, b_ut = powers(b_x, exponent, KIND)  # [BLOCK_N, BLOCK_M]
            if WANT_DV:
                b_dv = tl.dot(b_pt.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
            if WANT_DK:
                b_delta = tl.load(delta_ptr + rows + b_index, mask=b_index < S_q, other=0.0)  # [BLOCK_M]
                b_dpt = tl.dot(b_v, b_do.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
                b_dzt = b_ut * (b_dpt - b_delta[None, :])
                b_dk = tl.dot(b_dzt.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    if WANT_DK:
        store_tile(desc_dk, b_dk * sm_scale, (i_b, i_kv), start, BLOCK_N, BLOCK_D)
    if WANT_DV:
        store_tile(desc_dv, b_dv, (i_b, i_kv), start, BLOCK_N, BLOCK_D)
