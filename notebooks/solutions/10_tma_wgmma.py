"""Solutions of chapter 10."""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.book import lesson

ten = lesson.load_kernel("10_tma_wgmma")


def byte_of(row, column, rows, D):
    """The byte of element (row, column) of a swizzled [rows, D] fp16 tile: panel, row, chunk, place."""
    panel, column = divmod(column, 64)
    chunk, place = divmod(column, 8)
    return panel * rows * 128 + row * 128 + (chunk ^ row % 8) * 16 + place * 2


class MBarrier:
    """A barrier of arrivals and bytes; its phases follow each other."""

    def __init__(self, count):
        self.count, self.missing, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, expect=0):
        self.missing -= 1
        self.bytes += expect
        self._advance()

    def land(self, count):
        self.bytes -= count
        self._advance()

    def passed(self, parity):
        return self.phase % 2 != parity

    def _advance(self):
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count


def clocks_per_trip(product, softmax, latency):
    """The longest of three circles: the work, K's buffer, V's buffer. Free up to product + softmax."""
    work = 2 * product + softmax
    copy_of_k = product + latency  # product ends, copy, next product
    copy_of_v = latency + product  # second product ends, copy, second product
    return max(work, copy_of_k, copy_of_v)


@gluon.jit(do_not_specialize=["S"])
def paired_forward(q_desc, k_desc, v_desc, o_desc, S, qk_scale, CAUSAL: gl.constexpr):
    D: gl.constexpr = k_desc.block_shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[1]
    s_layout: gl.constexpr = ten.accumulator(BLOCK_N)
    o_layout: gl.constexpr = ten.accumulator(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)  # P: first operand, in registers
    q_tile = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [2] + k_desc.block_shape, k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [2] + v_desc.block_shape, v_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(5):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()  # the copy engine sees the barriers

    i_h, i_m = gl.program_id(1), gl.num_programs(0) - 1 - gl.program_id(0)
    row = i_m * 64
    tiles = gl.cdiv(gl.minimum(row + 64, S) if CAUSAL else S, BLOCK_N)
    ten.load_tile(q_desc, i_h, row, full.index(4), q_tile)
    for i in range(gl.minimum(tiles, 2)):  # two tiles of K and V are on their way before the loop
        ten.load_tile(k_desc, i_h, (tiles - 1 - i) * BLOCK_N, full.index(i), k_tiles.index(i))
        ten.load_tile(v_desc, i_h, (tiles - 1 - i) * BLOCK_N, full.index(2 + i), v_tiles.index(i))
    b_m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))  # [64]
    b_l = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))  # [64]
    b_o = gl.zeros([64, D], gl.float32, o_layout)  # [64, D]
    b_zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)  # [64, BLOCK_N]
    mbarrier.wait(full.index(4), 0)
    for i in range(tiles):
        slot, later = i % 2, (tiles - 3 - i) * BLOCK_N  # first key of the tile that takes this slot next
        mbarrier.wait(full.index(slot), (i // 2) & 1)
        k_t = ten.matrix(k_tiles.index(slot)).permute((1, 0))
        token = warpgroup_mma(ten.matrix(q_tile), k_t, b_zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(token,))  # [64, BLOCK_N]
        if i + 2 < tiles:
            ten.load_tile(k_desc, i_h, later, full.index(slot), k_tiles.index(slot))
        if i == 0:
            b_s = ten.mask(b_s, row, (tiles - 1) * BLOCK_N, S, CAUSAL)
        b_p, b_alpha, b_m, b_l = ten.softmax_tile(b_s, b_m, b_l, qk_scale)  # [64, BLOCK_N], [64]
        b_o = b_o * ten.rows_of(b_alpha, b_o)
        b_p = gl.convert_layout(b_p.to(v_desc.dtype), p_layout)
        mbarrier.wait(full.index(2 + slot), (i // 2) & 1)
        token = warpgroup_mma(b_p, ten.matrix(v_tiles.index(slot)), b_o, is_async=True)
        b_o = warpgroup_mma_wait(0, deps=(token,))  # [64, D]
        if i + 2 < tiles:
            ten.load_tile(v_desc, i_h, later, full.index(2 + slot), v_tiles.index(slot))
    b_o = b_o / ten.rows_of(b_l, b_o)
    ten.matrix(q_tile).store(b_o.to(o_desc.dtype))
    fence_async_shared()  # what threads wrote becomes visible to the copy engine
    tma.async_copy_shared_to_global(o_desc, [i_h, row, 0], q_tile)
    tma.store_wait(0)


def paired_attention(q, k, v, causal=True):
    (B, H, S, D), o = q.shape, torch.empty_like(q)
    paired_forward[(triton.cdiv(S, 64), B * H)](
        ten.windows(q, 64), ten.windows(k, 64), ten.windows(v, 64), ten.windows(o, 64), S,
        ten.LOG2_E * D**-0.5, causal, num_warps=4)
    return o
