"""Solutions of the exercises of chapter 01."""

import math

import torch
import triton
import triton.language as tl


def longest_sequence(memory: int, B: int, H: int, matrices: int = 2, itemsize: int = 2) -> int:
    """matrices * itemsize * B * H * S^2 <= memory, in integers."""
    return math.isqrt(memory // (matrices * itemsize * B * H))


@triton.jit
def softmax_once_kernel(s_ptr, p_ptr, columns, BLOCK: tl.constexpr):
    o_row = tl.program_id(0).to(tl.int64) * columns
    o_n = tl.arange(0, BLOCK)  # [BLOCK]
    b_s = tl.load(s_ptr + o_row + o_n, mask=o_n < columns, other=float("-inf")).to(tl.float32)  # [BLOCK]
    b_p = tl.exp(b_s - tl.max(b_s, 0))  # [BLOCK], 0 where masked and beyond the row
    tl.store(p_ptr + o_row + o_n, b_p / tl.sum(b_p, 0), mask=o_n < columns)


def softmax_once(s: torch.Tensor) -> torch.Tensor:
    """One program a row. 16384 scores are 32 registers a thread with 16 warps, 128 with the 4 used here."""
    rows, columns = s.shape
    p = torch.empty_like(s)
    softmax_once_kernel[(rows,)](s, p, columns, BLOCK=triton.next_power_of_2(columns), num_warps=4)
    return p


def first_subnormal_length(dtype: torch.dtype) -> int:
    """1/tiny is a power of two, so it is exact. For fp16 it is 16384, the length of d256."""
    return int(1 / torch.finfo(dtype).tiny) + 1
