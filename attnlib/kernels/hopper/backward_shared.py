"""What the two Hopper backward kernels have in common: the producer, the slots of Q and dO, the sum of dQ.
Chapter 20 derives the backward pass; the protocol is in the docstrings of the kernels.

`mem` is the `Memory` of either kernel, `plan` its plan.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attnlib.kernels.common.named_barrier import named_barrier
from attnlib.kernels.common.preprocess import DELTA, LSE2
from attnlib.kernels.hopper import backward_tiles as tiling

STAGES = gl.constexpr(2)  # blocks of Q and of dO in shared memory; a power of two
# The first of two named barriers each. Triton uses none from 8 on in these kernels.
Q_FREE = gl.constexpr(8)
DO_FREE = gl.constexpr(10)
NUMBERS = "S_q S_k H GROUP HEADS_KV SECTION num_m num_n right left B".split()
"""Parameters of both kernels that are numbers."""


# ---------------------------------------------------------------- slots


@gluon.jit
def slot_of(j):
    """Where block j of Q, or dO, is in memory."""
    return j & (STAGES - 1)


@gluon.jit
def parity_of(j):
    """Of the phase in which block j arrives in its slot."""
    return (j // STAGES) & 1


@gluon.jit
def release(first: gl.constexpr, j):
    """This consumer needs Q, or dO, of block j no more."""
    named_barrier("arrive", first + slot_of(j), 288)


@gluon.jit
def acquire(first: gl.constexpr, j):
    """Both consumers have released what lies where block j goes."""
    if j >= STAGES:
        named_barrier("sync", first + slot_of(j), 288)


# ---------------------------------------------------------------- producer


@gluon.jit
def produce(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan: gl.constexpr):
    tile = tiling.locate(gl.program_id(0), work, plan)
    if tiling.seen(tile, plan):
        _copy(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, tile, work, plan)


@gluon.jit
def _copy_keys(desc, tile, bar, buffers, work, plan: gl.constexpr):
    """Of K or V, 64 rows into each buffer."""
    parts: gl.constexpr = plan.block_n // 64
    at = tiling.keys(tile, work, plan)
    mbarrier.expect(bar, parts * desc.block_type.nbytes)
    for w in gl.static_range(parts):
        tma.async_copy_global_to_shared(
            desc, tiling.coordinates(at, 0, tile.start + w * 64), bar, buffers.index(w)
        )


@gluon.jit
def _copy(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, tile, work, plan: gl.constexpr):
    at_q = tiling.queries(tile, work, plan)
    n = (tile.m_end - tile.m_start) * work.GROUP
    q_bytes: gl.constexpr = desc_q.block_type.nbytes + desc_rows.block_type.nbytes
    do_bytes: gl.constexpr = desc_do.block_type.nbytes + desc_rows.block_type.nbytes
    _copy_keys(desc_k, tile, mem.k_full, mem.k, work, plan)
    m = tile.m_start
    g = 0
    for j in range(n):
        slot = slot_of(j)
        bar = mem.q_full.index(slot)
        acquire(Q_FREE, j)
        mbarrier.expect(bar, q_bytes)
        place = tiling.coordinates(at_q, g, m * plan.block_m)
        tma.async_copy_global_to_shared(desc_q, place, bar, mem.q.index(slot))
        tma.async_copy_global_to_shared(
            desc_rows, tiling.rows(tile, LSE2, g, m, work, plan), bar, mem.lse.index(slot)
        )
        if j == 0:
            _copy_keys(desc_v, tile, mem.v_full, mem.v, work, plan)
        bar = mem.do_full.index(slot)
        acquire(DO_FREE, j)
        mbarrier.expect(bar, do_bytes)
        tma.async_copy_global_to_shared(desc_do, place, bar, mem.do.index(slot))
        tma.async_copy_global_to_shared(
            desc_rows, tiling.rows(tile, DELTA, g, m, work, plan), bar, mem.delta.index(slot)
        )
        m += 1
        if m == tile.m_end:
            m = tile.m_start
            g += 1


# ---------------------------------------------------------------- dQ


@gluon.jit
def opaque_zero(j):
    """0, which the compiler can't know; j is not negative. It is added to the number of a buffer that is the
    same in all steps: otherwise the addresses of the buffer's parts are computed before the loop and take
    dozens of registers."""
    return j >> 30


# The expansion for four elements of a thread, _add_asm(4). $0 is a result of four bytes that is not used, $1
# to $4 are the elements, $5 is the address (of which every element has a copy), $9 says whether to add.
#
#     { .reg .pred q; .reg .b32 t; .reg .b64 a;
#     setp.eq.b32 q, $9, 0;
#     @q bra DONE;
#     mov.u32 t, %tid.x; and.b32 t, t, 127; shl.b32 t, t, 4; cvt.u64.u32 a, t;
#     add.s64 a, a, $5;
#     red.global.add.v4.f32 [a + 0], {$1, $2, $3, $4};
#     DONE:
#     mov.b32 $0, 0; }
@gluon.constexpr_function
def _add_asm(n):
    """All n elements of a thread. The n results, a byte each, are n // 4 registers that are not used."""
    outputs, values, pointer, wanted = 0, n // 4, n // 4 + n, n // 4 + 2 * n
    lines = [
        "{ .reg .pred q; .reg .b32 t; .reg .b64 a;",
        f"setp.eq.b32 q, ${wanted}, 0;",
        "@q bra DONE;",
        "mov.u32 t, %tid.x; and.b32 t, t, 127; shl.b32 t, t, 4; cvt.u64.u32 a, t;",
        f"add.s64 a, a, ${pointer};",
    ]
    for i in range(0, n, 4):
        four = ", ".join(f"${values + i + k}" for k in range(4))
        lines.append(f"red.global.add.v4.f32 [a + {i * 512}], {{{four}}};")
    lines.append("DONE:")
    lines += [f"mov.b32 ${outputs + i}, 0;" for i in range(n // 4)]
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _add_constraints(n):
    return ",".join(["=r"] * (n // 4) + ["f"] * n + ["l"] * n + ["r"] * n)


@gluon.jit
def add_dq(dq_ptr, block, dq, wanted, WG: gl.constexpr, plan: gl.constexpr):
    """Add [64, DQ_COLUMNS] to this consumer's half of a block, of [BLOCK_M / 64, D / 8, 512] in
    memory, as it lies in registers: four values of a thread, two columns of two rows, are 16 bytes, and the
    128 threads follow each other. Without `wanted`, do nothing."""
    n: gl.constexpr = plan.dq_columns // 2  # elements of dq in a thread
    offset = block.to(gl.int64) * (plan.block_m * plan.d) + WG * 64 * plan.dq_columns
    address = (dq_ptr + offset).to(gl.int64)
    gl.inline_asm_elementwise(
        _add_asm(n), _add_constraints(n), [dq, address, wanted.to(gl.int32)], dtype=gl.int8,
        is_pure=False, pack=n,
    )  # fmt: skip
