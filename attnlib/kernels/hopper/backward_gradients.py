"""How dK and dV of a consumer of the Hopper backward kernel leave: through its buffers of V, or as sums in
memory. They are tuples of parts of the columns; `plan` is the kernel's plan. Chapter 21 teaches the kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.kernels.common import tma
from attnlib.kernels.common.backward_ring import leave_sums
from attnlib.kernels.common.memory import matrix
from attnlib.kernels.hopper import backward_tiles as tiling


@gluon.jit
def times(x, factor):
    found = ()
    for i in gl.static_range(len(x)):
        found = found + (x[i] * factor,)
    return found


@gluon.jit
def store(descs, x, buffers, b, at, row):
    """Each part through this consumer's buffers."""
    for i in gl.static_range(len(x)):
        matrix(buffers[i], b).store(x[i].to(buffers[i].dtype))
    fence_async_shared()
    copy_out(descs, buffers, b, at, row)


@gluon.jit
def copy_out(descs, buffers, b, at, row):
    for i in gl.static_range(len(descs)):
        tma.async_copy_shared_to_global(descs[i], tiling.coordinates(at, 0, row), buffers[i].index(b))


@gluon.jit
def leave(sums, x, AT: gl.constexpr, plan: gl.constexpr):
    """Sums of 64 keys where other programs add to them."""
    for i in gl.static_range(len(x)):
        leave_sums(sums, x[i], AT + 64 * plan.d * i, plan.added, plan.persistent)
