"""MonarchAttention (arXiv 2505.18698) in plain `triton.language`: three kernels, none of which writes scores.

N tokens stand as a matrix of M rows of B, token n = m*B + p. The attention matrix is approximated by

    A[(m', p), (m, b)] = L_p[m', m] * R_m[p, b],    each row of every R_m (B x B) and L_p (M x M) sums to 1

and R and L are fitted in turn, each exactly while the other stands still:

- `r_step`: block m of the keys, once for each p. R_m[p, :] is the softmax of center (m, p) against the B keys
  of the block. It leaves the mean key, the entropy of the weights, and in the last round the mean value.
- `l_step`: column p of the queries. L_p is the softmax over blocks m of a query against mean key (m, p), plus
  that entropy; the output is the mean of the mean values.
- `center_step`: between rounds. Center (m, p) is the mean of the queries of column p, each with the weight
  that it gives block m. Before the first round center (m, p) is query (m, p) itself.

So `r_step` and `l_step` are attention of B and of M rows to as many keys, N/B and N/M times: N*(B + M) scores
instead of N*N. Scores are in units of log2. "first" is the place of token 0 among the M*B places: tokens that
only fill up the first or the last block are hidden as keys, and are no queries.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

STRIDES = ["q_b", "q_h", "q_n", "k_b", "k_h", "k_n", "v_b", "v_h", "v_n", "o_b", "o_h", "o_n", "mask_b"]
NUMBERS = ["N", "M", "H", "first", *STRIDES]


@triton.jit
def _token(place, first, N, mask, UNEVEN: tl.constexpr):
    """(token at each place, whether there is one that counts). mask: of a batch element, or None."""
    token = place - first
    there = token == token
    if UNEVEN:
        there = (place >= first) & (token < N)
    if mask is not None:
        there = there & (tl.load(mask + token, mask=there, other=0) != 0)
    return token, there


@triton.jit
def _load(head, row, there, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Rows of D columns, those that are not there as zeros: [rows, BLOCK_D]. WIDE: their offsets
    from `head` need 64 bits."""
    o_d = tl.arange(0, BLOCK_D)
    seen = there[:, None] & (o_d < D)[None, :] if D < BLOCK_D else there[:, None]
    offset = row.to(tl.int64 if WIDE else tl.int32) * stride  # [rows]
    return tl.load(head + offset[:, None] + o_d[None, :], mask=seen, other=0.0)


@triton.jit
def _store(head, b_x, row, there, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    o_d = tl.arange(0, BLOCK_D)
    seen = there[:, None] & (o_d < D)[None, :] if D < BLOCK_D else there[:, None]
    offset = row.to(tl.int64 if WIDE else tl.int32) * stride  # [rows]
    tl.store(head + offset[:, None] + o_d[None, :], b_x, mask=seen)


@triton.jit
def _weights(b_x, b_max, b_sum):
    """One step of the online softmax over axis 1: (weights, what to scale results so far with, maximum, sum).
    A row may have seen nothing but -inf."""
    new = tl.maximum(b_max, tl.max(b_x, 1))
    ref = tl.where(new == float("-inf"), 0.0, new)
    b_w = tl.math.exp2(b_x - ref[:, None])
    alpha = tl.math.exp2(b_max - ref)
    return b_w, alpha, new, b_sum * alpha + tl.sum(b_w, 1)


@triton.jit
def _mean(b_acc, b_sum):
    """A weighted sum divided by the sum of its weights; 0 where there is none."""
    return b_acc * (1.0 / tl.where(b_sum == 0.0, 1.0, b_sum))[:, None]


@triton.jit
def _add(b_w, b_x, b_acc, alpha, SINGLE: tl.constexpr, PRECISION: tl.constexpr):
    """The weighted sum of rows so far, and of these. SINGLE: there are no others."""
    if SINGLE:
        return tl.dot(b_w.to(b_x.dtype), b_x, input_precision=PRECISION)
    else:
        return tl.dot(b_w.to(b_x.dtype), b_x, b_acc * alpha[:, None], input_precision=PRECISION)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["mask_ptr"])
def r_step(
    q_ptr,  # (batch, H, N, D), read in the first round
    k_ptr,
    v_ptr,
    mean_ptr,  # (batch * H, M * BLOCK, D): centers in, mean keys out, in the same places
    value_ptr,  # the same for mean values, written in the last round
    entropy_ptr,  # (batch * H, M * BLOCK) float32
    mask_ptr,  # (batch, N) uint8, or None
    scale,  # positive, times log2(e)
    N,
    M,
    H,
    first,
    q_b,
    q_h,
    q_n,  # strides, in units of UNIT elements
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    mask_b,
    BLOCK: tl.constexpr,  # B, the keys of a block
    GROUP: tl.constexpr,  # query heads of a key head
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,  # a head has 2^31 elements or more
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    UNEVEN: tl.constexpr,  # N < M * BLOCK
    FLIP: tl.constexpr,  # the scale is negative: queries change their sign
    UNIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if OVERLAPS:
        gdc_launch_dependents()
    TILES: tl.constexpr = (BLOCK + ROWS - 1) // ROWS
    WHOLE: tl.constexpr = BLOCK % COLUMNS == 0 and not UNEVEN and mask_ptr is None  # no key is left out
    SINGLE: tl.constexpr = BLOCK <= COLUMNS
    i_m, i_bh = tl.program_id(0) // TILES % M, tl.program_id(0) // TILES // M
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    k_head = k_ptr + (i_b * k_b + i_h // GROUP * k_h) * UNIT
    v_head = v_ptr + (i_b * v_b + i_h // GROUP * v_h) * UNIT
    mask = None if mask_ptr is None else mask_ptr + i_b * mask_b

    o_p = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)  # [ROWS]
    in_block = o_p < BLOCK if BLOCK % ROWS else o_p == o_p  # [ROWS]
    head, place = i_bh.to(tl.int64) * M * BLOCK, i_m * BLOCK + o_p  # [ROWS]
    if FIRST:
        token, counts = _token(place, first, N, mask, UNEVEN)
        q_head = q_ptr + (i_b * q_b + i_h * q_h) * UNIT
        b_c = _load(q_head, token, in_block & counts, q_n * UNIT, D, BLOCK_D, WIDE)  # [ROWS, BLOCK_D]
        b_c = -b_c if FLIP else b_c
    else:
        if OVERLAPS:
            gdc_wait()
        b_c = _load(mean_ptr + head * D, place, in_block, D, D, BLOCK_D, WIDE)  # [ROWS, BLOCK_D]

    b_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_value = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, BLOCK, COLUMNS, num_stages=NUM_STAGES):
        o_k = start + tl.arange(0, COLUMNS)  # [COLUMNS]
        key, live = _token(i_m * BLOCK + o_k, first, N, mask, UNEVEN)
        live = (o_k < BLOCK) & live if BLOCK % COLUMNS else live
        b_k = _load(k_head, key, live, k_n * UNIT, D, BLOCK_D, WIDE)  # [COLUMNS, BLOCK_D]
        if LAST:  # here, so that it is on its way during the first product
            b_v = _load(v_head, key, live, v_n * UNIT, D, BLOCK_D, WIDE)  # [COLUMNS, BLOCK_D]
        b_x = tl.dot(b_c, b_k.T, input_precision=PRECISION) * scale  # [ROWS, COLUMNS]
        b_x = b_x if WHOLE else tl.where(live[None, :], b_x, float("-inf"))
        b_w, alpha, b_max, b_sum = _weights(b_x, b_max, b_sum)
        b_key = _add(b_w, b_k, b_key, alpha, SINGLE, PRECISION)
        if LAST:
            b_value = _add(b_w, b_v, b_value, alpha, SINGLE, PRECISION)

    b_mean = _mean(b_key, b_sum).to(b_c.dtype)  # [ROWS, BLOCK_D]
    # log2(sum exp2(x)) - sum(R * x) is the entropy of R. The mean key as it is rounded, not as it was before:
    # what a query near the center gets wrong by the rounding, the entropy then takes back.
    at_mean = tl.sum(b_c.to(tl.float32) * b_mean.to(tl.float32), 1) * scale  # [ROWS]
    b_entropy = b_max + tl.math.log2(b_sum) - at_mean  # [ROWS] -inf where there is no key
    _store(mean_ptr + head * D, b_mean, place, in_block, D, D, BLOCK_D, WIDE)
    tl.store(entropy_ptr + head + place, b_entropy, mask=in_block)
    if LAST:
        b_value = _mean(b_value, b_sum).to(b_c.dtype)  # [ROWS, BLOCK_D]
        _store(value_ptr + head * D, b_value, place, in_block, D, D, BLOCK_D, WIDE)


@triton.jit(do_not_specialize=NUMBERS)
def l_step(
    q_ptr,
    mean_ptr,  # mean keys
    value_ptr,
    entropy_ptr,
    lse_ptr,  # (batch * H, M * BLOCK) float32, written without OUTPUT
    out_ptr,  # (batch, H, N, D)
    scale,
    N,
    M,
    H,
    first,
    q_b,
    q_h,
    q_n,
    o_b,
    o_h,
    o_n,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,  # a head has 2^31 elements or more
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SINGLE: tl.constexpr,  # COLUMNS >= M
    OUTPUT: tl.constexpr,  # or the LSE of each row, for `center_step`
    UNEVEN: tl.constexpr,
    FLIP: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if OVERLAPS:
        gdc_launch_dependents()
    # Neighboring programs take neighboring p: what they read lies side by side.
    tiles = tl.cdiv(M, ROWS)
    i_p, i_bh = tl.program_id(0) % BLOCK, tl.program_id(0) // BLOCK // tiles
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    o_r = tl.program_id(0) // BLOCK % tiles * ROWS + tl.arange(0, ROWS)  # [ROWS]
    token, counts = _token(o_r * BLOCK + i_p, first, N, None, UNEVEN)
    counts = (o_r < M) & counts  # [ROWS]
    b_q = _load(q_ptr + (i_b * q_b + i_h * q_h) * UNIT, token, counts, q_n * UNIT, D, BLOCK_D, WIDE)
    b_q = -b_q if FLIP else b_q  # [ROWS, BLOCK_D]
    if OVERLAPS:
        gdc_wait()

    b_out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    head = i_bh.to(tl.int64) * M * BLOCK
    for start in tl.range(0, COLUMNS if SINGLE else M, COLUMNS, num_stages=NUM_STAGES):
        o_m = start + tl.arange(0, COLUMNS)  # [COLUMNS]
        place = o_m * BLOCK + i_p  # [COLUMNS]
        b_k = _load(mean_ptr + head * D, place, o_m < M, D, D, BLOCK_D, WIDE)  # [COLUMNS, BLOCK_D]
        b_e = tl.load(entropy_ptr + head + place, mask=o_m < M, other=float("-inf"))  # [COLUMNS]
        if OUTPUT:
            b_v = _load(value_ptr + head * D, place, o_m < M, D, D, BLOCK_D, WIDE)  # [COLUMNS, BLOCK_D]
        b_x = tl.dot(b_q, b_k.T, input_precision=PRECISION) * scale + b_e[None, :]  # [ROWS, COLUMNS]
        b_w, alpha, b_max, b_sum = _weights(b_x, b_max, b_sum)
        if OUTPUT:
            b_out = _add(b_w, b_v, b_out, alpha, SINGLE, PRECISION)

    if OUTPUT:
        b_out = _mean(b_out, b_sum).to(b_q.dtype)  # [ROWS, BLOCK_D]
        _store(out_ptr + (i_b * o_b + i_h * o_h) * UNIT, b_out, token, counts, o_n * UNIT, D, BLOCK_D, WIDE)
    else:
        tl.store(lse_ptr + head + o_r * BLOCK + i_p, b_max + tl.math.log2(b_sum), mask=counts)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["mask_ptr"])
def center_step(
    q_ptr,
    mean_ptr,  # mean keys in, centers out, in the same places
    entropy_ptr,
    lse_ptr,  # of the rows of L, from `l_step`; not read with WHOLE
    mask_ptr,
    scale,
    N,
    M,
    H,
    first,
    q_b,
    q_h,
    q_n,
    mask_b,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,  # a head has 2^31 elements or more
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SINGLE: tl.constexpr,  # COLUMNS >= M
    WHOLE: tl.constexpr,  # ROWS >= M: a program has whole rows of L, and needs no LSE of them
    UNEVEN: tl.constexpr,
    FLIP: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """L transposed: a row of the tile is a block m, a column a query (m', p)."""
    if OVERLAPS:
        gdc_launch_dependents()
    tiles = tl.cdiv(M, ROWS)
    i_p, i_bh = tl.program_id(0) % BLOCK, tl.program_id(0) // BLOCK // tiles
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    q_head = q_ptr + (i_b * q_b + i_h * q_h) * UNIT
    mask = None if mask_ptr is None else mask_ptr + i_b * mask_b
    head = i_bh.to(tl.int64) * M * BLOCK
    o_m = tl.program_id(0) // BLOCK % tiles * ROWS + tl.arange(0, ROWS)  # [ROWS]
    place = o_m * BLOCK + i_p  # [ROWS]
    if OVERLAPS:
        gdc_wait()
    b_k = _load(mean_ptr + head * D, place, o_m < M, D, D, BLOCK_D, WIDE)  # [ROWS, BLOCK_D]
    b_e = tl.load(entropy_ptr + head + place, mask=o_m < M, other=float("-inf"))  # [ROWS]

    b_center = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, COLUMNS if SINGLE else M, COLUMNS, num_stages=NUM_STAGES):
        o_r = start + tl.arange(0, COLUMNS)  # [COLUMNS]
        token, counts = _token(o_r * BLOCK + i_p, first, N, mask, UNEVEN)
        counts = (o_r < M) & counts  # [COLUMNS]
        b_q = _load(q_head, token, counts, q_n * UNIT, D, BLOCK_D, WIDE)  # [COLUMNS, BLOCK_D]
        b_q = -b_q if FLIP else b_q
        b_x = tl.dot(b_k, b_q.T, input_precision=PRECISION) * scale + b_e[:, None]  # [ROWS, COLUMNS]
        if WHOLE:
            ref = tl.max(b_x, 0)  # [COLUMNS]
            ref = tl.where(ref == float("-inf"), 0.0, ref)
            b_lse = ref + tl.math.log2(tl.sum(tl.math.exp2(b_x - ref[None, :]), 0))  # [COLUMNS]
        else:
            b_lse = tl.load(lse_ptr + head + o_r * BLOCK + i_p, mask=counts, other=float("-inf"))
        # log2 of L, and of each block's weights the largest set to 1: a block that hardly anyone looks at
        # still has a mean of those who do.
        counts = counts & (b_lse > float("-inf"))  # [COLUMNS]
        b_x = tl.where(counts[None, :], b_x - tl.where(counts, b_lse, 0.0)[None, :], float("-inf"))
        b_w, alpha, b_max, b_sum = _weights(b_x, b_max, b_sum)
        b_center = _add(b_w, b_q, b_center, alpha, SINGLE, PRECISION)

    b_center = _mean(b_center, b_sum).to(b_k.dtype)  # [ROWS, BLOCK_D]
    _store(mean_ptr + head * D, b_center, place, o_m < M, D, D, BLOCK_D, WIDE)
