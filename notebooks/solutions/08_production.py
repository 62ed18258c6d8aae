"""Solutions of chapter 08."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from attnlib.book import lesson

eight = lesson.load_kernel("08_production")


def shared_bytes_per_clock(block_n, a_in_registers):
    """Bytes per clock that one warpgroup at full speed reads from shared memory. Above 128 for N < 64."""
    flop_per_clock = 4096
    clocks = 2 * 64 * block_n * 16 / flop_per_clock
    a_bytes = 0 if a_in_registers else 2 * 64 * 16
    return (a_bytes + 2 * 16 * block_n) / clocks


@triton.jit
def cached_forward(q_desc, k_desc, v_desc, o_desc, S_k, shift, group, qk_scale, D: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i_m, i_h = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # longest rows first
    i_kv = i_h // group  # heads of a batch element are H = group * H_kv, so this holds over all of them
    o_last = tl.minimum(i_m * BLOCK_M + shift + tl.arange(0, BLOCK_M), S_k - 1)  # [BLOCK_M]
    first = tl.cdiv(tl.minimum(S_k, (i_m + 1) * BLOCK_M + shift), BLOCK_N) - 1  # tile to start with
    full = tl.minimum(first, (i_m * BLOCK_M + shift + 1) // BLOCK_N)  # tiles below it need no mask
    b_q = q_desc.load([i_h, i_m * BLOCK_M, 0]).reshape([BLOCK_M, D])  # [BLOCK_M, D]
    b_m, b_l = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    b_o = tl.zeros([BLOCK_M, D], tl.float32)  # [BLOCK_M, D]
    b_s = eight.score_tile(b_q, k_desc, i_kv, first * BLOCK_N, o_last, D, BLOCK_N, True)  # [BLOCK_M, BLOCK_N]
    b_p, b_alpha, b_m, b_l = eight.softmax_tile(b_s, b_m, b_l, qk_scale)  # [BLOCK_M, BLOCK_N], [BLOCK_M]
    b_p, b_alpha, b_m, b_l, b_o = eight.visit_tiles(
        b_q, b_p, b_alpha, b_m, b_l, b_o, k_desc, v_desc, i_kv, o_last, first, first - full, qk_scale,
        D, BLOCK_N, True, True, 1)
    b_p, b_alpha, b_m, b_l, b_o = eight.visit_tiles(
        b_q, b_p, b_alpha, b_m, b_l, b_o, k_desc, v_desc, i_kv, o_last, full, full, qk_scale,
        D, BLOCK_N, False, True, 2)
    b_o = eight.add_values(b_o, b_p, b_alpha, v_desc, i_kv, 0, D, BLOCK_N)
    o_desc.store([i_h, i_m * BLOCK_M, 0], (b_o / b_l[:, None]).to(o_desc.dtype).reshape([1, BLOCK_M, D]))


def cached_attention(q, k, v):
    (B, H, S, D), (H_kv, S_k) = q.shape, k.shape[1:3]
    o = torch.empty_like(q)

    def tiles(x, rows):  # windows of (rows, D) over every head
        return TensorDescriptor(x, [x.shape[0] * x.shape[1], *x.shape[2:]], x.stride()[1:], [1, rows, D])
    cached_forward[(triton.cdiv(S, 64), B * H)](
        tiles(q, 64), tiles(k, 32), tiles(v, 32), tiles(o, 64), S_k, S_k - S, H // H_kv,
        eight.LOG2_E * D**-0.5, D, 64, 32)
    return o
