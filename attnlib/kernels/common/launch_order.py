"""Launches that begin before the one ahead of them is done (programmatic dependent launch), in Gluon; plain
Triton has `gdc_launch_dependents` and `gdc_wait`. Chapter 21 says what for.

A launch with the option `launch_pdl` may begin when all programs of the one ahead have called
`let_next_begin` or ended. What that one writes is visible to a program when `await_launch_before` has
returned; everything launched before that one was done earlier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def await_launch_before():
    """Until the launch before this one is done."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_next_begin():
    """The next launch may begin, where there is room."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def overlap():
    """Of a backward pass: with the launch behind it, and with the one ahead, which writes LSE, delta and the
    zeros that are added to."""
    let_next_begin()
    await_launch_before()
