"""The end of the backward pass for Hopper, in plain Triton: it reorders the sums of dQ, which lie in memory
as they lay in registers, and those of dK and dV where programs share a key head. Chapter 21 explains it.

`backward_kernel` adds to dQ in float32 as an accumulator of wgmma lies in the registers of a warpgroup: of 64
rows and 8 columns thread t has rows 16 (t / 32) + t % 32 / 4 and that plus 8, columns 2 (t % 4) and that plus
1, and its four values are 16 bytes in memory. So an addition needs no shared memory, and a warp writes 512
bytes in a row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.kernels.common.program_order import in_memory
from attnlib.kernels.common.tile_access import VARLEN_ROWS, store_columns
from attnlib.kernels.common.varlen_rows import first_sums, row_of


@triton.jit(do_not_specialize=["H", "B", "num_m", "tiles"], do_not_specialize_on_alignment=["cu_q"])
def attention_backward_postprocess(
    desc_dq,  # (B, H, S_q, D), or varlen (T_q, H, D), in blocks of 64 rows and some of BLOCK_D columns
    sums_ptr,  # (B * H, num_m, BLOCK_D / 8, 512), float32, varlen as in `first_sums`
    cu_q,  # (B + 1), None for a batch
    sm_scale,
    H, B,
    num_m,  # blocks of 64 rows of a head in memory, of a batch
    tiles,  # and those of them that have a row of S_q, varlen all
    BLOCK_D: tl.constexpr,
    PADDING: tl.constexpr,  # the rows of a varlen sequence are padded to a multiple of this
    OTHERS: tl.constexpr = 0,  # columns of other sums that lie behind each 64 rows of these
    PARTS: tl.constexpr = 1,  # sums for each head to add up, which follow each other in memory
    KEYS: tl.constexpr = 0,  # of dK and dV whose keys are columns: keys of a block of sums
    OVERLAPS: tl.constexpr = False,  # with the launches before and after it
    CLOSE: tl.constexpr = False,  # heads of a row of the gradient lie side by side in memory
):  # fmt: skip
    """dq = sm_scale * sums. Grid: (tiles * heads,). dK and dV likewise, where programs share a key head.

    KEYS: sums are those of transposed gradients, [64, KEYS] for each 64 columns, and tiles have 32 rows.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    ROWS: tl.constexpr = 32 if KEYS else 64
    i_m, i_bh = in_memory(tiles, H, CLOSE)
    row = i_m * ROWS
    if cu_q is None:
        place = (i_bh.to(tl.int64) * PARTS * num_m + i_m) * ROWS
        padded = num_m * ROWS
        at = (i_bh // H, i_bh % H)
    else:
        padded_row = row
        row, end, S_q = row_of(padded_row, cu_q, B, PADDING)
        if row >= S_q:
            return
        place = first_sums(row, padded_row - row, S_q, i_bh * PARTS, H * PARTS, PADDING)
        padded = tl.cdiv(S_q, PADDING) * PADDING
        at = (end, i_bh, tl.sub(VARLEN_ROWS, S_q))
    COLUMNS: tl.constexpr = desc_dq.block_shape[-1]
    WIDTH: tl.constexpr = BLOCK_D + OTHERS
    for i in tl.static_range(BLOCK_D // COLUMNS):
        if KEYS:  # those of a block's columns before, and of its keys before
            before = i * KEYS * COLUMNS + place % KEYS * (COLUMNS - WIDTH)
        else:
            before = i * 64 * COLUMNS
        b_sums = tl.load(sums_ptr + place * WIDTH + before + tl.arange(0, ROWS * COLUMNS))
        for part in tl.static_range(1, PARTS):
            further = (place + part * padded) * WIDTH + before
            b_sums += tl.load(sums_ptr + further + tl.arange(0, ROWS * COLUMNS))
        # Eights of columns, warps, threads of a warp by row and by column, the two rows, the two columns.
        if KEYS:
            b_sums = tl.reshape(b_sums * sm_scale, (ROWS // 8, 4, 8, 4, 2, 2))
            b_dq = tl.reshape(tl.permute(b_sums, (0, 3, 5, 1, 4, 2)), (ROWS, COLUMNS))  # [ROWS, COLUMNS]
        else:
            b_sums = tl.reshape(b_sums * sm_scale, (COLUMNS // 8, 4, 8, 4, 2, 2))
            b_dq = tl.reshape(tl.permute(b_sums, (1, 4, 2, 0, 3, 5)), (64, COLUMNS))  # [64, COLUMNS]
        # Through a descriptor: a mask for the last columns would make it stores of two bytes.
        store_columns(desc_dq, b_dq, at, row, i * COLUMNS)
