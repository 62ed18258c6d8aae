"""Solutions of the exercises of chapter 35."""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # exp(x) = 2^(x * LOG2_E)


def best_block(N):
    # N = 2048: blocks of 32 need half the scores of blocks of 45, the integer next to the square root, whose
    # 46 blocks and 45 tokens stand in tiles of 64.
    def tile(size):
        return max(16, 1 << (size - 1).bit_length())

    def scores(block):
        blocks = -(-N // block)
        return blocks * tile(block) ** 2 + block * tile(blocks) ** 2

    return min(range(1, N + 1), key=scores)


@triton.jit
def center_kernel(q_ptr, mean_k_ptr, entropy_ptr, center_ptr, N, qk_scale, BLOCK, D: tl.constexpr,
                  TILE: tl.constexpr):
    o_m, o_d = tl.arange(0, TILE), tl.arange(0, D)  # [TILE] blocks, [D]
    row = tl.program_id(1).to(tl.int64) * N + o_m * BLOCK + tl.program_id(0)  # [TILE] a column
    o_x, there = row[:, None] * D + o_d[None, :], o_m * BLOCK < N  # [TILE, D], [TILE]
    b_q = tl.load(q_ptr + o_x, mask=there[:, None], other=0.0)  # [TILE, D]
    b_k = tl.load(mean_k_ptr + o_x, mask=there[:, None], other=0.0)  # [TILE, D]
    b_h = tl.load(entropy_ptr + row, mask=there, other=float("-inf"))  # [TILE]
    b_s = tl.dot(b_q, b_k.T, input_precision="ieee") * qk_scale + b_h[None, :]  # [TILE, TILE] m', m
    b_m = tl.max(b_s, 1)  # [TILE]
    b_lse = b_m + tl.log2(tl.sum(tl.exp2(b_s - b_m[:, None]), 1))  # [TILE]
    b_s = tl.where(there[:, None], b_s - b_lse[:, None], float("-inf"))  # [TILE, TILE] log2 of L
    b_top = tl.max(b_s, 0)  # [TILE] of each block, over the queries
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)  # [TILE] past the last block there is none
    b_w = tl.exp2(b_s - b_top[None, :])  # [TILE, TILE]
    b_l = tl.sum(b_w, 0)  # [TILE]
    b_c = tl.dot(b_w.to(b_q.dtype).T, b_q, input_precision="ieee")  # [TILE, D]
    b_c = b_c / tl.where(b_l == 0.0, 1.0, b_l)[:, None]  # [TILE, D]
    tl.store(center_ptr + o_x, b_c.to(center_ptr.dtype.element_ty), mask=there[:, None])


def centers(q, mean_k, entropy, block, sm_scale):
    (B, H, N, D), found = q.shape, torch.empty_like(q)
    tile = max(16, triton.next_power_of_2(N // block))
    center_kernel[(block, B * H)](q, mean_k, entropy, found, N, sm_scale * LOG2_E, block, D, tile)
    return found


@triton.jit
def whole_r_step(q_ptr, k_ptr, v_ptr, mean_k_ptr, mean_v_ptr, entropy_ptr, N, qk_scale, BLOCK: tl.constexpr,
                 D: tl.constexpr, LAST: tl.constexpr):
    """The chapter's `r_step` for blocks that are whole tiles, without masks. Only the last round makes mean
    values: no other reads them."""
    o_p, o_d = tl.arange(0, BLOCK), tl.arange(0, D)  # [BLOCK], [D]
    row = tl.program_id(1).to(tl.int64) * N + tl.program_id(0) * BLOCK + o_p  # [BLOCK]
    o_x = row[:, None] * D + o_d[None, :]  # [BLOCK, D]
    b_q, b_k = tl.load(q_ptr + o_x), tl.load(k_ptr + o_x)  # [BLOCK, D], [BLOCK, D]
    b_s = tl.dot(b_q, b_k.T, input_precision="ieee") * qk_scale  # [BLOCK, BLOCK]
    b_m = tl.max(b_s, 1)  # [BLOCK]
    b_r = tl.exp2(b_s - b_m[:, None])  # [BLOCK, BLOCK]
    b_l = tl.sum(b_r, 1)  # [BLOCK]
    b_r = b_r.to(b_k.dtype)
    b_mean = (tl.dot(b_r, b_k, input_precision="ieee") / b_l[:, None]).to(b_k.dtype)  # [BLOCK, D]
    b_at = tl.sum(b_q.to(tl.float32) * b_mean.to(tl.float32), 1) * qk_scale  # [BLOCK]
    tl.store(entropy_ptr + row, b_m + tl.log2(b_l) - b_at)
    tl.store(mean_k_ptr + o_x, b_mean)
    if LAST:
        b_v = tl.load(v_ptr + o_x)  # [BLOCK, D]
        b_mean = tl.dot(b_r, b_v, input_precision="ieee") / b_l[:, None]  # [BLOCK, D]
        tl.store(mean_v_ptr + o_x, b_mean.to(b_v.dtype))


@triton.jit
def whole_column(q_ptr, mean_k_ptr, mean_v_ptr, entropy_ptr, out_ptr, N, qk_scale, BLOCK,
                 D: tl.constexpr, BLOCKS: tl.constexpr, LAST: tl.constexpr):
    """`l_step` in the last round and `center_kernel` before it, for columns that are whole tiles."""
    o_m, o_d = tl.arange(0, BLOCKS), tl.arange(0, D)  # [BLOCKS], [D]
    row = tl.program_id(1).to(tl.int64) * N + o_m * BLOCK + tl.program_id(0)  # [BLOCKS] a column
    o_x = row[:, None] * D + o_d[None, :]  # [BLOCKS, D]
    b_q, b_k = tl.load(q_ptr + o_x), tl.load(mean_k_ptr + o_x)  # [BLOCKS, D], [BLOCKS, D]
    b_s = tl.dot(b_q, b_k.T, input_precision="ieee") * qk_scale + tl.load(entropy_ptr + row)[None, :]
    b_s -= tl.max(b_s, 1)[:, None]  # [BLOCKS, BLOCKS]
    if LAST:  # b_o: [BLOCKS, D]
        b_w = tl.exp2(b_s)  # [BLOCKS, BLOCKS] L, not yet divided by its sums
        b_v = tl.load(mean_v_ptr + o_x)  # [BLOCKS, D]
        b_o = tl.dot(b_w.to(b_v.dtype), b_v, input_precision="ieee") / tl.sum(b_w, 1)[:, None]
    else:
        b_s -= tl.log2(tl.sum(tl.exp2(b_s), 1))[:, None]  # [BLOCKS, BLOCKS] log2 of L
        b_w = tl.exp2(b_s - tl.max(b_s, 0)[None, :])  # [BLOCKS, BLOCKS]
        b_o = tl.dot(b_w.to(b_q.dtype).T, b_q, input_precision="ieee") / tl.sum(b_w, 0)[:, None]
    tl.store(out_ptr + o_x, b_o.to(b_q.dtype))


def faster(q, k, v, block):
    (B, H, N, D), blocks = q.shape, q.shape[2] // block
    mean_k, mean_v, center, out = (torch.empty_like(q) for _ in range(4))
    entropy, scale = q.new_empty(B, H, N, dtype=torch.float32), D**-0.5 * LOG2_E
    for last, queries, found in ((False, q, center), (True, center, out)):
        whole_r_step[(blocks, B * H)](queries, k, v, mean_k, mean_v, entropy, N, scale, block, D, last)
        whole_column[(block, B * H)](q, mean_k, mean_v, entropy, found, N, scale, block, D, blocks, last)
    return out
