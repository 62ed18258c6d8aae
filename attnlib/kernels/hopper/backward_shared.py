"""What the Hopper backward kernels have in common: S and dP, and the producer. Chapter 21 builds the kernels;
the protocol is in their docstrings.

`mem` is the `Memory` of a kernel, `plan` its plan.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from attnlib.kernels.common import tma
from attnlib.kernels.common.backward_ring import DO_FREE, Q_FREE, acquire, opaque_zero, slot_of
from attnlib.kernels.common.memory import matrix
from attnlib.kernels.common.preprocess import DELTA, LSE2
from attnlib.kernels.hopper import backward_tiles as tiling
from attnlib.kernels.hopper import column_parts
from attnlib.kernels.hopper.column_parts import nbytes

NUMBERS = "S_q S_k H GROUP HEADS_KV SECTION LAST num_m num_n right left B SHARE".split()
"""Parameters that are numbers; all three kernels have them."""


# ---------------------------------------------------------------- S and dP


class Keys(NamedTuple):
    """Of 96 keys 64 and 32, because sizes of tiles are powers of two: descriptors, or what is in memory."""

    most: tuple  # of each part of the columns
    few: tuple


class Rows(NamedTuple):
    """64 rows of K or of V, the first operand of S or dP: where they lie, and the parts of their columns that
    stay in registers, as many as `plan.held`. Of these a product reads half as much shared memory."""

    buffers: tuple  # of each part
    registers: tuple


@gluon.jit
def held(buffers, i, plan: gl.constexpr):
    """The rows in buffer i, which have come."""
    registers = ()
    for part in gl.static_range(plan.held):
        registers = registers + (matrix(buffers[part], i).load(plan.held_layout),)
    return Rows(buffers, registers)


@gluon.jit
def issue_scores(rows, i, b, j, plan: gl.constexpr):
    """Start K Q^T, or V dO^T, of the rows in buffer i, None where there is one: [64, D] x [D, BLOCK_M], a
    product for each part."""
    token = gl.zeros([64, plan.block_m], gl.float32, plan.s_layout)
    for part in gl.static_range(len(b)):
        if part < plan.held:
            a = rows.registers[part]
        else:
            a = matrix(rows.buffers[part], opaque_zero(j) if i is None else i + opaque_zero(j))
        token = warpgroup_mma(a, b[part].permute((1, 0)), token, use_acc=part > 0, is_async=True)
    return token


# ---------------------------------------------------------------- producer


@gluon.jit
def produce(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan: gl.constexpr):
    tile = tiling.locate(gl.program_id(0), work, plan)
    if tiling.seen(tile, plan):
        _copy(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, tile, work, plan)


@gluon.jit
def copy_keys(desc, tile, bar, MORE: gl.constexpr, buffers, first, work, plan: gl.constexpr):
    """Of K or V, 64 rows into each buffer from the first on. MORE: bytes of copies that follow."""
    blocks: gl.constexpr = plan.block_n // 64
    at = tiling.keys(tile, work, plan)
    if plan.few:
        mbarrier.expect(bar, nbytes(desc.most) + nbytes(desc.few) + MORE)
        place = tiling.coordinates(at, 0, tile.start)
        column_parts.copy(desc.most, place, bar, buffers.most, first, plan.step)
        place = tiling.coordinates(at, 0, tile.start + 64)
        column_parts.copy(desc.few, place, bar, buffers.few, first, plan.step)
    else:
        mbarrier.expect(bar, blocks * nbytes(desc) + MORE)
        for w in gl.static_range(blocks):
            column_parts.copy(desc, tiling.coordinates(at, 0, tile.start + w * 64), bar, buffers, first + w)


@gluon.jit
def copy_rows(
    descs, desc_rows, WHICH: gl.constexpr, buffers, rows, bar, slot, at, tile, g, m, work, plan: gl.constexpr
):
    """Block m of Q and its LSE2, or of dO and its delta, whose bytes `bar` expects."""
    column_parts.copy(descs, tiling.coordinates(at, g, m * plan.block_m), bar, buffers, slot, plan.step)
    tma.async_copy_global_to_shared(
        desc_rows, tiling.rows(tile, WHICH, g, m, work, plan), bar, rows.index(slot)
    )


@gluon.jit
def _copy(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, tile, work, plan: gl.constexpr):
    at = tiling.queries(tile, work, plan)
    n = (tile.m_end - tile.m_start) * work.GROUP
    q_bytes: gl.constexpr = nbytes(desc_q) + desc_rows.block_type.nbytes
    do_bytes: gl.constexpr = nbytes(desc_do) + desc_rows.block_type.nbytes
    copy_keys(desc_k, tile, mem.k_full, 0, mem.k, 0, work, plan)
    m = tile.m_first
    g = 0
    for j in range(n):
        slot = slot_of(j)
        bar = mem.q_full.index(slot)
        acquire(Q_FREE, j, plan.consumers)
        mbarrier.expect(bar, q_bytes)
        copy_rows(desc_q, desc_rows, LSE2, mem.q, mem.lse, bar, slot, at, tile, g, m, work, plan)
        if j == 0:
            copy_keys(desc_v, tile, mem.v_full, 0, mem.v, 0, work, plan)
        bar = mem.do_full.index(slot)
        acquire(DO_FREE, j, plan.consumers)
        mbarrier.expect(bar, do_bytes)
        copy_rows(desc_do, desc_rows, DELTA, mem.do, mem.delta, bar, slot, at, tile, g, m, work, plan)
        m, g = tiling.block_after(m, g, tile, plan)
