"""Solutions of the exercises of chapter 02."""

import torch
import triton
import triton.language as tl


def kv_bytes(seqlen, head_dim, block_m, block_n, causal, k_passes=3, v_passes=1, itemsize=2):
    """Bytes of K and V that the programs of one head load, summed over its blocks of rows."""
    keys = 0
    for start_m in range(0, seqlen, block_m):
        end = min(seqlen, start_m + block_m) if causal else seqlen
        keys += min(seqlen, -(-end // block_n) * block_n)  # the last tile may reach beyond the diagonal
    return keys * (k_passes + v_passes) * head_dim * itemsize


@triton.jit
def row_sum_kernel(q_ptr, k_ptr, m_ptr, l_ptr, S, sm_scale, D: tl.constexpr, BLOCK: tl.constexpr):
    o_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    o_d = tl.arange(0, D)  # [D]
    b_q = tl.load(q_ptr + o_m[:, None] * D + o_d[None, :], mask=o_m[:, None] < S, other=0.0)  # [BLOCK, D]
    b_m = tl.load(m_ptr + o_m, mask=o_m < S, other=0.0)  # [BLOCK] the row max, known
    b_l = tl.zeros([BLOCK], tl.float32)  # [BLOCK]
    for start in range(0, S, BLOCK):
        o_n = start + tl.arange(0, BLOCK)  # [BLOCK]
        b_k = tl.load(k_ptr + o_n[:, None] * D + o_d[None, :], mask=o_n[:, None] < S, other=0.0)  # [BLOCK, D]
        b_s = tl.dot(b_q, b_k.T, input_precision="ieee") * sm_scale  # [BLOCK, BLOCK] fp32
        keep = (o_n[None, :] < S) & (o_n[None, :] <= o_m[:, None])  # [BLOCK, BLOCK]
        b_s = tl.where(keep, b_s, float("-inf"))
        b_l += tl.sum(tl.exp(b_s - b_m[:, None]), 1)
    tl.store(l_ptr + o_m, b_l, mask=o_m < S)


def row_sum(q, k, m, sm_scale):
    """l [S] fp32 for one head: q, k [S, D], m [S] fp32, causal."""
    S, D = q.shape
    out = torch.empty(S, dtype=torch.float32, device=q.device)
    row_sum_kernel[(triton.cdiv(S, 32),)](q, k, m, out, S, sm_scale, D, 32)
    return out


UNITS = ("tensor_pct", "xu_pct", "fma_pct", "alu_pct", "issue_pct", "shared_pct", "l2_pct", "dram_pct")


def without_waits(row):
    """(key of the busiest unit, microseconds if it were busy all the time) of a row of counters."""
    unit = max((unit for unit in UNITS if row[unit] is not None), key=row.get)
    return unit, row["time_us"] * row[unit] / 100
