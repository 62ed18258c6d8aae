"""Solutions of chapter 07."""

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1.4426950408889634  # exp(x) = 2^(x * LOG2_E)


@triton.jit
def token_major_forward(q_desc, k_desc, v_desc, o_desc, S, H, qk_scale, D: tl.constexpr,
                        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i_m, i_b, i_h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M] row numbers
    b_q = q_desc.load([i_b, i_m * BLOCK_M, i_h, 0]).reshape([BLOCK_M, D])  # [BLOCK_M, D]
    b_m, b_l = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    b_o = tl.zeros([BLOCK_M, D], tl.float32)  # [BLOCK_M, D]
    for start in range(0, tl.minimum(S, (i_m + 1) * BLOCK_M), BLOCK_N):
        b_k = k_desc.load([i_b, start, i_h, 0]).reshape([BLOCK_N, D])  # [BLOCK_N, D]
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32, raw
        b_s = tl.where(start + tl.arange(0, BLOCK_N)[None, :] <= o_m[:, None], b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))  # [BLOCK_M]
        b_p = tl.exp2(b_s * qk_scale - (b_m_new * qk_scale)[:, None])  # [BLOCK_M, BLOCK_N]
        b_alpha = tl.exp2((b_m - b_m_new) * qk_scale)  # [BLOCK_M]
        b_l = b_l * b_alpha + tl.sum(b_p, 1)  # [BLOCK_M]
        b_v = v_desc.load([i_b, start, i_h, 0]).reshape([BLOCK_N, D])  # [BLOCK_N, D]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None], input_precision="ieee")  # [BLOCK_M, D]
        b_m = b_m_new  # [BLOCK_M]
    o_desc.store([i_b, i_m * BLOCK_M, i_h, 0],
                 (b_o / b_l[:, None]).to(o_desc.dtype).reshape([1, BLOCK_M, 1, D]))


def token_major(q, k, v):
    """Causal attention of tensors (B, S, H, D). Batch and tokens stay two dimensions: a tile that reaches
    beyond the last token of a sequence gets zeros and writes nothing there, where it would else meet the
    next sequence."""
    (B, S, H, D), o = q.shape, torch.empty_like(q)

    def tiles(x, rows):  # windows of (rows, D) over every head
        return TensorDescriptor(x, [B, S, H, D], [S * H * D, H * D, D, 1], [1, rows, 1, D])
    token_major_forward[(triton.cdiv(S, 64), B * H)](
        tiles(q, 64), tiles(k, 32), tiles(v, 32), tiles(o, 64), S, H, LOG2_E * D**-0.5, D, 64, 32)
    return o


def late_attention(scores, values, tiles):
    """Softmax-weighted sum over all tiles; the product of each tile is started one tile late."""

    def softmax_step(s, m, total):
        m_new = np.maximum(m, s.max(1))
        p, alpha = np.exp(s - m_new[:, None]), np.exp(m - m_new)
        return p, alpha, m_new, total * alpha + p.sum(1)

    p, alpha, m, total = softmax_step(scores(0), -np.inf, 0.0)
    o = 0.0
    for j in range(1, tiles):
        s = scores(j)
        o = o * alpha[:, None] + values(p, j - 1)
        p, alpha, m, total = softmax_step(s, m, total)
    return (o * alpha[:, None] + values(p, tiles - 1)) / total[:, None]


@triton.jit
def kept_keys_forward(q_desc, k_desc, v_desc, o_desc, begin, S, qk_scale, D: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first tile stands before the loop: with it a product is pending, and none is made of zeros."""
    i_m, i_h = tl.program_id(0), tl.program_id(1)
    b_q = q_desc.load([i_h, i_m * BLOCK_M, 0]).reshape([BLOCK_M, D])  # [BLOCK_M, D]
    b_k = k_desc.load([i_h, begin, 0]).reshape([BLOCK_N, D])  # [BLOCK_N, D]
    b_s = tl.dot(b_q, b_k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32, raw
    b_s = tl.where(begin + tl.arange(0, BLOCK_N)[None, :] < S, b_s, float("-inf"))
    b_m = tl.max(b_s, 1)  # [BLOCK_M]
    b_p = tl.exp2(b_s * qk_scale - (b_m * qk_scale)[:, None])  # [BLOCK_M, BLOCK_N]
    b_alpha, b_l = tl.full([BLOCK_M], 1.0, tl.float32), tl.sum(b_p, 1)  # [BLOCK_M]
    b_o = tl.zeros([BLOCK_M, D], tl.float32)  # [BLOCK_M, D]
    for start in range(begin + BLOCK_N, S, BLOCK_N):
        b_k = k_desc.load([i_h, start, 0]).reshape([BLOCK_N, D])  # [BLOCK_N, D]
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        b_s = tl.where(start + tl.arange(0, BLOCK_N)[None, :] < S, b_s, float("-inf"))
        b_v = v_desc.load([i_h, start - BLOCK_N, 0]).reshape([BLOCK_N, D])  # [BLOCK_N, D] of the tile before
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None], input_precision="ieee")  # [BLOCK_M, D]
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))  # [BLOCK_M]
        b_p = tl.exp2(b_s * qk_scale - (b_m_new * qk_scale)[:, None])  # [BLOCK_M, BLOCK_N]
        b_alpha = tl.exp2((b_m - b_m_new) * qk_scale)  # [BLOCK_M]
        b_l = b_l * b_alpha + tl.sum(b_p, 1)  # [BLOCK_M]
        b_m = b_m_new  # [BLOCK_M]
    b_v = v_desc.load([i_h, (S - 1) // BLOCK_N * BLOCK_N, 0]).reshape([BLOCK_N, D])  # [BLOCK_N, D]
    b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None], input_precision="ieee")  # [BLOCK_M, D]
    o_desc.store([i_h, i_m * BLOCK_M, 0], (b_o / b_l[:, None]).to(o_desc.dtype).reshape([1, BLOCK_M, D]))


def kept_keys(q, k, v, begin):
    """Dense attention to the keys from `begin` on, a multiple of the 32 keys of a tile."""
    (B, H, S, D), o = q.shape, torch.empty_like(q)

    def tiles(x, rows):  # windows of (rows, D) over every head
        return TensorDescriptor(x, [B * H, S, D], [S * D, D, 1], [1, rows, D])
    kept_keys_forward[(triton.cdiv(S, 64), B * H)](
        tiles(q, 64), tiles(k, 32), tiles(v, 32), tiles(o, 64), begin, S, LOG2_E * D**-0.5, D, 64, 32)
    return o
