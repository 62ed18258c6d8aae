"""Solutions of the exercises of chapter 20."""

import numpy as np
import torch
import triton
import triton.language as tl


def query_blocks(i_n, S_q, S_k, BLOCK_M, BLOCK_N):
    """(numbers of query blocks to visit with a mask, numbers of those to visit without)."""
    shift = S_k - S_q
    first_key, last_key = i_n * BLOCK_N, min(S_k, (i_n + 1) * BLOCK_N) - 1
    masked, full = [], []
    for m in range(-(-S_q // BLOCK_M)):
        first_row, last_row = m * BLOCK_M, min(S_q, (m + 1) * BLOCK_M) - 1
        if last_row + shift < first_key:
            continue
        (full if first_row + shift >= last_key else masked).append(m)
    return masked, full


def softcap_backward(d_out, q, k, v, out, lse, sm_scale, cap):
    """dq, dk, dv of causal attention whose scores are cap * tanh(scores / cap)."""
    bounded = np.tanh(sm_scale * q @ k.T / cap)  # the tile has it: the capped scores over the cap
    seen = np.tri(len(q), len(k), dtype=bool)
    p = np.where(seen, np.exp(np.where(seen, cap * bounded, -np.inf) - lse[:, None]), 0.0)
    delta = (d_out * out).sum(1, keepdims=True)
    ds = p * (d_out @ v.T - delta) * (1 - bounded**2)
    return sm_scale * ds @ k, sm_scale * ds.T @ q, p.T @ d_out


@triton.jit
def grouped_dv_kernel(d_out_ptr, q_ptr, k_ptr, lse_ptr, dv_ptr, S, group, qk_scale, D: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i_n, i_kv = tl.program_id(0), tl.program_id(1)  # which keys of which head of K and V
    o_n, o_d = i_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, D)  # [BLOCK_N], [D]
    o_kv = i_kv.to(tl.int64) * S * D + o_n[:, None] * D + o_d[None, :]  # [BLOCK_N, D]
    b_k = tl.load(k_ptr + o_kv, mask=o_n[:, None] < S, other=0.0)  # [BLOCK_N, D]
    b_dv = tl.zeros([BLOCK_N, D], tl.float32)  # [BLOCK_N, D]
    for g in range(group):
        i_h = i_kv * group + g  # a head that reads this K and V
        for start in range(i_n * BLOCK_N, S, BLOCK_M):  # no row above the diagonal sees these keys
            o_m = start + tl.arange(0, BLOCK_M)  # [BLOCK_M] query numbers
            o_q = i_h.to(tl.int64) * S * D + o_m[:, None] * D + o_d[None, :]  # [BLOCK_M, D]
            b_q = tl.load(q_ptr + o_q, mask=o_m[:, None] < S, other=0.0)  # [BLOCK_M, D]
            b_do = tl.load(d_out_ptr + o_q, mask=o_m[:, None] < S, other=0.0)  # [BLOCK_M, D]
            b_lse = tl.load(lse_ptr + i_h * S + o_m, mask=o_m < S, other=float("inf"))  # [BLOCK_M]
            b_et = tl.dot(b_k, b_q.T) * qk_scale - (b_lse * 1.4426950408889634)[None, :]  # [BLOCK_N, BLOCK_M]
            b_et = tl.where(o_n[:, None] <= o_m[None, :], b_et, float("-inf"))
            b_dv = tl.dot(tl.exp2(b_et).to(b_do.dtype), b_do, b_dv)  # [BLOCK_N, D]
    tl.store(dv_ptr + o_kv, b_dv.to(dv_ptr.dtype.element_ty), mask=o_n[:, None] < S)


def grouped_dv(d_out, q, k, lse, sm_scale):
    (B, H, S, D), H_kv, dv = q.shape, k.shape[1], torch.empty_like(k)
    grouped_dv_kernel[(triton.cdiv(S, 64), B * H_kv)](
        d_out, q, k, lse, dv, S, H // H_kv, sm_scale * 1.4426950408889634, D, 32, 64)
    return dv
