"""The mean of values over the keys of a sequence, and the largest magnitude that is left without it, in plain
`triton.language`: what `quantize_kernels.quantize_values` centers and scales with.

- `sum_values` reads all values once: sum, minimum and maximum of each column over a part of a sequence.
- `join_parts` joins the parts of each sequence, in their order: every run gives the same bits.

Minimum and maximum are what makes one pass enough: without the mean m the largest magnitude of a column is
the larger of maximum - m and m - minimum. A value that is not finite counts as 0 in the sum and takes no part
in the others.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.kernels.common.varlen_rows import sequence

INF = tl.constexpr(float("inf"))


@triton.jit
def _parts(cu, i_b, S, room, span, H, i_h, ROWS: tl.constexpr):
    """(first token, tokens of the sequence, where its first part lies among all, how many it has)."""
    if cu is None:
        start, length, first = 0 * S, S, (i_b * H + i_h).to(tl.int64) * room
    else:
        end_x, length = sequence(cu, i_b)
        start = end_x - length
        first = i_h.to(tl.int64) * room + (start // (ROWS * span) + i_b)
    return start, length, first, tl.cdiv(length, ROWS * span)


@triton.jit(
    do_not_specialize=["x_b", "x_h", "x_s", "S", "H", "parts", "span", "room"],
    do_not_specialize_on_alignment=["cu"],
)
def sum_values(
    x_ptr,  # (B, H, S, D), or varlen (T, H, D)
    parts_ptr,  # (B, H, room, 3, WIDTH), varlen (H, room, 3, WIDTH): sums over S, minima, maxima
    amax_ptr,  # (B, H) or (1,), varlen (H) or (1,): set to 0
    cu,  # (B + 1), None for a batch
    x_b, x_h, x_s,  # strides of x, in UNITs
    S,  # tokens of a batch's sequence
    H, parts, span,  # parts of the longest sequence; their blocks of ROWS
    room,  # parts of a head
    PER_HEAD: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TALL: tl.constexpr,  # rows of a block, and of each of the tiles that it is loaded in
    UNIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A part of a head of a sequence: of `count` parts every count-th block, so that programs side by side
    read what lies side by side. Grid: (parts * H * B,).

    Memory is read as fast as it can be only with few instructions for a number: blocks whose rows all exist
    are added up as they are. A sum that is not finite then tells that one of their numbers is not, or that
    the sum was too large: such a part is done again with care, and so is the last block of a sequence.
    """
    if OVERLAPS:
        gdc_launch_dependents()
    i_n, i_bh = tl.program_id(0) % parts, tl.program_id(0) // parts
    i_h, i_b = i_bh % H, i_bh // H
    if i_n == 0:
        place = 0 if not PER_HEAD else i_bh if cu is None else i_h
        tl.store(amax_ptr + place, 0.0)
    start, length, first, count = _parts(cu, i_b, S, room, span, H, i_h, ROWS)
    if i_n >= count:
        return
    x_ptr += (i_b.to(tl.int64) * x_b + i_h.to(tl.int64) * x_h + start.to(tl.int64) * x_s) * UNIT
    o_c, row = tl.arange(0, WIDTH), x_s.to(tl.int64) * UNIT  # [WIDTH]
    x_ptr = x_ptr + (tl.arange(0, TALL) * row)[:, None] + o_c[None, :]  # [TALL, WIDTH]
    inside = (o_c < D)[None, :]
    share = 1.0 / length.to(tl.float32)  # of a key
    b_sum = tl.zeros([TALL, WIDTH], tl.float32)
    b_min, b_max = b_sum + INF, b_sum - INF
    whole, blocks = length // ROWS, tl.cdiv(length, ROWS)  # blocks that have all their rows, and all blocks
    for i in tl.range(i_n, whole, count):
        tiles = ()  # all are asked for before the first is used
        for n in tl.static_range(0, ROWS, TALL):
            tile = x_ptr + (i * ROWS + n) * row  # [TALL, WIDTH]
            tiles = tiles + (tl.load(tile) if D == WIDTH else tl.load(tile, mask=inside, other=0.0),)
        for n in tl.static_range(ROWS // TALL):
            b_x = tiles[n].to(tl.float32)  # [TALL, WIDTH]
            b_sum += b_x
            b_min, b_max = tl.minimum(b_min, b_x), tl.maximum(b_max, b_x)
    finite = tl.sum(tl.sum(b_sum * 0.0, 1), 0) == 0.0
    b_sum = tl.where(finite, b_sum * share, 0.0)
    b_min, b_max = tl.where(finite, b_min, INF), tl.where(finite, b_max, -INF)
    last = tl.where(whole % count == i_n, whole, blocks)  # the one that has not, if it is of this part
    for i in tl.range(tl.where(finite, last, i_n), blocks, count):
        for n in tl.range(i * ROWS, tl.minimum((i + 1) * ROWS, length), TALL):
            seen = (n + tl.arange(0, TALL) < length)[:, None] & inside  # [TALL, WIDTH]
            b_x = tl.load(x_ptr + n * row, mask=seen, other=INF).to(tl.float32)  # [TALL, WIDTH]
            counts = tl.abs(b_x) < INF
            b_sum += tl.where(counts, b_x, 0.0) * share  # their mean is no larger than the largest
            b_min = tl.minimum(b_min, tl.where(counts, b_x, INF))
            b_max = tl.maximum(b_max, tl.where(counts, b_x, -INF))
    columns = parts_ptr + (first + i_n) * 3 * WIDTH + o_c  # [WIDTH]
    tl.store(columns, tl.sum(b_sum, 0))
    tl.store(columns + WIDTH, tl.min(b_min, 0))
    tl.store(columns + 2 * WIDTH, tl.max(b_max, 0))


@triton.jit(do_not_specialize=["S", "H", "span", "room"], do_not_specialize_on_alignment=["cu"])
def join_parts(
    parts_ptr,  # as in `sum_values`
    mean_ptr,  # (B, H, WIDTH)
    amax_ptr,  # as in `sum_values`
    cu, S, H, span, room,
    PER_HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,  # parts that are looked at together
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """COLUMNS of a head of a sequence. Grid: (B * H, WIDTH / COLUMNS)."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    i_bh = tl.program_id(0)
    i_h, i_b = i_bh % H, i_bh // H
    _, _, first, count = _parts(cu, i_b, S, room, span, H, i_h, ROWS)
    o_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    b_sum = tl.zeros([STEP, COLUMNS], tl.float32)
    b_min, b_max = b_sum + INF, b_sum - INF
    for i in range(0, count, STEP):
        o_n = i + tl.arange(0, STEP)  # [STEP]
        parts = parts_ptr + (first + o_n)[:, None] * 3 * WIDTH + o_c[None, :]  # [STEP, COLUMNS]
        seen = (o_n < count)[:, None]
        b_sum += tl.load(parts, mask=seen, other=0.0)
        b_min = tl.minimum(b_min, tl.load(parts + WIDTH, mask=seen, other=INF))
        b_max = tl.maximum(b_max, tl.load(parts + 2 * WIDTH, mask=seen, other=-INF))
    mean, least, most = tl.sum(b_sum, 0), tl.min(b_min, 0), tl.max(b_max, 0)  # [COLUMNS]
    left = tl.maximum(most - mean, mean - least)
    possible = left < INF  # or numbers are too far apart for a difference in float32
    mean, left = tl.where(possible, mean, 0.0), tl.where(possible, left, tl.maximum(most, -least))
    tl.store(mean_ptr + i_bh.to(tl.int64) * WIDTH + o_c, mean)
    place = 0 if not PER_HEAD else i_bh if cu is None else i_h
    tl.atomic_max(amax_ptr + place, tl.maximum(tl.max(left, 0), 0.0))
