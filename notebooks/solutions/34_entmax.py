"""Solutions of chapter 34."""

import torch
import triton
import triton.language as tl


@triton.jit
def scores(b_q, k_ptr, start, last_key, S, scale, D: tl.constexpr, BLOCK_N: tl.constexpr):
    """As in the chapter."""
    o_n, o_d = start + tl.arange(0, BLOCK_N), tl.arange(0, D)  # [BLOCK_N], [D]
    o_nd = o_n[:, None] * D + o_d[None, :]  # [BLOCK_N, D]
    b_k = tl.load(k_ptr + o_nd, mask=(o_n < S)[:, None], other=0.0)  # [BLOCK_N, D]
    b_s = tl.dot(b_q, b_k.T, input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
    return tl.where(o_n[None, :] <= last_key[:, None], b_s, float("-inf"))


@triton.jit
def sparsemax_forward(q_ptr, k_ptr, v_ptr, o_ptr, S, scale, D: tl.constexpr, CAUSAL: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """The chapter's kernel with p = 1."""
    head = tl.program_id(1).to(tl.int64) * S
    o_m, o_d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)  # [BLOCK_M], [D]
    at = (head + o_m)[:, None] * D + o_d[None, :]  # [BLOCK_M, D]
    b_q = tl.load(q_ptr + at, mask=(o_m < S)[:, None], other=0.0)  # [BLOCK_M, D]
    k_ptr += head * D
    v_ptr += head * D
    last_key = tl.minimum(o_m, S - 1) if CAUSAL else o_m * 0 + S - 1  # [BLOCK_M]
    end = tl.minimum((tl.program_id(0) + 1) * BLOCK_M, S) if CAUSAL else S
    # 1. The highest score of each group of keys.
    b_top = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)  # [BLOCK_M, BLOCK_N]
    for start in range(0, end, BLOCK_N):
        b_top = tl.maximum(b_top, scores(b_q, k_ptr, start, last_key, S, scale, D, BLOCK_N))
    # 2. Their threshold, by Newton's method: a lower bound of that of all keys.
    b_max = tl.max(b_top, 1)  # [BLOCK_M]
    b_t = b_max - 1.0  # [BLOCK_M]
    for _ in range(6):
        b_x = tl.maximum(b_top - b_t[:, None], 0.0)  # [BLOCK_M, BLOCK_N]
        b_t += (tl.sum(b_x, 1) - 1.0) / tl.sum((b_x > 0).to(tl.float32), 1)
    # 3. Newton's method over all keys: F = sum x, F' = -count. It ends when the support is the right one.
    for _ in range(5):
        b_f = tl.zeros([BLOCK_M], tl.float32) - 1.0
        b_n = tl.zeros([BLOCK_M], tl.float32)
        for start in range(0, end, BLOCK_N):
            b_x = tl.maximum(scores(b_q, k_ptr, start, last_key, S, scale, D, BLOCK_N) - b_t[:, None], 0.0)
            b_f += tl.sum(b_x, 1)
            b_n += tl.sum((b_x > 0).to(tl.float32), 1)
        b_t += b_f / b_n
    # 4. The values, by weights whose sum is 1 but for what the last step left.
    b_l = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    b_acc = tl.zeros([BLOCK_M, D], tl.float32)  # [BLOCK_M, D]
    for start in range(0, end, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        b_x = tl.maximum(scores(b_q, k_ptr, start, last_key, S, scale, D, BLOCK_N) - b_t[:, None], 0.0)
        o_nd = o_n[:, None] * D + o_d[None, :]  # [BLOCK_N, D]
        b_v = tl.load(v_ptr + o_nd, mask=(o_n < S)[:, None], other=0.0)  # [BLOCK_N, D]
        b_l += tl.sum(b_x, 1)
        b_acc = tl.dot(b_x.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    tl.store(o_ptr + at, (b_acc / b_l[:, None]).to(o_ptr.dtype.element_ty), mask=(o_m < S)[:, None])


def sparsemax_attention(q, k, v, causal, sm_scale):
    """One program for each 64 queries of a head."""
    out = torch.empty_like(q)
    B, H, S, D = q.shape
    grid = (triton.cdiv(S, 64), B * H)
    sparsemax_forward[grid](q, k, v, out, S, sm_scale, D, causal, 64, 64)
    return out


def break_even(dense, bound, flags, step, values, steps=2):
    """What dense attention has left after the first two passes, over what all keys would cost."""
    return min(1.0, max(0.0, (dense - bound - flags) / (steps * step + values)))


@triton.jit
def tile_of_scores(b_q, k_ptr, start, last_key, S, scale, D: tl.constexpr, BLOCK_N: tl.constexpr,
                   EDGE: tl.constexpr):
    """`scores`, with a mask only where a tile needs one."""
    o_n, o_d = start + tl.arange(0, BLOCK_N), tl.arange(0, D)  # [BLOCK_N], [D]
    o_nd = o_n[:, None] * D + o_d[None, :]  # [BLOCK_N, D]
    if EDGE:
        b_k = tl.load(k_ptr + o_nd, mask=(o_n < S)[:, None], other=0.0)  # [BLOCK_N, D]
    else:
        b_k = tl.load(k_ptr + o_nd)  # [BLOCK_N, D]
    b_s = tl.dot(b_q, b_k.T, input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
    if EDGE:
        b_s = tl.where(o_n[None, :] <= last_key[:, None], b_s, float("-inf"))
    return b_s


@triton.jit
def causal_entmax(q_ptr, k_ptr, v_ptr, o_ptr, S, scale, D: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr):
    """The chapter's kernel with three changes: the longest rows first, no mask before the diagonal, and sums
    over a row that go across threads once a walk instead of once a tile."""
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) * S
    o_m, o_d = i_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)  # [BLOCK_M], [D]
    at = (head + o_m)[:, None] * D + o_d[None, :]  # [BLOCK_M, D]
    b_q = tl.load(q_ptr + at, mask=(o_m < S)[:, None], other=0.0)  # [BLOCK_M, D]
    k_ptr += head * D
    v_ptr += head * D
    last_key = tl.minimum(o_m, S - 1)  # [BLOCK_M]
    cut, end = i_m * BLOCK_M // BLOCK_N * BLOCK_N, tl.minimum((i_m + 1) * BLOCK_M, S)
    b_top = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)  # [BLOCK_M, BLOCK_N]
    for edge in tl.static_range(2):  # tiles before the diagonal, then what is left
        for start in range(cut if edge else 0, end if edge else cut, BLOCK_N):
            b_s = tile_of_scores(b_q, k_ptr, start, last_key, S, scale, D, BLOCK_N, edge)
            b_top = tl.maximum(b_top, b_s)
    b_max = tl.max(b_top, 1)  # [BLOCK_M]
    b_t = b_max - 1.0  # [BLOCK_M]
    for _ in range(6):
        b_x = tl.maximum(b_top - b_t[:, None], 0.0)  # [BLOCK_M, BLOCK_N]
        b_f = tl.sum(b_x * b_x, 1)  # [BLOCK_M]
        b_t += (b_f - tl.sqrt(b_f)) / tl.sum(b_x, 1)
    for _ in range(2):
        b_ff = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # [BLOCK_M, BLOCK_N] not yet summed over columns
        b_dd = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # [BLOCK_M, BLOCK_N]
        b_nn = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # [BLOCK_M, BLOCK_N]
        for edge in tl.static_range(2):
            for start in range(cut if edge else 0, end if edge else cut, BLOCK_N):
                b_s = tile_of_scores(b_q, k_ptr, start, last_key, S, scale, D, BLOCK_N, edge)
                b_x = tl.maximum(b_s - b_t[:, None], 0.0)  # [BLOCK_M, BLOCK_N]
                b_ff += b_x * b_x
                b_dd += b_x
                b_nn += tl.where(b_x > 0, 1.0, 0.0)
        b_f, b_d, b_n = tl.sum(b_ff, 1) - 1.0, tl.sum(b_dd, 1), tl.sum(b_nn, 1)  # [BLOCK_M] each
        b_t = tl.minimum(b_t + 2.0 * b_f * b_d / (4.0 * b_d * b_d - b_f * b_n), b_max)
    b_ll = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # [BLOCK_M, BLOCK_N]
    b_acc = tl.zeros([BLOCK_M, D], tl.float32)  # [BLOCK_M, D]
    for start in range(0, end, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        b_s = tile_of_scores(b_q, k_ptr, start, last_key, S, scale, D, BLOCK_N, True)
        b_x = tl.maximum(b_s - b_t[:, None], 0.0)  # [BLOCK_M, BLOCK_N]
        o_nd = o_n[:, None] * D + o_d[None, :]  # [BLOCK_N, D]
        b_v = tl.load(v_ptr + o_nd, mask=(o_n < S)[:, None], other=0.0)  # [BLOCK_N, D]
        b_ll += b_x * b_x
        b_acc = tl.dot((b_x * b_x).to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    b_o = b_acc / tl.sum(b_ll, 1)[:, None]  # [BLOCK_M, D]
    tl.store(o_ptr + at, b_o.to(o_ptr.dtype.element_ty), mask=(o_m < S)[:, None])


def faster(q, k, v, causal, sm_scale):
    """Causal calls only."""
    (B, H, S, D), out = q.shape, torch.empty_like(q)
    causal_entmax[(triton.cdiv(S, 64), B * H)](q, k, v, out, S, 0.5 * sm_scale, D, 64, 64,
                                               num_warps=4, num_stages=4)
    return out
