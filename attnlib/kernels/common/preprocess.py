"""The beginning of every backward pass: delta = rowsum(dO * O), and the LSE in base 2, for rows padded to
whole tiles. Chapter 20 derives both."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from attnlib.kernels.common.logarithms import LOG2_E
from attnlib.kernels.common.program_order import in_memory
from attnlib.kernels.common.tile_access import VARLEN_ROWS, load_tile
from attnlib.kernels.common.varlen_rows import first_sums, row_of

LSE2 = tl.constexpr(0)  # places in rows_ptr
DELTA = tl.constexpr(1)


@triton.jit(
    do_not_specialize=["S_q", "T_q", "H", "B", "padded", "more"],
    do_not_specialize_on_alignment=["lse_ptr", "cu_q"],
)
def attention_backward_preprocess(
    desc_o, desc_do,  # (B, H, S_q, D), or varlen (T_q, H, D); D columns of values
    lse_ptr,  # (B, H, S_q), or varlen (H, T_q); natural logarithm
    rows_ptr,  # (2, B * H, padded), or varlen (2, H, padded)
    sums_ptr,  # (B * H, padded, SUMS_D), or varlen as in `first_sums`; None without SUMS_D
    cu_q,  # (B + 1), None for a batch
    S_q,
    T_q,  # None for a batch
    H, B,
    padded,  # rows of a head in rows_ptr, a multiple of PADDING
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    PADDING: tl.constexpr,  # the rows of a sequence are padded to a multiple of this
    SUMS_D: tl.constexpr,  # columns of sums_ptr
    TURNS: tl.constexpr = 0,  # words of the counters of BLOCK_M rows, which begin at 0, see `turns`
    turns_ptr=None,
    more_ptr=None, more=None, CHUNK: tl.constexpr = 0,  # `more` chunks of other sums, which begin at 0
    OVERLAPS: tl.constexpr = False,  # the launch after it may begin before this one is done
    CLOSE: tl.constexpr = False,  # heads of a row of dO lie side by side in memory
):  # fmt: skip
    """delta = rowsum(dO * O) and lse2 = LSE * log2(e), 0 and +inf past S_q; and 0 for the sums of dQ.
    Grid: (blocks * heads,), B * H heads or, varlen, H."""
    if OVERLAPS:
        gdc_launch_dependents()
    if CHUNK:
        o_c = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
        for _ in range(tl.program_id(0), more, tl.num_programs(0)):
            tl.store(more_ptr + o_c, tl.zeros([CHUNK], tl.float32))
            o_c += tl.num_programs(0).to(tl.int64) * CHUNK
    num_m = padded // BLOCK_M
    block, head = in_memory(num_m, H, CLOSE)
    start = block * BLOCK_M
    place = head.to(tl.int64) * padded + start
    if cu_q is None:
        at = (head // H, head % H)
        heads = B * H
        place_of_sums = place
        lse_ptr += head.to(tl.int64) * S_q
    else:
        padded_row = start
        start, end, S_q = row_of(padded_row, cu_q, B, PADDING)
        if start >= tl.cdiv(S_q, PADDING) * PADDING:
            return
        place_of_sums = first_sums(start, padded_row - start, S_q, head, H, PADDING)
        at = (end, head, tl.sub(VARLEN_ROWS, S_q))
        heads = H
        lse_ptr += head.to(tl.int64) * T_q + (end - S_q)
    if SUMS_D:
        SUMS: tl.constexpr = BLOCK_M * (SUMS_D & -SUMS_D)  # a range has a power of two
        for i in tl.static_range(BLOCK_M * SUMS_D // SUMS):
            o_s = place_of_sums * SUMS_D + i * SUMS + tl.arange(0, SUMS)  # [SUMS]
            tl.store(sums_ptr + o_s, tl.zeros([SUMS], tl.float32))
    if TURNS:
        o_t = place_of_sums // BLOCK_M * TURNS + tl.arange(0, TURNS)  # [TURNS]
        tl.store(turns_ptr + o_t, tl.zeros([TURNS], tl.float32))
    o_m = start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    b_o = load_tile(desc_o, at, start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    b_do = load_tile(desc_do, at, start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)  # [BLOCK_M]
    b_lse = tl.load(lse_ptr + o_m, mask=o_m < S_q, other=float("-inf"))  # [BLOCK_M]
    b_lse2 = tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2_E)
    rows_ptr += place + tl.arange(0, BLOCK_M)
    tl.store(rows_ptr + LSE2 * heads.to(tl.int64) * padded, b_lse2)
    tl.store(rows_ptr + DELTA * heads.to(tl.int64) * padded, b_delta)
