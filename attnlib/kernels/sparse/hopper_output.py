"""How the output of a tile leaves in the Hopper forward kernel under a block mask, and when the place of its
queries is given back. Chapter 30 explains the kernel.

With one place for queries a consumer gives it back behind its last scores. The output has a buffer of its
own, of all columns or a part of them; a part waits for the one before it to leave. With two places the output
leaves through the place of its tile's queries, all columns at once, and that is given back in the next tile.
The warps of a consumer may be a step apart, so they wait for each other before one of them writes there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.kernels.common import softmax, tma
from attnlib.kernels.common import tile_scheduler as tiling
from attnlib.kernels.common.memory import room
from attnlib.kernels.common.named_barrier import named_barrier
from attnlib.kernels.sparse.queries import q_place

TOGETHER = gl.constexpr(14)  # and 15: named barriers of the warps of a consumer


@gluon.jit
def give_q_back(mem, turn, WG: gl.constexpr, plan: gl.constexpr):
    """The producer may fill the place of the queries of a program's tile number `turn`."""
    at, _ = q_place(turn, WG, plan)
    if plan.ahead:
        tma.store_wait(0)  # the output of that tile has left
    mbarrier.arrive(mem.q_free.index(at), count=1)


@gluon.jit
def store_output(desc_o, o, mem, at, row, turn, WG: gl.constexpr, plan: gl.constexpr):
    """Start to copy o [64, D], the rows from `row` on of a program's tile number `turn`, to the head `at`."""
    if plan.ahead:
        named_barrier("sync", TOGETHER + WG, 128)
        _store_columns(desc_o, o, room(mem.q, q_place(turn, WG, plan)[0], desc_o), at, row, 0)
    else:
        _store_parts(desc_o, o, mem, at, row, 0, WG, plan)


@gluon.jit
def _store_columns(desc_o, part, buffer, at, row, column: gl.constexpr):
    buffer.reshape([64, part.shape[1]]).store(part)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc_o, tiling.coordinates(at, row, column), buffer)


@gluon.jit
def _store_parts(desc_o, o, mem, at, row, column: gl.constexpr, WG: gl.constexpr, plan: gl.constexpr):
    """Columns from `column` on, at once or in two halves."""
    if plan.o_columns == o.shape[1]:
        tma.store_wait(0)  # what was there before must have left
        _store_columns(desc_o, o, mem.o.index(WG), at, row, column)
    else:
        left, right = softmax.halves(o)
        _store_parts(desc_o, left, mem, at, row, column, WG, plan)
        _store_parts(desc_o, right, mem, at, row, column + o.shape[1] // 2, WG, plan)
