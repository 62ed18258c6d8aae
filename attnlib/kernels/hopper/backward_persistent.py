"""A backward program that stays on its SM: it computes tile after tile, each a block of keys, without a gap.

What a program costs beyond its steps is its launch, its barriers, the latency of its first copies, a first
and a last product that nothing overlaps, and the stores of its gradients. A `persistent` plan has a program
for each SM. Steps are counted through all tiles of a program, i below, and the last step of a tile starts S
of the next one, whose first step forms the last dQ of the tile before, as in the middle of a tile. K and V
have two sets of buffers; tile t, of those of a program, uses set t & 1, and there its dV and dK leave.

    Who tells whom

The producer draws the number of the next tile from a counter in global memory when it has come to the last
block of this one, and leaves it in `next_tile`, -1 after the last one. It copies K with the first Q and V
with the first dO, so these need no barriers of their own.

    barrier           completes when                           waited for by          parity of the wait
    q_full[slot]      TMA has written Q and LSE2 of step i,    each consumer          (i // 2) & 1
                      in a first step K; `next_tile` is there
    do_full[slot]     TMA has written dO and delta of step i,  each consumer          (i // 2) & 1
                      in a first step V
    KV_FREE           both consumers are done with K and V of  producer, to tell of
                      tile t, and their dV and dK have left;   tile t + 2
                      who adds has read of tile t + 1

K of tile t + 2 comes when the last dQ of tile t has been formed, in the first step of tile t + 1, whose last
step wants it. So a tile has two steps at least, if need be with a block of queries that see none of its
keys. After the last tile the producer arrives at q_full without a copy. It tells of tile t + 2 when both
consumers are in the first step of tile t + 1, and have read what was told of that, so there is one
`next_tile`.

`mem` is the `Memory` of a kernel, `plan` its plan. Chapter 20 derives the backward pass.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attnlib.kernels.common.backward_ring import DO_FREE, Q_FREE, acquire, slot_of
from attnlib.kernels.common.named_barrier import named_barrier
from attnlib.kernels.common.preprocess import DELTA, LSE2
from attnlib.kernels.common.tile_scheduler import draw, drawn, lanes
from attnlib.kernels.hopper import backward_tiles as tiling
from attnlib.kernels.hopper.backward_shared import copy_keys, copy_rows
from attnlib.kernels.hopper.column_parts import nbytes

KV_FREE = gl.constexpr(5)  # of the named barriers; Triton uses some below


# ---------------------------------------------------------------- numbers of tiles


@gluon.jit
def new_next_tile():
    """A store is one of all 32 lanes of the producer, so each has a word. The first one's counts: that lane
    also arrives at the barrier."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [32], layout)


@gluon.jit
def _tell(mem, number):
    mem.next_tile.store(number + 0 * lanes())


@gluon.jit
def next_tile(mem, WARPS: gl.constexpr):
    """What the producer has told: the number of a tile, or -1. A consumer that has waited for Q of its first
    step may ask."""
    return gl.max(mem.next_tile.slice(0, 1).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def look_ahead(mem):
    """For the warp that adds in bulk, which has been told of the last dQ of a tile, so that consumers have
    waited for Q of the next one: its number, or -1."""
    number = next_tile(mem, 1)
    if number >= 0:
        named_barrier("arrive", KV_FREE, 320)
    return number


# ---------------------------------------------------------------- sets of K and V


@gluon.jit
def set_of(t):
    """The first buffer of K and of V of a tile, there are two for 128 keys; of the tile after and of the one
    before it is `other_set` of this."""
    return 2 * (t & 1)


@gluon.jit
def other_set(first):
    return 2 - first


@gluon.constexpr_function
def _users(plan):
    """Threads that come to KV_FREE."""
    return 320 if plan.bulk else 288


@gluon.jit
def release_keys(i, j, plan: gl.constexpr):
    """This consumer has formed the last dQ of the tile before, in the first step of a tile: K and V of that
    are needed no more. Its gradients leave from there."""
    if (j == 0) & (i > 0):
        tma.store_wait(0)
        named_barrier("arrive", KV_FREE, _users(plan))


# ---------------------------------------------------------------- producer


@gluon.jit
def produce_tiles(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan: gl.constexpr):
    q_bytes: gl.constexpr = nbytes(desc_q) + desc_rows.block_type.nbytes
    do_bytes: gl.constexpr = nbytes(desc_do) + desc_rows.block_type.nbytes
    number = gl.program_id(0)
    t = 0  # of the tiles of this program
    i = 0  # of its steps
    asked = 0 * lanes()
    while number < work.tiles:
        tile = tiling.locate(number, work, plan)
        at = tiling.queries(tile, work, plan)
        first = set_of(t)
        n = (tile.m_end - tile.m_start) * work.GROUP
        m = tile.m_start
        g = 0
        if t > 1:
            named_barrier("sync", KV_FREE, _users(plan))
        for j in range(n):
            if j == n - 1:  # earlier, and an idle program could have computed the tile
                asked = draw(work.counter_ptr)
            slot = slot_of(i)
            bar = mem.q_full.index(slot)
            acquire(Q_FREE, i)
            if j == 0:
                _tell(mem, number)
                copy_keys(desc_k, tile, bar, q_bytes, mem.k, first, work, plan)
            else:
                mbarrier.expect(bar, q_bytes)
            copy_rows(desc_q, desc_rows, LSE2, mem.q, mem.lse, bar, slot, at, tile, g, m, work, plan)
            bar = mem.do_full.index(slot)
            acquire(DO_FREE, i)
            if j == 0:
                copy_keys(desc_v, tile, bar, do_bytes, mem.v, first, work, plan)
            else:
                mbarrier.expect(bar, do_bytes)
            copy_rows(desc_do, desc_rows, DELTA, mem.do, mem.delta, bar, slot, at, tile, g, m, work, plan)
            i += 1
            m += 1
            if m == tile.m_end:
                m = tile.m_start
                g += 1
        number = drawn(asked, work.counter_ptr, work.tiles, 1)
        t += 1
    if t > 1:
        named_barrier("sync", KV_FREE, _users(plan))
    acquire(Q_FREE, i)
    _tell(mem, -1)
    mbarrier.arrive(mem.q_full.index(slot_of(i)), count=1)
