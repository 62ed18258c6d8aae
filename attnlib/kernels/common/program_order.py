"""The order in which programs of plain Triton kernels take heads and blocks, in a grid of one dimension;
`tile_order` has it for kernels in Gluon."""

import triton
import triton.language as tl


@triton.jit
def upwards(num_blocks, HEADS, SECTION: tl.constexpr):
    """(block, head) of this program: a section of heads after the other, so that what they share stays in L2,
    and within one the first block of each, then the second."""
    section = tl.program_id(0) // (num_blocks * SECTION)
    rest = tl.program_id(0) % (num_blocks * SECTION)
    heads = tl.minimum(SECTION, HEADS - section * SECTION)
    return rest // heads, section * SECTION + rest % heads


@triton.jit
def in_memory(num_blocks, H, CLOSE: tl.constexpr):
    """(block, head) of this program where programs share nothing: in the order in which blocks lie in memory,
    so that programs of one time read neighboring bytes. CLOSE: the H heads of a row lie side by side, and all
    take their first block, then all the second; otherwise one head follows the other."""
    if CLOSE:
        rest = tl.program_id(0) % (num_blocks * H)
        return rest // H, tl.program_id(0) // (num_blocks * H) * H + rest % H
    return tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks


@triton.jit
def downwards(num_blocks, HEADS, SECTION: tl.constexpr):
    """The same from the last block on, which has most to do under a diagonal."""
    block, head = upwards(num_blocks, HEADS, SECTION)
    return num_blocks - 1 - block, head
