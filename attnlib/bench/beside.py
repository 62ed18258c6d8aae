"""Do the other units of an SM work at their own rate while its tensor cores multiply?

One program on each SM. A warpgroup multiplies 64 x 64 tiles from shared memory without a pause; three others
run a loop of independent instructions of one kind. Each reads its clock, with the others at work and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BATCHES = gl.constexpr(24)
"""Waits of the multiplying warpgroup, for 64 HGMMA or 2048 clocks each: the others are done before it is."""
ROUNDS, IN_FLIGHT = 256, 16
KINDS = {
    "multiply-adds": "fma.rn.f32 v{i}, v{i}, v{j}, v{i};",
    "multiplications by one number": "mul.f32 v{i}, v{i}, v0;",
    "maxima": "max.f32 v{i}, v{i}, v{j};",
    "exponentials": "ex2.approx.ftz.f32 v{i}, v{i};",
    "sums of whole numbers": "add.s32 w{i}, w{i}, w{j};",
}
"""What the other warpgroups do, an instruction for each of 16 values: {i} its number, {j} that of another."""


@gluon.constexpr_function
def loop_of(kind):
    """The clocks that a loop of these instructions takes, as assembly."""
    body = " ".join(KINDS[kind].format(i=i, j=(i + 5) % IN_FLIGHT) for i in range(IN_FLIGHT))
    start = " ".join(
        f"cvt.rn.f32.s32 v{i}, $1; add.f32 v{i}, v{i}, 0f3F8{i:X}0000; mov.b32 w{i}, v{i};"
        for i in range(IN_FLIGHT)
    )
    end = " ".join(f"mov.b32 w, v{i}; xor.b32 t, t, w; xor.b32 t, t, w{i};" for i in range(IN_FLIGHT))
    return f"""{{ .reg .pred p; .reg .b32 n, w, t, c, w<{IN_FLIGHT}>; .reg .f32 v<{IN_FLIGHT}>;
        {start} mov.b32 n, {ROUNDS}; mov.b32 t, 0; mov.u32 c, %clock;
        LOOP: {body} sub.s32 n, n, 1; setp.ne.s32 p, n, 0; @p bra LOOP;
        mov.u32 $0, %clock; sub.s32 $0, $0, c; {end}
        setp.eq.b32 p, t, 123456789; @p mov.b32 $0, t; }}"""


@gluon.jit
def clock(after):  # `after` is computed before
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %clock;", "=r,r", [after], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def multiply(a, b, out_ptr, BUSY: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, layout)  # [64, 64]
    begin = clock(gl.program_id(0))
    if BUSY:
        for _ in range(BATCHES):
            for _ in gl.static_range(16):
                acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
    took = clock(gl.program_id(0)) - begin
    if gl.max(gl.max(acc, 1), 0) > 1e30:  # never: it keeps the products
        took = 0
    gl.store(out_ptr + gl.program_id(0) * 4, took)


@gluon.jit
def work(out_ptr, W: gl.constexpr, KIND: gl.constexpr):
    if KIND is not None:
        lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))  # [128]
        text: gl.constexpr = loop_of(KIND)
        took = gl.inline_asm_elementwise(  # [128]
            text, "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1)
        gl.store(out_ptr + gl.program_id(0) * 4 + W, gl.max(took, 0))


@gluon.jit
def beside(out_ptr, BUSY: gl.constexpr, KIND: gl.constexpr):
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    zeros = gl.zeros([64, 64], gl.float16, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # [64, 64]
    a = gl.allocate_shared_memory(gl.float16, [64, 64], shared, zeros)
    b = gl.allocate_shared_memory(gl.float16, [64, 64], shared, zeros)
    fence_async_shared()
    gl.warp_specialize([
        (multiply, (a, b, out_ptr, BUSY)), (work, (out_ptr, 1, KIND)), (work, (out_ptr, 2, KIND)),
        (work, (out_ptr, 3, KIND)),
    ], [4, 4, 4], [96, 96, 96])  # fmt: skip


def clocks(busy: bool, kind: str | None) -> tuple[float, float]:
    """Of the products, and of the others' loop: medians over the SMs, on a GPU."""
    grid = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.zeros(grid, 4, dtype=torch.int32, device="cuda")
    for _ in range(3):
        beside[(grid,)](out, busy, kind, num_warps=4, maxnreg=96)
    torch.cuda.synchronize()
    return out[:, 0].float().median().item(), out[:, 1:].amax(1).float().median().item()


def rows() -> Iterator[dict[str, Any]]:
    """For each kind: clocks of a scheduler for an instruction of a warp, alone and beside products; and by
    how much these take longer for each clock in which the others work."""
    count = 3 * ROUNDS * IN_FLIGHT  # of a scheduler, for three warps
    alone, _ = clocks(True, None)
    for kind in KINDS:
        _, by_itself = clocks(False, kind)
        products, together = clocks(True, kind)
        yield {
            "kind": kind, "alone": by_itself / count, "beside products": together / count,
            "products alone": alone, "products beside it": products,
            "products slowed by": (products - alone) / min(together, products),
        }  # fmt: skip
