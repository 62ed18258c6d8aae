"""How the operands and results of Hopper's wgmma lie in the registers of a warpgroup."""

from triton.experimental.gluon import language as gl


def accumulator(columns: int, bits: int = 16) -> gl.constexpr:
    """Of a product of 64 rows and so many columns, whose operands' elements have so many bits."""
    return gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits]))


def first_operand(result: gl.constexpr, bits: int = 16) -> gl.constexpr:
    """Of the first operand of a product whose result has the layout `result`."""
    return gl.constexpr(gl.DotOperandLayout(0, result.value, 32 // bits))
