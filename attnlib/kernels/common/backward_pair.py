"""Consumers of a Hopper backward kernel, 64 keys each, that share dS: how they exchange it, and their
products, and the order in which they start them. `kernels.hopper.backward_kernel` has the order of a step and
the protocol; chapter 21 builds it.

`mem` is a kernel's `Memory`, `plan` its plan.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from attnlib.kernels.common.backward_ring import opaque_zero
from attnlib.kernels.common.memory import matrix
from attnlib.kernels.common.named_barrier import named_barrier

START = gl.constexpr(4)  # of the named barriers, and 5; Triton uses those below 3
DS_FULL = gl.constexpr(12)  # Q_FREE and DO_FREE are 8 to 11, or see `sparse.hopper_backward_columns`


@gluon.jit
def tell_ds(j, WG: gl.constexpr):
    named_barrier("arrive", DS_FULL + 2 * WG + (j & 1), 256)


@gluon.jit
def await_ds(j, WG: gl.constexpr):
    """Wait until the other consumer has written its dS of block j; there is none of block -1."""
    if j >= 0:
        named_barrier("sync", DS_FULL + 2 * (1 - WG) + (j & 1), 256)


@gluon.jit
def await_start(j, WG: gl.constexpr):
    """Wait until the other consumer has started its products: of this step the first one, of the step before
    the second."""
    if j + WG > 0:
        named_barrier("sync", START + WG, 256)


@gluon.jit
def tell_start(j, n, WG: gl.constexpr, plan: gl.constexpr):
    """n: steps of the tile. A persistent plan does not know which step is its last, so every step tells, and
    consumer 0 waits once more after the last one."""
    if plan.persistent:
        named_barrier("arrive", START + 1 - WG, 256)
    elif j + WG < n:  # consumer 0 has no step left that would wait for the last one of consumer 1
        named_barrier("arrive", START + 1 - WG, 256)


@gluon.constexpr_function
def _wait_asm(clocks):
    return (
        "{ .reg .pred p; .reg .b32 first, now; mov.u32 first, %clock; AGAIN: mov.u32 now, %clock; "
        f"sub.u32 now, now, first; setp.lt.u32 p, now, {clocks}; @p bra AGAIN; mov.b32 $0, $1; }}"
    )


@gluon.jit
def begin_later(n, CLOCKS: gl.constexpr):
    """Wait for so many clocks; n: any number."""
    # A loop of the language's own, in a consumer's code, would make what follows it differ for each thread.
    gl.inline_asm_elementwise(
        _wait_asm(CLOCKS), "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def issue_scores(a, b, j, WG: gl.constexpr, plan: gl.constexpr, first=0):
    """Start K Q^T, or V dO^T: [64, D] x [D, BLOCK_M]. The keys begin at buffer `first`."""
    zero = gl.zeros([64, plan.block_m], gl.float32, plan.s_layout)
    a = matrix(a, first + WG + opaque_zero(j))
    return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def issue_dq(ds, k, j, WG: gl.constexpr, plan: gl.constexpr, first=0):
    """Start this consumer's half of dQ of block j, of the rows or of the columns that `k` has: [64, 128] x
    [128, columns], as two products. The keys begin at buffer `first`."""
    columns: gl.constexpr = k.shape[-1] // (1 if plan.by_rows else 2)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    dq = gl.zeros([64, columns], gl.float32, layout)
    for w in gl.static_range(2):
        ds_w = ds.index((j & 1) * 2 + w)  # [64, BLOCK_M]: keys, queries
        k_w = matrix(k, first + w + opaque_zero(j + 1))  # [64, D]; j is -1 or more
        if plan.by_rows:
            ds_w = ds_w.slice(WG * 64, 64, 1)
        else:
            k_w = k_w.slice(WG * columns, columns, 1)
        dq = warpgroup_mma(ds_w.permute((1, 0)), k_w, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def write_ds(mem, ds_half, j, WG: gl.constexpr):
    mem.ds.index((j & 1) * 2 + WG).store(ds_half)
    fence_async_shared()
    tell_ds(j, WG)


@gluon.jit
def here(x):
    """x, of 16 bits. The compiler moves nothing that is computed from it ahead of this instruction."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )
