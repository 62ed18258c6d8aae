"""Solutions of the exercises of chapter 05."""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # exp(x) = 2^(x * LOG2_E)


def tile_counts(S, BLOCK_M, BLOCK_N):
    full = masked = 0
    for i_m in range(-(-S // BLOCK_M)):
        before = i_m * BLOCK_M // BLOCK_N
        end = -(-min(S, (i_m + 1) * BLOCK_M) // BLOCK_N)  # a partial tile is visited whole
        full += before
        masked += end - before
    return full, masked


def sectioned(launched, rows, heads, section):
    # With K and V of 1 MiB a head, 32 heads fill half of the 60 MiB of L2 of an H200.
    group, inside = divmod(launched, rows * section)
    size = min(section, heads - group * section)
    row, head = divmod(inside, size)
    return rows - 1 - row, group * section + head


def window_bounds(i_m, S, BLOCK_M, BLOCK_N, window):
    first_row, last_row = i_m * BLOCK_M, min(S, (i_m + 1) * BLOCK_M) - 1
    first = max(0, first_row - window + 1) // BLOCK_N * BLOCK_N
    end = -(-(last_row + 1) // BLOCK_N) * BLOCK_N
    # A full tile starts inside the window of the last row and ends no later than the first row.
    full_from = -(-max(0, last_row - window + 1) // BLOCK_N) * BLOCK_N
    full_to = (first_row + 1) // BLOCK_N * BLOCK_N
    full_from = min(max(full_from, first), end)
    return first, full_from, max(full_from, full_to), end


@triton.jit
def windowed_tiles(b_q, b_m, b_l, b_o, k_ptr, v_ptr, o_m, first, end, S, window, qk_scale,
                   D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    for start in range(first, end, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N] key numbers
        o_kv = o_n[:, None] * D + tl.arange(0, D)[None, :]  # [BLOCK_N, D]
        exists, zero = (o_n[:, None] < S, 0.0) if MASKED else (None, None)  # [BLOCK_N, 1], or no test at all
        b_k = tl.load(k_ptr + o_kv, mask=exists, other=zero)  # [BLOCK_N, D]
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32, raw
        if MASKED:
            keep = (o_n[None, :] < S) & (o_n[None, :] <= o_m[:, None])  # [BLOCK_M, BLOCK_N]
            keep = keep & (o_n[None, :] > o_m[:, None] - window)  # [BLOCK_M, BLOCK_N]
            b_s = tl.where(keep, b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))  # [BLOCK_M]
        b_ref = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)  # [BLOCK_M] maybe no key yet
        b_p = tl.exp2(b_s * qk_scale - (b_ref * qk_scale)[:, None])  # [BLOCK_M, BLOCK_N]
        b_alpha = tl.exp2((b_m - b_ref) * qk_scale)  # [BLOCK_M]
        b_l = b_l * b_alpha + tl.sum(b_p, 1)  # [BLOCK_M]
        b_v = tl.load(v_ptr + o_kv, mask=exists, other=zero)  # [BLOCK_N, D]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None], input_precision="ieee")  # [BLOCK_M, D]
        b_m = b_m_new  # [BLOCK_M]
    return b_m, b_l, b_o


@triton.jit
def windowed_forward(q_ptr, k_ptr, v_ptr, o_ptr, S, window, qk_scale, D: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr):
    i_m, o_head = tl.program_id(0), tl.program_id(1).to(tl.int64) * S * D
    q_ptr, k_ptr, v_ptr, o_ptr = q_ptr + o_head, k_ptr + o_head, v_ptr + o_head, o_ptr + o_head
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M] row numbers
    o_q = o_m[:, None] * D + tl.arange(0, D)[None, :]  # [BLOCK_M, D]
    b_q = tl.load(q_ptr + o_q, mask=o_m[:, None] < S, other=0.0)  # [BLOCK_M, D]
    end = tl.minimum(S, (i_m + 1) * BLOCK_M)
    first = tl.maximum(0, i_m * BLOCK_M - window + 1) // BLOCK_N * BLOCK_N
    oldest = tl.maximum(0, end - window)  # of the keys that the last row sees
    full = tl.minimum(tl.cdiv(oldest, BLOCK_N) * BLOCK_N, tl.cdiv(end, BLOCK_N) * BLOCK_N)
    edge = tl.maximum(full, (i_m * BLOCK_M + 1) // BLOCK_N * BLOCK_N)
    b_m, b_l = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    b_o = tl.zeros([BLOCK_M, D], tl.float32)  # [BLOCK_M, D]
    b_m, b_l, b_o = windowed_tiles(b_q, b_m, b_l, b_o, k_ptr, v_ptr, o_m, first, full, S, window, qk_scale,
                                   D, BLOCK_N, True)
    b_m, b_l, b_o = windowed_tiles(b_q, b_m, b_l, b_o, k_ptr, v_ptr, o_m, full, edge, S, window, qk_scale,
                                   D, BLOCK_N, False)
    b_m, b_l, b_o = windowed_tiles(b_q, b_m, b_l, b_o, k_ptr, v_ptr, o_m, edge, end, S, window, qk_scale,
                                   D, BLOCK_N, True)
    tl.store(o_ptr + o_q, (b_o / b_l[:, None]).to(o_ptr.dtype.element_ty), mask=o_m[:, None] < S)


def windowed(q, k, v, window):
    (B, H, S, D), o = q.shape, torch.empty_like(q)
    windowed_forward[(triton.cdiv(S, 64), B * H)](q, k, v, o, S, window, LOG2_E * D**-0.5, D, 64, 32)
    return o
