"""Solutions to the exercises of chapter 30."""

import math

import torch
import triton
import triton.language as tl


@triton.jit
def capped_forward(q_ptr, k_ptr, v_ptr, o_ptr, sinks_ptr, starts_ptr, ends_ptr, steps_ptr, S, sm_scale, cap,
                   D: tl.constexpr, BLOCK: tl.constexpr):
    i_m, i_h = tl.program_id(0), tl.program_id(1)
    LOG2_E = 1.4426950408889634
    head = i_h.to(tl.int64) * S * D
    o_b, o_d = tl.arange(0, BLOCK), tl.arange(0, D)  # [BLOCK], [D]
    o_q = head + (i_m * BLOCK + o_b)[:, None] * D + o_d[None, :]  # [BLOCK, D]
    b_q = tl.load(q_ptr + o_q)  # [BLOCK, D]
    b_m = tl.zeros([BLOCK], tl.float32) + tl.load(sinks_ptr + i_h) * LOG2_E  # [BLOCK]
    b_l = tl.full([BLOCK], 1.0, tl.float32)  # [BLOCK] the sink, as a key whose value is 0
    b_o = tl.zeros([BLOCK, D], tl.float32)  # [BLOCK, D]
    number = i_h * tl.num_programs(0) + i_m
    for j in range(tl.load(starts_ptr + number), tl.load(ends_ptr + number)):
        o_k = head + (tl.load(steps_ptr + j) * BLOCK + o_b)[:, None] * D + o_d[None, :]  # [BLOCK, D]
        b_k = tl.load(k_ptr + o_k)  # [BLOCK, D]
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee") * sm_scale  # [BLOCK, BLOCK]
        b_s = cap * (2 * tl.sigmoid(2 * b_s / cap) - 1) * LOG2_E  # [BLOCK, BLOCK]
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))  # [BLOCK]
        b_p, b_alpha = tl.exp2(b_s - b_m_new[:, None]), tl.exp2(b_m - b_m_new)  # [BLOCK, BLOCK], [BLOCK]
        b_m, b_l = b_m_new, b_l * b_alpha + tl.sum(b_p, 1)  # [BLOCK], [BLOCK]
        b_v = tl.load(v_ptr + o_k)  # [BLOCK, D]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None], input_precision="ieee")  # [BLOCK, D]
    tl.store(o_ptr + o_q, (b_o / b_l[:, None]).to(o_ptr.dtype.element_ty))


def capped_attention(q, k, v, sinks, starts, ends, steps, sm_scale, cap):
    (_, H, S, D), out = q.shape, torch.full_like(q, float("nan"))
    capped_forward[(S // 64, H)](q, k, v, out, sinks, starts, ends, steps, S, sm_scale, cap, D, 64)
    return out


@triton.jit
def values_gradient(q_ptr, k_ptr, do_ptr, lse_ptr, dv_ptr, starts_ptr, ends_ptr, steps_ptr, S, sm_scale,
                    D: tl.constexpr, BLOCK: tl.constexpr):
    i_n, i_h = tl.program_id(0), tl.program_id(1)
    LOG2_E = 1.4426950408889634
    head = i_h.to(tl.int64) * S * D
    o_b, o_d = tl.arange(0, BLOCK), tl.arange(0, D)  # [BLOCK], [D]
    o_k = head + (i_n * BLOCK + o_b)[:, None] * D + o_d[None, :]  # [BLOCK, D]
    b_k = tl.load(k_ptr + o_k)  # [BLOCK, D]
    b_dv = tl.zeros([BLOCK, D], tl.float32)  # [BLOCK, D]
    number = i_h * tl.num_programs(0) + i_n
    for j in range(tl.load(starts_ptr + number), tl.load(ends_ptr + number)):
        o_m = tl.load(steps_ptr + j) * BLOCK + o_b  # [BLOCK] queries
        o_q = head + o_m[:, None] * D + o_d[None, :]  # [BLOCK, D]
        b_q = tl.load(q_ptr + o_q)  # [BLOCK, D]
        b_lse = tl.load(lse_ptr + i_h.to(tl.int64) * S + o_m)  # [BLOCK]
        b_s = tl.dot(b_k, b_q.T, input_precision="ieee") * sm_scale  # [BLOCK, BLOCK] keys, queries
        b_p = tl.exp2((b_s - b_lse[None, :]) * LOG2_E)  # [BLOCK, BLOCK]
        b_do = tl.load(do_ptr + o_q)  # [BLOCK, D]
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision="ieee")  # [BLOCK, D]
    tl.store(dv_ptr + o_k, b_dv.to(dv_ptr.dtype.element_ty))


def gradient_of_values(q, k, d_out, lse, starts, ends, steps, sm_scale):
    (_, H, S, D), dv = q.shape, torch.full_like(k, float("nan"))
    values_gradient[(S // 64, H)](q, k, d_out, lse, dv, starts, ends, steps, S, sm_scale, D, 64)
    return dv


def fewest_blocks(share, x, N):
    return math.ceil(share * x / (1 + x / N - share) - 1e-9)  # a whole number stays one
