"""Exact attention of few queries to many keys, in plain `triton.language`: decoding with a KV cache.

The query rows of all heads that share a key/value head make one tile of BLOCK_M rows. So keys and values are
read once, and time is that of reading them. What remains is to keep every multiprocessor reading. A pair is a
sequence with one of its key/value heads, or with one block of rows of it where the rows need several tiles.
Its keys are cut into tiles of BLOCK_N, and programs share out the tiles of all pairs:

- one split: a program takes all tiles of a pair.
- a fixed number of splits: so many programs take about as many tiles each of one pair.
- stream-K (LeanAttention): the tiles of all pairs stand in one line, and each program takes an equal share of
  the line, wherever pairs begin or end in it. With WHOLE it takes a pair instead where lengths turn out to be
  so nearly equal that this is no slower (`line.are_whole`): nothing is left to merge.

A program that has not all tiles of a pair leaves its row maximum m, its row sum l and its output before the
division by l in memory. Such results merge by an associative operation, the rescaling of the online softmax.
Either a second launch merges them, or the program that finishes a pair last. Both merge in the order of the
keys, so that equal calls have equal bits. No program waits for another.

Caches in FP8 become float16 when they have been loaded, which is exact. Queries do, too, in units that bring
them into its range, and weights, in units that keep small ones. The scales of keys are applied to scores,
those of values to the output, both in float32. Two neighboring columns are loaded as one number of 16 bits,
so the first and the second columns of all pairs are two operands, and each product two.

Where a pair begins and ends follows from the lengths, which each program reads from memory. A grid that was
launched for one batch of lengths, in a CUDA graph for instance, is right for any other.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.kernels.common.logarithms import LN2
from attnlib.kernels.decode.keys import ask_for_first_tile, halves, in_float16, page_of, row_of, scale_of
from attnlib.kernels.decode.line import (
    are_whole,
    parts_of,
    sequence_at,
    share_of,
    span,
    tiles_before,
    tiles_of,
)

SMALLEST = tl.constexpr(2.0**-126)  # positive normal number
HEADROOM = tl.constexpr(15.0)
"""Weights of keys in FP8 are at most 2^15, not 1: they become float16, whose smallest number is 2^-24."""
EXACT = tl.constexpr(2.0**23)
"""Scores from which on they are at most 1 again: float32 rounds what HEADROOM leaves of these, and float16
has no 2^16."""


# ---------------------------------------------------------------- results


@triton.jit
def _finished(b_m, b_l):
    """(what a row's output is divided by, its LSE). A row that saw no key has l = 0: output 0, LSE -inf."""
    empty = b_l == 0.0
    b_lse = tl.where(empty, float("-inf"), (b_m + tl.math.log2(tl.where(empty, 1.0, b_l))) * LN2)
    return tl.where(empty, 1.0, b_l), b_lse


@triton.jit
def _merge_row(
    part_o,
    part_m,
    part_l,
    slot,
    count,
    row,
    column,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    SLICE: tl.constexpr,
    STREAM_K: tl.constexpr,
):
    """(output [SLICE] before its division by l, from a column on, m, l) of a row of a tile, from `count`
    partial results, of which PARTS are merged in one step: a step takes as long as memory to answer."""
    o_d = column + tl.arange(0, SLICE)  # [SLICE]
    b_acc = tl.zeros([SLICE], tl.float32)
    b_m = float("-inf")
    b_l = 0.0
    for start in tl.range(0, count, PARTS):
        o_p = start + tl.arange(0, PARTS)  # [PARTS]
        there = o_p < count
        # With stream-K the slot after the first one is the next program's first.
        places = slot + (tl.where(o_p == 0, 0, 2 * o_p - 1) if STREAM_K else o_p)  # [PARTS]
        places = places.to(tl.int64) * BLOCK_M + row
        # Another program may have written them a moment ago: not from L1.
        p_m = tl.load(part_m + places, mask=there, other=float("-inf"), cache_modifier=".cg")  # [PARTS]
        p_l = tl.load(part_l + places, mask=there, other=0.0, cache_modifier=".cg")  # [PARTS]
        p_o = tl.load(
            part_o + places[:, None] * BLOCK_D + o_d[None, :], mask=there[:, None], other=0.0,
            cache_modifier=".cg",
        )  # [PARTS, SLICE]  # fmt: skip
        m_new = tl.maximum(b_m, tl.max(p_m, 0))
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key in sight yet: no -inf minus -inf
        alpha = tl.math.exp2(b_m - m_ref)
        weight = tl.math.exp2(p_m - m_ref)  # [PARTS]
        b_l = b_l * alpha + tl.sum(p_l * weight, 0)
        b_acc = b_acc * alpha + tl.sum(p_o * weight[:, None], 0)  # [SLICE]
        b_m = m_new
    return b_acc, b_m, b_l


@triton.jit
def _merge_and_store_row(
    part_o,
    part_m,
    part_l,
    slot,
    count,
    row,
    column,
    out_ptr,
    lse_ptr,
    i_b,
    i_p,
    H_kv,
    o_b,
    o_h,
    o_s,
    D: tl.constexpr,
    S_Q: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    SLICE: tl.constexpr,
    UNIT_Q: tl.constexpr,
    STORE_LSE: tl.constexpr,
    STREAM_K: tl.constexpr,
):
    """Merge SLICE columns of a row of the tile of pair i_p of sequence i_b, and write them; and its LSE."""
    b_acc, b_m, b_l = _merge_row(
        part_o, part_m, part_l, slot, count, row, column, BLOCK_M, BLOCK_D, PARTS, SLICE, STREAM_K
    )
    divisor, b_lse = _finished(b_m, b_l)
    o_d = column + tl.arange(0, SLICE)  # [SLICE]
    o_r = i_p % BLOCKS * BLOCK_M + row
    i_h, i_s = i_p // BLOCKS * GROUP + o_r // S_Q, o_r % S_Q
    there = o_r < GROUP * S_Q
    place = (i_b.to(tl.int64) * o_b + i_h.to(tl.int64) * o_h + i_s.to(tl.int64) * o_s) * UNIT_Q
    b_o = (b_acc / divisor).to(out_ptr.dtype.element_ty)  # [SLICE]
    # Not `there & (o_d < D)`: triton 3.9's interpreter takes no scalar condition in a mask of columns.
    tl.store(out_ptr + place + o_d, b_o, mask=o_d < tl.where(there, D, 0))
    if STORE_LSE:
        lse_row = lse_ptr + (i_b.to(tl.int64) * H_kv * GROUP + i_h) * S_Q + i_s
        tl.store(lse_row, b_lse, mask=there & (column == 0))


# ---------------------------------------------------------------- the tiles of one pair


@triton.jit
def _attend(
    b_q,
    k_ptr,
    v_ptr,
    table,
    first,
    count,
    begin,
    end,
    first_key,
    last_key,
    qk_scale,
    k_page,
    k_s,
    k_d,
    v_page,
    v_s,
    v_d,
    k_scale, v_scale, k_scale_page, v_scale_page,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT_KV: tl.constexpr,
    WIDE: tl.constexpr,
    ALIKE: tl.constexpr,
    FLIP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    PAIRS: tl.constexpr,
    PTX: tl.constexpr,
    LATE_SUMS: tl.constexpr,
):
    """(output before its division by l, m, l) of `count` tiles from `first` on.

    Keys `begin` .. `end` - 1 are read, which some row sees; a row sees those from its first_key (None for no
    bound) to its last_key [BLOCK_M]. qk_scale: one number, with FP8 one for each row. `table`: the pages of
    this sequence; None where its keys lie in one piece. k_scale, v_scale: what keys and values are multiplied
    with, one number, or one for each page, which are k_scale_page and v_scale_page elements apart; None for
    1.
    """
    o_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    NUMBERS: tl.constexpr = 2 if PAIRS else 1  # of an element that is loaded
    o_d = tl.arange(0, BLOCK_D // NUMBERS)  # [BLOCK_D], or half of them
    if PAIRS:
        k_ptr = k_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        b_q, b_q2 = tl.split(tl.reshape(b_q, [BLOCK_M, BLOCK_D // 2, 2]))
        b_acc2 = tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32)  # of the second column of each pair
    k_column = o_d if k_d is None else o_d.to(tl.int64) * k_d  # [BLOCK_D]
    v_column = o_d if v_d is None else o_d.to(tl.int64) * v_d  # [BLOCK_D]
    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running row maximum of scores * qk_scale
    # Running row sums; or of each column of all tiles, which are added up behind the loop.
    b_l = tl.zeros([BLOCK_M, BLOCK_N] if LATE_SUMS else [BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D // NUMBERS], tl.float32)
    b_unit = SMALLEST  # of b_acc: the largest scale of a page of values so far
    if k_scale is not None and k_scale_page is None:
        b_ks = tl.load(k_scale)
    if table is not None:  # the pages of a tile are known one tile ahead: its loads need not wait for them
        next_page = page_of(table, first, o_n, begin, end, PAGE, BLOCK_N)  # [BLOCK_N], or one for all
    for j in tl.range(first, first + count, num_stages=NUM_STAGES):
        key = j * BLOCK_N + o_n  # [BLOCK_N]
        there = (key >= begin) & (key < end)  # [BLOCK_N]
        page = None
        if table is not None:
            page = next_page
            next_page = page_of(table, j + 1, o_n, begin, end, PAGE, BLOCK_N)
        k_row = row_of(key, page, k_page, k_s, PAGE, WIDE)  # [BLOCK_N]
        v_row = k_row if ALIKE else row_of(key, page, v_page, v_s, PAGE, WIDE)  # [BLOCK_N]
        # Not `o_d * NUMBERS < D`: of that the compiler does not know that neighbors have the same.
        mask = there[:, None] & (o_d < D // NUMBERS)[None, :] if D < BLOCK_D else there[:, None]
        # Rows, then columns: another order of these sums costs 50 instructions a tile.
        k_rows = k_ptr + (k_row.to(tl.int64) * (UNIT_KV // NUMBERS))[:, None]  # [BLOCK_N, 1]
        v_rows = v_ptr + (v_row.to(tl.int64) * (UNIT_KV // NUMBERS))[:, None]  # [BLOCK_N, 1]
        b_k = tl.load(k_rows + k_column[None, :], mask=mask, other=0.0)  # [BLOCK_N, BLOCK_D]
        b_v = tl.load(v_rows + v_column[None, :], mask=mask, other=0.0)  # [BLOCK_N, BLOCK_D]
        if PAIRS:
            b_k, b_k2 = halves(b_k, PTX)
            b_v, b_v2 = halves(b_v, PTX)
        elif FP8:
            b_k, b_v = b_k.to(tl.float16), b_v.to(tl.float16)
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if PAIRS:
            b_s = tl.dot(b_q2, b_k2.T, b_s)
        if k_scale_page is not None:
            b_ks = scale_of(k_scale, page, k_scale_page, there, PAGE, BLOCK_N)  # [1, BLOCK_N], or one for all
        if k_scale is not None:
            b_s *= b_ks
        b_s = -b_s if FLIP else b_s
        seen = key[None, :] <= last_key[:, None]  # [BLOCK_M, BLOCK_N]
        if first_key is not None:
            seen &= key[None, :] >= first_key[:, None]
        b_s = tl.where(seen, b_s, float("-inf"))
        m_tile = tl.max(b_s, 1) * qk_scale  # [BLOCK_M]
        if FP8:
            m_tile -= tl.where(tl.abs(m_tile) < EXACT, HEADROOM, 0.0)
        m_new = tl.maximum(b_m, m_tile)  # [BLOCK_M]
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
        b_p = tl.math.exp2(b_s * (qk_scale[:, None] if FP8 else qk_scale) - m_ref[:, None])
        alpha = tl.math.exp2(b_m - m_ref)  # [BLOCK_M]
        b_l = b_l * alpha[:, None] + b_p if LATE_SUMS else b_l * alpha + tl.sum(b_p, 1)
        if v_scale_page is not None:  # weights are in units of the largest scale, as 16 bits can't be small
            b_vs = scale_of(v_scale, page, v_scale_page, there, PAGE, BLOCK_N)  # [1, BLOCK_N], or one for all
            largest = tl.abs(b_vs) if PAGE % BLOCK_N == 0 else tl.max(tl.max(tl.abs(b_vs), 1), 0)
            larger = tl.maximum(b_unit, largest)
            b_p *= b_vs / larger
            alpha *= b_unit / larger
            b_unit = larger
        b_p = b_p.to(b_v.dtype)
        b_acc = tl.dot(b_p, b_v, b_acc * alpha[:, None], input_precision=PRECISION)
        if PAIRS:
            b_acc2 = tl.dot(b_p, b_v2, b_acc2 * alpha[:, None])
        b_m = m_new
    if LATE_SUMS:
        b_l = tl.sum(b_l, 1)
    if PAIRS:
        b_acc = tl.interleave(b_acc, b_acc2)
    if v_scale_page is not None:
        b_acc *= b_unit
    elif v_scale is not None:
        b_acc *= tl.load(v_scale)
    return b_acc, b_m, b_l


@triton.jit(
    do_not_specialize=[
        "B", "S", "H_kv", "left", "right", "shares", "q_b", "q_h", "q_s", "k_b", "k_h", "k_s", "k_d",
        "v_b", "v_h", "v_s", "v_d", "o_b", "o_h", "o_s", "table_b", "k_scale_b", "k_scale_h", "v_scale_b",
        "v_scale_h", "k_scale_page", "v_scale_page",
    ],
    do_not_specialize_on_alignment=["lengths", "starts", "page_table", "k_scale", "v_scale", "arrived"],
)  # fmt: skip
def attention_decode(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    part_o,  # partial results: outputs [slots, BLOCK_M, BLOCK_D]; None for one split
    part_m,
    part_l,  # m and l [slots, BLOCK_M]
    arrived,  # partial results of each pair so far [pairs], all 0 before and after; None: no merge here
    lengths,  # keys of each sequence [B]; None where all have S
    starts,  # of them the first that counts [B]; None where all do
    page_table,  # pages of each sequence [B, pages]; None where its keys lie in one piece
    k_scale, v_scale,  # what is multiplied with keys and values in FP8; None for 1
    qk_scale,  # |sm_scale| * log2(e), positive
    B,
    S,  # keys that a sequence has room for
    H_kv,
    left,
    right,  # keys that a row sees before and after its place; None for no bound
    shares,  # programs of stream-K, or splits of a pair
    q_b,
    q_h,
    q_s,  # strides, in units of UNIT_Q and UNIT_KV elements; of a paged cache k_b and v_b are those of a page
    k_b,
    k_h,
    k_s,
    k_d,  # elements; None for 1
    v_b,
    v_h,
    v_s,
    v_d,
    o_b,
    o_h,
    o_s,
    table_b,
    k_scale_b, k_scale_h, v_scale_b, v_scale_h,  # strides of a sequence's and a head's scales, in elements
    k_scale_page, v_scale_page,  # that of a page's; None where there is no scale for each page
    D: tl.constexpr,
    S_Q: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share one key/value head
    BLOCKS: tl.constexpr,  # tiles that their rows take
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,  # keys of a page; None where there are none
    PARTS: tl.constexpr,  # partial results that are merged in one step
    SLICE: tl.constexpr,  # columns of them
    STREAM_K: tl.constexpr,
    WHOLE: tl.constexpr,  # a program takes a pair if all have as many tiles as so many of the longest; or 0
    IDLE: tl.constexpr,  # tiles of a pair that stand for the time in which a program begins it
    AT_ONCE: tl.constexpr,  # sequences that are looked at together
    OVERLAPS: tl.constexpr,  # the launch that merges may begin before this one is done
    ALIGNED: tl.constexpr,  # which caches begin at a multiple of 16 bytes: the compiler is told by Triton
    UNIT_Q: tl.constexpr,
    UNIT_KV: tl.constexpr,
    WIDE: tl.constexpr,  # a place in a cache, in units, has more than 31 bits
    ALIKE: tl.constexpr,  # keys and values have the same strides
    PREFETCH: tl.constexpr,  # keys are asked for before the queries are there
    PREFETCH_NEXT: tl.constexpr,  # and those of the next pair before this one is done
    FLIP: tl.constexpr,  # sm_scale is negative: the row maximum of the flipped scores is the one to track
    STORE_LSE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,  # what keys and values are; they become float16, as queries do
    PAIRS: tl.constexpr,  # columns of FP8 are loaded two at a time
    PTX: tl.constexpr,  # instructions are available, as they are not in the interpreter
    LATE_SUMS: tl.constexpr,  # weights are added up over a row behind the loop
):
    """out = softmax(sm_scale * Q K^T) V for q (B, H, S_Q, D) and caches (B, H_kv, S, D), or (pages, H_kv,
    PAGE, D); see the module's docstring.

    Grid: `shares` with stream-K, otherwise shares * pairs, the splits of a pair one after the other.
    """
    if OVERLAPS:
        gdc_launch_dependents()
    place = tl.program_id(0)
    pairs = H_kv * BLOCKS  # of a sequence
    # What this program has to do: `todo` tiles, of pair i_p of sequence i_b from its tile `done` on, and so
    # on through the pairs after it.
    total = 0
    if STREAM_K:
        _, total, longest = tiles_before(0, lengths, starts, B, S, left, S_Q, BLOCK_N, IDLE, AT_ONCE)
        total = total * pairs
        whole = are_whole(longest, total, WHOLE) if WHOLE else False
        if whole:
            i_b, i_p = tl.minimum(place // pairs, B - 1), place % pairs
            length, start = span(lengths, starts, i_b, True, S)
            _, tiles = tiles_of(length, start, left, S_Q, BLOCK_N, IDLE)
            done, begin = 0, 0
            todo = tl.where(place < B * pairs, tiles, 0)
        else:
            tile = share_of(place, total, shares)
            todo = share_of(place + 1, total, shares) - tile
            i_b, before = sequence_at(
                tile, pairs, lengths, starts, B, S, left, S_Q, BLOCK_N, IDLE, AT_ONCE
            )
            length, start = span(lengths, starts, i_b, True, S)
            _, tiles = tiles_of(length, start, left, S_Q, BLOCK_N, IDLE)
            tile -= before * pairs
            i_p, done = tile // tiles, tile % tiles
            begin = (before * pairs + i_p * tiles).to(tl.int32)  # the pair's first tile in the line
    else:
        pair = place // shares
        i_b, i_p = pair // pairs, pair % pairs
        length, start = span(lengths, starts, i_b, True, S)
        _, tiles = tiles_of(length, start, left, S_Q, BLOCK_N, IDLE)
        share = tl.cdiv(tiles, shares)
        done = place % shares * share
        todo = tl.minimum(share, tiles - done)
        begin = 0

    o_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    while todo > 0:
        length, start = span(lengths, starts, i_b, True, S)
        first_tile, tiles = tiles_of(length, start, left, S_Q, BLOCK_N, IDLE)
        count = tl.minimum(tiles - done, todo)

        i_kv = i_p // BLOCKS
        k_head = k_ptr + i_kv.to(tl.int64) * k_h * UNIT_KV
        v_head = v_ptr + i_kv.to(tl.int64) * v_h * UNIT_KV
        if page_table is None:
            k_head += i_b.to(tl.int64) * k_b * UNIT_KV
            v_head += i_b.to(tl.int64) * v_b * UNIT_KV
            table = None
            if PREFETCH_NEXT:
                if count < todo:  # then the next pair begins in this share
                    n_p = tl.where(i_p + 1 == pairs, 0, i_p + 1)
                    n_b = i_b + (n_p == 0).to(tl.int32)
                    n_length, n_start = span(lengths, starts, n_b, n_b < B, S)
                    n_tile, _ = tiles_of(n_length, n_start, left, S_Q, BLOCK_N, IDLE)
                    n_row, n_kv = tl.minimum(n_b, B - 1).to(tl.int64), (n_p // BLOCKS).to(tl.int64)
                    n_k = k_ptr + (n_row * k_b + n_kv * k_h) * UNIT_KV
                    n_v = v_ptr + (n_row * v_b + n_kv * v_h) * UNIT_KV
                    key = n_tile * BLOCK_N
                    ask_for_first_tile(n_k, n_v, key, n_length, k_s, v_s, BLOCK_N, BLOCK_D, UNIT_KV)
            if PREFETCH:
                key = (first_tile + done) * BLOCK_N
                ask_for_first_tile(k_head, v_head, key, length, k_s, v_s, BLOCK_N, BLOCK_D, UNIT_KV)
        else:
            table = page_table + i_b.to(tl.int64) * table_b

        # The rows: query by query of a head, head by head of the group.
        o_r = i_p % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        i_h, i_s = i_kv * GROUP + o_r // S_Q, o_r % S_Q  # [BLOCK_M]
        row = o_r < GROUP * S_Q  # [BLOCK_M]
        columns = row[:, None] & (o_d < D)[None, :]  # [BLOCK_M, BLOCK_D]
        places = (i_b.to(tl.int64) * q_b + i_h.to(tl.int64) * q_h + i_s.to(tl.int64) * q_s) * UNIT_Q
        b_q = tl.load(q_ptr + places[:, None] + o_d[None, :], mask=columns, other=0.0)  # [BLOCK_M, BLOCK_D]
        b_scale = qk_scale
        if FP8:
            b_q, b_unit = in_float16(b_q)
            b_scale = tl.maximum(qk_scale * b_unit, SMALLEST)  # [BLOCK_M]; 0 times -inf is NaN
        position = length - S_Q + i_s  # [BLOCK_M] the last query stands at the last key
        last_key = tl.zeros([BLOCK_M], tl.int32) + (length - 1)  # [BLOCK_M]
        if right is not None:
            last_key = tl.minimum(last_key, position + right)  # [BLOCK_M]
        if left is None and starts is None:
            first_key, from_key = None, 0
        elif left is None:
            first_key, from_key = tl.zeros([BLOCK_M], tl.int32) + start, start  # [BLOCK_M]
        else:
            first_key = tl.maximum(position - left, start)  # [BLOCK_M]
            from_key = tl.maximum(length - S_Q - left, start)
        # Scales of this sequence and head; of this head where each page has one, and k_scale_b is 0.
        k_scales, v_scales = None, None
        if k_scale is not None:
            k_scales = k_scale + i_b.to(tl.int64) * k_scale_b + i_kv.to(tl.int64) * k_scale_h
        if v_scale is not None:
            v_scales = v_scale + i_b.to(tl.int64) * v_scale_b + i_kv.to(tl.int64) * v_scale_h
        busy = tl.minimum(count, tiles - IDLE - done)  # tiles that have keys; below 1 for none
        b_acc, b_m, b_l = _attend(
            b_q, k_head, v_head, table, first_tile + done, busy, from_key, length, first_key, last_key,
            b_scale, k_b, k_s, k_d, v_b, v_s, v_d, k_scales, v_scales, k_scale_page, v_scale_page, D,
            BLOCK_M, BLOCK_N, BLOCK_D, PAGE, UNIT_KV, WIDE, ALIKE, FLIP, NUM_STAGES, PRECISION, FP8, PAIRS,
            PTX, LATE_SUMS,
        )  # fmt: skip

        if count == tiles:  # nothing to merge
            divisor, b_lse = _finished(b_m, b_l)  # [BLOCK_M]
            places = (i_b.to(tl.int64) * o_b + i_h.to(tl.int64) * o_h + i_s.to(tl.int64) * o_s) * UNIT_Q
            b_o = (b_acc / divisor[:, None]).to(out_ptr.dtype.element_ty)  # [BLOCK_M, BLOCK_D]
            tl.store(out_ptr + places[:, None] + o_d[None, :], b_o, mask=columns)
            if STORE_LSE:
                lse_rows = lse_ptr + (i_b.to(tl.int64) * H_kv * GROUP + i_h) * S_Q + i_s
                tl.store(lse_rows, b_lse, mask=row)
        elif part_o is not None:
            slot = 2 * place + (done == 0).to(tl.int32) if STREAM_K else place
            o_m = slot.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
            tl.store(part_o + o_m[:, None] * BLOCK_D + o_d[None, :], b_acc, mask=row[:, None])
            tl.store(part_m + o_m, b_m, mask=row)
            tl.store(part_l + o_m, b_l, mask=row)
            if arrived is not None:
                pair = i_b * pairs + i_p
                first, parts = parts_of(pair, begin, tiles, total, shares, STREAM_K)
                tl.debug_barrier()  # all of this program's stores, then the one that says so
                if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == parts - 1:
                    SLICES: tl.constexpr = BLOCK_D // SLICE
                    rows = tl.minimum(GROUP * S_Q - i_p % BLOCKS * BLOCK_M, BLOCK_M)
                    for i in tl.range(0, rows * SLICES):
                        _merge_and_store_row(
                            part_o, part_m, part_l, first, parts, i // SLICES, i % SLICES * SLICE, out_ptr,
                            lse_ptr, i_b, i_p, H_kv, o_b, o_h, o_s, D, S_Q, GROUP, BLOCKS, BLOCK_M, BLOCK_D,
                            PARTS, SLICE, UNIT_Q, STORE_LSE, STREAM_K,
                        )  # fmt: skip
                    tl.store(arrived + pair, 0)  # for the next launch

        todo -= count
        begin += tiles
        done = 0
        i_p += 1
        if i_p == pairs:
            i_p = 0
            i_b += 1


@triton.jit(
    do_not_specialize=["B", "S", "H_kv", "left", "shares", "o_b", "o_h", "o_s"],
    do_not_specialize_on_alignment=["lengths", "starts"],
)
def attention_merge(
    out_ptr,
    lse_ptr,
    part_o,
    part_m,
    part_l,
    lengths,
    starts,
    B,
    S,
    H_kv,
    left,
    shares,
    o_b,
    o_h,
    o_s,
    D: tl.constexpr,
    S_Q: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    SLICE: tl.constexpr,
    STREAM_K: tl.constexpr,
    WHOLE: tl.constexpr,
    IDLE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
    UNIT_Q: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """Merge the partial results that `attention_decode` left; arguments as there.

    Grid: slices of a row * rows of a tile * pairs, those of a row and of a pair one after the other.
    """
    ROWS: tl.constexpr = min(BLOCK_M, GROUP * S_Q)
    SLICES: tl.constexpr = BLOCK_D // SLICE
    pairs = H_kv * BLOCKS
    place = tl.program_id(0)
    column, row, pair = place % SLICES * SLICE, place // SLICES % ROWS, place // (SLICES * ROWS)
    i_b, i_p = pair // pairs, pair % pairs
    length, start = span(lengths, starts, i_b, True, S)
    _, tiles = tiles_of(length, start, left, S_Q, BLOCK_N, IDLE)
    total, longest, begin = 0, 0, 0
    if STREAM_K:
        before, total, longest = tiles_before(i_b, lengths, starts, B, S, left, S_Q, BLOCK_N, IDLE, AT_ONCE)
        total = total * pairs
        begin = before * pairs + i_p * tiles
    slot, count = parts_of(pair, begin, tiles, total, shares, STREAM_K)
    if WHOLE:
        count = tl.where(are_whole(longest, total, WHOLE), 1, count)
    if OVERLAPS:
        gdc_wait()  # until all of the launch before is done; what came before it was done earlier
    if count > 1:  # else it was written
        _merge_and_store_row(
            part_o, part_m, part_l, slot, count, row, column, out_ptr, lse_ptr, i_b, i_p, H_kv, o_b, o_h,
            o_s, D, S_Q, GROUP, BLOCKS, BLOCK_M, BLOCK_D, PARTS, SLICE, UNIT_Q, STORE_LSE, STREAM_K,
        )  # fmt: skip
