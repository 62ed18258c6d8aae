"""Solutions of chapter 06."""

import torch
import triton
import triton.language as tl

from attnlib.bench import shapes
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.book import lesson

six = lesson.load_kernel("06_autotuning")


def stages(block_m, block_n, head_dim, ctas):
    """The largest num_stages with which `ctas` CTAs of this tile fit one SM; 0 if none."""
    budget = 228 * 1024 // ctas - 1024  # at one CTA this is 227 KiB, just what one CTA may have
    q, k = 2 * block_m * head_dim, 2 * block_n * head_dim
    if q + k > budget:
        return 0
    return max(1, (budget - q) // (2 * k))


def wrong_configs(attention, configs):
    """Those of `configs` with which attention(q, k, v, causal, sm_scale, config) is wrong for some input."""
    wrong = []
    for kind in ("normal", "large"):  # large scores: only a running max keeps exp finite
        for seqlen in (1, 63, 128, 129):  # whole tiles, and tails on both sides of one
            q, k, v = make_inputs(shapes.Shape(1, 1, seqlen, 64), kind, device=lesson.device())
            oracle = Oracle(q, k, v, causal=True)
            for config in configs:
                # judge() compares with `not (error <= budget)`, which NaN fails
                if config not in wrong and not oracle.judge(attention(q, k, v, True, 64**-0.5, config)).ok:
                    wrong.append(config)
    return wrong


@triton.jit
def packed_forward(q_ptr, k_ptr, v_ptr, o_ptr, S, group, qk_scale, D: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    i_m, i_kv = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # longest rows first
    o_head = i_kv.to(tl.int64) * S * D
    k_ptr, v_ptr = k_ptr + o_head, v_ptr + o_head
    q_ptr, o_ptr = q_ptr + o_head * group, o_ptr + o_head * group  # the first head of the group
    o_r = i_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M] rows of the group
    o_m, o_g = o_r // group, o_r % group  # [BLOCK_M] query numbers, heads of the group
    o_q = (o_g * S + o_m)[:, None] * D + tl.arange(0, D)[None, :]  # [BLOCK_M, D]
    b_q = tl.load(q_ptr + o_q, mask=o_m[:, None] < S, other=0.0)  # [BLOCK_M, D]
    end = tl.minimum(S, tl.cdiv((i_m + 1) * BLOCK_M, group)) if CAUSAL else S
    full = (i_m * BLOCK_M // group if CAUSAL else S) // BLOCK_N * BLOCK_N  # all rows see all keys up to here
    b_m, b_l = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    b_o = tl.zeros([BLOCK_M, D], tl.float32)  # [BLOCK_M, D]
    b_m, b_l, b_o = six.visit_tiles(b_q, b_m, b_l, b_o, k_ptr, v_ptr, o_m, 0, full, S, qk_scale,
                                    D, BLOCK_N, CAUSAL, False)
    b_m, b_l, b_o = six.visit_tiles(b_q, b_m, b_l, b_o, k_ptr, v_ptr, o_m, full, end, S, qk_scale,
                                    D, BLOCK_N, CAUSAL, True)
    tl.store(o_ptr + o_q, (b_o / b_l[:, None]).to(o_ptr.dtype.element_ty), mask=o_m[:, None] < S)


def packed(q, k, v, causal=True):
    (B, H, S, D), H_kv, o = q.shape, k.shape[1], torch.empty_like(q)
    group = H // H_kv
    packed_forward[(triton.cdiv(S * group, 32), B * H_kv)](
        q, k, v, o, S, group, six.LOG2_E * D**-0.5, D, 32, 32, causal)
    return o
