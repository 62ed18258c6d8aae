"""dQ on its way to global memory through shared memory: the consumers write float32 sums there, and a warp of
its own has the unit that copies add them (`bulk_add`). Chapter 21 teaches the additions from registers.

Additions from registers go through the queue in which a warp's loads and stores of shared memory wait, too,
and as fast as the L2 takes them. A plan that is `bulk` keeps them out of it.

    barrier           completes when                           waited for by          parity of the wait
    SUMS_FULL + w     consumer w has written dQ of a block     the warp that adds
    sums_free[w]      it has been read                         consumer w, to write   j & 1
                                                               dQ(j-1) after dQ(j-2)

A consumer has one buffer. With a deterministic plan this warp waits for the turn of each step, and counts it
(`turns`): the consumers know nothing of turns, they wait where their buffer is still full.
`mem` is the `Memory` of a kernel, `plan` its plan.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.kernels.common import launch_postprocess, tma
from attnlib.kernels.common.bulk_add import async_add_shared_to_global
from attnlib.kernels.common.named_barrier import named_barrier
from attnlib.kernels.common.turns import await_turn, end_turn
from attnlib.kernels.hopper import backward_tiles as tiling
from attnlib.kernels.hopper.backward_persistent import first_tile, tile_number, told_tile

LINE = gl.constexpr(launch_postprocess.LINE)
SUMS_FULL = gl.constexpr(6)  # of the named barriers, and 7


@gluon.constexpr_function
def place_of_dq(part, columns, WG, plan):
    """Where in a block of sums a consumer's dQ of a part begins, which has so many columns. 64 rows of the
    first part lie before the second one, and what is consumer 0's, rows or columns, before what is 1's."""
    if part == 1 and plan.own_right:
        return 64 * plan.d
    return 64 * (part * plan.d + WG * (plan.width if plan.by_rows else columns))


@gluon.jit
def _buffers(desc, plan: gl.constexpr):
    lines: gl.constexpr = desc.block_shape[0]
    return gl.allocate_shared_memory(gl.float32, [plan.writers, lines, LINE], desc.layout)


@gluon.jit
def new_buffers(descs, plan: gl.constexpr):
    """For each part of the columns, a buffer for each warpgroup that writes."""
    found = ()
    for i in gl.static_range(len(descs)):
        found = found + (_buffers(descs[i], plan),)
    return found


@gluon.jit
def _in_order_of_registers(x):
    """[64, columns] as they lie in memory, see `postprocess`: [columns / 4, LINE]."""
    columns: gl.constexpr = x.shape[1]
    # Warps, the two rows of a thread, threads by row; eights of columns, threads by column, two columns.
    x = x.reshape([4, 2, 8, columns // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return x.reshape([64 * columns // LINE, LINE])


@gluon.jit
def write_sums(mem, dq, j, WG: gl.constexpr):
    """dQ(j-1), to be fenced."""
    if j > 1:
        mbarrier.wait(mem.sums_free.index(WG), j & 1)
    for i in gl.static_range(len(dq)):
        mem.sums[i].index(WG).store(_in_order_of_registers(dq[i]))


@gluon.jit
def tell_sums(j, WG: gl.constexpr):
    """dQ(j-1) has been written and fenced; there is none of block -1."""
    if j > 0:
        named_barrier("arrive", SUMS_FULL + WG, 160)


@gluon.jit
def add_all(descs, mem, work, plan: gl.constexpr):
    """A warp's work: dQ of each step."""
    if plan.persistent:
        number = first_tile(mem, work, 1, plan)
        t = 0
        while number >= 0:
            tile = told_tile(mem, t, number, work, 1, plan)
            t += 1
            number = _add_tile(descs, mem, tile, t, work, plan)
    else:
        _add_tile(descs, mem, tiling.locate(gl.program_id(0), work, plan), 1, work, plan)


@gluon.jit
def _add_tile(descs, mem, tile, after, work, plan: gl.constexpr):
    """dQ of each step of a tile; of a persistent plan the first word of tile `after`, -1 if there is none."""
    following = tile.start * 0 - 1
    if tiling.seen(tile, plan):
        n = (tile.m_end - tile.m_start) * work.GROUP
        block = tiling.first_sums(tile, work, plan)
        gap = tiling.gap(tile, work, plan)
        m = tile.m_first
        parts: gl.constexpr = len(descs)
        for j in range(n):
            line = block * (plan.block_m * plan.width // LINE)
            if plan.deterministic:
                counted = tiling.counted(tile, m, work, plan)
                if counted:
                    await_turn(work.turns_ptr, block, tiling.turn(tile, m, work, plan), plan, True)
            for w in gl.static_range(plan.writers):
                named_barrier("sync", SUMS_FULL + w, 160)
                if not tiling.behind_all(tile, m, plan):
                    for i in gl.static_range(parts):
                        first = line + place_of_dq(i, descs[i].block_shape[0] * LINE // 64, w, plan) // LINE
                        async_add_shared_to_global(descs[i], [first, 0], mem.sums[i].index(w))
            if plan.persistent:
                if j + 1 == n:
                    following = tile_number(mem, after, 1, plan)
            for w in gl.static_range(plan.writers):
                tma.store_wait((plan.writers - 1 - w) * parts)
                if (j + 1 < n) | (following >= 0):
                    mbarrier.arrive(mem.sums_free.index(w), count=1)
            if plan.deterministic:
                if counted:
                    end_turn(work.turns_ptr, block, plan, True)
            block += 1
            m += 1
            if m == tile.m_end:
                m = tile.m_start
                block += gap
    return following
