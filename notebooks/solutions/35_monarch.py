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
