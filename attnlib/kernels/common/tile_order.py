"""The order in which heads and blocks become tiles. Chapter 13 teaches it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def divide(n, d):
    """(n // d, n % d), neither of them negative: a division without a sign is shorter."""
    quotient = (n.to(gl.uint32) // d.to(gl.uint32)).to(gl.int32)
    return quotient, n - quotient * d


@gluon.jit
def by_sections(number, blocks, HEADS, SECTION, LAST=None):
    """(block, head) of a number: section of heads by section, so that what they share stays in L2, and within
    one the first block of each, then the second. LAST: the head that the last section begins with, a multiple
    of SECTION; it has all from there on. None: it has as many as the others, or fewer."""
    section, rest = divide(number, blocks * SECTION)
    first = section * SECTION
    if LAST is None:
        heads = gl.minimum(SECTION, HEADS - first)
    else:
        first = gl.minimum(first, LAST)
        rest = number - first * blocks
        heads = gl.where(first == LAST, HEADS - LAST, SECTION)
    block, head = divide(rest, heads)
    return block, first + head


@gluon.jit
def leading_first(number, blocks, HEADS, SECTION, LEADING):
    """The same, but the first LEADING blocks of all heads come before the others."""
    before = LEADING * HEADS
    leads = number < before
    place = gl.where(leads, number, number - before)
    block, head = by_sections(place, gl.where(leads, LEADING, blocks - LEADING), HEADS, SECTION)
    return gl.where(leads, block, block + LEADING), head


@gluon.jit
def lanes():
    """[32], the producer's."""
    return gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
