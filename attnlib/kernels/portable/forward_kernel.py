"""Exact attention, forward, in plain `triton.language`: for any GPU that Triton knows, and its interpreter.

One program computes one block of BLOCK_M query rows of one head, in one of three orders (chapter 08):

- "two loops": keys upwards, first the tiles that every row sees whole, without a mask, then the others.
- "one loop": keys upwards, a mask in every tile. More instructions; but where a program has few tiles, the
  second loop costs more, because nothing overlaps its first loads.
- "late": keys downwards, the masked tiles first. In the long loop the product P V runs one tile late: it is
  issued after the next tile's Q K^T and before that tile's softmax, which does not depend on it, so that the
  tensor cores work while the exponentials are taken. P lives longer, which takes registers.

A row sees a window of the keys: from `left` before its own position to `right` after it. Tiles outside of
the window of a block are not visited; those on its edges get a mask. With a left edge the order is "two
loops", whose second loop visits the tiles of both edges, or "one loop".

Varlen sequences lie one after the other in tensors (T, H, D). Their descriptors have two dimensions more,
with which the hardware checks bounds at the end of any sequence: it loads zeros from beyond it, and stores
nothing there. See `descriptors.varlen_window`.

With ACCUMULATE rows have seen other keys before: the output and its LSE are merged into existing ones, in
place (chapter 42).
"""

import triton
import triton.language as tl

from attnlib.kernels.common.logarithms import LN2
from attnlib.kernels.common.tile_access import VARLEN_ROWS, load_tile


@triton.jit
def _scores(b_q, desc_k, at, row, FLIP: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    b_k = load_tile(desc_k, at[0], row, BLOCK_N, b_q.shape[1])  # [BLOCK_N, BLOCK_QK]
    b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    return -b_s if FLIP else b_s


@triton.jit
def _softmax_step(b_s, b_m, b_l, qk_scale, GUARD: tl.constexpr):
    """Fold a tile of raw scores into the row maximum m and the row sum l; returns P, the rescale, m, l."""
    m_new = tl.maximum(b_m, tl.max(b_s, 1) * qk_scale)  # [BLOCK_M]
    m_ref = m_new
    if GUARD:
        # A row that has seen no key yet has m = -inf; subtracting it from itself would give NaN.
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # [BLOCK_M]
    b_p = tl.math.exp2(b_s * qk_scale - m_ref[:, None])  # [BLOCK_M, BLOCK_N]
    alpha = tl.math.exp2(b_m - m_ref)  # [BLOCK_M]
    return b_p, alpha, m_new, b_l * alpha + tl.sum(b_p, 1)


@triton.jit
def _mask(b_s, last_key, earlier, first, BLOCK_N: tl.constexpr):
    """Scores of keys after each row's last visible one become -inf, and those more than `earlier` before it
    unless that is None; `first` is the tile's first key."""
    o_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if earlier is None:
        return tl.where(o_n[None, :] <= (last_key - first)[:, None], b_s, float("-inf"))  # [BLOCK_M, BLOCK_N]
    else:
        # Keys before the last one, counted without a sign: those after it are too many, too.
        before = ((last_key - first)[:, None] - o_n[None, :]).to(tl.uint32)  # [BLOCK_M, BLOCK_N]
        return tl.where(before <= earlier.to(tl.uint32)[:, None], b_s, float("-inf"))


@triton.jit
def _add_values(b_acc, b_p, alpha, desc_v, at, row, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                PRECISION: tl.constexpr):
    b_v = load_tile(desc_v, at[1], row, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    b_acc = b_acc * alpha[:, None]  # [BLOCK_M, BLOCK_D]
    return tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)


@triton.jit
def _tiles_upwards(b_acc, b_m, b_l, b_q, desc_k, desc_v, at, first, end, gap, width, last_key, earlier,
                   qk_scale, MASKED: tl.constexpr, GUARD: tl.constexpr, FLIP: tl.constexpr,
                   NUM_STAGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                   PRECISION: tl.constexpr):
    """Tiles first .. end - 1 of the keys, in order; returns the output before its division by l, and m, l.
    Unless `gap` is None, tile `gap` and those after it are `width` tiles further on."""
    for j in tl.range(first, end, num_stages=NUM_STAGES):
        row = j * BLOCK_N
        if gap is not None:
            row += tl.where(j < gap, 0, width * BLOCK_N)
        b_s = _scores(b_q, desc_k, at, row, FLIP, BLOCK_N, PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            b_s = _mask(b_s, last_key, earlier, row, BLOCK_N)
        b_p, alpha, b_m, b_l = _softmax_step(b_s, b_m, b_l, qk_scale, GUARD)
        b_acc = _add_values(b_acc, b_p, alpha, desc_v, at, row, BLOCK_N, BLOCK_D, PRECISION)
    return b_acc, b_m, b_l


@triton.jit
def _tiles_downwards(b_acc, b_m, b_l, b_p, alpha, b_q, desc_k, desc_v, at, first, count, last_key,
                     qk_scale, MASKED: tl.constexpr, GUARD: tl.constexpr, FLIP: tl.constexpr,
                     NUM_STAGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                     PRECISION: tl.constexpr):
    """`count` tiles of the keys from `first` down, P V one tile late: that of the tile before the first is
    still to be done, and afterwards that of the last one. So P and its rescale come in and go out too."""
    for i in tl.range(0, count, num_stages=NUM_STAGES):
        row = (first - i) * BLOCK_N
        b_s = _scores(b_q, desc_k, at, row, FLIP, BLOCK_N, PRECISION)  # [BLOCK_M, BLOCK_N]
        b_acc = _add_values(b_acc, b_p, alpha, desc_v, at, row + BLOCK_N, BLOCK_N, BLOCK_D, PRECISION)
        if MASKED:
            b_s = _mask(b_s, last_key, None, row, BLOCK_N)
        b_p, alpha, b_m, b_l = _softmax_step(b_s, b_m, b_l, qk_scale, GUARD)
    return b_acc, b_m, b_l, b_p, alpha


@triton.jit
def _merge_lse(lse_ptr, o_m, S_q, b_here):
    """Merge the LSE of these keys [BLOCK_M] into the existing one; returns the weights of the existing output
    and of this one, which add up to 1, or 0 where there is no key."""
    b_before = tl.load(lse_ptr + o_m, mask=o_m < S_q, other=float("-inf"))  # [BLOCK_M]
    b_max = tl.maximum(b_before, b_here)
    b_max = tl.where(b_max == float("-inf"), 0.0, b_max)  # no key at all: both weights are 0, not NaN
    b_old, b_new = tl.exp(b_before - b_max), tl.exp(b_here - b_max)
    b_sum = b_old + b_new
    tl.debug_barrier()  # several threads may have loaded a row, of which one stores
    tl.store(lse_ptr + o_m, b_max + tl.log(b_sum), mask=o_m < S_q)
    b_inverse = 1.0 / tl.where(b_sum == 0.0, 1.0, b_sum)
    return b_old * b_inverse, b_new * b_inverse


@triton.jit
def _merge_output(o_ptr, stride_m, o_m, S_q, b_old, b_o, COLUMNS: tl.constexpr):
    """Add the existing output to this one [BLOCK_M, BLOCK_D], which is weighted, in place. What has weight 0
    is not read, whatever lies there."""
    o_d = tl.arange(0, b_o.shape[1])  # [BLOCK_D]
    pointers = (o_ptr + o_m.to(tl.int64) * (stride_m * 8))[:, None] + o_d[None, :]
    # No comparison in two dimensions, which the compiler would not know to be equal for neighbors.
    in_d = (o_d < COLUMNS)[None, :]
    b_before = tl.load(pointers, mask=((o_m < S_q) & (b_old > 0.0))[:, None] & in_d, other=0.0)
    tl.store(pointers, b_o + b_old[:, None] * b_before.to(tl.float32), mask=(o_m < S_q)[:, None] & in_d)


UNSPECIALIZED = "S_q S_k T_q H left right shared_rows into_b into_h into_m into_lse_b into_lse_h".split()


@triton.jit(
    do_not_specialize=UNSPECIALIZED,
    do_not_specialize_on_alignment=["cu_q", "cu_k", "into_lse_ptr"],
)
def attention_forward(
    desc_q, desc_k, desc_v, desc_o, lse_ptr,
    cu_q, cu_k,  # where varlen sequences begin and end [B + 1]; None for a batch
    qk_scale,  # |sm_scale| * log2(e), positive
    S_q, S_k,  # of varlen sequences the longest
    T_q,  # rows of all varlen sequences
    H,  # query heads
    left, right,  # keys that a row sees before and after its place; None for no left bound, and for right = 0
    shared_rows,  # query rows that have keys of their own, like those of so many heads; None where all share
    GROUP: tl.constexpr,  # query heads that share one key/value head
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_QK: tl.constexpr,  # columns of queries and keys; BLOCK_D are those of values
    DIAGONAL: tl.constexpr,  # the keys of a row end on a diagonal: it has a right bound, causal is that of 0
    HAS_TAIL: tl.constexpr,  # no diagonal, and S_k is not a multiple of BLOCK_N
    ONE_MASKED_TILE: tl.constexpr,  # BLOCK_M == BLOCK_N and the diagonal starts at a tile's corner
    EMPTY_ROWS: tl.constexpr,  # some rows may have nothing to attend to: a diagonal, and S_q > S_k + right
    FLIP: tl.constexpr,  # sm_scale is negative: the row maximum of the flipped scores is the one to track
    STORE_LSE: tl.constexpr,
    ORDER: tl.constexpr,  # "two loops", "one loop" or "late"
    Q_IN_REGISTERS: tl.constexpr,
    SECTION: tl.constexpr,  # heads that advance together, so that their keys and values stay in L2; divides H
    FLAT: tl.constexpr,  # a grid of one dimension
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    into_ptr=None, into_lse_ptr=None,  # an existing output and its LSE, instead of desc_o and lse_ptr
    into_b=None, into_h=None, into_m=None,  # strides of the output in units of 8 elements: batch, head, row
    into_lse_b=None, into_lse_h=None,
    ACCUMULATE: tl.constexpr = 0,  # columns of the existing output; 0 for an output of its own
):
    """out = softmax(sm_scale * Q K^T) V over descriptors of shape (B, H, S, D), or those of varlen sequences;
    see the module docstring.

    Grid: (row blocks * SECTION, H / SECTION, B); FLAT, where y or z would pass 65535: their product.
    """
    tl.static_assert(left is None or ORDER != "late", "no mask on the left in the last tiles of this order")
    # Launch order: section by section, within one the longest rows (the last ones, when causal) first. The
    # hardware counts what it can: a division by a number unknown to the compiler delays the first load.
    num_m = tl.cdiv(S_q, BLOCK_M)
    place, section, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if FLAT:
        section = place // (num_m * SECTION) % (H // SECTION)
        i_b = place // (num_m * H)
        place = place % (num_m * SECTION)
    i_m = num_m - 1 - place // SECTION
    i_h = section * SECTION + place % SECTION
    i_kv = i_h // GROUP

    start = i_m * BLOCK_M
    if cu_q is None:
        at_q, at_kv = (i_b, i_h), ((i_b, i_kv), (i_b, i_kv))  # of keys and of values
        if shared_rows is not None:
            own = i_h * tl.cdiv(S_q, shared_rows) + start // shared_rows
            at_kv = (i_b, own), (i_b, i_kv)
    else:
        end_q, end_k = tl.load(cu_q + i_b + 1), tl.load(cu_k + i_b + 1)
        S_q, S_k = end_q - tl.load(cu_q + i_b), end_k - tl.load(cu_k + i_b)
        if start >= S_q:
            return
        at_k = end_k, i_kv, tl.sub(VARLEN_ROWS, S_k)
        at_q, at_kv = (end_q, i_h, tl.sub(VARLEN_ROWS, S_q)), (at_k, at_k)
    o_m = start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    shift = S_k - S_q  # query i has its place at key i + shift: bottom-right alignment
    if DIAGONAL:
        diagonal = shift if right is None else shift + right  # query i sees no key after i + diagonal
        visible = tl.maximum(tl.minimum(start + BLOCK_M + diagonal, S_k), 0)  # keys up to the last in sight
        shared = tl.maximum(tl.minimum(start + 1 + diagonal, S_k), 0)  # keys up to those in sight of all rows
        last_key = tl.minimum(o_m + diagonal, S_k - 1)  # [BLOCK_M] the last key that each row sees
    else:
        visible = S_k
        shared = S_k
        last_key = tl.full([BLOCK_M], 0, tl.int32) + (S_k - 1)  # [BLOCK_M]
    MASKED: tl.constexpr = DIAGONAL or HAS_TAIL or left is not None
    # The last tile that is visible; a row with no key masks it whole.
    last = tl.maximum(tl.cdiv(visible, BLOCK_N) - 1, 0)
    unmasked = shared // BLOCK_N  # tiles below this one need no mask on their right

    b_q = load_tile(desc_q, at_q, start, BLOCK_M, BLOCK_QK)  # [BLOCK_M, BLOCK_QK]
    if Q_IN_REGISTERS:
        # The tensor cores read A from shared memory or from registers. A value fresh from a load goes to
        # shared memory; one that was computed stays in registers, which halves the shared-memory traffic
        # of Q K^T and frees Q's buffer for another pipeline stage. The select changes nothing: those rows
        # are 0.
        b_q = tl.where((o_m < S_q)[:, None], b_q, 0.0)
    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running row maximum of scores * qk_scale
    b_l = tl.zeros([BLOCK_M], tl.float32)  # running row sum
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # output, not yet divided by l

    if ORDER == "late":
        # 1. The last visible tile, on the diagonal or the tail of the keys. A row may see none of it.
        GUARD: tl.constexpr = EMPTY_ROWS or (DIAGONAL and not ONE_MASKED_TILE)
        b_s = _scores(b_q, desc_k, at_kv, last * BLOCK_N, FLIP, BLOCK_N, PRECISION)
        if MASKED:
            b_s = _mask(b_s, last_key, None, last * BLOCK_N, BLOCK_N)
        b_p, alpha, b_m, b_l = _softmax_step(b_s, b_m, b_l, qk_scale, GUARD)
        # 2. The other tiles that cross the diagonal. Left out where there are none: its registers would cost
        # occupancy.
        unmasked = tl.minimum(unmasked, last)
        if DIAGONAL and not ONE_MASKED_TILE:
            b_acc, b_m, b_l, b_p, alpha = _tiles_downwards(
                b_acc, b_m, b_l, b_p, alpha, b_q, desc_k, desc_v, at_kv, last - 1, last - unmasked,
                last_key, qk_scale, True, GUARD, FLIP, 1, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
        # 3. All the tiles before them, without a mask.
        b_acc, b_m, b_l, b_p, alpha = _tiles_downwards(
            b_acc, b_m, b_l, b_p, alpha, b_q, desc_k, desc_v, at_kv, unmasked - 1, unmasked,
            last_key, qk_scale, False, False, FLIP, NUM_STAGES, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        b_acc = _add_values(b_acc, b_p, alpha, desc_v, at_kv, 0, BLOCK_N, BLOCK_D, PRECISION)
    else:
        if left is None:
            first, seen_by_all, earlier, gap, width = 0, 0, None, None, None
        else:
            first_key = o_m + (shift - left)  # [BLOCK_M] the first key that each row sees
            earlier = last_key - first_key  # [BLOCK_M] keys before its last one
            first = tl.maximum(start + shift - left, 0) // BLOCK_N  # the first tile in sight
            last_row = tl.minimum(start + BLOCK_M, S_q) - 1
            # Tiles from here on need no mask on their left.
            seen_by_all = tl.minimum(tl.cdiv(tl.maximum(last_row + shift - left, 0), BLOCK_N), last + 1)
            gap, width = seen_by_all, tl.maximum(unmasked - seen_by_all, 0)
        if ORDER == "two loops":
            b_acc, b_m, b_l = _tiles_upwards(
                b_acc, b_m, b_l, b_q, desc_k, desc_v, at_kv, seen_by_all, unmasked, None, None, last_key,
                None, qk_scale, False, False, FLIP, NUM_STAGES, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
        elif left is None:
            unmasked = 0
        else:
            width = 0
        # What is left: all tiles from the first masked one on, or with a left edge all tiles but the `width`
        # ones done, which leave a gap.
        end = last + 1
        if left is None:
            first = unmasked
        else:
            end -= width
        # Without a left edge tile 0 is the first: a row that sees any key sees one there. A loop without a
        # trip keeps the compiler from moving Q to registers anew for every tile of the loop before it.
        if MASKED or ORDER == "one loop" or Q_IN_REGISTERS:
            b_acc, b_m, b_l = _tiles_upwards(
                b_acc, b_m, b_l, b_q, desc_k, desc_v, at_kv, first, end, gap, width, last_key, earlier,
                qk_scale, MASKED or ORDER == "two loops", EMPTY_ROWS or left is not None, FLIP,
                NUM_STAGES if DIAGONAL or left is not None or ORDER == "one loop" else 1, BLOCK_N, BLOCK_D,
                PRECISION,
            )  # fmt: skip

    if STORE_LSE or ACCUMULATE:
        b_lse = (b_m + tl.math.log2(b_l)) * LN2  # [BLOCK_M]
        if EMPTY_ROWS:
            b_lse = tl.where(b_l == 0.0, float("-inf"), b_lse)
    if STORE_LSE and not ACCUMULATE:
        if cu_q is None:
            lse_ptr += (i_b * H + i_h).to(tl.int64) * S_q
        else:
            lse_ptr += i_h.to(tl.int64) * T_q + (end_q - S_q)
        tl.store(lse_ptr + o_m, b_lse, mask=o_m < S_q)
    if EMPTY_ROWS:  # they have l = 0: output 0, LSE -inf
        b_l = tl.where(b_l == 0.0, 1.0, b_l)
    b_o = b_acc / b_l[:, None]  # [BLOCK_M, BLOCK_D]
    if ACCUMULATE:
        into_lse_ptr += i_b.to(tl.int64) * into_lse_b + i_h.to(tl.int64) * into_lse_h
        into_ptr += (i_b.to(tl.int64) * into_b + i_h.to(tl.int64) * into_h) * 8
        b_old, b_new = _merge_lse(into_lse_ptr, o_m, S_q, b_lse)
        _merge_output(into_ptr, into_m, o_m, S_q, b_old, b_o * b_new[:, None], ACCUMULATE)
    else:
        b_o = b_o.to(desc_o.dtype)
        if cu_q is None:
            desc_o.store([i_b, i_h, start, 0], b_o.reshape([1, 1, BLOCK_M, BLOCK_D]))
        else:
            b_o = b_o.reshape([1, 1, 1, BLOCK_M, BLOCK_D])
            desc_o.store([VARLEN_ROWS, end_q, i_h, tl.sub(VARLEN_ROWS, S_q) + start, 0], b_o)
