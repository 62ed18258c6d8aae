"""What attention walks along under a causal mask of chosen blocks, in plain Triton; see
`attnlib.block_mask.chosen` for the numbers of the words, and `attnlib.block_mask.lists` for the lists."""

import triton
import triton.language as tl


@triton.jit
def _seen(blocks_ptr, row, column, blocks, UNITS: tl.constexpr):
    """Whether unit `row` of 64 queries sees all keys of the units `column`: not its own, of which it sees a
    triangle. A block is UNITS x UNITS units, and the one on the diagonal is always seen."""
    same = column // UNITS == row // UNITS
    below = column < row
    chosen = tl.load(blocks_ptr + row // UNITS * blocks + column // UNITS, mask=below, other=0) != 0
    return below & (chosen | same)


@triton.jit(do_not_specialize=["blocks", "units", "tiles"])
def chosen_lists(
    blocks_ptr,  # (masks, blocks, blocks) bool
    counts_ptr,  # (2, masks, tiles): steps of a row of tiles, and those of them that all its rows see
    starts_ptr,  # (masks * tiles + 1)
    steps_ptr, bits_ptr,  # see `block_mask.lists.Lists`
    blocks, units, tiles,  # of a mask, downwards: blocks, units of 64 rows, tiles of 128
    rows,  # masks * tiles
    UNITS: tl.constexpr,  # of a block along one side, 1 or 2
    HALVES: tl.constexpr,  # steps of a tile: 2 of 64 keys, or 1 of 128
    WRITE: tl.constexpr,  # write the lists; else count
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One program for each row of tiles. Grid: (rows,)."""
    number = tl.program_id(0)
    tile = number % tiles
    blocks_ptr += (number // tiles).to(tl.int64) * blocks * blocks
    top = 2 * tile
    low = tl.minimum(top + 1, units - 1)  # rows past the end are as the last one
    full, partial = 0, 0
    place = number * 0
    if WRITE:
        place = tl.load(starts_ptr + number)
        partial = tl.load(counts_ptr + rows + number)
    for first in range(0, (tile + 1) * HALVES, CHUNK):
        step = first + tl.arange(0, CHUNK)  # [CHUNK]
        column = step // HALVES * 2  # the tile's first unit of keys
        a = _seen(blocks_ptr, top, column, blocks, UNITS)
        b = _seen(blocks_ptr, top, column + 1, blocks, UNITS)
        c = _seen(blocks_ptr, low, column, blocks, UNITS)
        d = _seen(blocks_ptr, low, column + 1, blocks, UNITS)
        diagonal = column == top
        if HALVES == 2:
            right = step % 2 == 1
            whole = tl.where(right, b & d, a & c) & ~diagonal
            # The last tile may have rows of one unit only, which see nothing to the right of its diagonal.
            some = tl.where(right, b | d | (diagonal & (low > top)), a | c | diagonal)
        else:
            whole, some = a & b & c & d & ~diagonal, a | b | c | d | diagonal
        some &= step < (tile + 1) * HALVES
        whole &= some
        cut = some & ~whole
        if WRITE:
            code = a.to(tl.int32) + 2 * b.to(tl.int32) + 4 * c.to(tl.int32) + 8 * d.to(tl.int32)
            last = 2 * tile + 2 >= units
            code = tl.where(diagonal, tl.where(last, 17, 15) + (c & (low > top)).to(tl.int32), code)
            of_whole = full + tl.cumsum(whole.to(tl.int32), 0)
            of_cut = partial + tl.cumsum(cut.to(tl.int32), 0)
            at = place - 1 + tl.where(whole, of_whole, of_cut)
            tl.store(steps_ptr + at, step, mask=some)
            tl.store(bits_ptr + at, tl.where(whole, -1, 2 * code + (step % HALVES)), mask=some)
        full += tl.sum(whole.to(tl.int32), 0)
        partial += tl.sum(cut.to(tl.int32), 0)
    if not WRITE:
        tl.store(counts_ptr + number, full + partial)
        tl.store(counts_ptr + rows + number, full)
