"""How the operands and results of Hopper's wgmma lie in the registers of a warpgroup."""

from triton.experimental.gluon import language as gl


def accumulator(columns: int) -> gl.constexpr:
    """Of a product of 64 rows and so many columns."""
    return gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16]))


def first_operand(result: gl.constexpr) -> gl.constexpr:
    """Of the first operand of a product whose result has the layout `result`, in half precision."""
    return gl.constexpr(gl.DotOperandLayout(0, result.value, 2))
