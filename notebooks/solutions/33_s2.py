"""Solutions of the exercises of chapter 33."""

import torch
import triton
import triton.language as tl

from attnlib.book import lesson

LOG2_E = 1.4426950408889634  # exp(x) = 2^(x * LOG2_E)
one_block = lesson.load_kernel("33_s2").one_block


@triton.jit
def hybrid_forward(q_ptr, k_ptr, v_ptr, o_ptr, S, H, qk_scale, DENSE, LOCAL, STRIDE, STEP,
                   BLOCK: tl.constexpr, D: tl.constexpr):
    # A head whose stride is 1, from block 0 on, has all far columns.
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    head, i_h = tl.program_id(1).to(tl.int64) * S * D, tl.program_id(1) % H
    stride = tl.where(i_h >= H - DENSE, 1, STRIDE)
    first = (stride - i_h * STEP % stride) % stride
    near = tl.maximum(i - LOCAL + 1, 0)
    o_m, o_d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)  # [BLOCK] queries, [D]
    o_qd = head + o_m[:, None] * D + o_d[None, :]  # [BLOCK, D]
    b_q = tl.load(q_ptr + o_qd, mask=(o_m < S)[:, None], other=0.0)  # [BLOCK, D]
    b_m = tl.full([BLOCK], float("-inf"), tl.float32)  # [BLOCK]
    b_l = tl.zeros([BLOCK], tl.float32)  # [BLOCK]
    b_o = tl.zeros([BLOCK, D], tl.float32)  # [BLOCK, D]
    k_ptr, v_ptr = k_ptr + head, v_ptr + head
    for j in range(first, near, stride):
        b_m, b_l, b_o = one_block(b_q, b_m, b_l, b_o, k_ptr, v_ptr, j, o_m, S, qk_scale, False, BLOCK, D)
    for j in range(near, i):
        b_m, b_l, b_o = one_block(b_q, b_m, b_l, b_o, k_ptr, v_ptr, j, o_m, S, qk_scale, False, BLOCK, D)
    b_m, b_l, b_o = one_block(b_q, b_m, b_l, b_o, k_ptr, v_ptr, i, o_m, S, qk_scale, True, BLOCK, D)
    tl.store(o_ptr + o_qd, (b_o / b_l[:, None]).to(b_q.dtype), mask=(o_m < S)[:, None])


def hybrid_attention(q, k, v, local, stride, dense):
    (B, H, S, D), out = q.shape, torch.empty_like(q)
    scale, step = D**-0.5 * LOG2_E, max(1, stride // H)
    hybrid_forward[(triton.cdiv(S, 64), B * H)](q, k, v, out, S, H, scale, dense, local, stride, step, 64, D)
    return out


def pages_of(blocks, first, local, stride):
    free, pages, used = [], [], 0
    for block in range(blocks):
        dropped = block - local
        if dropped >= 0 and dropped % stride != first:
            free.append(pages[dropped])
        if free:
            pages.append(free.pop())
        else:
            pages.append(used)
            used += 1
    return pages


def longest(budget, layers, pattern, head_dim):
    # 32 layers, 8 key heads, 16 GB: 972,928 tokens with a stride of 8, and 122,048 if all heads are dense.
    def fits(blocks):
        return layers * pattern.cache_bytes(blocks * pattern.block_size, head_dim) <= budget

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * pattern.block_size
