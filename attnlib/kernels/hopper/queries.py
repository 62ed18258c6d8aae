"""Queries in 16 bits, which the FP8 kernel rotates, scales and rounds itself (`Fp8Plan.quantizes`). Chapter
22 measures what it saves.

A kernel before this one would read them, write them in e4m3, and this one would read that: at 8192 tokens and
128 columns that took 7% of the time that attention takes. Here a consumer multiplies its 64 rows with the
matrix of the rotation on the tensor cores, and the result stays in registers: each row scaled by its largest
magnitude, and packed in words, it is the first operand of Q K^T. A scale for each row, not for 64, because
four threads share a row, and no barrier is needed between them.

The result of a product has its columns in another order than a first operand in e4m3 (`e4m3._words`). So the
columns of the matrix are permuted beforehand, within each 16, and no number moves between threads.

As in `quantize_kernels`, 128 columns are rotated by one matrix of 64 for each half, and by sums and
differences of the halves.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.kernels.common import fp8
from attnlib.kernels.common.memory import matrix
from attnlib.kernels.common.ring import as_parts
from attnlib.kernels.hopper import e4m3

CHUNK = gl.constexpr(fp8.CHUNK)
LARGEST = gl.constexpr(fp8.LARGEST)
SMALLEST_MAGNITUDE = gl.constexpr(fp8.SMALLEST_MAGNITUDE)
LOW, HIGH = gl.constexpr(fp8.SIGNS[0]), gl.constexpr(fp8.SIGNS[1] - 2**32)  # as int32


@gluon.jit
def rotation(desc_q, plan: gl.constexpr):
    """The matrix of the rotation in shared memory [CHUNK, CHUNK], its columns permuted; the identity where
    queries are not rotated. () where the kernel gets them quantized."""
    if plan.quantizes:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))[:, None]  # [CHUNK, 1]
        place = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))[None, :]  # [1, CHUNK]
        # A thread's columns 2t, 2t + 1, 8 + 2t, 9 + 2t of 16 become 4t to 4t + 3.
        j = place // 16 * 16 + place // 2 % 4 * 4 + place // 8 % 2 * 2 + place % 2
        if plan.rotates:
            odd = i & j  # [CHUNK, CHUNK] -1 where i and j have an odd number of bits in common
            odd ^= odd >> 4
            odd ^= odd >> 2
            odd ^= odd >> 1
            odd ^= gl.where(i < 32, LOW, HIGH) >> (i % 32)
            entries = gl.where((odd & 1) == 1, -1.0, 1.0)
        else:
            entries = gl.where(i == j, 1.0, 0.0)
        dtype: gl.constexpr = desc_q[0].dtype
        shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype)
        found = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], shared)
        found.store(entries.to(dtype))
        return found
    else:
        return ()


@gluon.jit
def quantized(mem, WG: gl.constexpr, plan: gl.constexpr):
    """(Q of a warpgroup in e4m3 [64, D], first operand of Q K^T; the scale of each row [64]), from its
    buffer, which is free afterwards. A row with a number that is not finite becomes NaN."""
    zero = gl.zeros([64, CHUNK], gl.float32, plan.chunk_layout)
    q, tokens = matrix(mem.q[0], WG), ()
    for first in gl.static_range(0, plan.d, CHUNK):
        part = q.slice(first, CHUNK, 1)  # [64, CHUNK]
        tokens = tokens + (warpgroup_mma(part, mem.rotation, zero, use_acc=False, is_async=True),)
    chunks = as_parts(warpgroup_mma_wait(0, deps=tokens), len(tokens))
    mbarrier.arrive(mem.q_free.index(WG), count=1)
    if plan.d == CHUNK:
        left, right = chunks[0], None
        size = gl.abs(left)
    else:
        left, right = chunks
        if plan.rotates:
            left, right = left + right, left - right
        size = gl.maximum(gl.abs(left), gl.abs(right))
    used = gl.maximum(gl.max(size, 1), SMALLEST_MAGNITUDE)  # [64]
    factor = _quotient(used)[:, None]  # [64, 1]
    left *= factor
    if right is not None:
        right *= factor
    words = e4m3.operand(left, right, plan)
    scale = gl.convert_layout(used * (plan.norm / LARGEST), plan.row_layout)
    return e4m3.unpacked(words, plan.q_layout), scale


@gluon.jit
def _quotient(used):
    """LARGEST / used to the last bit, or numbers in the middle of two neighbors would be rounded to another
    one than `quantize_kernels` rounds them to: fast division, then a step of Newton's. A sixteenth of both,
    because fast division gives 0 for divisors beyond 2**126."""
    divisor = used * 0.0625
    quotient = (LARGEST / 16) / divisor
    left_over = gl.fma(-divisor, quotient, LARGEST / 16)
    return gl.fma(left_over, quotient * (16 / LARGEST), quotient)
