"""Gradients of exact attention in plain `triton.language`: any GPU that Triton knows, and its interpreter.

Nothing of size S_q x S_k was kept: P is computed again, tile by tile, from Q, K and the LSE. With

    P = exp(sm_scale * Q K^T - LSE),  dP = dO V^T,  delta = rowsum(dO * O),  dS = P * (dP - delta)

the gradients are dV = P^T dO, dK = sm_scale * dS^T Q, dQ = sm_scale * dS K. Three kernels, no atomics, so
that the same inputs give the same bits (chapter 20):

- `attention_backward_preprocess`: delta, and the LSE in base 2, for rows padded to whole tiles.
- `attention_backward_dkdv`: dK and dV. A program owns a block of keys and visits the queries that see it, of
  every query head that shares these keys. It works on transposed tiles, keys as rows: P^T and dS^T are then
  first operands of a product straight from registers. At D = 256 two accumulators are more than the registers
  hold: then it runs twice, once for each gradient, and computes P twice.
- `attention_backward_dq`: dQ. A program owns a block of queries and visits the keys they see.

Padding rows have an LSE of +inf, and so has a row with nothing to attend to: P is 0 there, without a mask.
Varlen sequences are read and written as the forward does it, see `forward_kernel`; of lse2 and delta each
sequence has its own rows, padded to whole tiles.
"""

import triton
import triton.language as tl

from attnlib.kernels.common.preprocess import DELTA, LSE2
from attnlib.kernels.common.tile_access import VARLEN_ROWS, load_tile, store_tile
from attnlib.kernels.common.varlen_rows import padded_start, sequence


@triton.jit
def _load_rows(desc_rows, which, at, row, BLOCK_M: tl.constexpr):
    """`at`: (batch * head, 0), or of varlen sequences (head, the first row of this one)."""
    # Through a descriptor, though it is a vector: TMA writes it to shared memory once, while every thread of
    # a plain load would fetch the quarter of it that its columns need.
    return desc_rows.load([which, at[0], at[1] + row]).reshape([BLOCK_M])  # [BLOCK_M]


@triton.jit
def _place(num_blocks, H, SECTION: tl.constexpr, FLAT: tl.constexpr):
    """(block, head, batch) of this program. Grid: (blocks * SECTION, H / SECTION, B); FLAT: their product."""
    place, section, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if FLAT:
        section = place // (num_blocks * SECTION) % (H // SECTION)
        i_b = place // (num_blocks * H)
        place = place % (num_blocks * SECTION)
    return place // SECTION, section * SECTION + place % SECTION, i_b


@triton.jit
def _visible(o_m, o_n, diagonal, lowest, S_k, RIGHT: tl.constexpr, LEFT: tl.constexpr, TAIL: tl.constexpr):
    """Which keys the queries see; `o_m` and `o_n` broadcast against each other."""
    seen = o_n >= 0
    if RIGHT:
        seen = seen & (o_n <= o_m + diagonal)
    if LEFT:
        seen = seen & (o_n >= o_m + lowest)
    if TAIL:
        seen = seen & (o_n < S_k)
    return seen


@triton.jit
def _query_tiles(b_dk, b_dv, b_k, b_v, desc_q, desc_do, desc_rows, at, at_rows, first, end, o_n,
                 qk_scale, diagonal, lowest, S_k, MASKED: tl.constexpr, RIGHT: tl.constexpr,
                 LEFT: tl.constexpr, FLIP: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
                 NUM_STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
                 PRECISION: tl.constexpr):
    """Add what the query tiles first .. end - 1 of one head give to dK (not yet scaled) and dV."""
    for i in tl.range(first, end, num_stages=NUM_STAGES):
        row = i * BLOCK_M
        o_m = row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        b_q = load_tile(desc_q, at, row, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        b_lse2 = _load_rows(desc_rows, LSE2, at_rows, row, BLOCK_M)  # [BLOCK_M]
        b_delta = _load_rows(desc_rows, DELTA, at_rows, row, BLOCK_M)  # [BLOCK_M]
        b_st = tl.dot(b_k, b_q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        b_do = load_tile(desc_do, at, row, BLOCK_M, b_dv.shape[1])  # [BLOCK_M, BLOCK_V]
        if WANT_DK:
            b_dpt = tl.dot(b_v, b_do.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        if FLIP:
            b_st = -b_st
        b_pt = tl.math.exp2(b_st * qk_scale - b_lse2[None, :])  # [BLOCK_N, BLOCK_M]
        if MASKED:
            seen = _visible(o_m[None, :], o_n[:, None], diagonal, lowest, S_k, RIGHT, LEFT, False)
            b_pt = tl.where(seen, b_pt, 0.0)
        if WANT_DV:
            b_dv = tl.dot(b_pt.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)  # [BLOCK_N, BLOCK_V]
        if WANT_DK:
            b_dst = b_pt * (b_dpt - b_delta[None, :])  # [BLOCK_N, BLOCK_M]
            b_dk = tl.dot(b_dst.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
    return b_dk, b_dv


@triton.jit(
    do_not_specialize=["S_q", "S_k", "H_kv", "right", "left"],
    do_not_specialize_on_alignment=["cu_q", "cu_k"],
)
def attention_backward_dkdv(
    desc_q, desc_do,  # (B, H, S_q, D), or varlen (T_q, H, D)
    desc_k, desc_v, desc_dk, desc_dv,  # (B, H_kv, S_k, D), or varlen (T_k, H_kv, D)
    desc_rows,  # (2, B * H, padded), or varlen (2, H, padded): lse2 and delta
    cu_q, cu_k,  # (B + 1), None for a batch
    qk_scale,  # |sm_scale| * log2(e), positive
    sm_scale,
    S_q, S_k,  # of varlen sequences the longest
    H_kv,  # key/value heads
    right, left,  # bounds of the mask window
    GROUP: tl.constexpr,  # query heads that share one key/value head
    PADDING: tl.constexpr,  # of rows in desc_rows
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,  # columns of queries and keys, of values and outputs
    RIGHT: tl.constexpr, LEFT: tl.constexpr,  # whether the window has such a bound
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,  # which of the two to compute
    FLIP: tl.constexpr,  # sm_scale is negative
    SECTION: tl.constexpr,  # heads that advance together, so that their queries stay in L2
    FLAT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys; see the module docstring. The longest blocks, causal, come first."""
    num_n = tl.cdiv(S_k, BLOCK_N)
    i_n, i_kv, i_b = _place(num_n, H_kv, SECTION, FLAT)
    start = i_n * BLOCK_N
    if cu_q is None:
        at_k = (i_b, i_kv)
    else:
        end_q, S_q = sequence(cu_q, i_b)
        end_k, S_k = sequence(cu_k, i_b)
        if start >= S_k:
            return
        at_k = (end_k, i_kv, tl.sub(VARLEN_ROWS, S_k))
    o_n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    # Query i stands at i + S_k - S_q among the keys.
    diagonal = S_k - S_q + right  # query i sees keys up to i + diagonal ...
    lowest = S_k - S_q - left  # ... from i + lowest on

    # Query tiles: first .. full see some of the block, full .. part all of it, part .. end some again.
    num_m = tl.cdiv(S_q, BLOCK_M)
    first, full, part, end = 0, 0, num_m, num_m
    if RIGHT:
        first = tl.minimum(tl.maximum(start - diagonal, 0) // BLOCK_M, num_m)
        full = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK_N - 1 - diagonal, 0), BLOCK_M), num_m)
    if LEFT:
        end = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK_N - lowest, 0), BLOCK_M), num_m)
        first = tl.minimum(first, end)
        full = tl.minimum(full, end)
        part = tl.minimum(tl.maximum((start - lowest + 1) // BLOCK_M, full), end)

    b_k = load_tile(desc_k, at_k, start, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    b_v = load_tile(desc_v, at_k, start, BLOCK_N, BLOCK_V)  # [BLOCK_N, BLOCK_V]
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for g in range(GROUP):
        i_h = i_kv * GROUP + g
        if cu_q is None:
            at_q, at_rows = (i_b, i_h), (i_b * H_kv * GROUP + i_h, 0)
        else:
            at_q = end_q, i_h, tl.sub(VARLEN_ROWS, S_q)
            at_rows = i_h, padded_start(end_q - S_q, i_b, PADDING)
        if RIGHT:
            b_dk, b_dv = _query_tiles(
                b_dk, b_dv, b_k, b_v, desc_q, desc_do, desc_rows, at_q, at_rows, first, full, o_n,
                qk_scale, diagonal, lowest, S_k, True, RIGHT, LEFT, FLIP, WANT_DK, WANT_DV, NUM_STAGES,
                BLOCK_M, BLOCK_D, PRECISION,
            )  # fmt: skip
        b_dk, b_dv = _query_tiles(
            b_dk, b_dv, b_k, b_v, desc_q, desc_do, desc_rows, at_q, at_rows, full, part, o_n,
            qk_scale, diagonal, lowest, S_k, False, RIGHT, LEFT, FLIP, WANT_DK, WANT_DV, NUM_STAGES,
            BLOCK_M, BLOCK_D, PRECISION,
        )  # fmt: skip
        if LEFT:
            b_dk, b_dv = _query_tiles(
                b_dk, b_dv, b_k, b_v, desc_q, desc_do, desc_rows, at_q, at_rows, part, end, o_n,
                qk_scale, diagonal, lowest, S_k, True, RIGHT, LEFT, FLIP, WANT_DK, WANT_DV, NUM_STAGES,
                BLOCK_M, BLOCK_D, PRECISION,
            )  # fmt: skip
    # Keys past S_k have had P = exp2(-lse2), which may be inf; a row of dK and dV has only to do with its own
    # key, and these rows are not stored.
    if WANT_DK:
        store_tile(desc_dk, b_dk * sm_scale, at_k, start, BLOCK_N, BLOCK_D)
    if WANT_DV:
        store_tile(desc_dv, b_dv, at_k, start, BLOCK_N, BLOCK_V)


@triton.jit
def _key_tiles(b_dq, b_q, b_do, b_lse2, b_delta, desc_k, desc_v, at, first, end, o_m, qk_scale,
               diagonal, lowest, S_k, MASKED: tl.constexpr, RIGHT: tl.constexpr, LEFT: tl.constexpr,
               TAIL: tl.constexpr, FLIP: tl.constexpr, NUM_STAGES: tl.constexpr, BLOCK_N: tl.constexpr,
               BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """Add what the key tiles first .. end - 1 give to dQ (not yet scaled)."""
    for j in tl.range(first, end, num_stages=NUM_STAGES):
        row = j * BLOCK_N
        b_k = load_tile(desc_k, at, row, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        b_v = load_tile(desc_v, at, row, BLOCK_N, b_do.shape[1])  # [BLOCK_N, BLOCK_V]
        b_dp = tl.dot(b_do, b_v.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if FLIP:
            b_s = -b_s
        b_p = tl.math.exp2(b_s * qk_scale - b_lse2[:, None])  # [BLOCK_M, BLOCK_N]
        if MASKED:
            o_n = row + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            seen = _visible(o_m[:, None], o_n[None, :], diagonal, lowest, S_k, RIGHT, LEFT, TAIL)
            b_p = tl.where(seen, b_p, 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None])  # [BLOCK_M, BLOCK_N]
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return b_dq


@triton.jit(
    do_not_specialize=["S_q", "S_k", "H", "right", "left"],
    do_not_specialize_on_alignment=["cu_q", "cu_k"],
)
def attention_backward_dq(
    desc_q, desc_do, desc_dq,  # (B, H, S_q, D), or varlen (T_q, H, D)
    desc_k, desc_v,  # (B, H_kv, S_k, D), or varlen (T_k, H_kv, D)
    desc_rows,  # (2, B * H, padded), or varlen (2, H, padded): lse2 and delta
    cu_q, cu_k,  # (B + 1), None for a batch
    qk_scale,  # |sm_scale| * log2(e), positive
    sm_scale,
    S_q, S_k,  # of varlen sequences the longest
    H,  # query heads
    right, left,  # bounds of the mask window
    GROUP: tl.constexpr,  # query heads that share one key/value head
    PADDING: tl.constexpr,  # of rows in desc_rows
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,  # columns of queries and keys, of values and outputs
    RIGHT: tl.constexpr, LEFT: tl.constexpr,  # whether the window has such a bound
    TAIL: tl.constexpr,  # S_k may be no multiple of BLOCK_N, and the right bound may not hide what is past it
    FLIP: tl.constexpr,  # sm_scale is negative
    SECTION: tl.constexpr,  # heads that advance together, so that their keys and values stay in L2
    FLAT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of a block of queries; see the module docstring. Longest blocks first: causal, the last ones."""
    num_m = tl.cdiv(S_q, BLOCK_M)
    i_m, i_h, i_b = _place(num_m, H, SECTION, FLAT)
    i_m = num_m - 1 - i_m
    i_kv = i_h // GROUP
    start = i_m * BLOCK_M
    if cu_q is None:
        at_q, at_k, at_rows = (i_b, i_h), (i_b, i_kv), (i_b * H + i_h, 0)
    else:
        end_q, S_q = sequence(cu_q, i_b)
        end_k, S_k = sequence(cu_k, i_b)
        if start >= S_q:
            return
        at_q, at_k = (end_q, i_h, tl.sub(VARLEN_ROWS, S_q)), (end_k, i_kv, tl.sub(VARLEN_ROWS, S_k))
        at_rows = (i_h, padded_start(end_q - S_q, i_b, PADDING))
    o_m = start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    diagonal = S_k - S_q + right
    lowest = S_k - S_q - left

    # Key tiles: first .. full are seen by some of the rows, full .. part by all, part .. end by some again.
    num_n = tl.cdiv(S_k, BLOCK_N)
    first, full, part, end = 0, 0, S_k // BLOCK_N, num_n
    if RIGHT:
        end = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK_M + diagonal, 0), BLOCK_N), num_n)
        part = tl.minimum(tl.minimum(tl.maximum(start + 1 + diagonal, 0) // BLOCK_N, part), end)
    if LEFT:
        first = tl.minimum(tl.maximum(start + lowest, 0) // BLOCK_N, end)
        full = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK_M - 1 + lowest, 0), BLOCK_N), end)
        part = tl.maximum(part, full)

    b_q = load_tile(desc_q, at_q, start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    b_do = load_tile(desc_do, at_q, start, BLOCK_M, BLOCK_V)  # [BLOCK_M, BLOCK_V]
    b_lse2 = _load_rows(desc_rows, LSE2, at_rows, start, BLOCK_M)  # [BLOCK_M]
    b_delta = _load_rows(desc_rows, DELTA, at_rows, start, BLOCK_M)  # [BLOCK_M]
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if LEFT:
        b_dq = _key_tiles(
            b_dq, b_q, b_do, b_lse2, b_delta, desc_k, desc_v, at_k, first, full, o_m, qk_scale, diagonal,
            lowest, S_k, True, RIGHT, LEFT, TAIL, FLIP, NUM_STAGES, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    b_dq = _key_tiles(
        b_dq, b_q, b_do, b_lse2, b_delta, desc_k, desc_v, at_k, full, part, o_m, qk_scale, diagonal,
        lowest, S_k, False, RIGHT, LEFT, TAIL, FLIP, NUM_STAGES, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    if RIGHT or TAIL:
        b_dq = _key_tiles(
            b_dq, b_q, b_do, b_lse2, b_delta, desc_k, desc_v, at_k, part, end, o_m, qk_scale, diagonal,
            lowest, S_k, True, RIGHT, LEFT, TAIL, FLIP, NUM_STAGES, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    store_tile(desc_dq, b_dq * sm_scale, at_q, start, BLOCK_M, BLOCK_D)
