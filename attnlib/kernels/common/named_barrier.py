"""The hardware's 16 named barriers. An arrival at one does not synchronize the warpgroup first, as Gluon's
arrival at an mbarrier does; in return a named barrier has no parity to wait for. Chapter 14 has what they
gain."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _barrier_asm(operation, threads):
    # For instance "bar.sync $1, 288; mov.b32 $0, 0;", whose result is not used: Triton wants one.
    return f"bar.{operation} $1, {threads}; mov.b32 $0, 0;"


@gluon.jit
def named_barrier(operation: gl.constexpr, number, threads: gl.constexpr):
    """Arrive at a barrier, which opens when `threads` threads have arrived.

    operation: "arrive" goes on at once, "sync" waits until it opens. threads: those of both kinds.
    """
    gl.inline_asm_elementwise(
        _barrier_asm(operation, threads), "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )
