"""Which keys can have weight: a lower bound of each row's threshold, the keys above it, and lists of them.

The threshold tau of a row solves F(tau) = sum_j [s_j - tau]_+^p = 1, with s = (alpha - 1) * sm_scale * q k^T
and p = 1 / (alpha - 1). Leaving keys out makes F smaller, and so its root: the threshold of a part of a row's
keys is a lower bound of tau. The part taken here costs one maximum a score: of the keys j, j + BLOCK_N,
j + 2 BLOCK_N ... the one with the highest score. With one of 64 such groups each, few of the highest scores
of a row share a group, and the bound is close.
"""

import triton
import triton.language as tl

from attnlib.kernels.common.program_order import downwards
from attnlib.kernels.common.tile_access import load_tile
from attnlib.kernels.common.varlen_rows import padded_start
from attnlib.kernels.entmax.walk import (
    ANY,
    ROWS,
    THREE_HALVES,
    blocks_of,
    last_visible,
    positive,
    powers,
    query_block,
    rows_of,
    varlen_block,
)

NEWTON_STEPS = tl.constexpr(6)
WHOLE = tl.constexpr(2.0**23)  # from here to 2^24 floats are whole numbers, and their last bits the number's


@triton.jit
def _tiles(start, S_q, S_k, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(tiles of keys that all rows of a block see whole, tiles that some row sees some of)."""
    seen_by_all, seen = S_k, S_k
    if CAUSAL:
        seen_by_all = tl.maximum(tl.minimum(start + 1 + S_k - S_q, S_k), 0)
        seen = tl.maximum(tl.minimum(start + BLOCK_M + S_k - S_q, S_k), 0)
    return seen_by_all // BLOCK_N, tl.cdiv(seen, BLOCK_N)


@triton.jit
def _highest(b_top, b_q, desc_k, at, first, end, last_key, MASKED: tl.constexpr, NUM_STAGES: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The highest score of each group over the tiles first .. end - 1; NaN where one is."""
    for j in tl.range(first, end, num_stages=NUM_STAGES):
        b_k = load_tile(desc_k, at, j * BLOCK_N, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            o_n = j * BLOCK_N + tl.arange(0, BLOCK_N)
            b_s = tl.where(o_n[None, :] <= last_key[:, None], b_s, float("-inf"))
        b_top = tl.maximum(b_top, b_s, propagate_nan=tl.PropagateNan.ALL)
    return b_top


@triton.jit(
    do_not_specialize=["S_q", "S_k", "H", "HEADS", "B"], do_not_specialize_on_alignment=["cu_q", "cu_k"]
)
def entmax_bound(
    desc_q, desc_k,  # (B, H, S_q, D), (B, H_kv, S_k, D)
    rows_ptr,  # (2, HEADS, S_q): the bound, and the highest score
    scale,  # |(alpha - 1) * sm_scale|, positive
    exponent,  # 1 / (alpha - 1)
    S_q, S_k,  # of varlen sequences all together
    H,  # query heads
    HEADS,  # B * H, of varlen sequences H
    cu_q, cu_k, B,  # of varlen sequences: where they begin and end [B + 1]; None for a batch
    GROUP: tl.constexpr,  # query heads that share one key/value head
    KIND: tl.constexpr,  # of alpha
    CAUSAL: tl.constexpr,
    FLIP: tl.constexpr,  # sm_scale is negative
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SECTION: tl.constexpr,  # heads that advance together
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A lower bound of each row's threshold. Grid: (blocks of BLOCK_M rows * HEADS,)."""
    T_q = S_q
    i_m, head = downwards(blocks_of(T_q, cu_q, B, BLOCK_M), HEADS, SECTION)
    start, S_q, S_k, at_q, at_k, _ = query_block(i_m * BLOCK_M, head, S_q, S_k, H, cu_q, cu_k, B, GROUP)
    if cu_q is not None:
        if start >= S_q:
            return
    o_m = start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    last_key = last_visible(o_m, S_q, S_k, CAUSAL)
    full, end = _tiles(start, S_q, S_k, CAUSAL, BLOCK_M, BLOCK_N)
    b_q = load_tile(desc_q, at_q, start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    if FLIP:
        b_q = -b_q
    b_top = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    b_top = _highest(b_top, b_q, desc_k, at_k, 0, full, last_key, False, NUM_STAGES, BLOCK_N, BLOCK_D,
                     PRECISION)  # fmt: skip
    b_top = _highest(b_top, b_q, desc_k, at_k, full, end, last_key, True, 1, BLOCK_N, BLOCK_D, PRECISION)
    b_top *= scale
    b_max = tl.max(b_top, 1)  # [BLOCK_M]
    unknown = tl.max((b_top != b_top).to(tl.int32), 1) > 0  # a reduction leaves NaN out
    b_max = tl.where(unknown, float("nan"), b_max)
    empty = last_key < 0
    b_top -= tl.where(empty, 0.0, b_max)[:, None]
    # Newton's method for |[s - t]_+|_p = 1, from the left: the norm is convex in t, no step passes the root.
    b_t = tl.full([BLOCK_M], -1.0, tl.float32)  # counted from the highest score, where F >= 1
    for _ in range(NEWTON_STEPS):
        b_f, b_d = powers(tl.maximum(b_top - b_t[:, None], 0.0), exponent, KIND)
        b_f, b_d = tl.sum(b_f, 1), tl.sum(b_d, 1)  # [BLOCK_M]
        b_t += newton(b_f, tl.where(empty, 1.0, b_d), exponent, KIND)
    # What rounding may have added: scores come from another product next time.
    b_bound = b_max + b_t - (tl.abs(b_max) + 1.0) * 0.0000152587890625
    rows_ptr += rows_of(at_q, head, S_q, T_q) + o_m
    tl.store(rows_ptr, tl.where(empty, float("inf"), b_bound), mask=o_m < S_q)
    tl.store(rows_ptr + HEADS.to(tl.int64) * T_q, tl.where(empty, 0.0, b_max), mask=o_m < S_q)


@triton.jit
def newton(b_f, b_d, exponent, KIND: tl.constexpr):
    """A step of Newton's method for F^(1/p) = 1, where F = sum x^p; b_d: sum x^(p - 1)."""
    if KIND == THREE_HALVES:
        return (b_f - tl.sqrt(b_f)) / b_d
    elif KIND == ANY:
        return (b_f - tl.math.exp2(tl.math.log2(b_f) * (1.0 - 1.0 / exponent))) / b_d
    else:
        return (b_f - 1.0) / b_d


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _bits(b_x):
    """Which of 64 numbers a row are positive: [rows, 2, 4] int32, a bit for each of 32 numbers, eight of
    which each of four threads has. They are sums of powers of 2; a float has room for 16 bits."""
    b_x = positive(b_x).reshape([b_x.shape[0], 2, 2, 2, 4, 2])  # words, halves, eights, threads, ones
    b_x = tl.sum(b_x * (1 << tl.arange(0, 2)).to(tl.float32), 5)
    b_x = tl.sum(b_x * (1 << 8 * tl.arange(0, 2)).to(tl.float32)[:, None], 3)  # words, halves, threads
    b_x = b_x * (1 << 2 * tl.arange(0, 4)).to(tl.float32) + WHOLE
    b_half = b_x.to(tl.int32, bitcast=True) & 0xFFFF
    return tl.sum(b_half << (16 * tl.arange(0, 2)[:, None]), 2)


@triton.jit
def _flag(b_begun, b_q, b_limit, desc_k, at, keys_ptr, queries_ptr, words, first, end, last_key,
          MASKED: tl.constexpr, COLUMNS: tl.constexpr, NUM_STAGES: tl.constexpr, BLOCK_N: tl.constexpr,
          BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write the flags of the tiles first .. end - 1. b_begun: [4] those of a block of keys that a tile before
    has begun; returned for the tile after."""
    for j in tl.range(first, end, num_stages=NUM_STAGES):
        b_k = load_tile(desc_k, at, j * BLOCK_N, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_st = tl.dot(b_k, b_q.T, input_precision=PRECISION)  # [BLOCK_N, ROWS], keys as rows
        b_above = b_st - b_limit[None, :]
        if MASKED:
            o_n = j * BLOCK_N + tl.arange(0, BLOCK_N)
            b_above = tl.where(o_n[:, None] <= last_key[None, :], b_above, -1.0)
        b_low, b_high = tl.split(_bits(b_above).trans(0, 2, 1))  # [BLOCK_N, 4] of queries
        start = tl.full([], j, tl.int32) * BLOCK_N
        place = start & (ROWS - 1)  # of the tile in its block of keys
        o_n = place + tl.arange(0, BLOCK_N)
        b_key = tl.where((b_low | b_high) != 0, (1 << o_n % 32)[:, None], 0)  # [BLOCK_N, 4]
        b_key_low = tl.where((o_n < 32)[:, None], b_key, 0)
        b_all = tl.join(tl.join(b_low, b_high), tl.join(b_key_low, b_key - b_key_low))
        b_all = tl.reduce(b_all.reshape([BLOCK_N * 4, 4]), 0, _either)  # [4]
        if ROWS > BLOCK_N:
            b_all |= tl.where(place == 0, 0, b_begun)
            b_begun = b_all
        b_queries, b_keys = tl.split(b_all.reshape([2, 2]))
        low, high = tl.split(b_queries)
        key_low, key_high = tl.split(b_keys)
        block = start // ROWS
        tl.store(keys_ptr + 2 * block, key_low)
        tl.store(keys_ptr + 2 * block + 1, key_high)
        if COLUMNS:
            tl.store(queries_ptr + block.to(tl.int64) * words, low)
            tl.store(queries_ptr + block.to(tl.int64) * words + 1, high)
    return b_begun


@triton.jit(
    do_not_specialize=["S_q", "S_k", "H", "HEADS", "B", "key_words", "query_words"],
    do_not_specialize_on_alignment=["cu_q", "cu_k"],
)
def entmax_flags(
    desc_q, desc_k,  # as in `entmax_bound`
    rows_ptr,  # (2, HEADS, S_q): the bound, and the highest score
    keys_ptr,  # (HEADS, blocks of 64 rows, key_words) int32: which keys are above the bound of some row
    queries_ptr,  # (HEADS, blocks of 64 keys, query_words) int32: which rows have such a key
    scale, S_q, S_k, H, HEADS, cu_q, cu_k, B,  # as in `entmax_bound`
    key_words, query_words,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, FLIP: tl.constexpr,
    COLUMNS: tl.constexpr,  # write queries_ptr, which the backward pass wants
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SECTION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One bit for each key and block of rows, and one for each row and block of keys.
    Grid: (blocks of 64 rows * HEADS,). Not written: flags of blocks of keys that no row of a block sees."""
    T_q, T_k = S_q, S_k
    num_m = blocks_of(T_q, cu_q, B, ROWS)
    i_m, head = downwards(num_m, HEADS, SECTION)
    start, S_q, S_k, at_q, at_k, i_b = query_block(i_m * ROWS, head, S_q, S_k, H, cu_q, cu_k, B, GROUP)
    if cu_q is not None:
        if start >= S_q:
            return
    o_m = start + tl.arange(0, ROWS)  # [ROWS]
    last_key = last_visible(o_m, S_q, S_k, CAUSAL)
    full, end = _tiles(start, S_q, S_k, CAUSAL, ROWS, BLOCK_N)
    b_q = load_tile(desc_q, at_q, start, ROWS, BLOCK_D)  # [ROWS, BLOCK_D]
    if FLIP:
        b_q = -b_q
    rows_ptr += rows_of(at_q, head, S_q, T_q) + o_m
    b_limit = tl.load(rows_ptr, mask=o_m < S_q, other=float("inf")) / scale  # [ROWS] of raw scores
    b_limit = tl.where(b_limit == b_limit, b_limit, float("inf"))  # a row with NaN has no keys
    keys_ptr += (head.to(tl.int64) * num_m + i_m) * key_words
    if COLUMNS:
        if cu_q is None:
            queries_ptr += head.to(tl.int64) * (key_words // 2) * query_words + 2 * i_m
        else:
            block = (
                head.to(tl.int64) * blocks_of(T_k, cu_k, B, ROWS)
                + padded_start(at_k[0] - S_k, i_b, ROWS) // ROWS
            )
            queries_ptr += block * query_words + 2 * (start // ROWS)
    b_begun = tl.zeros([4], tl.int32)
    b_begun = _flag(b_begun, b_q, b_limit, desc_k, at_k, keys_ptr, queries_ptr, query_words, 0, full,
                    last_key, False, COLUMNS, NUM_STAGES, BLOCK_N, BLOCK_D, PRECISION)  # fmt: skip
    _flag(b_begun, b_q, b_limit, desc_k, at_k, keys_ptr, queries_ptr, query_words, full, end, last_key, True,
          COLUMNS, 1, BLOCK_N, BLOCK_D, PRECISION)  # fmt: skip


@triton.jit
def bits_set(b_word):
    """How many bits of each int32 are set. The compiler makes one instruction of these steps."""
    b = b_word.to(tl.uint32, bitcast=True)
    b -= (b >> 1) & 0x55555555
    b = (b & 0x33333333) + ((b >> 2) & 0x33333333)
    b = (b + (b >> 4)) & 0x0F0F0F0F
    return ((b * 0x01010101) >> 24).to(tl.int32)


@triton.jit(
    do_not_specialize=["words", "room", "blocks", "S_q", "S_k", "B", "identity"],
    do_not_specialize_on_alignment=["cu_q", "cu_k"],
)
def entmax_lists(
    words_ptr,  # (heads * blocks, words) int32
    lists_ptr,  # (heads * blocks, room) int32, and after them `identity`: 0, 1, 2 ...
    records_ptr,  # (heads * blocks, 4) int32: count, middle, first, nothing
    words, room,
    blocks,  # lists of a head
    S_q, S_k,
    cu_q, cu_k, B,  # as in `entmax_bound`
    identity,  # heads * blocks * room
    CAUSAL: tl.constexpr,
    COLUMNS: tl.constexpr,  # lists of queries for blocks of keys; else of keys for blocks of queries
    CHUNK: tl.constexpr,  # words of a step
):  # fmt: skip
    """The numbers of the bits that are set, in order; how many there are; and how many of them come before
    the middle: of keys those that all rows of a block see, of queries those that do not see all keys of a
    block. If there is no room, nothing of that: all numbers from `first` on are walked along; else first is
    -1.
    Grid: (heads * blocks + steps of the identity,)."""
    SIZE: tl.constexpr = CHUNK * 32
    number = tl.program_id(0)
    lists = tl.num_programs(0) - tl.cdiv(words, CHUNK)
    if number >= lists:
        o_n = (number - lists) * SIZE + tl.arange(0, SIZE)
        tl.store(lists_ptr + tl.full([], identity, tl.int64) + o_n, o_n)
        return
    start = number % blocks * ROWS
    if cu_q is not None:
        if COLUMNS:
            _, start, _, S_k, _, S_q = varlen_block(start, cu_k, cu_q, B)
            own = S_k
        else:
            _, start, _, S_q, _, S_k = varlen_block(start, cu_q, cu_k, B)
            own = S_q
        if start >= own:
            return
    shift = S_k - S_q
    if COLUMNS:
        first, end, edge = 0, S_q, 0
        if CAUSAL:
            first = tl.minimum(tl.maximum(start - shift, 0), S_q)
            edge = tl.minimum(tl.maximum(start + ROWS - 1 - shift, 0), S_q)
    else:
        first, end, edge = 0, S_k, S_k
        if CAUSAL:
            end = tl.maximum(tl.minimum(start + ROWS + shift, S_k), 0)
            edge = tl.maximum(tl.minimum(start + 1 + shift, S_k), 0)
    words_ptr += number.to(tl.int64) * words
    lists_ptr += number.to(tl.int64) * room
    o_b = tl.arange(0, 32)
    below = (1 << o_b) - 1  # [32] the bits before each bit
    count, middle = 0, 0
    end_word = tl.cdiv(end, 32)
    for word in range(first // 32, end_word, CHUNK):
        o_w = word + tl.arange(0, CHUNK)
        b_word = tl.load(words_ptr + o_w, mask=o_w < end_word, other=0)  # [CHUNK]
        b_count = bits_set(b_word)  # [CHUNK]
        b_before = count + tl.cumsum(b_count, 0) - b_count  # [CHUNK]
        b_at = b_before[:, None] + bits_set(b_word[:, None] & below[None, :])  # [CHUNK, 32]
        b_bit = (b_word[:, None] >> o_b[None, :]) & 1  # [CHUNK, 32]
        b_number = o_w[:, None] * 32 + o_b[None, :]  # [CHUNK, 32]
        tl.store(lists_ptr + b_at, b_number, mask=(b_bit != 0) & (b_at < room))
        count += tl.sum(b_count, 0)
        o_edge = edge - o_w * 32  # [CHUNK] how many bits of each word come before the edge
        b_whole = tl.where(o_edge >= 32, -1, (1 << tl.minimum(tl.maximum(o_edge, 0), 31)) - 1)
        middle += tl.sum(bits_set(b_word & b_whole), 0)
    full = count > room
    records_ptr += number.to(tl.int64) * 4
    tl.store(records_ptr, tl.where(full, end - first, count))
    tl.store(records_ptr + 1, tl.where(full, edge - first, middle))
    tl.store(records_ptr + 2, tl.where(full, first, -1))
