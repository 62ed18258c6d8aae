"""`attnlib.bench.reused_barriers`: kernels that let the memory of an mbarrier go to something else."""

from __future__ import annotations

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.bench.reused_barriers import reused_barriers
from attnlib.kernels.common.memory import barriers


@gluon.jit
def _through_shared_memory(x_ptr):
    """128 numbers, each plus one, through a buffer."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout=layout)
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    buffer = gl.allocate_shared_memory(gl.float32, [128], shared, gl.load(x_ptr + at) + 1)
    gl.store(x_ptr + at, buffer.load(layout))


@gluon.jit
def unused(x_ptr):
    barriers(1, 1)
    _through_shared_memory(x_ptr)


@gluon.jit
def forgotten(x_ptr):
    bar = barriers(2, 1).index(1)
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, 0)
    _through_shared_memory(x_ptr)


@gluon.jit
def invalidated(x_ptr):
    bar = barriers(1, 1).index(0)
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    _through_shared_memory(x_ptr)


@gluon.jit
def one_of_two_invalidated(x_ptr):
    bars = barriers(2, 1)
    for i in gl.static_range(2):
        mbarrier.arrive(bars.index(i), count=1)
        mbarrier.wait(bars.index(i), 0)
    mbarrier.invalidate(bars.index(0))
    _through_shared_memory(x_ptr)


@gluon.jit
def under_a_change_of_layouts(x_ptr):
    """What that needs begins before the barrier: a buffer comes first, and both are dead then."""
    _through_shared_memory(x_ptr)
    bar = barriers(1, 1).index(0)
    mbarrier.arrive(bar, count=1)
    before = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    columns: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    before.store(gl.load(x_ptr + gl.arange(0, 128, layout=layout)))
    x = before.load(layout)
    mbarrier.wait(bar, 0)
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, rows))[:, None] * 64
    at = at + gl.arange(0, 64, layout=gl.SliceLayout(0, rows))[None, :]
    y = gl.convert_layout(gl.load(x_ptr + at), columns)
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, columns))[:, None]
    at = at + gl.arange(0, 64, layout=gl.SliceLayout(0, columns))[None, :] * 64
    gl.store(x_ptr + at, y)
    gl.store(x_ptr + gl.arange(0, 128, layout=layout), x)


@gluon.jit
def used_to_the_end(x_ptr):
    bar = barriers(1, 1).index(0)
    mbarrier.arrive(bar, count=1)
    _through_shared_memory(x_ptr)
    mbarrier.wait(bar, 0)


@gluon.jit
def _waits(bar, x_ptr):
    mbarrier.wait(bar, 0)
    _through_shared_memory(x_ptr)


@gluon.jit
def _waits_only(bar):
    mbarrier.wait(bar, 0)


@gluon.jit
def _arrives(bar):
    mbarrier.arrive(bar, count=1)


@gluon.jit
def divided_among_warps(x_ptr):
    bar = barriers(1, 1).index(0)
    gl.warp_specialize([(_waits, (bar, x_ptr)), (_arrives, (bar,))], [1], [24])


@gluon.jit
def divided_among_others(x_ptr):
    """The first warps know nothing of the barrier."""
    bar = barriers(2, 1)
    gl.warp_specialize(
        [(_through_shared_memory, (x_ptr,)), (_arrives, (bar.index(1),)), (_waits_only, (bar.index(1),))],
        [1, 1], [24, 24],
    )  # fmt: skip


@gluon.jit
def unused_before_warps(x_ptr):
    barriers(1, 1)
    bar = barriers(1, 1).index(0)
    gl.warp_specialize([(_waits, (bar, x_ptr)), (_arrives, (bar,))], [1], [24])


CASES = {
    unused: ["never used", "shares its memory with %buffer"],
    forgotten: ["shares its memory with %buffer"],
    invalidated: [],
    one_of_two_invalidated: ["shares its memory with %buffer"],
    under_a_change_of_layouts: ["shares its memory with ttg.convert_layout"],
    used_to_the_end: [],
    divided_among_warps: [],
    divided_among_others: [],
    unused_before_warps: ["never used", "shares its memory"],
}


@pytest.mark.parametrize("kernel", CASES, ids=lambda kernel: kernel.__name__)
def test_a_barrier_whose_memory_is_reused_is_found(kernel):
    made = compile_kernel(GluonASTSource(kernel, {"x_ptr": "*fp32"}), target=GPUTarget("cuda", 90, 32))
    found = reused_barriers(made.asm["ttgir"])
    assert len(found) >= len(CASES[kernel]) and bool(found) == bool(CASES[kernel]), found
    assert all(any(words in sentence for sentence in found) for words in CASES[kernel]), found


def test_a_kernel_without_barriers_has_none():
    assert reused_barriers("module {}") == []
