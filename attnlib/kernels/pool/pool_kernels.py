"""The largest weight of each unit of 64 queries by 64 keys, exp(score - LSE of the row), in plain Triton.

A weight is the larger the larger its score, so the largest of a row within 64 keys is that of its largest
score; over the rows, whose LSE differ, the weights themselves have to be compared. Two kernels, by what is
there: `pool_scores` multiplies Q and K again, half of what the forward pass did; `pool_maxima` reads the
largest scores that it has kept (`hopper.maxima`), 4 bytes for each 64 scores.
"""

import triton
import triton.language as tl

from attnlib.kernels.common import tiles
from attnlib.kernels.common.logarithms import LOG2_E
from attnlib.kernels.common.tile_access import load_tile

UNIT = tl.constexpr(tiles.UNIT)


@triton.jit
def _rows_lse(lse_ptr, head, o_m, S_q):
    """LSE in units of log2 of rows o_m; +inf for those that see nothing or are not there, whose weights then
    are 0."""
    b_lse = tl.load(lse_ptr + head.to(tl.int64) * S_q + o_m, mask=o_m < S_q, other=float("-inf")) * LOG2_E
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse)


@triton.jit
def _keys_seen(last_row, S_q, S_k, CAUSAL: tl.constexpr):
    """How many keys rows up to `last_row` see."""
    if CAUSAL:
        return tl.maximum(tl.minimum(tl.minimum(last_row, S_q - 1) + 1 + S_k - S_q, S_k), 0)
    else:
        return S_k


@triton.jit(do_not_specialize=["S_q", "S_k", "H", "across"])
def pool_scores(
    desc_q, desc_k,  # (B, H, S_q, D), (B, H_kv, S_k, D)
    lse_ptr,  # (B, H, S_q)
    map_ptr,  # (B, H, blocks of BLOCK_M queries, across), 0
    scale,  # sm_scale * log2(e)
    S_q, S_k, H, across,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of queries * heads,), the longest rows first."""
    num_m = tl.cdiv(S_q, BLOCK_M)
    i_m, head = num_m - 1 - tl.program_id(0) % num_m, tl.program_id(0) // num_m
    start = i_m * BLOCK_M
    o_m = start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    b_lse = _rows_lse(lse_ptr, head, o_m, S_q)  # [BLOCK_M]
    seen = _keys_seen(start + BLOCK_M - 1, S_q, S_k, CAUSAL)
    b_q = load_tile(desc_q, (head // H, head % H), start, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    at_k = head // H, head % H // GROUP
    map_ptr += (head.to(tl.int64) * num_m + i_m) * across
    for j in tl.range(0, tl.cdiv(seen, BLOCK_N), num_stages=NUM_STAGES):
        b_k = load_tile(desc_k, at_k, j * BLOCK_N, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
        o_n = j * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        there = o_n[None, :] <= o_m[:, None] + (S_k - S_q) if CAUSAL else o_n[None, :] < S_k
        b_top = tl.max(tl.where(there, b_s, float("-inf")), 1)  # [BLOCK_M]
        tl.store(map_ptr + j, tl.max(tl.math.exp2(b_top - b_lse), 0))


@triton.jit(do_not_specialize=["S_q", "S_k", "rows", "blocks", "down", "across"])
def pool_maxima(
    maxima_ptr,  # (B, H, blocks, rows): in units of log2
    lse_ptr,  # (B, H, S_q)
    map_ptr,  # (B, H, down, across), 0
    S_q, S_k, rows, blocks, down, across,
    CAUSAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (units of queries * heads, units of keys / COLUMNS)."""
    i_m, head = down - 1 - tl.program_id(0) % down, tl.program_id(0) // down
    start, column = i_m * UNIT, tl.program_id(1) * COLUMNS
    if column * UNIT >= _keys_seen(start + UNIT - 1, S_q, S_k, CAUSAL):
        return
    o_m, o_n = start + tl.arange(0, UNIT), column + tl.arange(0, COLUMNS)  # [UNIT], [COLUMNS]
    b_lse = _rows_lse(lse_ptr, head, o_m, S_q)  # [UNIT]
    last = o_m * 0 + S_k - 1
    if CAUSAL:
        last = o_m + (S_k - S_q)  # [UNIT] the last key that each row sees
    # What a row does not see, the forward pass may never have gone to.
    there = (o_n[:, None] * UNIT <= last[None, :]) & (o_n < across)[:, None]  # [COLUMNS, UNIT]
    at = maxima_ptr + (head.to(tl.int64) * blocks + o_n)[:, None] * rows + o_m[None, :]
    b_top = tl.load(at, mask=there & (o_m < S_q)[None, :], other=float("-inf"))  # [COLUMNS, UNIT]
    b_weight = tl.max(tl.math.exp2(b_top - b_lse[None, :]), 1)  # [COLUMNS]
    tl.store(map_ptr + (head.to(tl.int64) * down + i_m) * across + o_n, b_weight, mask=o_n < across)
