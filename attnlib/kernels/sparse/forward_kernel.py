"""Exact attention under a block mask, forward, in plain `triton.language`.

A program computes BLOCK_M query rows of one head, and walks along the list of its row of tiles: first the
steps that all rows see whole, without a mask, then those that carry bits. A step is 64 keys, in one or more
pieces of BLOCK_N.
"""

import triton
import triton.language as tl

from attnlib.kernels.common.logarithms import LN2, LOG2_E
from attnlib.kernels.common.program_order import upwards
from attnlib.kernels.common.tile_access import load_tile, store_tile
from attnlib.kernels.sparse.scores import head_bias, head_slope, scored
from attnlib.kernels.sparse.walk import TILE, row_of_rank, seen


@triton.jit
def _steps(b_acc, b_m, b_l, b_q, desc_k, desc_v, at, first, end, row, steps_ptr, bits_ptr, words_ptr,
           qk_scale, start, S_q, S_k, score, SCORED: tl.constexpr, FUNCTION: tl.constexpr,
           DERIVATIVE: tl.constexpr, PARTIAL: tl.constexpr, FLIP: tl.constexpr, STEP: tl.constexpr,
           NUM_STAGES: tl.constexpr, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Steps first .. end - 1 of the lists; returns the output before its division by l, and m, l."""
    pieces: tl.constexpr = STEP // BLOCK_N
    for j in tl.range(first * pieces, end * pieces, num_stages=NUM_STAGES):
        column = j % pieces * BLOCK_N
        key = tl.load(steps_ptr + j // pieces) * STEP + column
        b_k = load_tile(desc_k, at, key, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if FLIP:
            b_s = -b_s
        if SCORED:
            o_q, o_k = start + tl.arange(0, BLOCK_M), key + tl.arange(0, BLOCK_N)
            b_s, _ = scored(b_s, o_q[:, None], o_k[None, :], qk_scale, S_q, S_k, score, FUNCTION, DERIVATIVE)
            unit = 1.0
        else:
            unit = qk_scale
        if PARTIAL:
            bits = tl.load(bits_ptr + j // pieces)
            b_s = tl.where(seen(words_ptr, bits, row, column, BLOCK_M, BLOCK_N), b_s, float("-inf"))
        m_new = tl.maximum(b_m, tl.max(b_s, 1) * unit)  # [BLOCK_M]
        m_ref = m_new
        if PARTIAL or score[2] is not None or FUNCTION is not None:
            # A row that has seen no key yet has m = -inf; subtracting it from itself would give NaN.
            m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        b_p = tl.math.exp2(b_s * unit - m_ref[:, None])  # [BLOCK_M, BLOCK_N]
        alpha = tl.math.exp2(b_m - m_ref)  # [BLOCK_M]
        b_m, b_l = m_new, b_l * alpha + tl.sum(b_p, 1)
        b_v = load_tile(desc_v, at, key, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * alpha[:, None], input_precision=PRECISION)
    return b_acc, b_m, b_l


NUMBERS = "S_q S_k H HEADS num_tiles mask_b mask_h bias_b bias_h bias_m".split()


@triton.jit(do_not_specialize=NUMBERS)
def attention_sparse_forward(
    desc_q, desc_k, desc_v, desc_o,  # (B, H, S_q, D), (B, H_kv, S_k, D) twice, (B, H, S_q, D)
    lse_ptr,  # (B, H, S_q)
    starts_ptr, middles_ptr, steps_ptr, bits_ptr, order_ptr,  # see `block_mask.lists.Lists`
    words_ptr,  # (slots, 128, 4)
    alibi_ptr, sinks_ptr, bias_ptr,  # (H), (H), and of any strides; None for what the score does not have
    qk_scale,  # |sm_scale| * log2(e), positive; SCORED see `scores.scored`
    cap, after,  # the soft cap times log2(e), or None; and see `scores`
    S_q, S_k,
    H,  # query heads
    HEADS,  # B * H
    num_tiles,  # rows of tiles of a mask
    mask_b, mask_h,  # masks from one batch element, or head, to the next; 0 where they share one
    bias_b, bias_h, bias_m,  # strides of the bias; BIAS_N is the last one
    GROUP: tl.constexpr,  # query heads that share one key/value head
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SCORED: tl.constexpr,  # the score is more than sinks
    BIAS_N: tl.constexpr,
    FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr,  # of the user's own, or None
    PARTIAL: tl.constexpr,  # some steps carry bits
    FLIP: tl.constexpr,  # sm_scale is negative: the row maximum of the flipped scores is the one to track
    STORE_LSE: tl.constexpr,
    SECTION: tl.constexpr,  # heads that advance together
    STEP: tl.constexpr,  # keys of a step of the lists
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out = softmax(sm_scale * Q K^T) V where the mask has a bit. Grid: (row blocks * HEADS,)."""
    rank, head = upwards(num_tiles * (TILE // BLOCK_M), HEADS, SECTION)
    i_b, i_h = head // H, head % H
    mask = i_b * mask_b + i_h * mask_h
    tile, start = row_of_rank(rank, mask, order_ptr, num_tiles, BLOCK_M)
    if start >= S_q:
        return
    number = mask * num_tiles + tile
    first, middle, end = (
        tl.load(starts_ptr + number), tl.load(middles_ptr + number), tl.load(starts_ptr + number + 1)
    )  # fmt: skip
    at_k = (i_b, i_h // GROUP)
    b_q = load_tile(desc_q, (i_b, i_h), start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    slope, bias = alibi_ptr, bias_ptr
    if alibi_ptr is not None:
        slope = head_slope(alibi_ptr, i_h)
    if bias_ptr is not None:
        bias = head_bias(bias_ptr, bias_b, bias_h, i_b, i_h)
    score = (cap, slope, bias, bias_m, BIAS_N, after, i_h, i_b)
    if sinks_ptr is None:
        b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running row maximum of scores * qk_scale
        b_l = tl.zeros([BLOCK_M], tl.float32)  # running row sum
    else:  # a row begins with its sink, as with a key whose value is 0
        b_m = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + i_h) * LOG2_E
        b_l = tl.full([BLOCK_M], 1.0, tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # output, not yet divided by l
    row = start - tile * TILE
    b_acc, b_m, b_l = _steps(
        b_acc, b_m, b_l, b_q, desc_k, desc_v, at_k, first, middle, row, steps_ptr, bits_ptr, words_ptr,
        qk_scale, start, S_q, S_k, score, SCORED, FUNCTION, DERIVATIVE, False, FLIP, STEP, NUM_STAGES,
        BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    if PARTIAL:
        b_acc, b_m, b_l = _steps(
            b_acc, b_m, b_l, b_q, desc_k, desc_v, at_k, middle, end, row, steps_ptr, bits_ptr, words_ptr,
            qk_scale, start, S_q, S_k, score, SCORED, FUNCTION, DERIVATIVE, True, FLIP, STEP, 1,
            BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    # A row that sees nothing, and has no sink, has l = 0: output 0, LSE -inf.
    empty = b_l == 0.0
    if STORE_LSE:
        o_m = start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        b_lse = (b_m + tl.math.log2(b_l)) * LN2
        b_lse = tl.where(empty, float("-inf"), b_lse)
        tl.store(lse_ptr + head.to(tl.int64) * S_q + o_m, b_lse, mask=o_m < S_q)
    b_o = b_acc / tl.where(empty, 1.0, b_l)[:, None]  # [BLOCK_M, BLOCK_D]
    store_tile(desc_o, b_o, (i_b, i_h), start, BLOCK_M, BLOCK_D)
