"""Exact attention, forward, in plain `triton.language`: for any GPU that Triton knows, and its interpreter.

One program computes one block of BLOCK_M query rows of one head. Keys are visited from the diagonal down to
key 0, so the tiles that need a mask come first and the long loop has none. In that loop the product P V runs
one tile late: P V of the last tile is issued after this tile's Q K^T and before this tile's softmax, which
does not depend on it, so that the tensor cores work while the exponentials are taken (notebook 07).
"""

import triton
import triton.language as tl


@triton.jit
def _load_tile(desc, i_b, i_h, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    # Rows past the end of the sequence and columns past the head dimension arrive as zeros.
    return desc.load([i_b, i_h, row, 0]).reshape([ROWS, BLOCK_D])  # [ROWS, BLOCK_D]


@triton.jit
def _scores(b_q, desc_k, i_b, i_h, row, FLIP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
            PRECISION: tl.constexpr):
    b_k = _load_tile(desc_k, i_b, i_h, row, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    return -b_s if FLIP else b_s


@triton.jit
def _softmax_step(b_s, b_m, b_l, qk_scale):
    """Fold a tile of raw scores into the row maximum m and the row sum l; returns P, the rescale, m, l."""
    m_new = tl.maximum(b_m, tl.max(b_s, 1))  # [BLOCK_M]
    # A row that has seen no key yet has m = -inf; subtracting it from itself would give NaN.
    m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # [BLOCK_M]
    b_p = tl.math.exp2(b_s * qk_scale - (m_ref * qk_scale)[:, None])  # [BLOCK_M, BLOCK_N]
    # The difference first: equal maxima must give exactly 1, which a contracted a*b - c*b does not promise.
    alpha = tl.math.exp2((b_m - m_ref) * qk_scale)  # [BLOCK_M]
    return b_p, alpha, m_new, b_l * alpha + tl.sum(b_p, 1)


@triton.jit
def _mask(b_s, last_key, first, BLOCK_N: tl.constexpr):
    """Scores of keys after each row's last visible one become -inf; `first` is the tile's first key."""
    o_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    return tl.where(o_n[None, :] <= (last_key - first)[:, None], b_s, float("-inf"))  # [BLOCK_M, BLOCK_N]


@triton.jit
def _add_values(b_acc, b_p, alpha, desc_v, i_b, i_h, row, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                PRECISION: tl.constexpr):
    b_v = _load_tile(desc_v, i_b, i_h, row, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    b_acc = b_acc * alpha[:, None]  # [BLOCK_M, BLOCK_D]
    return tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["S_q", "S_k", "H", "GROUP", "HEADS_TOTAL"])
def attention_forward(
    desc_q, desc_k, desc_v, desc_o, lse_ptr,
    qk_scale,  # |sm_scale| * log2(e), positive
    S_q, S_k,
    H,  # query heads
    GROUP,  # query heads that share one key/value head
    HEADS_TOTAL,  # B * H
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_TAIL: tl.constexpr,  # not causal, and S_k is not a multiple of BLOCK_N
    ONE_MASKED_TILE: tl.constexpr,  # BLOCK_M == BLOCK_N and the diagonal starts at a tile's corner
    FLIP: tl.constexpr,  # sm_scale is negative: the row maximum of the flipped scores is the one to track
    STORE_LSE: tl.constexpr,
    Q_IN_REGISTERS: tl.constexpr,
    SECTION: tl.constexpr,  # heads that advance together, so that their keys and values stay in L2
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = softmax(sm_scale * Q K^T) V over descriptors of shape (B, H, S, D); see the module docstring."""
    # Launch order: section by section, within one the longest rows (the last ones, when causal) first.
    pid = tl.program_id(0)
    num_m = tl.cdiv(S_q, BLOCK_M)
    section = pid // (num_m * SECTION)
    in_section = pid % (num_m * SECTION)
    heads = tl.minimum(SECTION, HEADS_TOTAL - section * SECTION)
    i_m = num_m - 1 - in_section // heads
    i_bh = section * SECTION + in_section % heads
    i_b = i_bh // H
    i_h = i_bh % H
    i_kv = i_h // GROUP

    start = i_m * BLOCK_M
    o_m = start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    diagonal = S_k - S_q  # query i sees keys 0 .. i + diagonal: bottom-right alignment
    if CAUSAL:
        visible = tl.maximum(tl.minimum(start + BLOCK_M + diagonal, S_k), 0)  # keys that some row sees
        shared = tl.maximum(tl.minimum(start + 1 + diagonal, S_k), 0)  # keys that every row sees
    else:
        visible = S_k
        shared = S_k
    last_key = tl.full([BLOCK_M], 0, tl.int32) + (S_k - 1)  # [BLOCK_M] the last key that each row sees
    if CAUSAL:
        last_key = tl.minimum(o_m + diagonal, last_key)
    # The first tile visited; a row with no key masks it whole.
    last = tl.maximum(tl.cdiv(visible, BLOCK_N) - 1, 0)
    unmasked = tl.minimum(shared // BLOCK_N, last)  # tiles below this one need no mask

    b_q = _load_tile(desc_q, i_b, i_h, start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    if Q_IN_REGISTERS:
        # The tensor cores read A from shared memory or from registers. A value fresh from a load goes to
        # shared memory; one that was computed stays in registers, which halves the shared-memory traffic
        # of Q K^T and frees Q's buffer for another pipeline stage. The select changes nothing: those rows
        # are 0.
        b_q = tl.where((o_m < S_q)[:, None], b_q, 0.0)
    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running row maximum of the raw scores
    b_l = tl.zeros([BLOCK_M], tl.float32)  # running row sum
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # output, not yet divided by l

    # 1. The last visible tile, on the diagonal or the tail of the keys.
    b_s = _scores(b_q, desc_k, i_b, i_kv, last * BLOCK_N, FLIP, BLOCK_N, BLOCK_D, PRECISION)
    if CAUSAL or HAS_TAIL:
        b_s = _mask(b_s, last_key, last * BLOCK_N, BLOCK_N)
    b_p, alpha, b_m, b_l = _softmax_step(b_s, b_m, b_l, qk_scale)

    # 2. The other tiles that cross the diagonal. Left out where there are none: its registers would cost
    # occupancy.
    if CAUSAL and not ONE_MASKED_TILE:
        for i in tl.range(0, last - unmasked, num_stages=1):
            j = last - 1 - i
            b_s = _scores(b_q, desc_k, i_b, i_kv, j * BLOCK_N, FLIP, BLOCK_N, BLOCK_D, PRECISION)
            b_acc = _add_values(
                b_acc, b_p, alpha, desc_v, i_b, i_kv, (j + 1) * BLOCK_N, BLOCK_N, BLOCK_D, PRECISION
            )
            b_s = _mask(b_s, last_key, j * BLOCK_N, BLOCK_N)
            b_p, alpha, b_m, b_l = _softmax_step(b_s, b_m, b_l, qk_scale)

    # 3. All the tiles before them, without a mask.
    for i in tl.range(0, unmasked, num_stages=NUM_STAGES):
        j = unmasked - 1 - i
        b_s = _scores(b_q, desc_k, i_b, i_kv, j * BLOCK_N, FLIP, BLOCK_N, BLOCK_D, PRECISION)
        b_acc = _add_values(
            b_acc, b_p, alpha, desc_v, i_b, i_kv, (j + 1) * BLOCK_N, BLOCK_N, BLOCK_D, PRECISION
        )
        b_p, alpha, b_m, b_l = _softmax_step(b_s, b_m, b_l, qk_scale)
    b_acc = _add_values(b_acc, b_p, alpha, desc_v, i_b, i_kv, 0, BLOCK_N, BLOCK_D, PRECISION)

    if STORE_LSE:
        LN2: tl.constexpr = 0.6931471805599453
        b_lse = (b_m * qk_scale + tl.math.log2(b_l)) * LN2  # [BLOCK_M]
        b_lse = tl.where(b_l == 0.0, float("-inf"), b_lse)
        tl.store(lse_ptr + (i_b * H + i_h).to(tl.int64) * S_q + o_m, b_lse, mask=o_m < S_q)
    # A row with nothing to attend to has l = 0: its output is 0 and its LSE -inf. (Where an input is NaN, so
    # is l.)
    empty = b_l == 0.0  # [BLOCK_M]
    b_o = tl.where(empty[:, None], 0.0, b_acc / tl.where(empty, 1.0, b_l)[:, None])  # [BLOCK_M, BLOCK_D]
    desc_o.store([i_b, i_h, start, 0], b_o.to(desc_o.dtype).reshape([1, 1, BLOCK_M, BLOCK_D]))
