"""The kernels that join two parts of a result, the second of which may have some of the rows only: attention
to disjoint sets of keys, which chapter 42 derives, and parts of a gradient."""

import triton
import triton.language as tl


@triton.jit
def _rows(ptr, stride, at, o_m, o_d):
    """Pointers to rows of one head of a (B, H, S, D) tensor. [BLOCK_M, BLOCK_D]"""
    place = at[0].to(tl.int64) * stride[0] + at[1].to(tl.int64) * stride[1]
    return ptr + place + o_m.to(tl.int64)[:, None] * stride[2] + o_d[None, :] * stride[3]


@triton.jit
def _column(ptr, stride, at, o_m):
    """Pointers to the same rows of a (B, H, S) tensor. [BLOCK_M]"""
    place = at[0].to(tl.int64) * stride[0] + at[1].to(tl.int64) * stride[1]
    return ptr + place + o_m.to(tl.int64) * stride[2]


@triton.jit
def merge_rows(
    a_ptr, a_lse_ptr, b_ptr, b_lse_ptr, o_ptr, o_lse_ptr,
    a_stride, b_stride, o_stride, a_lse_stride, b_lse_stride, o_lse_stride,
    H, S, start, count, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """LSE = log(exp(LSE_a) + exp(LSE_b)), O = exp(LSE_a - LSE) O_a + exp(LSE_b - LSE) O_b. B has `count` rows
    from `start` on; the others are A's. Grid: (blocks of rows, B * H)."""
    at = (tl.program_id(1) // H, tl.program_id(1) % H)
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    o_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    o_b = o_m - start  # where B has these rows
    in_m, in_b = o_m < S, (o_b >= 0) & (o_b < count)  # [BLOCK_M]
    in_md, in_bd = in_m[:, None] & (o_d < D)[None, :], in_b[:, None] & (o_d < D)[None, :]
    b_la = tl.load(_column(a_lse_ptr, a_lse_stride, at, o_m), mask=in_m, other=float("-inf"))  # [BLOCK_M]
    b_lb = tl.load(_column(b_lse_ptr, b_lse_stride, at, o_b), mask=in_b, other=float("-inf"))  # [BLOCK_M]
    b_a = tl.load(_rows(a_ptr, a_stride, at, o_m, o_d), mask=in_md, other=0.0)  # [BLOCK_M, BLOCK_D]
    b_b = tl.load(_rows(b_ptr, b_stride, at, o_b, o_d), mask=in_bd, other=0.0)  # [BLOCK_M, BLOCK_D]
    b_max = tl.maximum(b_la, b_lb)
    b_max = tl.where(b_max == float("-inf"), 0.0, b_max)  # no key at all: the weights below are 0, not NaN
    b_wa, b_wb = tl.exp(b_la - b_max), tl.exp(b_lb - b_max)
    b_sum = b_wa + b_wb
    b_none = b_sum == 0.0
    b_sum = tl.where(b_none, 1.0, b_sum)
    b_inverse = 1.0 / b_sum
    # A part without keys has weight 0. It is left out, so that nothing in it counts.
    b_a = tl.where((b_wa == 0.0)[:, None], 0.0, b_a.to(tl.float32) * (b_wa * b_inverse)[:, None])
    b_b = tl.where((b_wb == 0.0)[:, None], 0.0, b_b.to(tl.float32) * (b_wb * b_inverse)[:, None])
    b_lse = tl.where(b_none, float("-inf"), b_max + tl.log(b_sum))
    tl.store(_rows(o_ptr, o_stride, at, o_m, o_d), (b_a + b_b).to(o_ptr.dtype.element_ty), mask=in_md)
    tl.store(_column(o_lse_ptr, o_lse_stride, at, o_m), b_lse, mask=in_m)


@triton.jit
def add_rows(
    a_ptr, b_ptr, o_ptr, a_stride, b_stride, o_stride,
    H, S, start, count, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """O = A + B in the `count` rows from `start` on, which B has, and A in the others. Grid as above."""
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
