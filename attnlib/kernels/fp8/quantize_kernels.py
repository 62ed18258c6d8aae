"""Quantizing to float8_e4m3fn, in plain `triton.language`: what is read is read once or twice, what is
written is written once.

- `quantize_amax`: the largest magnitude of a head, or of all, after the rotation.
- `quantize_rows`: queries and keys: rotated, scaled and rounded. A scale per block needs no pass before.
- `quantize_values`: values: scaled, rounded, transposed, keys permuted. See `common.fp8.Fp8` for the layouts.

The rotation is x -> x S H / sqrt(width): signs S, then a Hadamard matrix H. H of 128 or 256 is one of 64 for
each 64 columns, which a tensor core multiplies with, exactly but for the order of the sum, and sums and
differences of the results. Division by sqrt(width) goes into the scale.

A value that is not finite becomes NaN and takes no part in a scale: it spoils its row and no others.
"""

import triton
import triton.language as tl

from attnlib.kernels.common.varlen_rows import sequence
from attnlib.kernels.common import fp8

LARGEST = tl.constexpr(fp8.LARGEST)
GROUP = tl.constexpr(fp8.GROUP)
CHUNK = tl.constexpr(fp8.CHUNK)
SIGNS = tl.constexpr(fp8.SIGNS)
SMALLEST = tl.constexpr(2.0**-126)  # normal in float32: with a smaller amax a scale would be less exact


@triton.jit
def _hadamard(dtype: tl.constexpr):
    """Entry (i, j) is -1 where i and j have an odd number of bits in common."""
    o_c = tl.arange(0, CHUNK)  # [CHUNK]
    odd = o_c[:, None] & o_c[None, :]  # [CHUNK, CHUNK]
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    return tl.where((odd & 1) == 1, -1.0, 1.0).to(dtype)  # [CHUNK, CHUNK]


@triton.jit
def _load_chunk(rows, seen, first: tl.constexpr, D: tl.constexpr, ROTATE: tl.constexpr):
    """CHUNK columns of some rows, from column `first` on; with their signs, if they are to be rotated."""
    o_c = tl.arange(0, CHUNK)  # [CHUNK]
    mask = seen[:, None] if first + CHUNK <= D else seen[:, None] & (first + o_c < D)[None, :]
    b_x = tl.load(rows[:, None] + (first + o_c)[None, :], mask=mask, other=0.0)  # [ROWS, CHUNK]
    if ROTATE:
        low: tl.constexpr = SIGNS[first // 32]
        high: tl.constexpr = SIGNS[first // 32 + 1]
        word = tl.where(o_c < 32, tl.full([CHUNK], low, tl.uint32), tl.full([CHUNK], high, tl.uint32))
        negative = ((word >> (o_c % 32).to(tl.uint32)) & 1) == 1  # [CHUNK]
        b_x = tl.where(negative[None, :], -b_x, b_x)
    return b_x


@triton.jit
def _load_rows(rows, seen, b_h, D: tl.constexpr, WIDTH: tl.constexpr, ROTATE: tl.constexpr,
               PRECISION: tl.constexpr):
    """Rows as chunks of columns [ROWS, CHUNK], float32; rotated but for the division by sqrt(WIDTH)."""
    chunks = ()
    for first in tl.static_range(0, WIDTH, CHUNK):
        b_x = _load_chunk(rows, seen, first, D, ROTATE)  # [ROWS, CHUNK]
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
    return chunks


@triton.jit
def _largest(chunks):
    """The largest finite magnitude in them."""
    amax = 0.0
    for i in tl.static_range(len(chunks)):
        size = tl.abs(chunks[i])
        amax = tl.maximum(amax, tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0))
    return amax


@triton.jit
def _scale(amax, NORM: tl.constexpr):
    """(the scale, what to multiply values with) of values that are as large as `amax` times NORM."""
    used = tl.maximum(amax, SMALLEST * LARGEST)
    scale = tl.where(amax == 0.0, 1.0, used * (NORM / LARGEST))
    return scale, tl.where(amax == 0.0, 1.0, tl.math.div_rn(LARGEST, used))


@triton.jit
def _rounded(b_x, factor, INTERPRETED: tl.constexpr):
    """The values times the factor as float8_e4m3fn, to the nearest, ties to even."""
    b_y = tl.where(tl.abs(b_x) < float("inf"), b_x * factor, float("nan"))
    if INTERPRETED:  # its cast rounds wrongly (triton 3.6): leave it nothing to round
        bits = b_y.to(tl.uint32, bitcast=True)
        ulp = tl.maximum(bits & 0x7F800000, 0x3C800000) - 0x01800000  # 2^-3 of 2^exponent, or of 2^-6
        magic = ulp.to(tl.float32, bitcast=True) * 12582912.0  # 1.5 * 2^23: the sum has no finer bits
        b_r = ((b_y + magic) - magic).to(tl.uint32, bitcast=True) | (bits & 0x80000000)  # -0 stays
        b_y = tl.where(b_y == b_y, b_r.to(tl.float32, bitcast=True), 480.0)  # which it takes for NaN
    return b_y.to(tl.float8e4nv)


@triton.jit
def _begin(cu, i_b, S):
    """(first token of a sequence, its length); of a batch 0 and S."""
    if cu is None:
        return 0, S
    else:
        end, length = sequence(cu, i_b)
        return end - length, length


@triton.jit(do_not_specialize=["x_b", "x_h", "x_s", "S", "H", "blocks"])
def quantize_amax(
    x_ptr,
    amax_ptr,  # (B, H) or (1,), all 0; of varlen sequences (H) or (1,)
    x_b, x_h, x_s,  # strides of x, in UNITs
    S,  # tokens; of varlen sequences all of them, which here are one
    H, blocks,
    PER_HEAD: tl.constexpr,  # or one amax for all
    D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROTATE: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest finite magnitude of each head, or of all, after the rotation and before its division."""
    i_n, i_h = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_b, i_h = i_h // H, i_h % H
    x_ptr += (i_b.to(tl.int64) * x_b + i_h.to(tl.int64) * x_h) * UNIT
    o_n = i_n * ROWS + tl.arange(0, ROWS)  # [ROWS]
    rows = x_ptr + o_n.to(tl.int64) * x_s * UNIT  # [ROWS]
    b_h = _hadamard(x_ptr.dtype.element_ty) if ROTATE else 0
    amax = _largest(_load_rows(rows, o_n < S, b_h, D, WIDTH, ROTATE, PRECISION))
    tl.atomic_max(amax_ptr + (i_b * H + i_h if PER_HEAD else 0), amax)


@triton.jit(
    do_not_specialize=["x_b", "x_h", "x_s", "S", "H", "blocks", "room"],
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
    H,
    blocks,  # programs of a head of a sequence
    room,  # blocks of a head in scale_ptr
    PER_BLOCK: tl.constexpr,
    PER_HEAD: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A block of queries or keys: rotated, scaled, rounded. Grid: (blocks * H * B,)."""
    i_n, i_h = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_b, i_h = i_h // H, i_h % H
    if not PER_BLOCK:
        i_n = blocks - 1 - i_n  # what the pass before read last may still be in L2
    start, length = _begin(cu, i_b, S)
    if cu is None:
        head = i_b * H + i_h
        of_data, stride = head.to(tl.int64) * S, WIDTH
        of_scale = head.to(tl.int64) * room
    else:
        # Blocks of scales are a sequence's own up to the next one's first: all are written.
        before = start // ROWS + i_b
        if i_n > (start + length) // ROWS + i_b - before:
            return
        head = i_h
        of_data, stride = start.to(tl.int64) * H + i_h, H * WIDTH
        of_scale = i_h.to(tl.int64) * room + before
        x_ptr += start.to(tl.int64) * x_s * UNIT
    o_n = i_n * ROWS + tl.arange(0, ROWS)  # [ROWS]
    x_ptr += (i_b.to(tl.int64) * x_b + i_h.to(tl.int64) * x_h) * UNIT
    rows = x_ptr + o_n.to(tl.int64) * x_s * UNIT  # [ROWS]
    b_h = _hadamard(x_ptr.dtype.element_ty) if ROTATE else 0
    chunks = _load_rows(rows, o_n < length, b_h, D, WIDTH, ROTATE, PRECISION)
    if PER_BLOCK:
        scale, factor = _scale(_largest(chunks), NORM)
        tl.store(scale_ptr + of_scale + i_n, scale)
    else:
        place = head if PER_HEAD else 0
        scale, factor = _scale(tl.load(amax_ptr + place), NORM)
        tl.store(scale_ptr + place, scale)
    rows = data_ptr + of_data * WIDTH + o_n.to(tl.int64) * stride  # [ROWS]
    o_c = tl.arange(0, CHUNK)  # [CHUNK]
    for first in tl.static_range(0, WIDTH, CHUNK):
        b_y = _rounded(chunks[first // CHUNK], factor, INTERPRETED)  # [ROWS, CHUNK]
        tl.store(rows[:, None] + (first + o_c)[None, :], b_y, mask=(o_n < length)[:, None])


@triton.jit(
    do_not_specialize=["x_b", "x_h", "x_s", "S", "H", "blocks", "room"],
    do_not_specialize_on_alignment=["cu"],
)
def quantize_values(
    x_ptr,  # (B, H, S, D), or varlen (T, H, D)
    data_ptr,  # (B, H, WIDTH, room * GROUP), or varlen (H, WIDTH, room * GROUP), contiguous
    scale_ptr, amax_ptr,  # (B, H) or (1,), varlen (H) or (1,)
    cu,  # (B + 1), None for a batch
    x_b, x_h, x_s,  # strides of x, in UNITs
    S,  # tokens of a batch's sequence
    H,
    blocks,  # programs of a head of a sequence
    room,  # groups of keys in data_ptr
    PER_HEAD: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A block of values: scaled, rounded, transposed, keys permuted. Grid: (blocks * H * B,)."""
    i_n, i_h = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_b, i_h = i_h // H, i_h % H
    i_n = blocks - 1 - i_n  # what the pass before read last may still be in L2
    start, length = _begin(cu, i_b, S)
    if cu is None:
        head = i_b * H + i_h
        of_data, groups = head.to(tl.int64) * WIDTH * room, room
    else:
        # Positions are a sequence's own up to the next one's first: all are written.
        before = start // GROUP + i_b
        groups = (start + length) // GROUP + i_b + 1 - before
        head = i_h
        of_data = i_h.to(tl.int64) * WIDTH * room + before
        x_ptr += start.to(tl.int64) * x_s * UNIT
        if i_n * ROWS >= groups * GROUP:
            return
    o_p = i_n * ROWS + tl.arange(0, ROWS)  # [ROWS], positions
    o_n = o_p // GROUP * GROUP + o_p // 2 % 2 * 8 + o_p // 4 % 4 * 2 + o_p % 2  # [ROWS], their keys
    x_ptr += (i_b.to(tl.int64) * x_b + i_h.to(tl.int64) * x_h) * UNIT
    rows = x_ptr + o_n.to(tl.int64) * x_s * UNIT  # [ROWS]
    place = head if PER_HEAD else 0
    scale, factor = _scale(tl.load(amax_ptr + place), 1.0)
    tl.store(scale_ptr + place, scale)
    for first in tl.static_range(0, WIDTH, CHUNK):
        b_x = _load_chunk(rows, o_n < length, first, D, False).to(tl.float32)  # [ROWS, CHUNK]
        b_y = _rounded(b_x, factor, INTERPRETED).T  # [CHUNK, ROWS]
        o_c = first + tl.arange(0, CHUNK)  # [CHUNK]
        columns = data_ptr + (of_data + o_c.to(tl.int64) * room) * GROUP  # [CHUNK]
        tl.store(columns[:, None] + o_p[None, :], b_y, mask=(o_p < groups * GROUP)[None, :])
