"""Solutions of chapter 31."""

import torch
import triton
import triton.language as tl


@triton.jit
def visit_tiles(b_q, b_m, b_l, b_o, k_ptr, v_ptr, o_m, first, count, margin, S, qk_scale, D: tl.constexpr,
                BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The chapter's, from the tile that begins at `first` downwards, by the running maximum."""
    for i in range(count):
        o_n = first - i * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N] key numbers
        o_kv = o_n[:, None] * D + tl.arange(0, D)[None, :]  # [BLOCK_N, D]
        b_k = tl.load(k_ptr + o_kv, mask=o_n[:, None] < S, other=0.0)  # [BLOCK_N, D]
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32, raw
        if MASKED:
            keep = o_n[None, :] < S  # [1, BLOCK_N]
            if CAUSAL:
                keep = keep & (o_n[None, :] <= o_m[:, None])  # [BLOCK_M, BLOCK_N]
            b_s = tl.where(keep, b_s, float("-inf"))
        b_top = tl.max(b_s, 1)  # [BLOCK_M]
        above = (b_top - b_m) * qk_scale  # [BLOCK_M] in powers of 2
        if MASKED or not (tl.max(tl.where(o_m < S, above, float("-inf")), 0) < -margin * 1.4426950408889634):
            b_m_new = tl.maximum(b_m, b_top)  # [BLOCK_M]
            b_p = tl.exp2(b_s * qk_scale - (b_m_new * qk_scale)[:, None])  # [BLOCK_M, BLOCK_N]
            b_alpha = tl.exp2((b_m - b_m_new) * qk_scale)  # [BLOCK_M]
            b_l = b_l * b_alpha + tl.sum(b_p, 1)  # [BLOCK_M]
            b_v = tl.load(v_ptr + o_kv, mask=o_n[:, None] < S, other=0.0)  # [BLOCK_N, D]
            b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None], input_precision="ieee")
            b_m = b_m_new  # [BLOCK_M]
    return b_m, b_l, b_o


@triton.jit
def running_forward(q_ptr, k_ptr, v_ptr, o_ptr, S, margin, qk_scale, D: tl.constexpr, BLOCK_M: tl.constexpr,
                    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """One program for each 64 queries of a head."""
    i_m, i_h = tl.program_id(0), tl.program_id(1)
    o_head = i_h.to(tl.int64) * S * D
    q_ptr, k_ptr, v_ptr, o_ptr = q_ptr + o_head, k_ptr + o_head, v_ptr + o_head, o_ptr + o_head
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M] row numbers
    o_q = o_m[:, None] * D + tl.arange(0, D)[None, :]  # [BLOCK_M, D]
    b_q = tl.load(q_ptr + o_q, mask=o_m[:, None] < S, other=0.0)  # [BLOCK_M, D]
    full = (i_m * BLOCK_M if CAUSAL else S - 1) // BLOCK_N  # tiles before that of a row's last key

    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
    b_l = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    b_o = tl.zeros([BLOCK_M, D], tl.float32)  # [BLOCK_M, D]
    b_m, b_l, b_o = visit_tiles(b_q, b_m, b_l, b_o, k_ptr, v_ptr, o_m, full * BLOCK_N, 1, margin, S, qk_scale,
                                D, BLOCK_N, CAUSAL, True)  # fmt: skip
    b_m, b_l, b_o = visit_tiles(b_q, b_m, b_l, b_o, k_ptr, v_ptr, o_m, (full - 1) * BLOCK_N, full, margin, S,
                                qk_scale, D, BLOCK_N, CAUSAL, False)  # fmt: skip
    b_o = b_o / b_l[:, None]
    tl.store(o_ptr + o_q, b_o.to(o_ptr.dtype.element_ty), mask=o_m[:, None] < S)


def running_attention(q, k, v, causal, sm_scale, margin):
    """The tile on the diagonal first, then those before it, the nearest first."""
    B, H, S, D = q.shape
    o = torch.empty_like(q)
    grid = (triton.cdiv(S, 64), B * H)
    running_forward[grid](q, k, v, o, S, float(margin), sm_scale * 1.4426950408889634, D, 64, 64, causal)
    return o


def bytes_of(kept, both, d):
    """Keys once; values for each, or once for either."""
    block = 128 * d * 2
    return block * (1 + 2 * kept), block * (1 + 2 * kept - both)
