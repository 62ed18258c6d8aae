"""The ring of key and value blocks of the forward Hopper kernel: waiting for a slot, and releasing it.
Chapter 11 teaches it.

`mem` is `forward_kernel.Memory`, `plan` a `plan.ForwardPlan`; the protocol is in the docstring of
`forward_kernel`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.kernels.common.named_barrier import named_barrier

KV_FREE = gl.constexpr(8)  # the first of the named barriers that Triton does not use in this kernel


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def _power_of_two(n):
    return n & (n - 1) == 0


@gluon.jit
def slot(c, plan: gl.constexpr):
    """Where block c of the ring is in memory."""
    if _power_of_two(plan.pipeline.stages):
        return c & (plan.pipeline.stages - 1)
    else:
        return c % plan.pipeline.stages


@gluon.jit
def _parity(c, plan: gl.constexpr):
    if _power_of_two(plan.pipeline.stages):
        return (c >> _log2(plan.pipeline.stages)) & 1
    else:
        return (c // plan.pipeline.stages) & 1


@gluon.jit
def _kv_free(operation: gl.constexpr, c, plan: gl.constexpr):
    threads: gl.constexpr = 32 + 128 * plan.pipeline.warpgroups  # of the producer and all consumers
    named_barrier(operation, KV_FREE + slot(c, plan), threads)


@gluon.jit
def wait_k(mem, c, plan: gl.constexpr):
    """Wait until the keys of slot c are there."""
    mbarrier.wait(mem.k_full.index(slot(c, plan)), _parity(c, plan))


@gluon.jit
def wait_v(mem, c, plan: gl.constexpr):
    """Wait until the values of slot c, those of block c-1, are there."""
    mbarrier.wait(mem.v_full.index(slot(c, plan)), _parity(c, plan))


@gluon.jit
def release(mem, c, plan: gl.constexpr):
    """A consumer needs slot c no more."""
    if plan.pipeline.named:
        _kv_free("arrive", c, plan)
    else:
        mbarrier.arrive(mem.kv_free.index(slot(c, plan)), count=1)


@gluon.jit
def acquire(mem, c, plan: gl.constexpr):
    """The producer may fill slot c: all consumers have released c - STAGES."""
    if plan.pipeline.named:
        if c >= plan.pipeline.stages:
            _kv_free("sync", c, plan)
    else:
        mbarrier.wait(mem.kv_free.index(slot(c, plan)), _parity(c, plan) ^ 1)


@gluon.jit
def as_parts(found, N: gl.constexpr):
    """What a wait for N products gives, which is a tuple only for more than one."""
    if N == 1:
        return (found,)
    else:
        return found
