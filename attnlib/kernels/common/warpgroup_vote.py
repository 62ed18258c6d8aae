"""Whether a condition holds for some thread of a warpgroup, in one instruction of the hardware.

A branch around a product of a warpgroup has to be taken by all of its four warps, so they decide together. A
barrier can do that by itself: `bar.red` waits for all threads and tells each of them whether one has said
yes. By way of shared memory it takes a vote of each warp, a store, a barrier and loads, and some 50 clocks
more. Chapter 31 uses it.

Gluon makes a number of a tile only by a reduction, which would exchange values that all threads have already.
So the instruction leaves what it found in a register that is declared once, at the start of a consumer, and
another line of assembly reads it as a number. Both have side effects for the compiler, which keeps their
order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _declaration(barrier):
    return f".reg .b32 vote_{barrier}; mov.b32 $0, 0;"


# After the barrier all warps know; the vote of a warp tells ptxas that its threads agree, so what depends on
# it stays in the registers that a warp has for such numbers. A thread has two rows: pack=2.
@gluon.constexpr_function
def _vote(barrier):
    return f"""{{
        .reg .pred q;
        setp.ne.b32 q, $2, 0;
        setp.ne.or.b32 q, $3, 0, q;
        bar.red.or.pred q, {barrier}, 128, q;
        vote.sync.any.pred q, q, 0xffffffff;
        selp.b32 vote_{barrier}, 1, 0, q;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
    }}"""


@gluon.constexpr_function
def _reading(barrier):
    return f"mov.b32 $0, vote_{barrier};"


@gluon.jit
def prepare_vote(number, BARRIER: gl.constexpr):
    """Once, before the first vote of a consumer. number: any, as assembly wants an operand."""
    asm: gl.constexpr = _declaration(BARRIER)
    gl.inline_asm_elementwise(asm, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def any_in_warpgroup(flags, number, BARRIER: gl.constexpr):
    """1 if one of `flags`, [64] or [64, 4], is not 0, else 0; the warps of the warpgroup have then met at the
    named barrier BARRIER, which must be theirs alone."""
    vote: gl.constexpr = _vote(BARRIER)
    gl.inline_asm_elementwise(vote, "=r,=r,r,r", [flags], dtype=gl.int32, is_pure=False, pack=2)
    reading: gl.constexpr = _reading(BARRIER)
    return gl.inline_asm_elementwise(reading, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)
