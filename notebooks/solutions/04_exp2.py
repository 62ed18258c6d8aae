"""Solutions of the exercises of chapter 04."""

import math

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # exp(x) = 2^(x * LOG2_E)


def balanced_head_dim(tensor_flop_per_clock, exp_per_clock):
    # 4 D / tensor_flop_per_clock = 1 / exp_per_clock. Tensor cores twice as fast double D.
    return tensor_flop_per_clock / (4 * exp_per_clock)


def lse_from_raw(b_m, b_l, sm_scale):
    qk_scale = sm_scale * math.log2(math.e)
    return (b_m * qk_scale + torch.log2(b_l)) * math.log(2)


def attention_any_scale(attention, q, k, v, causal, sm_scale):
    if sm_scale < 0:
        return attention(-q, k, v, causal, -sm_scale)
    if sm_scale == 0:
        return attention(torch.zeros_like(q), k, v, causal, 1.0)
    return attention(q, k, v, causal, sm_scale)


@triton.jit
def signed_forward(q_ptr, k_ptr, v_ptr, o_ptr, S, qk_scale, D: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr):
    o_head = tl.program_id(1).to(tl.int64) * S * D
    q_ptr, k_ptr, v_ptr, o_ptr = q_ptr + o_head, k_ptr + o_head, v_ptr + o_head, o_ptr + o_head
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M] row numbers
    o_q = o_m[:, None] * D + tl.arange(0, D)[None, :]  # [BLOCK_M, D]
    b_q = tl.load(q_ptr + o_q, mask=o_m[:, None] < S, other=0.0)  # [BLOCK_M, D]
    end = tl.minimum(S, (tl.program_id(0) + 1) * BLOCK_M) if CAUSAL else S
    never = float("inf") if NEGATIVE else float("-inf")  # the score whose weight is 0
    b_m = tl.full([BLOCK_M], never, tl.float32)  # [BLOCK_M] the raw score that weighs most
    b_l = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    b_o = tl.zeros([BLOCK_M, D], tl.float32)  # [BLOCK_M, D]
    for start in range(0, end, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N] key numbers
        o_kv = o_n[:, None] * D + tl.arange(0, D)[None, :]  # [BLOCK_N, D]
        b_k = tl.load(k_ptr + o_kv, mask=o_n[:, None] < S, other=0.0)  # [BLOCK_N, D]
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32, raw
        keep = o_n[None, :] < S  # [1, BLOCK_N]
        if CAUSAL:
            keep = keep & (o_n[None, :] <= o_m[:, None])  # [BLOCK_M, BLOCK_N]
        b_s = tl.where(keep, b_s, never)
        if NEGATIVE:
            b_m_new = tl.minimum(b_m, tl.min(b_s, 1))  # [BLOCK_M]
        else:
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1))  # [BLOCK_M]
        b_p = tl.exp2(b_s * qk_scale - (b_m_new * qk_scale)[:, None])  # [BLOCK_M, BLOCK_N]
        b_alpha = tl.exp2((b_m - b_m_new) * qk_scale)  # [BLOCK_M]
        b_l = b_l * b_alpha + tl.sum(b_p, 1)  # [BLOCK_M]
        b_v = tl.load(v_ptr + o_kv, mask=o_n[:, None] < S, other=0.0)  # [BLOCK_N, D]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None], input_precision="ieee")  # [BLOCK_M, D]
        b_m = b_m_new  # [BLOCK_M]
    tl.store(o_ptr + o_q, (b_o / b_l[:, None]).to(o_ptr.dtype.element_ty), mask=o_m[:, None] < S)


def signed(q, k, v, causal, sm_scale):
    (B, H, S, D), o = q.shape, torch.empty_like(q)
    signed_forward[(triton.cdiv(S, 64), B * H)](
        q, k, v, o, S, sm_scale * LOG2_E, D, 64, 64, causal, sm_scale < 0)
    return o
