"""The kernel that adds parts of a gradient, the second of which may have some of the rows only."""

import triton
import triton.language as tl


@triton.jit
def _rows(ptr, stride, at, o_m, o_d):
    """Pointers to rows of one head of a (B, H, S, D) tensor. [BLOCK_M, BLOCK_D]"""
    place = at[0].to(tl.int64) * stride[0] + at[1].to(tl.int64) * stride[1]
    return ptr + place + o_m.to(tl.int64)[:, None] * stride[2] + o_d[None, :] * stride[3]


@triton.jit
def add_rows(
    a_ptr, b_ptr, o_ptr, a_stride, b_stride, o_stride,
    H, S, start, count, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """O = A + B in the `count` rows from `start` on, which B has, and A in the others. Grid: (blocks of rows,
    B * H)."""
    at = (tl.program_id(1) // H, tl.program_id(1) % H)
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    o_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    o_b = o_m - start
    in_md = (o_m < S)[:, None] & (o_d < D)[None, :]
    in_bd = ((o_b >= 0) & (o_b < count))[:, None] & (o_d < D)[None, :]
    b_a = tl.load(_rows(a_ptr, a_stride, at, o_m, o_d), mask=in_md, other=0.0)  # [BLOCK_M, BLOCK_D]
    b_b = tl.load(_rows(b_ptr, b_stride, at, o_b, o_d), mask=in_bd, other=0.0)  # [BLOCK_M, BLOCK_D]
    b_o = b_a.to(tl.float32) + b_b.to(tl.float32)
    tl.store(_rows(o_ptr, o_stride, at, o_m, o_d), b_o.to(o_ptr.dtype.element_ty), mask=in_md)
