"""Quantizing to float8_e4m3fn, in plain `triton.language`: what is read is read once or twice, what is
written is written once.

- `quantize_amax`: the largest magnitude of a head, or of all, after the rotation.
- `quantize_rows`: queries and keys: rotated, scaled and rounded. A scale per block needs no pass before.
- `quantize_values`: values: centered, scaled, rounded, transposed, keys permuted. See `common.fp8.Fp8` for
  the layouts, and `mean_kernels` for what finds the mean and the largest magnitude of centered values.

The rotation is x -> x S H / sqrt(width): signs S, then a Hadamard matrix H. For 128 or 256 columns that is
one of 64 for each 64 columns, which tensor cores multiply with, exactly but for the order of the sum, and
sums and differences of the results. Division by sqrt(width) goes into the scale.

A value that is not finite becomes NaN and takes no part in a scale: it spoils its row and no others.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.kernels.common import fp8
from attnlib.kernels.common.varlen_rows import sequence

LARGEST = tl.constexpr(fp8.LARGEST)
GROUP = tl.constexpr(fp8.GROUP)
CHUNK = tl.constexpr(fp8.CHUNK)
SIGNS = tl.constexpr(fp8.SIGNS)
SMALLEST = tl.constexpr(2.0**-126)  # normal in float32: with a smaller amax a scale would be less exact


@triton.jit
def _hadamard(dtype: tl.constexpr):
    """Signs times Hadamard matrix, whose entry (i, j) is -1 where i and j have an odd number of bits in
    common."""
    low: tl.constexpr = SIGNS[0]
    high: tl.constexpr = SIGNS[1]
    o_c = tl.arange(0, CHUNK)  # [CHUNK]
    word = tl.where(o_c < 32, tl.full([CHUNK], low, tl.uint32), tl.full([CHUNK], high, tl.uint32))
    odd = o_c[:, None] & o_c[None, :]  # [CHUNK, CHUNK]
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    odd ^= (word >> (o_c % 32).to(tl.uint32)).to(tl.int32)[:, None]
    return tl.where((odd & 1) == 1, -1.0, 1.0).to(dtype)  # [CHUNK, CHUNK]


@triton.jit
def _load_chunk(rows, seen, first: tl.constexpr, D: tl.constexpr):
    """CHUNK columns of some rows, from column `first` on."""
    o_c = first + tl.arange(0, CHUNK)  # [CHUNK]
    mask = seen[:, None] if first + CHUNK <= D else seen[:, None] & (o_c < D)[None, :]
    return tl.load(rows[:, None] + o_c[None, :], mask=mask, other=0.0)  # [ROWS, CHUNK]


@triton.jit
def _load_rows(rows, seen, b_h, D: tl.constexpr, WIDTH: tl.constexpr, ROTATE: tl.constexpr,
               PRECISION: tl.constexpr):
    """Rows as chunks of columns [ROWS, CHUNK], float32; rotated but for the division by sqrt(WIDTH). What is
    not finite is NaN."""
    chunks = ()
    for first in tl.static_range(0, WIDTH, CHUNK):
        b_x = _load_chunk(rows, seen, first, D)  # [ROWS, CHUNK]
        if ROTATE:
            b_x = tl.dot(b_x, b_h, input_precision=PRECISION)  # [ROWS, CHUNK]
        chunks = chunks + (b_x.to(tl.float32),)
    if ROTATE and WIDTH == 2 * CHUNK:
        a, b = chunks
        chunks = (a + b, a - b)
    if ROTATE and WIDTH == 4 * CHUNK:
        a, b, c, d = chunks
        a, b, c, d = a + b, a - b, c + d, c - d
        chunks = (a + c, b + d, a - c, b - d)
    finite = ()
    for first in tl.static_range(0, WIDTH, CHUNK):
        b_x = chunks[first // CHUNK]
        finite = finite + (b_x * 0.0 + b_x,)  # one instruction
    return finite


@triton.jit
def _maximum(b_max, chunks):
    """The largest of `b_max` and the magnitudes in all chunks, [ROWS, CHUNK]; NaN does not count."""
    for i in tl.static_range(len(chunks)):
        b_max = tl.maximum(b_max, tl.abs(chunks[i]))
    return b_max


@triton.jit
def _scale(amax, NORM: tl.constexpr):
    """(the scale, what to multiply values with) of values that are as large as `amax` times NORM."""
    used = tl.maximum(amax, SMALLEST * LARGEST)
    scale = tl.where(amax == 0.0, 1.0, used * (NORM / LARGEST))
    return scale, tl.where(amax == 0.0, 1.0, tl.math.div_rn(LARGEST, used))


@triton.jit
def _rounded(b_y, INTERPRETED: tl.constexpr):
    """Values of up to 448 as float8_e4m3fn, to the nearest, ties to even."""
    if INTERPRETED:  # its cast rounds wrongly (triton 3.6): leave it nothing to round
        bits = b_y.to(tl.uint32, bitcast=True)
        ulp = tl.maximum(bits & 0x7F800000, 0x3C800000) - 0x01800000  # 2^-3 of 2^exponent, or of 2^-6
        magic = ulp.to(tl.float32, bitcast=True) * 12582912.0  # 1.5 * 2^23: the sum has no finer bits
        b_r = ((b_y + magic) - magic).to(tl.uint32, bitcast=True) | (bits & 0x80000000)  # -0 stays
        b_y = tl.where(b_y == b_y, b_r.to(tl.float32, bitcast=True), 480.0)  # which it takes for NaN
    return b_y.to(tl.float8e4nv)


@triton.jit
def _place(program, blocks, span, H):
    """(the first block of a program, the one after its last, head, sequence). Grid: (cdiv(blocks, span) * H *
    B,)."""
    programs = tl.cdiv(blocks, span)
    i_n, i_h = program % programs * span, program // programs
    return i_n, tl.minimum(i_n + span, blocks), i_h % H, i_h // H


@triton.jit
def _backwards():
    """The number of this program, counted from the last one: what the pass before read last, which may still
    be in L2, is read first."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit(do_not_specialize=["x_b", "x_h", "x_s", "S", "H", "blocks", "span"])
def quantize_amax(
    x_ptr,
    amax_ptr,  # (B, H) or (1,), all 0; of varlen sequences (H) or (1,)
    x_b, x_h, x_s,  # strides of x, in UNITs
    S,  # tokens; of varlen sequences all of them, which here are one
    H, blocks, span,  # blocks of a head; how many a program takes
    PER_HEAD: tl.constexpr,  # or one amax for all
    D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROTATE: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The largest finite magnitude of each head, or of all, after the rotation and before its division."""
    if OVERLAPS:
        gdc_launch_dependents()
    begin, end, i_h, i_b = _place(tl.program_id(0), blocks, span, H)
    x_ptr += (i_b.to(tl.int64) * x_b + i_h.to(tl.int64) * x_h) * UNIT
    b_h = _hadamard(x_ptr.dtype.element_ty) if ROTATE else 0
    b_max = tl.zeros([ROWS, CHUNK], tl.float32)
    for i_n in tl.range(begin, end, num_stages=NUM_STAGES):
        o_n = i_n * ROWS + tl.arange(0, ROWS)  # [ROWS]
        rows = x_ptr + o_n.to(tl.int64) * x_s * UNIT  # [ROWS]
        b_max = _maximum(b_max, _load_rows(rows, o_n < S, b_h, D, WIDTH, ROTATE, PRECISION))
    tl.atomic_max(amax_ptr + (i_b * H + i_h if PER_HEAD else 0), tl.max(tl.max(b_max, 1), 0))


@triton.jit(
    do_not_specialize=["x_b", "x_h", "x_s", "S", "H", "blocks", "span", "room"],
    do_not_specialize_on_alignment=["cu"],
)
def quantize_rows(
    x_ptr,  # (B, H, S, D), or varlen (T, H, D)
    data_ptr,  # (B, H, S, WIDTH), or varlen (T, H, WIDTH), contiguous
    scale_ptr,  # (B, H, room), or varlen (H, room); without PER_BLOCK shaped as amax
    amax_ptr,  # (B, H) or (1,), varlen (H) or (1,); None with PER_BLOCK
    cu,  # (B + 1), None for a batch
    x_b, x_h, x_s,  # strides of x, in UNITs
    S,  # tokens of a batch's sequence
    H, blocks, span,  # blocks of a head of a sequence; how many a program takes
    room,  # blocks of a head in scale_ptr
    PER_BLOCK: tl.constexpr,
    PER_HEAD: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Blocks of queries or keys: rotated, scaled, rounded."""
    begin, end, i_h, i_b = _place(_backwards(), blocks, span, H)
    if OVERLAPS:
        gdc_wait()
    if cu is None:
        length, head = S, i_b * H + i_h
        of_data, stride = head.to(tl.int64) * S, WIDTH
        of_scale = head.to(tl.int64) * room
    else:
        # Blocks of scales are a sequence's own up to the next one's first: all are written.
        end_x, length = sequence(cu, i_b)
        start, head = end_x - length, i_h
        before = start // ROWS + i_b
        end = tl.minimum(end, end_x // ROWS + i_b + 1 - before)
        of_data, stride = start.to(tl.int64) * H + i_h, H * WIDTH
        of_scale = i_h.to(tl.int64) * room + before
        x_ptr += start.to(tl.int64) * x_s * UNIT
    x_ptr += (i_b.to(tl.int64) * x_b + i_h.to(tl.int64) * x_h) * UNIT
    b_h = _hadamard(x_ptr.dtype.element_ty) if ROTATE else 0
    o_c = tl.arange(0, CHUNK)  # [CHUNK]
    if not PER_BLOCK:
        place = head if PER_HEAD else 0
        scale, factor = _scale(tl.load(amax_ptr + place), NORM)
        tl.store(scale_ptr + place, scale)
    for i_n in tl.range(begin, end, num_stages=NUM_STAGES):
        o_n = i_n * ROWS + tl.arange(0, ROWS)  # [ROWS]
        rows = x_ptr + o_n.to(tl.int64) * x_s * UNIT  # [ROWS]
        chunks = _load_rows(rows, o_n < length, b_h, D, WIDTH, ROTATE, PRECISION)
        if PER_BLOCK:
            b_max = _maximum(tl.zeros([ROWS, CHUNK], tl.float32), chunks)
            scale, factor = _scale(tl.max(tl.max(b_max, 1), 0), NORM)
            tl.store(scale_ptr + of_scale + i_n, scale)
        rows = data_ptr + of_data * WIDTH + o_n.to(tl.int64) * stride  # [ROWS]
        for first in tl.static_range(0, WIDTH, CHUNK):
            b_y = _rounded(chunks[first // CHUNK] * factor, INTERPRETED)  # [ROWS, CHUNK]
            tl.store(rows[:, None] + (first + o_c)[None, :], b_y, mask=(o_n < length)[:, None])


@triton.jit
def _key_at(position):
    """The key that stands at a position of values: see `common.fp8.Fp8`."""
    return position // GROUP * GROUP + position // 2 % 2 * 8 + position // 4 % 4 * 2 + position % 2


@triton.jit(
    do_not_specialize=["x_b", "x_h", "x_s", "S", "H", "blocks", "span", "room"],
    do_not_specialize_on_alignment=["cu"],
)
def quantize_values(
    x_ptr,  # (B, H, S, D), or varlen (T, H, D)
    data_ptr,  # (B, H, WIDTH, room * GROUP), or varlen (H, WIDTH, room * GROUP), contiguous
    scale_ptr, amax_ptr,  # (B, H) or (1,), varlen (H) or (1,)
    mean_ptr,  # (B, H, WIDTH); None: values are not centered
    cu,  # (B + 1), None for a batch
    x_b, x_h, x_s,  # strides of x, in UNITs
    S,  # tokens of a batch's sequence
    H, blocks, span,  # blocks of a head of a sequence; how many a program takes
    room,  # groups of keys in data_ptr
    PER_HEAD: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Blocks of values: centered, scaled, rounded, transposed, keys permuted. Grid: as in `_place`, times
    WIDTH / CHUNK: programs side by side read the columns of the same rows."""
    chunks: tl.constexpr = WIDTH // CHUNK
    begin, end, i_h, i_b = _place(_backwards() // chunks, blocks, span, H)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    if cu is None:
        length, head = S, i_b * H + i_h
        of_data, groups = head.to(tl.int64) * WIDTH * room, room
    else:
        # Positions are a sequence's own up to the next one's first: all are written.
        end_x, length = sequence(cu, i_b)
        start, head = end_x - length, i_h
        before = start // GROUP + i_b
        groups = end_x // GROUP + i_b + 1 - before
        of_data = i_h.to(tl.int64) * WIDTH * room + before
        end = tl.minimum(end, tl.cdiv(groups * GROUP, ROWS))
        x_ptr += start.to(tl.int64) * x_s * UNIT
    x_ptr += (i_b.to(tl.int64) * x_b + i_h.to(tl.int64) * x_h) * UNIT
    place = head if PER_HEAD else 0
    scale, factor = _scale(tl.load(amax_ptr + place), 1.0)
    tl.store(scale_ptr + place, scale)
    o_c = _backwards() % chunks * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
    columns = data_ptr + (of_data + o_c.to(tl.int64) * room) * GROUP  # [CHUNK]
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + (i_b * H + i_h).to(tl.int64) * WIDTH + o_c)  # [CHUNK]
    o_p = tl.arange(0, ROWS)  # [ROWS], positions in a block
    o_n = _key_at(o_p)  # [ROWS]
    x_ptr = x_ptr + (o_n.to(tl.int64) * x_s * UNIT)[:, None] + o_c[None, :]  # [ROWS, CHUNK]
    data_ptr = columns[:, None] + o_p[None, :]  # [CHUNK, ROWS]
    for i_n in tl.range(begin, end):
        seen = (o_n < length - i_n * ROWS)[:, None]
        mask = seen & (o_c < D)[None, :] if D < WIDTH else seen
        block = x_ptr + x_s.to(tl.int64) * UNIT * (i_n * ROWS)
        b_x = tl.load(block, mask=mask, other=0.0).to(tl.float32)  # [ROWS, CHUNK]
        b_x = b_x * 0.0 + b_x
        if mean_ptr is not None:
            b_x -= mean[None, :]
            if (i_n + 1) * ROWS > length:  # what is past the end stays 0
                b_x = tl.where((_key_at(i_n * ROWS + o_p) < length)[:, None], b_x, 0.0)
        b_y = _rounded(b_x * factor, INTERPRETED).T  # [CHUNK, ROWS]
        tl.store(data_ptr + i_n * ROWS, b_y, mask=(o_p < groups * GROUP - i_n * ROWS)[None, :])
