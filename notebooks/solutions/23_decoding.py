"""Solutions of chapter 23."""

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def decode_pages_kernel(q_ptr, k_ptr, v_ptr, o_ptr, table, lengths, pages_of, scale, H_KV,
                        GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row key % PAGE of page table[key // PAGE], for each key of a tile; nothing beyond the length."""
    pair, o_r, o_d = tl.program_id(0), tl.arange(0, 16), tl.arange(0, D)  # [16], [D]
    o_rd = (pair * GROUP + o_r[:, None]) * D + o_d[None, :]  # [16, D]
    b_q = tl.load(q_ptr + o_rd, mask=o_r[:, None] < GROUP, other=0.0)  # [16, D]
    b, head, o_n = pair // H_KV, pair % H_KV, tl.arange(0, BLOCK_N)  # [BLOCK_N]
    S = tl.load(lengths + b)
    b_m = tl.full([16], float("-inf"), tl.float32)  # [16]
    b_l, b_o = tl.zeros([16], tl.float32), tl.zeros([16, D], tl.float32)  # [16], [16, D]
    for start in range(0, S, BLOCK_N):
        o_k = start + o_n  # [BLOCK_N]
        b_page = tl.load(table + b * pages_of + o_k // PAGE, mask=o_k < S, other=0)  # [BLOCK_N]
        b_row = (b_page.to(tl.int64) * H_KV + head) * PAGE + o_k % PAGE  # [BLOCK_N]
        o_kd = b_row[:, None] * D + o_d[None, :]  # [BLOCK_N, D]
        b_k = tl.load(k_ptr + o_kd, mask=o_k[:, None] < S, other=0.0)  # [BLOCK_N, D]
        b_v = tl.load(v_ptr + o_kd, mask=o_k[:, None] < S, other=0.0)  # [BLOCK_N, D]
        b_s = tl.where(o_k[None, :] < S, tl.dot(b_q, b_k.T) * scale, float("-inf"))  # [16, BLOCK_N]
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))  # [16]
        b_p, b_alpha = tl.exp2(b_s - b_m_new[:, None]), tl.exp2(b_m - b_m_new)  # [16, BLOCK_N], [16]
        b_l, b_m = b_l * b_alpha + tl.sum(b_p, 1), b_m_new
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None])
    tl.store(o_ptr + o_rd, (b_o / b_l[:, None]).to(o_ptr.dtype.element_ty), mask=o_r[:, None] < GROUP)


def decode_pages(q, k_pages, v_pages, table, lengths, sm_scale):
    (B, H, _, D), (_, H_kv, page, _), o = q.shape, k_pages.shape, torch.empty_like(q)
    decode_pages_kernel[(B * H_kv,)](q, k_pages, v_pages, o, table, lengths, table.shape[1],
                                     sm_scale * 1.4426950408889634, H_kv, H // H_kv, D, page, 64)
    return o


def snapped(begins, programs, slack):
    """A share may grow by twice the slack, for which all others wait: that is what a merge less costs."""
    begins = np.asarray(begins)
    cuts = np.unique(np.linspace(0, begins[-1], programs + 1).round().astype(int))
    for i in range(1, len(cuts) - 1):
        near = begins[np.abs(begins - cuts[i]).argmin()]
        if abs(near - cuts[i]) <= slack:
            cuts[i] = near
    return np.unique(cuts)


def free_queries(group, tflops, gb_per_s, itemsize=2):
    """2 * queries * group FLOPs for each `itemsize` bytes. 51 for a group of 4 in fp16, 25 with an 8-bit
    cache: half the bytes leave half the time."""
    return int(itemsize * tflops * 1e12 // (2 * group * gb_per_s * 1e9))
