"""The order in which heads and blocks become tiles. Chapter 13 teaches it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def divide(n, d):
    """(n // d, n % d), neither of them negative: a division without a sign is shorter."""
    quotient = (n.to(gl.uint32) // d.to(gl.uint32)).to(gl.int32)
    return quotient, n - quotient * d


@gluon.jit
def by_sections(number, blocks, HEADS, SECTION):
    """(block, head) of a number: section of heads by section, so that what they share stays in L2, and within
    one the first block of each, then the second."""
    section, rest = divide(number, blocks * SECTION)
    heads = gl.minimum(SECTION, HEADS - section * SECTION)
    block, head = divide(rest, heads)
    return block, section * SECTION + head


@gluon.jit
def lanes():
    """[32], the producer's."""
    return gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
