"""Solutions of the exercises of chapter 32."""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # exp(x) = 2^(x * LOG2_E)


@triton.jit
def pool_keys_kernel(k_ptr, out_ptr, S, BLOCK: tl.constexpr, D: tl.constexpr):
    j, blocks, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    o_n, o_d = j * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)  # [BLOCK], [D]
    there = (o_n < S)[:, None]  # [BLOCK, 1]
    at = (head * S + o_n)[:, None] * D + o_d[None, :]  # [BLOCK, D]
    b_k = tl.load(k_ptr + at, mask=there, other=0.0).to(tl.float32)  # [BLOCK, D]
    out_ptr += (head * blocks + j) * 3 * D
    tl.store(out_ptr + o_d, tl.max(tl.where(there, b_k, float("-inf")), 0))
    tl.store(out_ptr + D + o_d, tl.min(tl.where(there, b_k, float("inf")), 0))
    tl.store(out_ptr + 2 * D + o_d, tl.sum(b_k, 0) / tl.minimum(BLOCK, S - j * BLOCK))


def pool_keys(k, block=64):
    (B, H, S, D), n = k.shape, triton.cdiv(k.shape[2], block)
    out = torch.full((B, H, n, 3 * D), float("nan"), dtype=torch.float32, device=k.device)
    pool_keys_kernel[(n, B * H)](k, out, S, block, D)
    return out


@triton.jit
def mean_forward(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sum_ptr, S, rows, scale, D: tl.constexpr,
                 CAUSAL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The chapter's kernel, but of a row and key block it keeps log2 of the sum of 2^s."""
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    o_m, o_d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)  # [BLOCK], [D]
    at = (head * S + o_m)[:, None] * D + o_d[None, :]  # [BLOCK, D]
    b_q = tl.load(q_ptr + at, mask=(o_m < S)[:, None], other=0.0)  # [BLOCK, D]
    b_m = tl.full([BLOCK], float("-inf"), tl.float32)  # [BLOCK]
    b_l = tl.zeros([BLOCK], tl.float32)  # [BLOCK]
    b_o = tl.zeros([BLOCK, D], tl.float32)  # [BLOCK, D]
    last = o_m if CAUSAL else 0 * o_m + S - 1  # [BLOCK]
    for j in range(0, i + 1 if CAUSAL else tl.cdiv(S, BLOCK)):
        o_n = j * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        of_k = (head * S + o_n)[:, None] * D + o_d[None, :]  # [BLOCK, D]
        b_k = tl.load(k_ptr + of_k, mask=(o_n < S)[:, None], other=0.0)  # [BLOCK, D]
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee") * scale  # [BLOCK, BLOCK]
        b_s = tl.where(o_n[None, :] <= last[:, None], b_s, float("-inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1))  # [BLOCK]
        b_p, b_a = tl.exp2(b_s - b_new[:, None]), tl.exp2(b_m - b_new)  # [BLOCK, BLOCK], [BLOCK]
        b_sum = tl.sum(b_p, 1)  # [BLOCK]
        # Where the running maximum is far above this block's, its sum may be 0: so are its weights.
        tl.store(sum_ptr + (head * tl.num_programs(0) + j) * rows + o_m, tl.log2(b_sum) + b_new)
        b_v = tl.load(v_ptr + of_k, mask=(o_n < S)[:, None], other=0.0)  # [BLOCK, D]
        b_m, b_l = b_new, b_l * b_a + b_sum
        b_o = b_o * b_a[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")  # [BLOCK, D]
    tl.store(o_ptr + at, (b_o / b_l[:, None]).to(b_q.dtype), mask=(o_m < S)[:, None])
    tl.store(lse_ptr + head * S + o_m, b_m + tl.log2(b_l), mask=o_m < S)


@triton.jit
def mean_pool(sum_ptr, lse_ptr, map_ptr, S, rows, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    i, blocks = tl.program_id(0), tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64)
    o_m = i * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    b_lse = tl.load(lse_ptr + head * S + o_m, mask=o_m < S, other=float("inf"))  # [BLOCK]
    count = tl.minimum(BLOCK, S - i * BLOCK)
    for j in range(0, i + 1 if CAUSAL else blocks):
        b_sum = tl.load(sum_ptr + (head * blocks + j) * rows + o_m)  # [BLOCK]
        tl.store(map_ptr + (head * blocks + i) * blocks + j, tl.sum(tl.exp2(b_sum - b_lse), 0) / count)


def mean_pooled_attention(q, k, v, causal=True, sm_scale=None, block=64):
    (B, H, S, D), out, n = q.shape, torch.empty_like(q), triton.cdiv(q.shape[2], block)
    lse, found = q.new_empty(B, H, S, dtype=torch.float32), q.new_zeros(B, H, n, n, dtype=torch.float32)
    sums = q.new_empty(B, H, n, n * block, dtype=torch.float32)
    scale = (D**-0.5 if sm_scale is None else sm_scale) * LOG2_E
    mean_forward[(n, B * H)](q, k, v, out, lse, sums, S, n * block, scale, D, causal, block)
    mean_pool[(n, B * H)](sums, lse, found, S, n * block, causal, block)
    return out, found


def pays_from(sparsity, heads, head_dim, rate, tbs, fixed):
    # 32 heads of 128 columns, 700 TFLOP/s, 3 TB/s, 100 µs: 6144 tokens at 50%, 4096 at 90%.
    tokens = 1024
    while True:
        saved = sparsity * 4 * heads * head_dim * tokens**2 / 2 / (rate * 1e12)
        if saved > 4 * heads * tokens * head_dim * 2 / (tbs * 1e12) + fixed * 1e-6:
            return tokens
        tokens += 1024
