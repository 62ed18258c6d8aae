"""The order in which programs add to a sum in global memory: where it is fixed, the sum has the same bits in
every run. Chapter 20 says what that is for, docs/lab/hopper-backward.md what it costs.

Each block of sums has a counter of the programs that have added to it. A program with turn t waits until the
counter is t, adds, and counts on.

    Who may wait for whom

Where a program has one tile it waits for programs of a smaller number only. GPUs start programs in the order
of their numbers, so of those that have not ended the one with the smallest number has been started and never
waits: there is no deadlock, however few programs an SM array holds. (CUDA does not promise that order. All
GPUs so far keep it.)

Programs that stay on their SM draw every tile, the first one, too, from a counter, and compute their tiles in
the order in which they drew them. A tile waits for tiles of smaller numbers only. All of these have been
drawn, and the smallest that is not done waits for nobody.

    Why a sum is complete when it is counted

`red` returns before it is done. What a program's threads have added is ordered before the count by a barrier
that they arrive at, and by a fence of the GPU's scope behind it, which waits until the additions are done;
the wait for a turn acquires what that releases. Additions and counts go through the generic proxy, so no
fence between proxies is needed.

Additions in bulk (`BULK`) go through the async proxy. The warp that has started them waits until they have
been made (`cp.async.bulk.wait_group`, not only until shared memory has been read), and then counts. When its
turn has come it executes a fence between the proxies, so that its additions don't begin before.

    Why a warp of its own

The fence and the load of the counter are two round trips to the L2, some 3000 clocks together on an H200,
about as much as a step has. So neither is in the warps that compute: one warp of a program only waits for
turns, another one only counts, and mbarriers tell the others. Where additions are made in bulk, the warp that
starts them does both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common import launch_preprocess

TURNS = gl.constexpr(launch_preprocess.TURNS)


@gluon.constexpr_function
def _await_asm(bulk):
    fence = "fence.proxy.async.global; " if bulk else ""
    return (
        "{ .reg .pred q; .reg .b32 t; AGAIN: ld.acquire.gpu.global.b32 t, [$1]; setp.lt.u32 q, t, $2; "
        f"@q bra AGAIN; bar.warp.sync 0xffffffff; {fence}mov.b32 $0, 0; }}"
    )


# `elect.sync`, not a comparison with the lane: with that, ptxas takes the loops of consumers, too, for
# different in each thread, and moves the addresses of operands in every step.
@gluon.constexpr_function
def _end_asm(bulk):
    made = "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; " if bulk else ""
    return (
        f"{{ .reg .pred q; .reg .b32 t; {made}fence.acq_rel.gpu; elect.sync t|q, 0xffffffff; "
        "@q red.relaxed.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }"
    )


@gluon.jit
def _counter(turns_ptr, block, plan: gl.constexpr):
    return (turns_ptr + block.to(gl.int64) * (plan.block_m // 64 * TURNS)).to(gl.int64)


@gluon.jit
def await_turn(turns_ptr, block, turn, plan: gl.constexpr, BULK: gl.constexpr = False):
    """For a warp: wait until so many programs have added to a block of sums. BULK: this warp then starts
    additions in bulk."""
    address = _counter(turns_ptr, block, plan)
    gl.inline_asm_elementwise(
        _await_asm(BULK), "=r,l,r", [address, turn], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def end_turn(turns_ptr, block, plan: gl.constexpr, BULK: gl.constexpr = False):
    """For another warp, which knows that its program has added to a block of sums: count that. BULK: for the
    warp that has started the additions, in bulk."""
    address = _counter(turns_ptr, block, plan)
    gl.inline_asm_elementwise(
        _end_asm(BULK), "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )
