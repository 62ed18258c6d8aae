"""Blocks of Q and dO that a persistent backward program will copy soon, asked for in the L2.

A copy of Q of block j+2 begins when step j ends, and its data is used in the middle of step j+1. Who comes
first to a block waits for DRAM meanwhile, and the programs of all other blocks of keys of the head, which
visit the same blocks of queries at about the same time, do not get far ahead of it. So the producer asks for
a block some steps earlier. Programs share this out: the one of key block n asks for every so many rows, from
its own on, and each of these lines of 128 bytes once.

`ahead` of `Work` is an `Ahead`, `plan` a `BackwardPlan`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.hopper import backward_tiles as tiling

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


class Ahead(NamedTuple):
    """Where Q and dO begin, and how many elements lie between their batch entries, heads and rows. Varlen
    sequences have no batch entries."""

    q_ptr: gl.tensor
    do_ptr: gl.tensor
    q_batch: gl.tensor
    q_head: gl.tensor
    q_row: gl.tensor
    do_batch: gl.tensor
    do_head: gl.tensor
    do_row: gl.tensor


@gluon.jit
def _ask(ptr, batch, head, row, tile, g, m, columns: gl.constexpr, work, plan: gl.constexpr):
    """For this program's rows of block m, of the head that is `g` behind the first one."""
    LINES: gl.constexpr = 2 if columns > 64 else 1  # of a row
    ROWS: gl.constexpr = 32 // LINES
    lane = gl.arange(0, 32, layout=LANES)
    share = tile.start // plan.block_n % (plan.block_m // ROWS)
    o_m = m * plan.block_m + share * ROWS + lane // LINES  # [32]
    at = tiling.queries(tile, work, plan)
    place = (at[1] + g).to(gl.int64) * head + lane % LINES * 64
    if plan.varlen:
        place += (at[0] - tile.S_q + o_m).to(gl.int64) * row
    else:
        place += at[0].to(gl.int64) * batch + o_m.to(gl.int64) * row
    wanted = (o_m < tile.S_q) & (m < tile.m_end)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b64 a; setp.ne.b32 p, $3, 0; add.s64 a, $2, $1; "
        "@p prefetch.global.L2 [a]; mov.b32 $0, 0; }", "=r,l,l,r",
        [ptr.to(gl.int64), 2 * place, wanted.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _ask_both(ahead, tile, g, m, work, plan: gl.constexpr):
    values: gl.constexpr = plan.own_values if plan.own_values > 0 else plan.width
    _ask(ahead.q_ptr, ahead.q_batch, ahead.q_head, ahead.q_row, tile, g, m, plan.width, work, plan)
    _ask(ahead.do_ptr, ahead.do_batch, ahead.do_head, ahead.do_row, tile, g, m, values, work, plan)


@gluon.jit
def ask_ahead(tile, g, m, j, work, plan: gl.constexpr):
    """In step j of a tile, which copies block m: for the block that is `plan.ahead` behind it, and in the
    first step for those between."""
    ahead = work.ahead
    if j == 0:
        for i in gl.static_range(1, plan.ahead):
            _ask_both(ahead, tile, g, m + i, work, plan)
    _ask_both(ahead, tile, g, m + plan.ahead, work, plan)
