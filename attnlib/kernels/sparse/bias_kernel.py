"""The gradient of a bias, in plain `triton.language`: dS summed up over all scores that share an element.

A program owns a block of the bias, and visits the blocks of scores that it is added to, of one head after the
other: so it reads its bias once, the sum stays in registers, and nobody else adds to it. Of a bias of
diagonals a program owns those of a block's, and goes down the blocks along them, which all have the same
bias; they overlap with those of its neighbor. S and dP are computed again, two of the five products of a
backward pass; without this gradient nothing is.
"""

import triton
import triton.language as tl

from attnlib.kernels.common.logarithms import LOG2_E
from attnlib.kernels.common.tile_access import load_tile
from attnlib.kernels.sparse.scores import head_bias, head_slope, unbiased
from attnlib.kernels.sparse.walk import TILE, seen

NUMBERS = "S_q S_k padded B H down across mask_b mask_h bias_b bias_h bias_m".split()
NUMBERS += ["dbias_b", "dbias_h", "dbias_m"]

LOOK = tl.constexpr(128)
"""Blocks that are looked at together for what is seen of them."""


@triton.jit
def _band(rank, rows, columns, RATIO: tl.constexpr):
    """(first row of blocks, behind the last one, column of row 0) of a band of blocks along the diagonal;
    RATIO columns of blocks are as long as a row. In a causal mask longer ones come first."""
    d = columns - 1 - rank
    first = tl.maximum(0, (RATIO - 1 - d) // RATIO)
    return first, tl.minimum(rows, (columns - d + RATIO - 1) // RATIO), d


@triton.jit
def _place(t, own, heads, RATIO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(batch element, head, first query, first key) of visit t; own: those of visit 0, and the rows of blocks
    that come one after the other."""
    i_b, i_h, first, d, turns = own
    i_m = first + t % turns
    return i_b + t // turns // heads, i_h + t // turns % heads, i_m * BLOCK_M, (RATIO * i_m + d) * BLOCK_N


@triton.jit
def _tile(i_b, i_h, start, key, mask):
    """(slot, whether anything is seen) of the tile that has query `start` and key `key`."""
    kinds_ptr, slots_ptr, down, across, mask_b, mask_h = mask
    row = (i_b * mask_b + i_h * mask_h).to(tl.int64) * down + start // TILE  # of tiles
    slot = tl.load(slots_ptr + row * across + key // TILE)
    kind = tl.load(kinds_ptr + row * 4 * across + key // TILE * 2)  # of the tile's first unit
    return slot, (slot >= 0) | (kind != 0)


@triton.jit
def _rows(t, own, heads, rows, mask, RATIO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(slot, LSE in base 2 [BLOCK_M], delta [BLOCK_M]) of visit t. The LSE is +inf, which makes weights of 0,
    in rows behind the last one and where nothing is seen."""
    lse2_ptr, delta_ptr, H, padded = rows
    i_b, i_h, start, key = _place(t, own, heads, RATIO, BLOCK_M, BLOCK_N)
    slot, some = _tile(i_b, i_h, start, key, mask)
    first = (i_b * H + i_h).to(tl.int64) * padded + start
    b_lse2 = tl.load(lse2_ptr + first + tl.arange(0, BLOCK_M))
    b_delta = tl.load(delta_ptr + first + tl.arange(0, BLOCK_M))
    return slot, tl.where(some, b_lse2, float("inf")), b_delta


@triton.jit
def _visits(b_sum, b_bias, visits, own, heads, descriptors, rows, mask, words_ptr, alibi_ptr, qk_scale, cap,
            after, shift, GROUP: tl.constexpr, FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr,
            PARTIAL: tl.constexpr, NUM_STAGES: tl.constexpr, RATIO: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add dS of so many blocks of scores. There is no branch: with one the compiler copies nothing ahead. Nor
    does it copy rows ahead by TMA, because no product takes them: by pointers it does."""
    desc_q, desc_do, desc_k, desc_v = descriptors
    for t in tl.range(visits, num_stages=NUM_STAGES):
        i_b, i_h, start, key = _place(t, own, heads, RATIO, BLOCK_M, BLOCK_N)
        slot, b_lse2, b_delta = _rows(t, own, heads, rows, mask, RATIO, BLOCK_M, BLOCK_N)
        slope, i_kv = alibi_ptr, i_h // GROUP  # together: alone, a None would not be one any more
        if alibi_ptr is not None:
            slope = head_slope(alibi_ptr, i_h)
        score = (cap, slope, after, i_h, i_b)
        at, at_k = (i_b, i_h), (i_b, i_kv)
        b_q = load_tile(desc_q, at, start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        b_k = load_tile(desc_k, at_k, key, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        b_do = load_tile(desc_do, at, start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        b_v = load_tile(desc_v, at_k, key, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_dp = tl.dot(b_do, b_v.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        o_q, o_k = start + tl.arange(0, BLOCK_M)[:, None], key + tl.arange(0, BLOCK_N)[None, :]
        b_s, _ = unbiased(b_s, o_q, o_k, qk_scale, shift, score, FUNCTION, DERIVATIVE)
        b_p = tl.math.exp2(b_s + b_bias - b_lse2[:, None])  # [BLOCK_M, BLOCK_N]
        if FUNCTION is not None:  # which may be NaN for a query that does not exist, or in a hidden tile
            b_p = tl.where(b_lse2[:, None] == float("inf"), 0.0, b_p)
        if PARTIAL:  # a tile without words gets those of slot 0; that of the last keys has words
            b_seen = seen(words_ptr, 2 * tl.maximum(slot, 0), start % TILE, key % TILE, BLOCK_M, BLOCK_N)
            b_p = tl.where(b_seen | (slot < 0), b_p, 0.0)
        b_sum += b_p * (b_dp - b_delta[:, None])
    return b_sum


@triton.jit(do_not_specialize=NUMBERS)
def attention_sparse_bias_gradient(
    desc_q, desc_do,  # (B, H, S_q, D)
    desc_k, desc_v,  # (B, H_kv, S_k, D)
    lse2_ptr, delta_ptr,  # (B * H, padded), see `common.preprocess`
    kinds_ptr,  # int8 (masks, 2 * down, 2 * across): of units, see `attnlib.block_mask.tiles`
    slots_ptr,  # (masks, down, across)
    words_ptr,  # (slots, 128, 4)
    alibi_ptr, bias_ptr,  # as in the forward kernel
    dbias_ptr,  # float32; 0 before the launch where programs add to it
    qk_scale, cap, after,  # as in the forward kernel
    S_q, S_k, padded, B,
    H,  # query heads
    down, across,  # tiles of a mask
    mask_b, mask_h,
    bias_b, bias_h, bias_m,
    dbias_b, dbias_h, dbias_m,  # strides of dbias, 0 where it has one value for all; that of keys is 1
    GROUP: tl.constexpr,
    BIAS_N: tl.constexpr,
    FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr,
    BATCHES: tl.constexpr, HEADS: tl.constexpr,  # each batch element, and head, has a bias of its own,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # and each query, and key; else one for all
    DIAGONAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTIAL: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks, or bands of blocks, of a bias * its batch elements * its heads,)."""
    RATIO: tl.constexpr = BLOCK_M // BLOCK_N
    rows, columns = down * (TILE // BLOCK_M), across * (TILE // BLOCK_N)
    if DIAGONAL:
        blocks = RATIO * (rows - 1) + columns
        first, end, d = _band(tl.program_id(0) % blocks, rows, columns, RATIO)
        turns = end - first
    else:  # a band of one block
        blocks = rows * columns
        first = tl.program_id(0) % blocks // columns
        d = tl.program_id(0) % blocks % columns - RATIO * first
        turns = 1
    own_b = tl.program_id(0) // blocks
    own_h, heads = own_b * 0, H
    if HEADS:
        own_b, own_h, heads = own_b // H, own_b % H, 1
    own = (own_b, own_h, first, d, turns)
    mask = (kinds_ptr, slots_ptr, down, across, mask_b, mask_h)
    visits = (1 if BATCHES else B) * heads * turns
    seen_by_some, mixed = 0, 0
    for t in range(0, visits, LOOK):
        i_b, i_h, start, key = _place(
            tl.minimum(t + tl.arange(0, LOOK), visits - 1), own, heads, RATIO, BLOCK_M, BLOCK_N
        )
        slot, some = _tile(i_b, i_h, start, key, mask)
        seen_by_some |= tl.max(some.to(tl.int32), 0)
        mixed |= tl.max((slot >= 0).to(tl.int32), 0)
    # Of the first block of a band, whose places have the distances of all.
    o_q = first * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    o_k = (RATIO * first + d) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if DIAGONAL:
        distance = o_k[None, :] - o_q[:, None]
        there = (distance > -S_q) & (distance < S_k)
    else:
        there = (o_q < S_q)[:, None] & (o_k < S_k)[None, :]
    at_q = head_bias(bias_ptr, bias_b, bias_h, own_b, own_h) + o_q.to(tl.int64) * bias_m
    wanted = there & (seen_by_some != 0)
    b_bias = tl.load(at_q[:, None] + (o_k.to(tl.int64) * BIAS_N)[None, :], mask=wanted, other=0.0)
    b_bias = b_bias.to(tl.float32) * LOG2_E  # [BLOCK_M, BLOCK_N]
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    descriptors, rows = (desc_q, desc_do, desc_k, desc_v), (lse2_ptr, delta_ptr, H, padded)
    b_sum = _visits(
        b_sum, b_bias, visits * (seen_by_some - mixed), own, heads, descriptors, rows, mask, words_ptr,
        alibi_ptr, qk_scale, cap, after, S_k - S_q, GROUP, FUNCTION, DERIVATIVE, False, NUM_STAGES, RATIO,
        BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    if PARTIAL:
        b_sum = _visits(
            b_sum, b_bias, visits * mixed, own, heads, descriptors, rows, mask, words_ptr, alibi_ptr,
            qk_scale, cap, after, S_k - S_q, GROUP, FUNCTION, DERIVATIVE, True, 1, RATIO, BLOCK_M, BLOCK_N,
            BLOCK_D, PRECISION,
        )  # fmt: skip
    dbias_ptr += own_b.to(tl.int64) * dbias_b + own_h.to(tl.int64) * dbias_h
    at_q = dbias_ptr + o_q.to(tl.int64) * dbias_m
    if DIAGONAL:
        tl.atomic_add(at_q[:, None] + o_k[None, :], b_sum, mask=there, sem="relaxed")
    elif ROWS and COLUMNS:
        tl.store(at_q[:, None] + o_k[None, :], b_sum, mask=there)
    elif COLUMNS:
        tl.atomic_add(dbias_ptr + o_k, tl.sum(b_sum, 0), mask=o_k < S_k, sem="relaxed")
    elif ROWS:
        tl.atomic_add(at_q, tl.sum(b_sum, 1), mask=o_q < S_q, sem="relaxed")
    else:
        tl.atomic_add(dbias_ptr, tl.sum(tl.sum(b_sum, 1), 0), sem="relaxed")
