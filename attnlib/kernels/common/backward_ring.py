"""The slots of Q and dO of the Hopper backward kernels, their release and reuse, and sums in memory. Chapter
21 builds the backward kernels; the protocol is in their docstrings.

`plan` is a kernel's plan.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common.named_barrier import named_barrier

STAGES = gl.constexpr(2)  # blocks of Q and of dO in shared memory; a power of two
# The first of two named barriers each. Triton uses none from 8 on in these kernels.
Q_FREE = gl.constexpr(8)
DO_FREE = gl.constexpr(10)


# ---------------------------------------------------------------- slots


@gluon.jit
def slot_of(j, SLOTS: gl.constexpr = STAGES):
    """Where block j of Q, or dO, is in memory."""
    if SLOTS & (SLOTS - 1) == 0:
        return j & (SLOTS - 1)
    else:
        return j % SLOTS


@gluon.jit
def parity_of(j, SLOTS: gl.constexpr = STAGES):
    """Of the phase in which block j arrives in its slot."""
    return (j // SLOTS) & 1


@gluon.jit
def release(first: gl.constexpr, j, CONSUMERS: gl.constexpr = 2, SLOTS: gl.constexpr = STAGES):
    """This consumer, one of so many, no longer needs Q, or dO, of block j."""
    named_barrier("arrive", first + slot_of(j, SLOTS), CONSUMERS * 128 + 32)


@gluon.jit
def acquire(first: gl.constexpr, j, CONSUMERS: gl.constexpr = 2, SLOTS: gl.constexpr = STAGES):
    """Wait until all consumers have released what lies where block j goes."""
    if j >= SLOTS:
        named_barrier("sync", first + slot_of(j, SLOTS), CONSUMERS * 128 + 32)


# ---------------------------------------------------------------- sums in memory


@gluon.jit
def opaque_zero(j):
    """0, which the compiler can't know; j is not negative. It is added to the number of a buffer that is the
    same in all steps: otherwise the addresses of the buffer's parts are computed before the loop and take
    dozens of registers."""
    return j >> 30


PAUSE_NS = 16
"""What a pause asks for. On an H200 all from 1 to 30 ns take 63 clocks, 40 and 60 twice as many."""


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
def _add_asm(n, operation="red.global.add.v4.f32", always=False, placed=False, pause_every=0):
    """All n elements of a thread. The n results, a byte each, are n // 4 registers that are not used.
    `always`: without $9 and what depends on it. `placed`: $13 is what t is here, see `place_of`; with both
    it is $9. `pause_every`: see `add_sums`."""
    outputs, values, pointer, wanted = 0, n // 4, n // 4 + n, n // 4 + 2 * n
    place = "mov.u32 t, %tid.x; and.b32 t, t, 127; shl.b32 t, t, 4;"
    lines = [
        "{ .reg .pred q; .reg .b32 t; .reg .b64 a;",
        *([] if always else [f"setp.eq.b32 q, ${wanted}, 0;", "@q bra DONE;"]),
        f"mov.u32 t, ${wanted + (0 if always else n)};" if placed else place,
        "cvt.u64.u32 a, t;",
        f"add.s64 a, a, ${pointer};",
    ]
    for i in range(0, n, 4):
        four = ", ".join(f"${values + i + k}" for k in range(4))
        lines.append(f"{operation} [a + {i * 512}], {{{four}}};")
        if pause_every and i // 4 % pause_every == 0:
            lines.append(f"nanosleep.u32 {PAUSE_NS};")
    lines += [] if always else ["DONE:"]
    lines += [f"mov.b32 ${outputs + i}, 0;" for i in range(n // 4)]
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _add_constraints(n, always=False, placed=False):
    numbers = (0 if always else n) + (n if placed else 0)
    return ",".join(["=r"] * (n // 4) + ["f"] * n + ["l"] * n + ["r"] * numbers)


@gluon.jit
def place_of(x):
    """Where in a block of sums, in bytes, the thread's part of each four elements of x is, for each of these,
    by the elements that the thread has. In a loop over tiles ptxas, on finding %tid.x in the assembly, would
    take the addresses of a step's operands for different in each thread."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, x.type.layout))[:, None]
    column = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))[None, :]
    # 16 rows a warp, and in it a row or two for four threads, of two columns each of eight.
    return ((row >> 4) * 32 + (row & 7) * 4 + ((column >> 1) & 3)) * 16


@gluon.jit
def add_sums(
    dq_ptr, block, dq, wanted, AT: gl.constexpr, plan: gl.constexpr, PLACED: gl.constexpr = False
):
    """Add [64, columns] to the sums of a block, of [BLOCK_M / 64, D / 8, 512] in memory, from element AT on,
    as it lies in registers: four values of a thread, two columns of two rows, are 16 bytes, and the 128
    threads follow each other. Without `wanted`, do nothing. PLACED: with places as `place_of` has them.

    The plan's `pause_every`: after the first addition and every so many more a thread pauses, 0: never.
    Additions go through the load/store unit, 8 clocks or more each for a warp, and while they queue up there
    the shared memory of the other warpgroups waits behind them."""
    n: gl.constexpr = dq.shape[1] // 2  # elements of dq in a thread
    offset = block.to(gl.int64) * (plan.block_m * plan.width) + AT
    operands = dq, (dq_ptr + offset).to(gl.int64), wanted.to(gl.int32)
    if PLACED:
        operands = operands + (place_of(dq),)
    gl.inline_asm_elementwise(
        _add_asm(n, "red.global.add.v4.f32", False, PLACED, plan.pause_every),
        _add_constraints(n, False, PLACED), operands, dtype=gl.int8, is_pure=False, pack=n,
    )  # fmt: skip


@gluon.jit
def leave_sums(ptr, x, AT: gl.constexpr, ADD: gl.constexpr, PLACED: gl.constexpr = False):
    """Add [64, columns] to float32 in memory, or store it there, from element AT on: as it lies in registers,
    as `add_sums` does it."""
    n: gl.constexpr = x.shape[1] // 2  # elements of x in a thread
    operation: gl.constexpr = "red.global.add.v4.f32" if ADD else "st.global.v4.f32"
    operands = x, (ptr + AT).to(gl.int64)
    if PLACED:
        operands = operands + (place_of(x),)
    gl.inline_asm_elementwise(
        _add_asm(n, operation, True, PLACED), _add_constraints(n, True, PLACED), operands, dtype=gl.int8,
        is_pure=False, pack=n,
    )  # fmt: skip
