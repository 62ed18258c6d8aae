"""Solutions of the exercises of chapter 03."""

import numpy as np
import torch
import triton
import triton.language as tl


def merge(x, y):
    """(m, l, o) of the union of two disjoint sets of keys; x and y are such triples."""
    m1, l1, o1 = x
    m2, l2, o2 = y
    m = np.maximum(m1, m2)
    pivot = np.where(np.isfinite(m), m, 0)  # -inf - -inf is NaN
    scale1, scale2 = np.exp(m1 - pivot), np.exp(m2 - pivot)
    return m, l1 * scale1 + l2 * scale2, o1 * scale1[:, None] + o2 * scale2[:, None]


def merge_outputs(out1, lse1, out2, lse2):
    """out [n, D] and lse [n] of all keys, from two splits: normalized outputs [n, D], natural-log LSE [n]."""
    m, row_sum, out = merge((lse1, np.ones_like(lse1), out1), (lse2, np.ones_like(lse2), out2))
    return out / row_sum[:, None], m + np.log(row_sum)


@triton.jit
def one_head_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, S, sm_scale, D: tl.constexpr, BLOCK: tl.constexpr):
    o_m, o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)  # [BLOCK], [D]
    o_q = o_m[:, None] * D + o_d[None, :]  # [BLOCK, D]
    b_q = tl.load(q_ptr + o_q, mask=o_m[:, None] < S, other=0.0)  # [BLOCK, D]
    b_m = tl.full([BLOCK], float("-inf"), tl.float32)  # [BLOCK]
    b_l = tl.zeros([BLOCK], tl.float32)  # [BLOCK]
    b_o = tl.zeros([BLOCK, D], tl.float32)  # [BLOCK, D]
    for start in range(0, S, BLOCK):
        o_n = start + tl.arange(0, BLOCK)  # [BLOCK]
        o_kv = o_n[:, None] * D + o_d[None, :]  # [BLOCK, D]
        b_k = tl.load(k_ptr + o_kv, mask=o_n[:, None] < S, other=0.0)  # [BLOCK, D]
        b_v = tl.load(v_ptr + o_kv, mask=o_n[:, None] < S, other=0.0)  # [BLOCK, D]
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee") * sm_scale  # [BLOCK, BLOCK] fp32
        b_s = tl.where(o_n[None, :] < S, b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))  # [BLOCK]
        b_p = tl.exp(b_s - b_m_new[:, None])  # [BLOCK, BLOCK]
        b_alpha = tl.exp(b_m - b_m_new)  # [BLOCK]
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        # the bug: b_o was not brought to the new max
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None], input_precision="ieee")
        b_m = b_m_new
    tl.store(o_ptr + o_q, (b_o / b_l[:, None]).to(o_ptr.dtype.element_ty), mask=o_m[:, None] < S)
    tl.store(lse_ptr + o_m, b_m + tl.log(b_l), mask=o_m < S)


def one_head(q, k, v, sm_scale):
    """q, k, v [S, D] -> O [S, D] in their dtype and LSE [S] fp32, dense."""
    o, lse = torch.empty_like(q), torch.empty(len(q), dtype=torch.float32, device=q.device)
    one_head_kernel[(triton.cdiv(len(q), 32),)](q, k, v, o, lse, len(q), sm_scale, q.shape[1], 32)
    return o, lse


@triton.jit
def causal_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, S, sm_scale, D: tl.constexpr, BLOCK: tl.constexpr):
    o_m, o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)  # [BLOCK], [D]
    o_q = o_m[:, None] * D + o_d[None, :]  # [BLOCK, D]
    b_q = tl.load(q_ptr + o_q, mask=o_m[:, None] < S, other=0.0)  # [BLOCK, D]
    b_m = tl.full([BLOCK], float("-inf"), tl.float32)  # [BLOCK]
    b_l = tl.zeros([BLOCK], tl.float32)  # [BLOCK]
    b_o = tl.zeros([BLOCK, D], tl.float32)  # [BLOCK, D]
    for start in range(0, tl.minimum(S, (tl.program_id(0) + 1) * BLOCK), BLOCK):
        o_n = start + tl.arange(0, BLOCK)  # [BLOCK]
        o_kv = o_n[:, None] * D + o_d[None, :]  # [BLOCK, D]
        b_k = tl.load(k_ptr + o_kv, mask=o_n[:, None] < S, other=0.0)  # [BLOCK, D]
        b_v = tl.load(v_ptr + o_kv, mask=o_n[:, None] < S, other=0.0)  # [BLOCK, D]
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee") * sm_scale  # [BLOCK, BLOCK] fp32
        b_s = tl.where(o_n[None, :] <= o_m[:, None], b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))  # [BLOCK] finite: every row sees key 0
        b_p = tl.exp(b_s - b_m_new[:, None])  # [BLOCK, BLOCK]
        b_alpha = tl.exp(b_m - b_m_new)  # [BLOCK]
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None], input_precision="ieee")
        b_m = b_m_new
    tl.store(o_ptr + o_q, (b_o / b_l[:, None]).to(o_ptr.dtype.element_ty), mask=o_m[:, None] < S)
    tl.store(lse_ptr + o_m, b_m + tl.log(b_l), mask=o_m < S)


def causal_head(q, k, v, sm_scale):
    """q, k, v [S, D] -> O [S, D] in their dtype and LSE [S] fp32, causal."""
    o, lse = torch.empty_like(q), torch.empty(len(q), dtype=torch.float32, device=q.device)
    causal_kernel[(triton.cdiv(len(q), 32),)](q, k, v, o, lse, len(q), sm_scale, q.shape[1], 32)
    return o, lse
