"""Solutions of chapter 19."""

import torch
import triton
import triton.language as tl


@triton.jit
def lazy_kernel(q_ptr, k_ptr, v_ptr, o_ptr, moves_ptr, S, qk_scale, CAUSAL: tl.constexpr, D: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    i_m, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_r, o_d = tl.arange(0, BLOCK), tl.arange(0, D)  # [BLOCK], [D]
    o_m = i_m * BLOCK + o_r  # [BLOCK]
    o_md, inside = (i_h * S + o_m)[:, None] * D + o_d[None, :], o_m < S  # [BLOCK, D], [BLOCK]
    b_q = tl.load(q_ptr + o_md, mask=inside[:, None], other=0.0)  # [BLOCK, D]
    b_c = tl.full([BLOCK], float("-inf"), tl.float32)  # [BLOCK] the shift
    b_l, b_o = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK, D], tl.float32)  # [BLOCK], [BLOCK, D]
    b_moves = tl.full([BLOCK], -1, tl.int32)  # [BLOCK] the first block moves each shift
    for i in range(0, i_m + 1 if CAUSAL else tl.cdiv(S, BLOCK)):
        o_n = i * BLOCK + o_r  # [BLOCK]
        o_nd = (i_h * S + o_n)[:, None] * D + o_d[None, :]  # [BLOCK, D]
        there = (o_n < S)[:, None]  # [BLOCK, 1]
        b_k = tl.load(k_ptr + o_nd, mask=there, other=0.0)  # [BLOCK, D]
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee") * qk_scale  # [BLOCK, BLOCK] in base 2
        seen = (o_n[None, :] < S) & ((o_n[None, :] <= o_m[:, None]) | (not CAUSAL))
        b_s = tl.where(seen, b_s, float("-inf"))
        b_top = tl.max(b_s, 1)  # [BLOCK]
        grown = b_top > b_c + 8.0  # [BLOCK]
        if tl.max(grown.to(tl.int32), 0) > 0:
            b_new = tl.where(grown, b_top, b_c)  # [BLOCK]
            b_alpha = tl.exp2(b_c - b_new)  # [BLOCK] 0 in the first block
            b_l, b_o, b_c = b_l * b_alpha, b_o * b_alpha[:, None], b_new
            b_moves += grown.to(tl.int32)
        b_p = tl.exp2(b_s - b_c[:, None])  # [BLOCK, BLOCK] up to 2^8
        b_v = tl.load(v_ptr + o_nd, mask=there, other=0.0)  # [BLOCK, D]
        b_l += tl.sum(b_p, 1)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision="ieee")  # [BLOCK, D]
    tl.store(o_ptr + o_md, (b_o / b_l[:, None]).to(o_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(moves_ptr + i_h * S + o_m, b_moves, mask=inside)


def lazy_attention(q, k, v, causal, sm_scale):
    """(output, how often each row's shift has moved after the first block)."""
    (B, H, S, D), o = q.shape, torch.empty_like(q)
    moves = torch.empty(B, H, S, dtype=torch.int32, device=q.device)
    lazy_kernel[(triton.cdiv(S, 32), B * H)](
        q, k, v, o, moves, S, sm_scale * 1.4426950408889634, causal, D, 32
    )
    return o, moves


def power_account(flops, ms, sm_mhz, watts, better=1.0, sms=132):
    """(share of the throttled roof, pJ per FLOP, TFLOP/s at `better` times that energy)."""
    tflops = flops / ms * 1e-9
    throttled = sms * 4096 * sm_mhz * 1e-6
    return tflops / throttled, watts / tflops, tflops / better


def violations(rows, peer, least, ours="attnlib"):
    """Cells where `ours` is slower than `least` times `peer`, worst first."""
    keys = ("batch", "heads", "seqlen", "head_dim", "causal", "dtype")
    ms = {(row["impl"], *(row[key] for key in keys)): row["ms"] for row in rows if row["status"] == "ok"}
    cells = []
    for (impl, *shape), mine in ms.items():
        theirs = ms.get((peer, *shape))
        if impl == ours and theirs is not None and theirs / mine < least:
            cells.append((theirs / mine, *shape[2:]))
    return sorted(cells)
