"""The warps that keep additions of dQ from registers in a fixed order, and what consumers wait for. `turns`
has the order of programs, `backward_kernel` the barriers.

One warp waits for the turn of each step, another one counts the steps whose additions have been made. Where
programs stay on their SM, both read the number of the next tile when the producer has `told` it. The
producer tells of the tile after that one only when the consumers have added dQ of the step before the next
tile. So each of the two warps reads the number before it grants that step its turn.

`mem` is the `Memory` of a kernel, `plan` its plan. Chapter 20 says what an order is for and what it costs,
chapter 21 builds the kernels.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.kernels.common.memory import barriers
from attnlib.kernels.common.turns import await_turn, end_turn
from attnlib.kernels.hopper import backward_tiles as tiling
from attnlib.kernels.hopper.backward_persistent import drawn_first, tile_number


class Turns(NamedTuple):
    """mbarriers of a deterministic plan; a phase is a step."""

    granted: gl.shared_memory_descriptor  # the turn has come, and what was added before is known to have been
    added: gl.shared_memory_descriptor  # by the warpgroups that add dQ
    # Where a plan is persistent; a phase is a tile, from the second one on. Elsewhere `granted` once more,
    # because a function of Gluon can't return None in a tuple.
    told: gl.shared_memory_descriptor


@gluon.jit
def new_turns(WARPGROUPS: gl.constexpr, plan: gl.constexpr):
    """For so many warpgroups that add to dQ."""
    granted = barriers(1, 2).index(0)
    added = barriers(1, WARPGROUPS).index(0)
    told = granted
    if plan.persistent:
        told = barriers(1, 1).index(0)
    return Turns(granted, added, told)


# ---------------------------------------------------------------- consumers


@gluon.jit
def await_grant(turns, j):
    """Before dQ of step j is added, from 0 on."""
    if j >= 0:
        mbarrier.wait(turns.granted, j & 1)


@gluon.jit
def tell_added(turns, j):
    if j >= 0:
        mbarrier.arrive(turns.added, count=1)


# ---------------------------------------------------------------- the two warps


@gluon.jit
def keep_turns(mem, work, COUNTS: gl.constexpr, plan: gl.constexpr):
    """A warp's work: wait for the turn of each step. COUNTS: another one's, wait for the additions of each
    step, and count them when they are complete; meanwhile the next step may add."""
    if plan.persistent:
        number = drawn_first(work, plan)
        t = 0
        i = 0
        while number >= 0:
            t += 1
            i, number = _keep_turns_of_tile(mem, number, i, t, work, COUNTS, plan)
    else:
        _keep_turns_of_tile(mem, gl.program_id(0), 0, 1, work, COUNTS, plan)


@gluon.jit
def _keep_turns_of_tile(mem, number, before, after, work, COUNTS: gl.constexpr, plan: gl.constexpr):
    """(steps of the program so far, of which there are `before`; and of a persistent plan the number of tile
    `after`, -1 if there is none)."""
    turns = mem.turns
    tile = tiling.locate(number, work, plan)
    following = number * 0 - 1
    n = (tile.m_end - tile.m_start) * work.GROUP
    if tiling.seen(tile, plan):
        block = tiling.first_sums(tile, work, plan)
        gap = tiling.gap(tile, work, plan)
        m = tile.m_start
        if COUNTS:
            if (before == 0) & (n > 0):
                mbarrier.arrive(turns.granted, count=1)
        for j in range(n):
            i = before + j
            counted = tiling.counted(tile, m, work, plan)
            if COUNTS:
                mbarrier.wait(turns.added, i & 1)
                if plan.persistent:
                    if j == n - 2:
                        following = _next_number(mem, after, plan)
                if (j < n - 1) | (following >= 0):
                    mbarrier.arrive(turns.granted, count=1)
                if counted:
                    end_turn(work.turns_ptr, block, plan)
            else:
                if counted:
                    await_turn(work.turns_ptr, block, tiling.turn(tile, m, work, plan), plan)
                if plan.persistent:
                    if j == n - 1:
                        following = _next_number(mem, after, plan)
                mbarrier.arrive(turns.granted, count=1)
                mbarrier.wait(turns.granted, i & 1)
            block += 1
            m += 1
            if m == tile.m_end:
                m = tile.m_start
                block += gap
    return before + n, following


@gluon.jit
def _next_number(mem, t, plan: gl.constexpr):
    """Of tile t, from 1 on, when the producer has told it; -1 if there is none."""
    mbarrier.wait(mem.turns.told, (t - 1) & 1)
    return tile_number(mem, t, 1, plan)
