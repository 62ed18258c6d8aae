"""Where the decoding kernels find keys and values; and what they do with them in PTX, because the compiler
would do it otherwise or not at all: ask for them ahead, and make numbers of 16 bits of FP8."""

import triton
import triton.language as tl


@triton.jit
def page_of(table, tile, o_n, begin, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each key of a tile [BLOCK_N], or the one that has all of them; 0 where none is read."""
    if PAGE % BLOCK_N == 0:
        key = tile * BLOCK_N
        read = (key + BLOCK_N > begin) & (key < end)
    else:
        key = tile * BLOCK_N + o_n  # [BLOCK_N]
        read = (key >= begin) & (key < end)
    return tl.load(table + key // PAGE, mask=read, other=0)


@triton.jit
def row_of(key, page, of_page, of_row, PAGE: tl.constexpr, WIDE: tl.constexpr):
    """Where keys are in a cache, in units. page: None where it is in one piece. of_page, of_row: strides."""
    if WIDE:
        of_page, of_row = of_page.to(tl.int64), of_row.to(tl.int64)
    if page is None:
        return key * of_row
    else:
        return page * of_page + key % PAGE * of_row


@triton.jit
def scale_of(scales, page, of_page, there, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """What the keys of a tile are multiplied with: [1, BLOCK_N], or one number where they are of one page; 0
    for those that are not read."""
    if PAGE % BLOCK_N == 0:
        read = tl.max(there.to(tl.int32), 0) > 0
        return tl.load(scales + page.to(tl.int64) * of_page, mask=read, other=0.0)
    else:
        return tl.load(scales + page.to(tl.int64) * of_page, mask=there, other=0.0)[None, :]


@triton.jit
def _prefetch(pointers):
    """Ask for the lines of 128 bytes that these are in, to L2, and wait for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def ask_for_first_tile(
    k_ptr,
    v_ptr,
    first_key,
    end,
    k_s,
    v_s,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNIT_KV: tl.constexpr,
):
    """Keys and values that a program will read first are on their way while the queries are: the compiler has
    no copy begin before they have come. Where there are none, row 0 is asked for, which every cache has."""
    LINE: tl.constexpr = 128 // (k_ptr.dtype.element_ty.primitive_bitwidth // 8)  # elements
    key = tl.maximum(tl.minimum(first_key + tl.arange(0, BLOCK_N), end - 1), 0).to(tl.int64)  # [BLOCK_N]
    column = tl.arange(0, max(1, BLOCK_D // LINE)) * LINE  # [lines]
    _prefetch(k_ptr + (key * k_s * UNIT_KV)[:, None] + column[None, :])
    _prefetch(v_ptr + (key * v_s * UNIT_KV)[:, None] + column[None, :])


@triton.jit
def halves(pairs, PTX: tl.constexpr):
    """(first, second) numbers of pairs of FP8 (e4m3), which come as int16, as float16, without rounding.

    As elements of 16 bits pairs come from shared memory in the layout of an operand, values too, which are
    transposed. Two pairs are in a register, of neighbors along the axis that a product sums over, and become
    a register of first numbers and one of second ones. FP8 as elements of its own would have to become
    float16 before it is transposed, and go through shared memory once more.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;
            cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first, second = (pairs & 0xFF).to(tl.uint8), ((pairs >> 8) & 0xFF).to(tl.uint8)
        first, second = first.to(tl.float8e4nv, bitcast=True), second.to(tl.float8e4nv, bitcast=True)
        return first.to(tl.float16), second.to(tl.float16)


@triton.jit
def in_float16(x):
    """(x as float16, unit [rows] float32) of rows [rows, columns] of 16 bits. A row's unit is a power of two
    that makes its largest number 2^14 to 2^15, so that bfloat16 fits in. What is lost of a number is at most
    2^-39 of the largest one."""
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    unit = tl.maximum(power, 2.0**-100) * 2.0**-14  # its inverse is finite
    return (x * (1 / unit)[:, None]).to(tl.float16), unit
