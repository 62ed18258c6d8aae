"""Block-Sparse FlashAttention, forward, in plain `triton.language`.

A program computes ROWS query rows of one head, and goes along the blocks of KEYS keys from the last one in
sight to the first. The scores of a block are computed, always. The blocks that hold the last key of one of
the rows are kept; an earlier one is kept if its largest score is no smaller than the threshold of the row
block, and skipped if it is: then its values are not loaded, no exponential is taken, and maximum, sum and
output stay as they are. So the softmax is that over the keys of kept blocks.
"""

import triton
import triton.language as tl

from attnlib.kernels.common import bsfa
from attnlib.kernels.common.logarithms import LN2, LOG2_E
from attnlib.kernels.common.program_order import downwards
from attnlib.kernels.common.tile_access import load_tile, store_tile

ROWS, KEYS = tl.constexpr(bsfa.ROWS), tl.constexpr(bsfa.KEYS)


@triton.jit
def _last_key(row, S_q, S_k, CAUSAL: tl.constexpr):
    """The last key that a row sees, below 0 if it sees none."""
    if CAUSAL:
        return tl.minimum(row + S_k - S_q, S_k - 1)
    else:
        return row * 0 + S_k - 1


@triton.jit
def _scores(b_q, desc_k, at, block, FLIP: tl.constexpr, PRECISION: tl.constexpr):
    b_k = load_tile(desc_k, at, block * KEYS, KEYS, b_q.shape[1])  # [KEYS, D]
    b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [ROWS, KEYS]
    return -b_s if FLIP else b_s


@triton.jit
def _add(b_acc, b_m, b_l, b_s, b_top, desc_v, at, block, qk_scale, GUARD: tl.constexpr,
         PRECISION: tl.constexpr):  # fmt: skip
    """Fold a kept block into the output before its division by l, and into m and l. b_top: its row maxima."""
    m_new = tl.maximum(b_m, b_top * qk_scale)  # [ROWS]
    m_ref = m_new
    if GUARD:  # a row that has seen no key yet has m = -inf; subtracting it from itself would give NaN
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
    b_p = tl.math.exp2(b_s * qk_scale - m_ref[:, None])  # [ROWS, KEYS]
    alpha = tl.math.exp2(b_m - m_ref)  # [ROWS]
    b_v = load_tile(desc_v, at, block * KEYS, KEYS, b_acc.shape[1])  # [KEYS, D]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * alpha[:, None], input_precision=PRECISION)
    return b_acc, m_new, b_l * alpha + tl.sum(b_p, 1)


NUMBERS = "S_q S_k H HEADS num_m num_n limit_b limit_h limit_m limits".split()


@triton.jit(do_not_specialize=NUMBERS)
def attention_bsfa_forward(
    desc_q, desc_k, desc_v, desc_o,  # (B, H, S_q, D), (B, H_kv, S_k, D) twice, (B, H, S_q, D)
    lse_ptr,  # (B, H, S_q)
    kept_ptr,  # (B, H, num_m, num_n) uint8, 0; or None
    limit_ptr,  # thresholds of row blocks, float32, in units of scaled scores
    qk_scale,  # |sm_scale| * log2(e), positive
    S_q, S_k,
    H,  # query heads
    HEADS,  # B * H
    num_m, num_n,  # blocks along queries and keys
    limit_b, limit_h, limit_m,  # strides of the thresholds
    limits,  # how many there are for a head; the last one is that of all later row blocks
    GROUP: tl.constexpr,  # query heads that share one key/value head
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    FLIP: tl.constexpr,  # sm_scale is negative: the maximum of the flipped scores is the one to track
    STORE_LSE: tl.constexpr,
    SECTION: tl.constexpr,  # heads that advance together
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out = softmax(sm_scale * Q K^T) V over kept blocks. Grid: (num_m * HEADS,)."""
    i_m, head = downwards(num_m, HEADS, SECTION)
    i_b, i_h = head // H, head % H
    at = (i_b, i_h // GROUP)
    start = i_m * ROWS
    o_m, o_n = start + tl.arange(0, ROWS), tl.arange(0, KEYS)  # [ROWS], [KEYS]
    last_key = _last_key(o_m, S_q, S_k, CAUSAL)  # [ROWS]
    last = tl.maximum(_last_key(tl.minimum(start + ROWS, S_q) - 1, S_q, S_k, CAUSAL), 0) // KEYS
    first = tl.maximum(_last_key(start, S_q, S_k, CAUSAL), 0) // KEYS  # of the blocks that are always kept
    b_q = load_tile(desc_q, (i_b, i_h), start, ROWS, D)  # [ROWS, D]
    b_m = tl.full([ROWS], float("-inf"), tl.float32)  # running row maximum of scores * qk_scale
    b_l = tl.zeros([ROWS], tl.float32)  # running row sum
    b_acc = tl.zeros([ROWS, D], tl.float32)  # output, not yet divided by l
    kept_at = (head * num_m + i_m).to(tl.int64) * num_n

    # 1. The blocks that hold the last key of a row.
    for i in tl.range(0, last + 1 - first, num_stages=1):
        block = last - i
        b_s = _scores(b_q, desc_k, at, block, FLIP, PRECISION)  # [ROWS, KEYS]
        b_s = tl.where(o_n[None, :] <= (last_key - block * KEYS)[:, None], b_s, float("-inf"))
        b_acc, b_m, b_l = _add(
            b_acc, b_m, b_l, b_s, tl.max(b_s, 1), desc_v, at, block, qk_scale, True, PRECISION
        )
        if kept_ptr is not None:
            tl.store(kept_ptr + kept_at + block, (tl.max(last_key, 0) >= 0).to(tl.uint8))

    # 2. All before them, by their largest score. Rows beyond the last one have scores, too: 0.
    limit = tl.load(limit_ptr + i_b * limit_b + i_h * limit_h + tl.minimum(i_m, limits - 1) * limit_m)
    limit *= LOG2_E
    for i in tl.range(0, first, num_stages=NUM_STAGES):
        block = first - 1 - i
        b_s = _scores(b_q, desc_k, at, block, FLIP, PRECISION)  # [ROWS, KEYS]
        b_top = tl.max(b_s, 1)  # [ROWS]
        top = tl.max(tl.where(o_m < S_q, b_top, float("-inf")), 0) * qk_scale
        if not (top < limit):
            b_acc, b_m, b_l = _add(
                b_acc, b_m, b_l, b_s, b_top, desc_v, at, block, qk_scale, False, PRECISION
            )
            if kept_ptr is not None:
                tl.store(kept_ptr + kept_at + block, 1)

    # A row that sees nothing has l = 0: output 0, LSE -inf.
    empty = b_l == 0.0
    if STORE_LSE:
        b_lse = tl.where(empty, float("-inf"), (b_m + tl.math.log2(b_l)) * LN2)  # [ROWS]
        tl.store(lse_ptr + head.to(tl.int64) * S_q + o_m, b_lse, mask=o_m < S_q)
    b_o = b_acc / tl.where(empty, 1.0, b_l)[:, None]  # [ROWS, D]
    store_tile(desc_o, b_o, (i_b, i_h), start, ROWS, D)


@triton.jit(do_not_specialize=["S_q", "S_k", "H", "HEADS", "num_m", "num_n"])
def block_maxima(
    desc_q, desc_k,  # (B, H, S_q, D), (B, H_kv, S_k, D)
    maxima_ptr,  # (B, H, num_m, num_n) float32, -inf
    scale,  # |sm_scale|
    S_q, S_k,
    H,  # query heads
    HEADS,  # B * H
    num_m, num_n,  # blocks along queries and keys
    GROUP: tl.constexpr,  # query heads that share one key/value head
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    FLIP: tl.constexpr,
    SECTION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest score of each block that `attention_bsfa_forward` decides on. Grid: (num_m * HEADS,)."""
    i_m, head = downwards(num_m, HEADS, SECTION)
    start = i_m * ROWS
    o_m = start + tl.arange(0, ROWS)  # [ROWS]
    first = tl.maximum(_last_key(start, S_q, S_k, CAUSAL), 0) // KEYS
    b_q = load_tile(desc_q, (head // H, head % H), start, ROWS, D)  # [ROWS, D]
    maxima_ptr += (head * num_m + i_m).to(tl.int64) * num_n
    for block in tl.range(0, first, num_stages=NUM_STAGES):
        b_s = _scores(b_q, desc_k, (head // H, head % H // GROUP), block, FLIP, PRECISION)  # [ROWS, KEYS]
        top = tl.max(tl.where(o_m < S_q, tl.max(b_s, 1), float("-inf")), 0)
        tl.store(maxima_ptr + block, top * scale)
