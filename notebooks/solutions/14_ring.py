"""Solutions of the exercises of chapter 14: functions that take the place of the kernel's own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common.named_barrier import named_barrier


@gluon.jit
def release(mem, c, plan: gl.constexpr):
    named_barrier("arrive", KV_FREE + slot(c, plan), 128 * plan.warpgroups + 32)  # all consumers count


@gluon.jit
def acquire(mem, c, plan: gl.constexpr):
    if c >= plan.stages:  # what was never filled is not given back
        named_barrier("sync", KV_FREE + slot(c, plan), 128 * plan.warpgroups + 32)


@gluon.jit
def copy_blocks(k_desc, v_desc, mem, c, begin, end, i_h, blocks, plan: gl.constexpr):
    for i in range(begin, end):
        acquire(mem, c + i, plan)
        copy(k_desc, mem.k_full, mem.k, c + i, i_h, blocks - 1 - i, plan)
        copy(v_desc, mem.v_full, mem.v, c + i, i_h, blocks - i, plan)  # the values of the block before


mended_ring = [release, acquire, copy_blocks]


@gluon.jit
def new_shift(s, shift, qk_scale):
    top = gl.max(s, 1) * qk_scale  # [64]
    grown = top - shift > LAZY  # [64]
    new = gl.where(grown, gl.ceil(top), shift)
    return new, gl.exp2(shift - new), any_in_warp(grown.to(gl.int32))


@gluon.jit
def first_weights(s, qk_scale):
    shift = gl.maximum(gl.ceil(gl.max(s, 1) * qk_scale), -1e30)  # [64] finite: see chapter 11
    p = weights(s, shift, qk_scale)
    return p, shift, sum_parts(p)


whole_shifts = [new_shift, first_weights]
