"""The gradient of a bias, in plain `triton.language`: dS summed up over all scores that share an element.

A program owns a block of the bias, and visits the blocks of scores that it is added to, of one head after the
other: so the sum stays in registers, and nobody else adds to it. Of a bias of diagonals a program owns those
of a block's, and goes down the blocks along them; they overlap with those of its neighbor. S and dP are
computed again, two of the five products of a backward pass; without this gradient nothing is.
"""

import triton
import triton.language as tl

from attnlib.kernels.common.preprocess import DELTA, LSE2
from attnlib.kernels.common.tile_access import load_tile
from attnlib.kernels.sparse.scores import head_bias, head_slope, scored
from attnlib.kernels.sparse.walk import TILE, seen

NUMBERS = "S_q S_k B H down across mask_b mask_h bias_b bias_h bias_m".split()
NUMBERS += ["dbias_b", "dbias_h", "dbias_m", "dbias_n"]


@triton.jit
def _band(rank, rows, columns, RATIO: tl.constexpr):
    """(first row of blocks, behind the last one, column of row 0) of a band of blocks along the diagonal;
    RATIO columns of blocks are as long as a row. In a causal mask longer ones come first."""
    d = columns - 1 - rank
    first = tl.maximum(0, (RATIO - 1 - d) // RATIO)
    return first, tl.minimum(rows, (columns - d + RATIO - 1) // RATIO), d


@triton.jit(do_not_specialize=NUMBERS)
def attention_sparse_bias_gradient(
    desc_q, desc_do,  # (B, H, S_q, D)
    desc_k, desc_v,  # (B, H_kv, S_k, D)
    desc_rows,  # (2, B * H, padded): lse2 and delta
    kinds_ptr,  # int8 (masks, 2 * down, 2 * across): of units, see `attnlib.block_mask.tiles`
    slots_ptr,  # (masks, down, across)
    words_ptr,  # (slots, 128, 4)
    alibi_ptr, bias_ptr,  # as in the forward kernel
    dbias_ptr,  # float32; 0 before the launch where programs add to it
    qk_scale, cap, after,  # as in the forward kernel
    S_q, S_k, B,
    H,  # query heads
    down, across,  # tiles of a mask
    mask_b, mask_h,
    bias_b, bias_h, bias_m,
    dbias_b, dbias_h, dbias_m, dbias_n,  # strides of dbias, 0 where it has one value for all
    GROUP: tl.constexpr,
    BIAS_N: tl.constexpr,
    FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr,
    BATCHES: tl.constexpr, HEADS: tl.constexpr,  # each batch element, and head, has a bias of its own,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # and each query, and key; else one for all
    DIAGONAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks, or bands of blocks, of a bias * its batch elements * its heads,)."""
    RATIO: tl.constexpr = BLOCK_M // BLOCK_N
    rows, columns = down * (TILE // BLOCK_M), across * (TILE // BLOCK_N)
    first, d, turns = 0, 0, 1
    if DIAGONAL:
        blocks = RATIO * (rows - 1) + columns
        first, end, d = _band(tl.program_id(0) % blocks, rows, columns, RATIO)
        turns = end - first
    else:
        blocks = rows * columns
    own = tl.program_id(0) // blocks
    i_m, i_n = tl.program_id(0) % blocks // columns, tl.program_id(0) % blocks % columns
    if HEADS:
        heads = 1
        own_b, own_h = own // H, own % H
    else:
        heads = H
        own_b, own_h = own, own * 0
    batches = 1 if BATCHES else B
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for t in range(batches * heads * turns):
        i_b, i_h = own_b + t // turns // heads, own_h + t // turns % heads
        if DIAGONAL:
            i_m = first + t % turns
            i_n = RATIO * i_m + d
        start, key = i_m * BLOCK_M, i_n * BLOCK_N
        tile = ((i_b * mask_b + i_h * mask_h).to(tl.int64) * down + start // TILE) * across + key // TILE
        slot = tl.load(slots_ptr + tile)
        unit = tile // across * 4 * across + key // TILE * 2  # the first one of the tile
        if (slot >= 0) | (tl.load(kinds_ptr + unit) != 0):
            slope, bias = alibi_ptr, head_bias(bias_ptr, bias_b, bias_h, i_b, i_h)
            if alibi_ptr is not None:
                slope = head_slope(alibi_ptr, i_h)
            score = (cap, slope, bias, bias_m, BIAS_N, after, i_h, i_b)
            at, at_k, head = (i_b, i_h), (i_b, i_h // GROUP), i_b * H + i_h
            b_q = load_tile(desc_q, at, start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
            b_k = load_tile(desc_k, at_k, key, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
            b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            b_do = load_tile(desc_do, at, start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
            b_v = load_tile(desc_v, at_k, key, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
            b_dp = tl.dot(b_do, b_v.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            b_lse2 = desc_rows.load([LSE2, head, start]).reshape([BLOCK_M])  # [BLOCK_M]
            b_delta = desc_rows.load([DELTA, head, start]).reshape([BLOCK_M])  # [BLOCK_M]
            o_q, o_k = start + tl.arange(0, BLOCK_M)[:, None], key + tl.arange(0, BLOCK_N)[None, :]
            EXACT: tl.constexpr = PRECISION == "ieee"
            b_s, _ = scored(b_s, o_q, o_k, qk_scale, S_q, S_k, score, FUNCTION, DERIVATIVE, EXACT)
            b_p = tl.math.exp2(b_s - b_lse2[:, None])  # [BLOCK_M, BLOCK_N]
            b_p = tl.where((o_q < S_q) & (o_k < S_k), b_p, 0.0)
            if PARTIAL:
                if slot >= 0:
                    b_seen = seen(words_ptr, 2 * slot, start % TILE, key % TILE, BLOCK_M, BLOCK_N)
                    b_p = tl.where(b_seen, b_p, 0.0)
            b_sum += b_p * (b_dp - b_delta[:, None])
    dbias_ptr += own_b.to(tl.int64) * dbias_b + own_h.to(tl.int64) * dbias_h
    if DIAGONAL:  # of the first block of the band, whose places have these distances
        i_m = first
        i_n = RATIO * first + d
    o_q = i_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    o_k = i_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    at_q, at_k = dbias_ptr + o_q.to(tl.int64) * dbias_m, o_k.to(tl.int64) * dbias_n
    if DIAGONAL:
        distance = o_k[None, :] - o_q[:, None]
        there = (distance > -S_q) & (distance < S_k)
        tl.atomic_add(at_q[:, None] + at_k[None, :], b_sum, mask=there, sem="relaxed")
    elif ROWS and COLUMNS:
        there = (o_q < S_q)[:, None] & (o_k < S_k)[None, :]
        tl.store(at_q[:, None] + at_k[None, :], b_sum, mask=there)
    elif COLUMNS:
        tl.atomic_add(dbias_ptr + at_k, tl.sum(b_sum, 0), mask=o_k < S_k, sem="relaxed")
    elif ROWS:
        tl.atomic_add(at_q, tl.sum(b_sum, 1), mask=o_q < S_q, sem="relaxed")
    else:
        tl.atomic_add(dbias_ptr, tl.sum(tl.sum(b_sum, 1), 0), sem="relaxed")
