"""The emulator itself: small kernels, each of which shows one rule of Hopper, and one mistake against it."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnlib.emulator import Deadlock, Emulated, Race, run
from attnlib.emulator.values import Int
from attnlib.kernels.common.bulk_add import async_add_shared_to_global
from attnlib.kernels.common.memory import barriers, room
from attnlib.kernels.common.turns import await_turn, end_turn

RUNS = [("eager", 0), ("late", 0), ("random", 0), ("random", 1), ("random", 2)]
runs = pytest.mark.parametrize(("order", "seed"), RUNS)


def descriptor(x: torch.Tensor, rows: int = 64) -> TensorDescriptor:
    """Of blocks of [rows, all columns] of a matrix."""
    block = [rows, x.shape[1]]
    dtype = gl.float32 if x.dtype == torch.float32 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def halves(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@gluon.jit
def buffer(desc):
    return gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)


# ---------------------------------------------------------------- copies


@gluon.jit
def copy(desc_x, desc_y, row, to):
    """Rows `row` and 63 more to rows `to` and so on."""
    x = buffer(desc_x)
    bar = barriers(1, 1).index(0)
    fence_async_shared()
    mbarrier.expect(bar, desc_x.block_type.nbytes)
    tma.async_copy_global_to_shared(desc_x, [row, 0], bar, x)
    mbarrier.wait(bar, 0)
    tma.async_copy_shared_to_global(desc_y, [to, 0], x)
    tma.store_wait(0)


@runs
@pytest.mark.parametrize(("row", "to"), [(0, 0), (20, 30), (-10, 0), (50, -20), (200, 0), (0, 200)])
def test_copies_read_zeros_outside_and_write_nothing_there(row: int, to: int, order: str, seed: int) -> None:
    x, more = halves(100, 32), torch.full((102, 32), 7.0).half()
    y = more[1:101]
    run(copy, (1,), descriptor(x), descriptor(y), row, to, order=order, seed=seed)
    expected = torch.full((100, 32), 7.0)
    for i in range(64):
        if 0 <= to + i < 100:
            expected[to + i] = x[row + i].float() if 0 <= row + i < 100 else 0.0
    assert torch.equal(y.float(), expected)
    assert bool((more[[0, -1]] == 7.0).all())


def test_a_descriptor_of_more_than_its_memory() -> None:
    x, y = halves(100, 32), halves(100, 32)
    desc = descriptor(x)
    desc.shape = [120, 32]
    with pytest.raises(IndexError, match=r"outside of its tensor: elements 1600 .. 3647 of 3200"):
        run(copy, (1,), desc, descriptor(y), 50, 0)


# ---------------------------------------------------------------- products


@gluon.jit
def multiply(desc_a, desc_b, desc_c, BUG: gl.constexpr):
    """C = A B^T, [64, 64] each."""
    a, b, c = buffer(desc_a), buffer(desc_b), buffer(desc_c)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    full = barriers(1, 1).index(0)
    if BUG != "barrier not fenced":
        fence_async_shared()
    if BUG == "stored before":
        a.store(gl.zeros([64, 64], gl.float16, layout))
    size: gl.constexpr = desc_a.block_type.nbytes + desc_b.block_type.nbytes
    if BUG == "too many bytes":
        mbarrier.expect(full, size + 16)
    elif BUG == "too few bytes":
        mbarrier.expect(full, size // 2)
    else:
        mbarrier.expect(full, size)
    tma.async_copy_global_to_shared(desc_a, [0, 0], full, a)
    if BUG == "two copies":
        tma.async_copy_global_to_shared(desc_b, [0, 0], full, a)
    tma.async_copy_global_to_shared(desc_b, [0, 0], full, b)
    if BUG == "wrong parity":
        mbarrier.wait(full, 1)
    elif BUG != "no wait":
        mbarrier.wait(full, 0)
    zero = gl.zeros([64, 64], gl.float32, layout)
    first = warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)
    second = warpgroup_mma(a, b.permute((1, 0)), first, is_async=True)
    if BUG == "operand overwritten":
        a.store(gl.zeros([64, 64], gl.float16, layout))
    if BUG == "operand copied over":
        tma.async_copy_global_to_shared(desc_b, [0, 0], full, b)
    if BUG == "used before":
        second = second * 2.0
    if BUG == "one outstanding":
        x = warpgroup_mma_wait(1, deps=(second,))
    else:
        x = warpgroup_mma_wait(0, deps=(second,))
    if BUG == "two products":
        warpgroup_mma(a, b.permute((1, 0)), x, is_async=True)
    c.store((x * 0.5).to(gl.float16))
    if BUG != "output not fenced":
        fence_async_shared()
    tma.async_copy_shared_to_global(desc_c, [0, 0], c)
    if BUG == "output overwritten":
        c.store((x * 0.5).to(gl.float16))
    if BUG != "output not waited for":
        tma.store_wait(0)


EITHER = Race, Deadlock  # depending on the order
BUGS = {
    "barrier not fenced": (Race, "a copy finds barrier initialized without fence_async_shared"),
    "stored before": (Race, "a copy of .* finds shared memory stored without fence_async_shared"),
    "too many bytes": (Deadlock, r"warps 0-3\) of program 0 waits for barrier, parity 0 .* 16 bytes"),
    "too few bytes": (EITHER, "a product of .* touches shared memory: a copy writes it"),
    "two copies": (Race, "a copy of .* touches shared memory: a copy writes it"),
    "wrong parity": (EITHER, "a product of .* touches shared memory: a copy writes it|parity 1"),
    "no wait": (Race, "a product of .* touches shared memory: a copy writes it"),
    "operand overwritten": (Race, "a store of .* overwrites shared memory while a product or copy out"),
    "operand copied over": (Race, "a copy of .* overwrites shared memory while a product or copy out"),
    "used before": (Race, "a product is used before it was waited for"),
    "one outstanding": (Race, "a product is used with 1 outstanding, it among them"),
    "two products": (Race, "ends and has not waited for its products"),
    "output not fenced": (Race, "a copy out of .* finds shared memory stored without fence_async_shared"),
    "output overwritten": (Race, "a store of .* overwrites shared memory while a product or copy out reads"),
    "output not waited for": (Race, "ends and has not waited for its copies out of shared memory"),
}


@runs
def test_a_product(order: str, seed: int) -> None:
    a, b, c = halves(64, 64), halves(64, 64, seed=1), halves(64, 64)
    run(multiply, (1,), descriptor(a), descriptor(b), descriptor(c), "", order=order, seed=seed)
    torch.testing.assert_close(c, (a.float() @ b.float().T).half())


@runs
@pytest.mark.parametrize("bug", BUGS)
def test_a_mistake_is_found_in_any_order(bug: str, order: str, seed: int) -> None:
    kind, said = BUGS[bug]
    x = halves(64, 64)
    with pytest.raises(kind, match=said):
        run(multiply, (1,), *(descriptor(x.clone()) for _ in range(3)), bug, order=order, seed=seed)


@gluon.jit
def shapes(desc_a, desc_b, WHAT: gl.constexpr):
    a, b = buffer(desc_a), buffer(desc_b)
    zero = gl.zeros([64, 32], gl.float32)
    if WHAT == "shapes":
        warpgroup_mma(a, b, zero)
    elif WHAT == "types":
        warpgroup_mma(gl.zeros([64, 64], gl.float32), b.permute((1, 0)), zero)
    elif WHAT == "a store":
        a.store(gl.zeros([64, 64], gl.float32))
    elif WHAT == "a copy":
        tma.async_copy_shared_to_global(desc_a, [0, 0], b)
    elif WHAT == "too much room":
        room(b.reshape([1, 32, 64]), 0, desc_a)
    elif WHAT == "a branch on a tile":
        if zero > 0.0:
            pass


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shapes", r"\[64, 64\] times \[32, 64\]"),
        ("types", "fp32 times fp16"),
        ("a store", r"\[64, 64\] of fp16, got \[64, 64\] of fp32"),
        ("a copy", r"\[32, 64\] of fp16, copies of \[64, 64\]"),
        ("too much room", r"expected a buffer of a whole number of \[64, 64\], got \[32, 64\]"),
        ("a branch on a tile", "only a scalar can be a condition"),
    ],
)
def test_shapes_and_types(what: str, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        run(shapes, (1,), descriptor(halves(64, 64)), descriptor(halves(32, 64), 32), what)


@gluon.jit
def reuse(desc_x, desc_y, BUG: gl.constexpr):
    """The first rows of x leave through the memory of all of them."""
    x = gl.allocate_shared_memory(desc_x.dtype, [1, 64, desc_x.block_shape[1]], desc_x.layout)
    bar = barriers(2, 1)
    fence_async_shared()
    for i in gl.static_range(2):
        mbarrier.expect(bar.index(i), desc_x.block_type.nbytes)
        tma.async_copy_global_to_shared(desc_x, [0, 0], bar.index(i), x.index(0))
        mbarrier.wait(bar.index(i), 0)
        if i == 0:
            tma.async_copy_shared_to_global(desc_y, [0, 0], room(x, 0, desc_y))
            if not BUG:
                tma.store_wait(0)
    tma.store_wait(0)


@runs
def test_the_start_of_a_buffer_as_another_one(order: str, seed: int) -> None:
    x, y = halves(64, 32), torch.zeros(16, 32).half()
    run(reuse, (1,), descriptor(x), descriptor(y, 16), False, order=order, seed=seed)
    assert torch.equal(y, x[:16])
    with pytest.raises(Race, match=r"overwrites shared memory\[0\] while a .* copy out reads it"):
        run(reuse, (1,), descriptor(x), descriptor(y, 16), True, order=order, seed=seed)


@gluon.jit
def two_copies_out(desc, PENDING: gl.constexpr, AGAIN: gl.constexpr):
    """Two buffers leave; after a wait one of them is stored to again."""
    one, two = buffer(desc), buffer(desc)
    x = gl.full([64, 32], 1.0, gl.float16)
    one.store(x)
    two.store(x * 2.0)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [0, 0], one)
    tma.async_copy_shared_to_global(desc, [64, 0], two)
    tma.store_wait(PENDING)
    if AGAIN == 1:
        one.store(x)
    else:
        two.store(x)
    tma.store_wait(0)


@runs
def test_a_wait_for_copies_out_is_for_the_oldest(order: str, seed: int) -> None:
    y = torch.zeros(128, 32).half()
    run(two_copies_out, (1,), descriptor(y), 1, 1, order=order, seed=seed)
    run(two_copies_out, (1,), descriptor(y), 0, 2, order=order, seed=seed)
    assert torch.equal(y.float(), torch.tensor([1.0, 2.0]).repeat_interleave(64)[:, None].expand(128, 32))
    with pytest.raises(Race, match="a store of .* overwrites shared memory while a product or copy out"):
        run(two_copies_out, (1,), descriptor(y), 1, 2, order=order, seed=seed)


@gluon.jit
def add_in_order(desc, count_ptr, BUG: gl.constexpr):
    """The programs add their number and 1 to a sum in bulk, one after the other."""
    plan: gl.constexpr = Blocks(64)
    x = buffer(desc)
    number = gl.program_id(0)
    x.store(gl.zeros([64, 32], gl.float32) + (number + 1))
    fence_async_shared()
    if BUG != "early":
        await_turn(count_ptr, number * 0, number, plan, True)
    async_add_shared_to_global(desc, [0, 0], x)
    tma.store_wait(0)
    end_turn(count_ptr, number * 0, plan, BUG != "counted")


class Blocks(NamedTuple):
    """What `turns` wants to know of a plan."""

    block_m: int


def sums_in_order(bug: str, order: str, seed: int) -> set[float]:
    """After four programs; in float32 2^25 + 1 + 2 + 3 + 4 depends on the order."""
    y, count = torch.full((64, 32), 2.0**25), torch.zeros(8, dtype=torch.int32)
    run(add_in_order, (4,), descriptor(y), count, bug, order=order, seed=seed, sms=4, in_order=True)
    assert int(count.sum()) == 4
    return set(y.flatten().tolist())


def test_additions_in_bulk_take_turns() -> None:
    """Those that are counted when shared memory has been read may still be under way."""
    right = sums_in_order("", "eager", 0)
    assert len(right) == 1
    for bug in ("", "early", "counted"):
        found = set()
        for seed in range(40):
            found |= sums_in_order(bug, "random", seed)
        assert (found == right) == (not bug), bug


# ---------------------------------------------------------------- several partitions


class Memory(NamedTuple):
    x: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor


@gluon.jit
def write(mem, N: gl.constexpr, BUG: gl.constexpr):
    for i in gl.static_range(N):
        if BUG != "written without asking":
            mbarrier.wait(mem.free.index(0), (i & 1) ^ 1)
        mem.x.store(gl.full([64, 32], i, gl.float16))
        if BUG != "nobody fences" and BUG != "the reader fences" and BUG != "fenced too late":
            fence_async_shared()
        if BUG != "not told":
            mbarrier.arrive(mem.full.index(0), count=1)
        if BUG == "told twice":
            mbarrier.arrive(mem.full.index(0), count=1)
        if BUG == "fenced too late":
            fence_async_shared()


@gluon.jit
def read(desc, mem, N: gl.constexpr, BUG: gl.constexpr):
    for i in gl.static_range(N):
        if BUG == "parity of 2":
            mbarrier.wait(mem.full.index(0), 2)
        elif BUG != "not waited for":
            mbarrier.wait(mem.full.index(0), i & 1)
        if BUG == "the reader fences":
            fence_async_shared()
        if BUG == "loaded":
            y = mem.x.load()
            mbarrier.arrive(mem.free.index(0), count=1)
            gl.store(desc + gl.arange(0, 32), gl.max(y, 0))
        else:
            tma.async_copy_shared_to_global(desc, [i * 64, 0], mem.x)
            if BUG != "given back too early":
                tma.store_wait(0)
            mbarrier.arrive(mem.free.index(0), count=1)
            tma.store_wait(0)
    if BUG == "a product of one warp":
        warpgroup_mma(mem.x, mem.x.permute((1, 0)), gl.zeros([64, 64], gl.float32))


@gluon.jit
def hand_over(desc, layout: gl.constexpr, N: gl.constexpr, BUG: gl.constexpr):
    """One partition fills a buffer N times, another one copies it to memory."""
    mem = Memory(gl.allocate_shared_memory(gl.float16, [64, 32], layout), barriers(1, 1), barriers(1, 1))
    fence_async_shared()
    gl.warp_specialize([(write, (mem, N, BUG)), (read, (desc, mem, N, BUG))], [1], [24])


@runs
@pytest.mark.parametrize("who", ["", "the reader fences"])
def test_a_buffer_is_handed_over(who: str, order: str, seed: int) -> None:
    y = torch.zeros(256, 32).half()
    desc = descriptor(y)
    run(hand_over, (1,), desc, desc.layout, 4, who, order=order, seed=seed)
    assert torch.equal(y[:, 0].float(), torch.arange(4.0).repeat_interleave(64))


HANDED = {
    "nobody fences": "Race: .* finds x stored without fence_async_shared",
    "fenced too late": "Race: .* finds x stored without fence_async_shared",
    "not waited for": r"Race: .* touches x: write \(warps 0-3\) .* has stored|Race: .* overwrites x|Deadlock",
    "written without asking": r"Race: .* overwrites x|Race: .* has stored to it|Deadlock: .* full\[0\]",
    "given back too early": "Race: .* overwrites x",
    "told twice": r"Race: .* overwrites x|Race: .* has stored|Deadlock: .* waits for (free|full)\[0\]",
}


@runs
@pytest.mark.parametrize("bug", HANDED)
def test_a_hand_over_with_a_mistake_is_found_in_any_order(bug: str, order: str, seed: int) -> None:
    desc = descriptor(torch.zeros(256, 32).half())
    with pytest.raises((Race, Deadlock)) as found:
        run(hand_over, (1,), desc, desc.layout, 4, bug, order=order, seed=seed)
    assert re.match(HANDED[bug], f"{found.type.__name__}: {found.value}")


@gluon.jit
def copy_again(desc, mem, N: gl.constexpr, BUG: gl.constexpr):
    for i in gl.static_range(N):
        mbarrier.wait(mem.free.index(0), (i & 1) ^ 1)
        if BUG == "the copying warp fences":
            fence_async_shared()
        mbarrier.expect(mem.full.index(0), desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [i * 64, 0], mem.full.index(0), mem.x)


@gluon.jit
def load_again(out, mem, N: gl.constexpr, BUG: gl.constexpr):
    for i in gl.static_range(N):
        mbarrier.wait(mem.full.index(0), i & 1)
        if BUG == "fenced too early":
            fence_async_shared()
        x = mem.x.load()
        if BUG == "":
            fence_async_shared()
        mbarrier.arrive(mem.free.index(0), count=1)
        if BUG == "fenced too late":
            fence_async_shared()
        gl.store(out + i * 32 + gl.arange(0, 32), gl.max(x, 0))


@gluon.jit
def copy_over_loads(desc, out, N: gl.constexpr, BUG: gl.constexpr):
    """One partition copies N blocks to the same buffer, another one loads each of them."""
    layout: gl.constexpr = desc.layout
    mem = Memory(gl.allocate_shared_memory(gl.float16, [64, 32], layout), barriers(1, 1), barriers(1, 1))
    fence_async_shared()
    gl.warp_specialize([(load_again, (out, mem, N, BUG)), (copy_again, (desc, mem, N, BUG))], [1], [24])


@runs
def test_a_copy_over_what_was_loaded_wants_a_fence_between(order: str, seed: int) -> None:
    x, y = halves(256, 32), torch.zeros(4 * 32).half()
    run(copy_over_loads, (1,), descriptor(x), y, 4, "", order=order, seed=seed)
    assert torch.equal(y, x.view(4, 64, 32).amax(1).flatten())
    said = r"a copy of copy_again .* overwrites x: load_again .* loaded it without fence_async_shared"
    for bug in "not fenced", "fenced too early", "fenced too late", "the copying warp fences":
        with pytest.raises(Race, match=said):
            run(copy_over_loads, (1,), descriptor(x), y, 4, bug, order=order, seed=seed)


@runs
def test_a_store_over_what_was_loaded_needs_no_fence(order: str, seed: int) -> None:
    y = torch.zeros(32).half()
    layout = descriptor(torch.zeros(64, 32).half()).layout
    run(hand_over, (1,), y, layout, 4, "loaded", order=order, seed=seed)
    assert bool((y == 3.0).all())


@runs
def test_a_deadlock_says_who_waits_for_what(order: str, seed: int) -> None:
    desc = descriptor(torch.zeros(256, 32).half())
    said = (
        r"write \(warps 0-3\) of program 0 waits for free\[0\], parity 0 \(phase 0: 0 of 1 arrived, 0 bytes "
        r"missing\); read \(warp 4\) of program 0 waits for full\[0\], parity 0 \(phase 0: 0 of 1"
    )
    with pytest.raises(Deadlock, match=said):
        run(hand_over, (1,), desc, desc.layout, 2, "not told", order=order, seed=seed)


def test_other_mistakes() -> None:
    desc = descriptor(torch.zeros(256, 32).half())
    with pytest.raises(ValueError, match=r"full\[0\]: expected a parity of 0 or 1, got 2"):
        run(hand_over, (1,), desc, desc.layout, 2, "parity of 2")
    with pytest.raises(TypeError, match=r"wgmma wants 4 warps, read \(warp 4\) of program 0 has 1"):
        run(hand_over, (1,), desc, desc.layout, 1, "a product of one warp", order="late")


@gluon.jit
def nobody_waits(N: gl.constexpr):
    bars = barriers(2, 1)
    fence_async_shared()
    for i in gl.static_range(N):
        mbarrier.arrive(bars.index(0), count=1)
        if i == 1:
            mbarrier.wait(bars.index(0), 1)


def test_the_report_has_phases_that_nobody_waited_for() -> None:
    report = run(nobody_waits, (2,), 3)
    assert report.unwaited == tuple((program, "barrier", phase) for program in (0, 1) for phase in (0, 2))


@gluon.jit
def again_after(BUG: gl.constexpr):
    bar = barriers(1, 1).index(0)
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, 0)
    if BUG == "in a phase":
        mbarrier.expect(bar, 16)
    mbarrier.invalidate(bar)
    if BUG == "twice":
        mbarrier.invalidate(bar)
    if BUG == "an arrival":
        mbarrier.arrive(bar, count=1)
    if BUG == "a wait":
        mbarrier.wait(bar, 0)
    mbarrier.init(bar, count=2)
    mbarrier.arrive(bar, count=1)
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, 0)


def test_a_barrier_that_is_invalidated() -> None:
    assert run(again_after, (1,), "").unwaited == ()
    said = {
        "in a phase": "barrier: invalidated in the middle of a phase",
        "twice": "barrier: invalidated before it is initialized",
        "an arrival": "arrives at barrier, which is not initialized",
        "a wait": "waits for barrier, which is not initialized",
    }
    for bug, message in said.items():
        with pytest.raises(Race, match=message):
            run(again_after, (1,), bug)


@gluon.jit
def _copied(desc, bar, x):
    mbarrier.expect(bar, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [0, 0], bar, x)
    mbarrier.wait(bar, 0)


@gluon.jit
def copies_after_both(desc, FENCED: gl.constexpr):
    x = buffer(desc)
    bar = barriers(1, 1).index(0)
    fence_async_shared()
    _copied(desc, bar, x)
    mbarrier.invalidate(bar)
    mbarrier.init(bar, count=1)
    if FENCED:
        fence_async_shared()
    _copied(desc, bar, x)


def test_copies_know_nothing_of_a_barrier_that_is_initialized_again() -> None:
    run(copies_after_both, (1,), descriptor(halves(64, 32)), True)
    with pytest.raises(Race, match="initialized without fence_async_shared"):
        run(copies_after_both, (1,), descriptor(halves(64, 32)), False)


@gluon.jit
def _stores(x, bar, y_ptr):
    x.store(gl.full([64], 5, gl.int32))
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _makes_anew(x, bar, y_ptr):
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    mbarrier.init(bar, count=1)


@gluon.jit
def _waits_for_nothing(x, bar, y_ptr):
    mbarrier.wait(bar, 1)  # returns at once where the barrier is new, and orders nothing
    gl.store(y_ptr + gl.arange(0, 64), x.load())


@gluon.jit
def reads_in_the_next_life(y_ptr):
    x = gl.allocate_shared_memory(gl.int32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = barriers(1, 1).index(0)
    given = x, bar, y_ptr
    gl.warp_specialize(
        [(_stores, given), (_makes_anew, given), (_waits_for_nothing, given)], [1, 1], [24, 24]
    )


@gluon.jit
def _waits(bar):
    mbarrier.wait(bar, 0)


@gluon.jit
def _takes_away(bar):
    mbarrier.invalidate(bar)


@gluon.jit
def taken_from_who_waits():
    bar = barriers(1, 1).index(0)
    gl.warp_specialize([(_waits, (bar,)), (_takes_away, (bar,))], [1], [24])


@pytest.mark.parametrize("seed", range(20))
def test_a_barrier_has_one_life(seed: int) -> None:
    with pytest.raises(Race):
        run(reads_in_the_next_life, (1,), torch.zeros(64, dtype=torch.int32), order="random", seed=seed)
    with pytest.raises(Race, match="invalidated while somebody waits for it|is not initialized"):
        run(taken_from_who_waits, (1,), order="random", seed=seed)


# ---------------------------------------------------------------- named barriers


@gluon.constexpr_function
def bar(operation, number, threads):
    return f"bar.{operation} {number}, {threads}; mov.b32 $0, 0;"


@gluon.jit
def named(OPERATION: gl.constexpr, NUMBER: gl.constexpr, THREADS: gl.constexpr):
    asm: gl.constexpr = bar(OPERATION, NUMBER, THREADS)
    gl.inline_asm_elementwise(asm, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def left(x, BUG: gl.constexpr):
    x.store(gl.full([64], 5, gl.int32))
    if BUG == "twice":
        named("arrive", 10, 256)
        named("arrive", 10, 256)
    if BUG == "threads":
        named("arrive", 8, 128)
    else:
        named("arrive", 8, 160)


@gluon.jit
def right(x, y_ptr, BUG: gl.constexpr):
    if BUG == "another":
        named("sync", 9, 160)
    elif BUG != "none":
        named("sync", 8, 160)
    gl.store(y_ptr + gl.arange(0, 64), x.load())


@gluon.jit
def meet(y_ptr, BUG: gl.constexpr):
    x = gl.allocate_shared_memory(gl.int32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(left, (x, BUG)), (right, (x, y_ptr, BUG))], [1], [24])


@runs
def test_named_barriers(order: str, seed: int) -> None:
    y = torch.zeros(64, dtype=torch.int32)
    run(meet, (1,), y, "", order=order, seed=seed)
    assert bool((y == 5).all())


@runs
@pytest.mark.parametrize(
    ("bug", "kind", "said"),
    [
        ("twice", Race, r"left \(warps 0-3\) of program 0 comes to barrier 10 twice"),
        ("threads", (Race, Deadlock), r"barrier 8: .* expects 1\d\d threads, others 1|waits for barrier 8"),
        ("another", Deadlock, r"right \(warp 4\) of program 0 waits for barrier 9"),
        ("none", Race, r"a load of \w+ \(warp 4\) .* touches|a store of .* overwrites shared memory"),
    ],
)
def test_named_barriers_with_a_mistake(bug: str, kind, said: str, order: str, seed: int) -> None:
    y = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(kind, match=said):
        run(meet, (1,), y, bug, order=order, seed=seed)


# ---------------------------------------------------------------- numbers and addresses


@gluon.jit
def numbers(y_ptr, a, b):
    gl.store(y_ptr, a // b)
    gl.store(y_ptr + 1, a % b)
    gl.store(y_ptr + 2, gl.cdiv(a, b))
    gl.store(y_ptr + 3, a >> 1)
    gl.store(y_ptr + gl.arange(4, 6), gl.full([2], a, gl.int32) // b)
    gl.store(y_ptr + gl.arange(6, 8), gl.full([2], a, gl.int32) % b)
    gl.store(y_ptr + 8, gl.minimum(a, b) + gl.maximum(a, 1))
    gl.store(y_ptr + 9, gl.where(a < b, 1, 2))


@pytest.mark.parametrize(("a", "b"), [(7, 2), (-7, 2), (7, -2), (-7, -2), (6, 3), (0, 5)])
def test_integers_are_divided_towards_zero(a: int, b: int) -> None:
    y = torch.zeros(10, dtype=torch.int64)
    run(numbers, (1,), y, a, b)
    whole, rest, up = int(math.trunc(a / b)), int(math.fmod(a, b)), int(math.trunc((a + b - 1) / b))
    sums = [min(a, b) + max(a, 1), 1 if a < b else 2]
    assert y.tolist() == [whole, rest, up, a >> 1, whole, whole, rest, rest, *sums]


@gluon.jit
def overflow(y_ptr, a, WHAT: gl.constexpr):
    if WHAT == "scalar":
        gl.store(y_ptr, a * 2)
    elif WHAT == "tile":
        gl.store(y_ptr + gl.arange(0, 4), gl.arange(0, 4) + a)
    elif WHAT == "wide":
        gl.store(y_ptr, a.to(gl.int64) * 2)


def test_int32_does_not_overflow_unseen() -> None:
    y = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(OverflowError, match=f"int32 overflow: {2**31}"):
        run(overflow, (1,), y, 2**30, "scalar")
    with pytest.raises(OverflowError, match=f"int32 overflow in a tile: {2**31 - 2} .. {2**31 + 1}"):
        run(overflow, (1,), y, 2**31 - 2, "tile")
    run(overflow, (1,), y, 2**30, "wide")
    assert y[0] == 2**31
    with pytest.raises(OverflowError, match="int64"):
        Int(2**62, wide=True) * 2


@gluon.jit
def access(x_ptr, place, n, WHAT: gl.constexpr):
    o = place + gl.arange(0, 8)
    if WHAT == "store":
        gl.store(x_ptr + o, gl.full([8], 1.0, gl.float32))
    elif WHAT == "masked":
        gl.store(x_ptr + o, gl.full([8], 1.0, gl.float32), mask=o < n)
    elif WHAT == "load":
        gl.store(x_ptr, gl.load(x_ptr + place))
    elif WHAT == "scalar mask":
        gl.store(x_ptr + place, 2.0, mask=place < n)


@pytest.mark.parametrize("what", ["store", "load"])
@pytest.mark.parametrize("place", [-1, 20])
def test_an_address_outside(what: str, place: int) -> None:
    with pytest.raises(IndexError, match="address outside of its tensor: elements .* of 20"):
        run(access, (1,), torch.zeros(20), place, 20, what)


def test_a_mask_keeps_stores_inside() -> None:
    x = torch.zeros(20)
    run(access, (1,), x, 16, 20, "masked")
    run(access, (1,), x, 30, 20, "scalar mask")
    run(access, (1,), x, 0, 20, "scalar mask")
    assert x.tolist() == [2.0] + [0.0] * 15 + [1.0] * 4


# ---------------------------------------------------------------- order


@gluon.jit
def draw(counter_ptr, y_ptr, place):
    for i in gl.static_range(4):
        gl.store(y_ptr + (gl.program_id(0) * 2 + place) * 4 + i, gl.atomic_add(counter_ptr, 1))


@gluon.jit
def tickets(counter_ptr, y_ptr):
    gl.warp_specialize([(draw, (counter_ptr, y_ptr, 0)), (draw, (counter_ptr, y_ptr, 1))], [1], [24])


def drawn(seed: int, order: str = "random") -> tuple[int, ...]:
    counter, y = torch.zeros(1, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    run(tickets, (2,), counter, y, order=order, seed=seed)
    assert sorted(y.tolist()) == list(range(16))
    return tuple(y.tolist())


def test_a_seed_gives_one_order_and_another_seed_another() -> None:
    orders = [drawn(seed) for seed in range(10)]
    assert orders == [drawn(seed) for seed in range(10)]
    assert len(set(orders)) == 10
    # Programs run beside each other.
    assert any(min(order[8:]) < max(order[:8]) and min(order[:8]) < max(order[8:]) for order in orders)


@gluon.jit
def draw_in_one_lane(counter_ptr, y_ptr):
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    before = gl.atomic_add(counter_ptr + lane, 2 * lane + 5, mask=lane < 2, sem="relaxed")
    gl.store(y_ptr + lane, before, mask=lane < 3)


def test_an_atomic_tile_touches_only_what_its_mask_allows() -> None:
    counter, y = torch.tensor([1, 2, 3], dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    run(draw_in_one_lane, (1,), counter, y)
    assert counter.tolist() == [6, 9, 3]
    assert y[:2].tolist() == [1, 2] and y[2] not in (0, 3) and not y[3:].any()


@gluon.jit
def add_by_threes(sums_ptr):
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.atomic_add(sums_ptr + lane % 3, lane.to(gl.float32), mask=lane < 9, sem="relaxed")


def test_an_atomic_tile_adds_all_elements_of_one_place() -> None:
    sums = torch.tensor([1.0, 2.0, 3.0, 4.0])
    run(add_by_threes, (2,), sums)
    assert sums.tolist() == [1 + 2 * (0 + 3 + 6), 2 + 2 * (1 + 4 + 7), 3 + 2 * (2 + 5 + 8), 4]


@gluon.jit
def draw_from_floats(sums_ptr):
    gl.atomic_add((sums_ptr + 1).to(gl.pointer_type(gl.int32)), 3)


def test_a_pointer_to_other_words_of_the_same_size() -> None:
    sums = torch.zeros(3)
    run(draw_from_floats, (2,), sums)
    assert sums.view(torch.int32).tolist() == [0, 6, 0]


@gluon.jit
def places(y_ptr):
    number = gl.program_id(1) + gl.num_programs(1) * gl.program_id(2)
    number = gl.program_id(0) + gl.num_programs(0) * number
    gl.atomic_add(y_ptr + number, 1)


def test_a_grid_of_three_dimensions() -> None:
    y = torch.zeros(30, dtype=torch.int32)
    kernel = Emulated(places)
    kernel[(2, 3, 5)](y, num_warps=4, maxnreg=128)
    assert y.tolist() == [1] * 30 and len(kernel.reports) == 1
