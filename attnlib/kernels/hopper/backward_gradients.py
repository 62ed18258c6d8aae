"""How dK and dV of a consumer of the Hopper backward kernel leave: through its buffers of V, or as sums in
memory. They are tuples of parts of the columns; `plan` is the kernel's plan. Chapter 21 teaches the kernel.

Where values have other columns than keys, dK does not lie in memory as V does, and has two buffers of its
own: `mem.dk`, of which consumer w uses number w. Its copy of the tile before has left it by when dV of a tile
comes, as that of dV has (`backward_persistent.await_gradients`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.kernels.common import tma
from attnlib.kernels.common.backward_ring import leave_sums
from attnlib.kernels.common.memory import matrix
from attnlib.kernels.hopper import backward_tiles as tiling
from attnlib.kernels.hopper import column_parts


@gluon.jit
def zero_values(plan: gl.constexpr):
    """An accumulator of dV for each part."""
    if plan.own_values == 0:
        return column_parts.zeros(plan.d_layout, plan)
    else:
        return (gl.zeros([64, plan.own_values], gl.float32, plan.values_layout),)


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
def await_room(plan: gl.constexpr):
    """For dK, where dV is."""
    if plan.own_values == 0:
        tma.store_wait(0)


@gluon.jit
def store_keys(descs, dk, mem, first, WG: gl.constexpr, at, row, plan: gl.constexpr):
    """dK, behind dV, which used the buffers from `first` on."""
    if plan.own_values == 0:
        store(descs, dk, mem.v, first + WG, at, row)
    else:
        store(descs, dk, mem.dk, WG, at, row)


@gluon.jit
def leave_nothing(desc_dk, desc_dv, mem, tile, work, WG: gl.constexpr, plan: gl.constexpr):
    """Of keys that no query sees."""
    if plan.shared:
        if not plan.added:
            sums = tiling.key_sums(desc_dk, WG, tile, work, plan)
            leave(sums, column_parts.zeros(plan.d_layout, plan), 0, plan)
            leave(sums, zero_values(plan), 64 * plan.width, plan)
    else:
        at, row = tiling.keys(tile, work, plan), tile.start + WG * 64
        store(desc_dv, zero_values(plan), mem.v, WG, at, row)
        if plan.own_values == 0:
            copy_out(desc_dk, mem.v, WG, at, row)
        else:
            store(desc_dk, column_parts.zeros(plan.d_layout, plan), mem.dk, WG, at, row)
        tma.store_wait(0)


@gluon.jit
def leave(sums, x, AT: gl.constexpr, plan: gl.constexpr):
    """Sums of 64 keys where other programs add to them."""
    for i in gl.static_range(len(x)):
        leave_sums(sums, x[i], AT + 64 * plan.d * i, plan.added, plan.persistent)
