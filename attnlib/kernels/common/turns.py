"""Whose turn it is to add to a sum in global memory: where programs add in a fixed order, the sum has the
same bits in every run.

Each block of sums has counters, one for each warp that adds to it, of what has been added. A warp with turn t
waits until its counter is t, adds, and counts on. The same warp of each program adds to the same elements, so
no warp has to know of another one's.

    Who may wait for whom

A program waits for programs of a smaller number only. GPUs start programs in the order of their numbers, so
of those that have not ended the one with the smallest number has been started and never waits: there is no
deadlock, however few programs an SM array holds. (CUDA does not promise that order. All GPUs so far keep it.)

    Why a sum is complete when it is counted

`red` returns before it is done. What a warp's lanes have added is ordered before the count by the warp's
barrier and a fence of the GPU's scope, which waits until the additions are done; the wait for a turn acquires
what that releases. Additions and counts go through the generic proxy, so no fence between proxies is needed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common import launch_preprocess

TURNS = gl.constexpr(launch_preprocess.TURNS)

_ADDRESS = (
    "mov.u32 t, %tid.x; and.b32 t, t, 96; shr.b32 t, t, 3; cvt.u64.u32 a, t; add.s64 a, a, $1; "  # 4 * warp
)
_AWAIT = gl.constexpr(
    "{ .reg .pred q; .reg .b32 t; .reg .b64 a; setp.lt.s32 q, $2, 0; @q bra DONE; "
    + _ADDRESS
    + "AGAIN: ld.acquire.gpu.global.b32 t, [a]; setp.lt.u32 q, t, $2; @q bra AGAIN; "
    "DONE: bar.warp.sync 0xffffffff; mov.b32 $0, 0; }"
)
_END = gl.constexpr(
    "{ .reg .pred q; .reg .b32 t; .reg .b64 a; setp.eq.b32 q, $2, 0; @q bra DONE; "
    + _ADDRESS
    + "bar.warp.sync 0xffffffff; fence.acq_rel.gpu; mov.u32 t, %tid.x; and.b32 t, t, 31; "
    "setp.eq.b32 q, t, 0; @q red.relaxed.gpu.global.add.u32 [a], 1; DONE: mov.b32 $0, 0; }"
)


@gluon.jit
def _counter(turns_ptr, block, WG: gl.constexpr, plan: gl.constexpr):
    """The address of the first warp's, in a warpgroup that adds what no other one does."""
    offset = block.to(gl.int64) * (plan.block_m // 64 * TURNS) + 4 * WG
    return (turns_ptr + offset).to(gl.int64)


@gluon.jit
def await_turn(turns_ptr, block, turn, wanted, WG: gl.constexpr, plan: gl.constexpr):
    """Wait until so many additions to a block of sums are complete. Without `wanted`, do nothing."""
    address = _counter(turns_ptr, block, WG, plan)
    gl.inline_asm_elementwise(
        _AWAIT, "=r,l,r", [address, gl.where(wanted, turn, -1)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def end_turn(turns_ptr, block, wanted, WG: gl.constexpr, plan: gl.constexpr):
    """The additions of this warp to a block of sums, all before this, make one more. Without `wanted`, do
    nothing."""
    address = _counter(turns_ptr, block, WG, plan)
    gl.inline_asm_elementwise(
        _END, "=r,l,r", [address, wanted.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1
    )
