"""Where a tile's queries lie, and how they get there, in the Hopper forward kernel under a block mask.
Chapter 30 explains the kernel.

With one buffer the producer waits until both consumers have given the queries of the tile before back; its
copies of keys wait behind that. With two it copies the next tile's queries as soon as that tile is drawn.
Tile t of a program has buffer t & 1, and the parity of that buffer's barriers is t >> 1 & 1. The producer
waits for the place before it tells of the tile: what it tells overwrites words that consumers have read by
then.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.kernels.common import tile_scheduler as tiling
from attnlib.kernels.common import tma
from attnlib.kernels.common.memory import matrix


@gluon.jit
def q_place(turn, w, plan: gl.constexpr):
    """(number among the buffers of Q, and among their barriers, parity) of a program's tile number `turn` for
    warpgroup w."""
    if plan.q_buffers == 1:
        return w, turn & 1
    else:
        return (turn & 1) * 2 + w, (turn >> 1) & 1


@gluon.jit
def copy_q(desc_q, mem, turn, tile, there, plan: gl.constexpr):
    """Wait for the place of the queries of a program's tile number `turn`, and start to copy them, if that
    tile is there."""
    for w in gl.static_range(2):
        at, parity = q_place(turn, w, plan)
        mbarrier.wait(mem.q_free.index(at), parity ^ 1)
        if there:
            mbarrier.expect(mem.q_full.index(at), desc_q.block_type.nbytes)
            tma.async_copy_global_to_shared(
                desc_q, tiling.coordinates((tile.i_b, tile.i_h), tile.row + w * 64, 0),
                mem.q_full.index(at), mem.q.index(at),
            )


@gluon.jit
def await_q(mem, turn, there, WG: gl.constexpr, plan: gl.constexpr):
    """Wait for the queries of a tile, if it is there; those of its columns that stay in registers."""
    at, parity = q_place(turn, WG, plan)
    if there:
        mbarrier.wait(mem.q_full.index(at), parity)
    q_registers = 0
    if plan.q_columns > 0:
        q_registers = matrix(mem.q, at).slice(0, plan.q_columns, 1).load(plan.q_layout)
    return q_registers
