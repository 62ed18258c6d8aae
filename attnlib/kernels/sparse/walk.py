"""What the portable kernels under a block mask have in common: which row of tiles a program has, and which
of a step's elements are seen."""

import triton
import triton.language as tl

TILE = tl.constexpr(128)  # rows that share a list; see `attnlib.block_mask.tiles`


@triton.jit
def row_of_rank(rank, mask, order_ptr, num_tiles, BLOCK: tl.constexpr):
    """(row of tiles, first of this block's elements): blocks with the longest lists come first."""
    parts: tl.constexpr = TILE // BLOCK
    tile = tl.load(order_ptr + mask * num_tiles + rank // parts)
    return tile, tile * TILE + rank % parts * BLOCK


@triton.jit
def seen(words_ptr, bits, row, column, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Bool [BLOCK, STEP]: elements from (row, column) on, counted within a tile. `bits` is a step's entry."""
    o_r = row + tl.arange(0, BLOCK)  # [BLOCK]
    o_c = bits % 2 * 64 + column + tl.arange(0, STEP)  # [STEP]
    words_ptr += (bits // 2).to(tl.int64) * (TILE * 4)
    b_words = tl.load(words_ptr + o_r[:, None] * 4 + (o_c % 8 // 2)[None, :])  # [BLOCK, STEP]
    return (b_words >> (o_c // 8 * 2 + o_c % 2)[None, :]) & 1 != 0
