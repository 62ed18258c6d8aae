"""What the backward pass for Hopper leaves to plain Triton: dQ from the order of registers to that of q.

`hopper_backward` adds to dQ in float32 as an accumulator of wgmma lies in the registers of a warpgroup: of 64
rows and 8 columns thread t has rows 16 (t / 32) + t % 32 / 4 and that plus 8, columns 2 (t % 4) and that plus
1, and its four values are 16 bytes in memory. So an addition needs no shared memory, and a warp writes 512
bytes in a row.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["S_q", "D", "H", "num_m"])
def attention_backward_dq(
    sums_ptr,  # (B * H, num_m, BLOCK_D / 8, 512), float32
    dq_ptr,  # (B, H, S_q, D)
    sm_scale,
    S_q, D, H,
    num_m,  # blocks of 64 rows of a head
    stride_b, stride_h, stride_m,  # of dq
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq = sm_scale * sums. Grid: (blocks of 64 rows of all heads that have one of S_q,)."""
    blocks = tl.cdiv(S_q, 64)
    i_bh = tl.program_id(0) // blocks
    i_m = tl.program_id(0) % blocks
    start = (i_bh.to(tl.int64) * num_m + i_m) * (64 * BLOCK_D)
    b_sums = tl.load(sums_ptr + start + tl.arange(0, 64 * BLOCK_D))
    # Eights of columns, warps, threads of a warp by row and by column, the two rows, the two columns.
    b_sums = tl.reshape(b_sums, (BLOCK_D // 8, 4, 8, 4, 2, 2))
    b_dq = tl.reshape(tl.permute(b_sums, (1, 4, 2, 0, 3, 5)), (64, BLOCK_D)) * sm_scale  # [64, BLOCK_D]
    o_m = i_m * 64 + tl.arange(0, 64)  # [64]
    o_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    head_ptr = dq_ptr + (i_bh // H).to(tl.int64) * stride_b + (i_bh % H).to(tl.int64) * stride_h
    where = o_m.to(tl.int64)[:, None] * stride_m + o_d[None, :]  # [64, BLOCK_D]
    mask = (o_m < S_q)[:, None] & (o_d < D)[None, :]
    tl.store(head_ptr + where, b_dq.to(dq_ptr.dtype.element_ty), mask=mask)
