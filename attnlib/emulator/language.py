"""The parts of `triton.experimental.gluon.language` that the kernels use, for the emulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from attnlib.emulator.barriers import Barrier
from attnlib.emulator.clocks import NEVER
from attnlib.emulator.errors import Race
from attnlib.emulator.machine import Partition, Program, Work
from attnlib.emulator.memory import Barriers, Descriptor, Shared
from attnlib.emulator.ptx import Threads, elements_of_threads
from attnlib.emulator.values import TORCH, Int, Pointer, Tensor, plain, result

UNDEFINED = 0x7EA5  # what an atomic operation returns where its mask is not set


class Product(Work):
    """What a product in flight will be. It can be another product's accumulator; anything else must wait."""

    def __init__(self, a: Shared | Tensor, b: Shared, acc: Product | Tensor, use_acc: bool) -> None:
        super().__init__(tuple(x for x in (a, b) if isinstance(x, Shared)))
        self.shape = [*a.shape[:1], *b.shape[1:]]
        self.operands, self.acc = (a, b), acc if use_acc else None
        self.value: torch.Tensor | None = None

    def do(self) -> None:
        a, b = (x.values if isinstance(x, Shared) else x.data for x in self.operands)
        self.value = a.float() @ b.float()
        if self.acc is not None:
            self.value += self.acc.value if isinstance(self.acc, Product) else self.acc.data

    def _unknown(self, *others: object):
        raise Race("a product is used before it was waited for")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _unknown
    __getitem__ = to = reshape = permute = _unknown
    data = dtype = property(_unknown)


class CopyIn(Work):
    def __init__(self, desc: Descriptor, coordinates, barrier: Barrier, buffer: Shared) -> None:
        super().__init__()
        self.desc, self.coordinates, self.barrier, self.buffer = desc, coordinates, barrier, buffer
        self.landed = NEVER  # when
        barrier.program.copies.append(self)

    def do(self) -> None:
        self.landed = self.barrier.next
        self.buffer.end_writing(self.desc.read(self.coordinates), self.landed)
        self.barrier.received(self.desc.block_type.nbytes)


class CopyOut(Work):
    """Out of shared memory to a tensor."""

    def __init__(self, desc: Descriptor, coordinates, buffer: Shared) -> None:
        super().__init__((buffer,))
        self.desc, self.coordinates = desc, coordinates

    def do(self) -> None:
        self.desc.write(self.coordinates, self.reads[0].values)


class AddOut(CopyOut):
    """The same, added to the tensor, which takes place later."""

    def __init__(self, desc: Descriptor, coordinates, buffer: Shared, partition: Partition) -> None:
        super().__init__(desc, coordinates, buffer)
        self.partition = partition

    def do(self) -> None:
        read = self.reads[0].values.clone()
        self.partition.program.machine.land(self.partition, Landing(self.desc, self.coordinates, read))


class Landing(Work):
    """What `AddOut` has read, added to the tensor."""

    def __init__(self, desc: Descriptor, coordinates, read: torch.Tensor) -> None:
        super().__init__()
        self.desc, self.coordinates, self.read = desc, coordinates, read

    def do(self) -> None:
        self.desc.write(self.coordinates, self.read, True)


class Language:
    """`gl`, `tma`, `mbarrier`, and the functions of Hopper, for one program."""

    def __init__(self, program: Program, place: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.program, self.machine = program, program.machine
        self.gl = SimpleNamespace(
            **{name: getattr(gl, name) for name in dir(gl) if isinstance(getattr(gl, name), gl.dtype)},
            **{name: _Layout for name in dir(gl) if name.endswith("Layout")},
            pointer_type=gl.pointer_type,
            program_id=lambda axis: Int(place[axis]), num_programs=lambda axis=0: Int(grid[axis]),
            static_range=range, constexpr=lambda value: value, cdiv=_cdiv,
            arange=_arange, zeros=_zeros, full=_full, where=_where, minimum=_minimum, maximum=_maximum,
            abs=lambda x: abs(x) if isinstance(x, int) else Tensor(x.data.abs(), x.dtype),
            exp2=_exp2, log2=_log2, ceil=_ceil, fma=_fma, max=_max, sum=_sum, broadcast=_broadcast,
            expand_dims=lambda x, axis: Tensor(x.data.unsqueeze(axis), x.dtype),
            convert_layout=lambda x, layout, assert_trivial=False: x, split=_split,
            join=_join, load=_load, store=_store,
            atomic_add=self._atomic_add, allocate_shared_memory=self._allocate,
            inline_asm_elementwise=self._inline_asm, warp_specialize=self._warp_specialize,
        )  # fmt: skip
        self.mbarrier = SimpleNamespace(
            MBarrierLayout=_Layout, init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, size, pred=True: pred and barrier.arrive(expected=int(size)),
            arrive=lambda barrier, count=1: barrier.arrive(int(count)),
            wait=lambda barrier, parity: barrier.wait(int(parity)),
            invalidate=lambda barrier: barrier.invalidate(),
        )  # fmt: skip
        self.tma = SimpleNamespace(
            async_copy_global_to_shared=self._copy_in, async_copy_shared_to_global=self._copy_out,
            store_wait=self._store_wait,
        )  # fmt: skip
        self.hopper = {
            "fence_async_shared": program.fence,
            "async_add_shared_to_global": self._add_out,
            "warpgroup_mma": self._warpgroup_mma,
            "warpgroup_mma_wait": self._warpgroup_mma_wait,
        }

    # ------------------------------------------------------------ shared memory

    def _allocate(self, dtype: gl.dtype, shape: list[int], layout: object) -> Shared | Barriers:
        if dtype == gl.int64:  # an mbarrier
            return Barriers(self.program, int(shape[0]))
        return Shared.allocate(self.program, dtype, [int(n) for n in shape])

    def _copy_in(self, desc: Descriptor, coordinates, barrier: Barrier, buffer: Shared, pred=True) -> None:
        _check_block(desc, buffer)
        if not pred:
            return
        if not self.machine.current.clock.saw(barrier.fenced):
            raise Race(f"a copy finds {barrier.name} initialized without fence_async_shared")
        buffer.begin_writing()
        self.machine.issue(self.machine.copies, CopyIn(desc, coordinates, barrier, buffer))

    def _copy_out(self, desc: Descriptor, coordinates, buffer: Shared) -> None:
        self._issue_out(CopyOut(desc, coordinates, buffer))

    def _add_out(self, desc: Descriptor, coordinates, buffer: Shared) -> None:
        self._issue_out(AddOut(desc, coordinates, buffer, self.machine.current))

    def _issue_out(self, copy: CopyOut) -> None:
        buffer = copy.reads[0]
        _check_block(copy.desc, buffer)
        buffer.begin_reading("a copy out")
        self.machine.issue(self.machine.current.stores, copy)

    def _store_wait(self, pendings: int) -> None:
        self.machine.wait_for(self.machine.current.stores, int(pendings), "copies out")

    # ------------------------------------------------------------ tensor cores

    def _warpgroup_mma(self, a, b: Shared, acc, *, use_acc=True, is_async=False):
        current = self.machine.current
        if current.warps != 4:
            raise TypeError(f"wgmma wants 4 warps, {current} has {current.warps}")
        if not isinstance(a, Shared | Tensor):
            raise Race("a product is the operand of another before it was waited for")
        product = Product(a, b, acc, bool(use_acc))
        if list(acc.shape) != product.shape or a.shape[1] != b.shape[0] or a.shape[0] != 64:
            raise TypeError(f"{a.shape} times {b.shape} plus {list(acc.shape)}")
        if a.dtype != b.dtype or b.dtype not in (gl.float16, gl.bfloat16, gl.float8e4nv):
            raise TypeError(f"{a.dtype} times {b.dtype}")
        if b.dtype == gl.float8e4nv and b.values.stride()[0] != 1:
            raise TypeError(f"{b.name}: the columns of a second operand of 8 bits lie contiguously")
        for operand in product.reads:
            operand.begin_reading("a product")
        self.machine.issue(current.products, product)
        return product if is_async else self._warpgroup_mma_wait(0, (product,))

    def _warpgroup_mma_wait(self, num_outstanding=0, deps=None):
        self.machine.wait_for(self.machine.current.products, int(num_outstanding), "products")
        found = []
        for dep in deps:
            if isinstance(dep, Product):
                if not dep.waited:
                    raise Race(f"a product is used with {num_outstanding} outstanding, it among them")
                dep = Tensor(dep.value)
            found.append(dep)
        return found[0] if len(found) == 1 else tuple(found)

    # ------------------------------------------------------------ the rest

    def _atomic_add(self, pointer: Pointer, value: int | Tensor, mask: Tensor | None = None, sem="acq_rel"):
        """Elements that the mask hides are undefined, and so is which of several at one place came first."""
        if mask is None and isinstance(value, Tensor):
            mask = Tensor(torch.ones(tuple(value.shape), dtype=torch.bool))
        place = pointer.places(mask)
        if mask is None:
            before = pointer.memory[place].item()
            pointer.memory[place] = before + value
            self.machine.pause()
            return Int(before) if isinstance(before, int) else before
        before = torch.full(mask.data.shape, UNDEFINED, dtype=pointer.memory.dtype)
        before[mask.data] = pointer.memory[place]
        pointer.memory.index_add_(0, place, value.data[mask.data].to(pointer.memory.dtype))
        self.machine.pause()
        return Tensor(before)

    def _warp_specialize(self, functions, worker_warps, worker_registers) -> None:
        program, first = self.program, self.machine.current
        for _, args in functions:
            _name_parts(args)
        (function, args), *workers = functions
        start, started = first.warps, []
        for (worker, worker_args), warps in zip(workers, worker_warps, strict=True):
            name, call = named(worker, start, warps), lambda f=worker, a=worker_args: f(*a)
            started.append(program.start(name, 32 * start, warps, call))
            start += warps
        first.name = named(function, 0, first.warps)
        function(*args)
        self.machine.wait(lambda: all(partition.done for partition in started), lambda: "the others' end")
        for partition in started:
            first.clock.join(partition.clock)

    def _inline_asm(self, asm: str, constraints: str, args: list, dtype: gl.dtype, is_pure: bool, pack: int):
        if asm == "mov.b32 $0, $1;":  # may hold two halves; whatever it holds, it is the same afterwards
            return args[0]
        outputs = constraints.count("=")
        shapes = {x.data.shape for x in args if isinstance(x, Tensor)}
        shape = tuple(shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes))
        places = _places(shape, pack)
        elements, threads = places.shape
        several = isinstance(dtype, tuple)
        halves = not several and dtype.primitive_bitwidth == 16 and pack == 2 * outputs  # two in a register
        registers = [_registers(x, shape, places, halves) for x in args]
        if several:  # all elements of a thread at once, and several tiles as results
            return _several(self.machine.current, asm, registers, places, shape, dtype)
        collected = np.zeros(int(np.prod(shape)), np.float32 if dtype.is_floating() else np.int64)
        if halves:
            return _of_halves(self.machine.current, asm, registers, places, shape, dtype)
        for start in range(0, elements, pack):
            operands = [np.zeros(threads)] * outputs
            for x in registers:
                operands.extend([x] * pack if isinstance(x, Pointer) else x[start : start + pack])
            run = Threads(self.machine.current, operands, threads)
            run.run(asm)
            if outputs == pack:
                for i in range(pack):
                    collected[places[start + i]] = run.registers[f"${i}"]
        if not shape:
            if dtype.is_floating():
                return float(collected[0])
            value = int(collected[0])
            if dtype == gl.int32:  # with a sign, as what the assembly says may have none
                value = (value + (1 << 31)) % (1 << 32) - (1 << 31)
            return Int(value, dtype == gl.int64)
        return Tensor(torch.from_numpy(collected.reshape(shape)).to(TORCH[dtype]), dtype)


def _check_block(desc: Descriptor, buffer: Shared) -> None:
    if buffer.dtype != desc.dtype or buffer.values.numel() != desc.elements:
        raise TypeError(f"{buffer.name}: {buffer.shape} of {buffer.dtype}, copies of {desc.block_shape}")


@cache
def _places(shape: tuple[int, ...], pack: int) -> np.ndarray:
    """[elements of a thread, threads], numbers of elements in a tile; one at a time, a thread for each."""
    if pack == 1:
        return np.arange(math.prod(shape))[None, :]
    return np.ascontiguousarray(elements_of_threads(shape).T)


def _registers(x, shape: tuple[int, ...], places: np.ndarray, halves: bool):
    """[elements of a thread, threads]; their bits where they are halves of a register."""
    if isinstance(x, Pointer):
        return x
    if isinstance(x, Tensor):
        data = x.data.expand(shape).contiguous().view(-1)
        return (data.view(torch.int16) if halves else data).numpy()[places]
    return np.broadcast_to(np.asarray(x), places.shape)


def _of_halves(partition, asm: str, registers: list, places: np.ndarray, shape, dtype: gl.dtype) -> Tensor:
    """Assembly with one result, of two elements of 16 bits, the first of them in the lower half; its operands
    have the same type."""
    bits = [x.view(np.uint16).astype(np.int64) for x in registers]
    collected = np.zeros(int(np.prod(shape)), np.uint16)
    elements, threads = places.shape
    for start in range(0, elements, 2):
        operands = [x[start + 1] << 16 | x[start] for x in bits]
        run = Threads(partition, [np.zeros(threads), *operands], threads)
        run.run(asm)
        word = run.registers["$0"]
        collected[places[start]], collected[places[start + 1]] = word & 0xFFFF, word >> 16
    return Tensor(torch.from_numpy(collected.view(np.int16).reshape(shape)).view(TORCH[dtype]), dtype)


def _several(partition, asm: str, registers: list, places: np.ndarray, shape, dtypes: tuple) -> tuple:
    """Assembly with a result of 32 bits for each element of each of these types."""
    elements, threads = places.shape
    operands = [np.zeros(threads) for _ in range(len(dtypes) * elements)]
    run = Threads(partition, operands + [row for x in registers for row in x], threads)
    run.run(asm)
    found = []
    for number, dtype in enumerate(dtypes):
        collected = np.zeros(int(np.prod(shape)), np.float32 if dtype.is_floating() else np.int64)
        for i in range(elements):
            collected[places[i]] = run.registers[f"${number * elements + i}"]
        data = torch.from_numpy(collected.reshape(shape))
        found.append(Tensor(data if dtype.is_floating() else data.to(TORCH[dtype]), dtype))
    return tuple(found)


def named(function: Callable, first: int, warps: int) -> str:
    """What messages call the partition that executes a function."""
    span = f"warp {first}" if warps == 1 else f"warps {first}-{first + warps - 1}"
    return f"{function.__name__} ({span})"


class _Layout:
    """Of every kind: where an element lies makes no difference here."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    @classmethod
    def get_default_for(cls, *args) -> _Layout:
        return cls()


def _name_parts(args: tuple) -> None:
    """Buffers and barriers are called as the fields of the tuples that they are passed in."""
    for arg in args:
        if type(arg) is tuple:
            _name_parts(arg)
        for name in getattr(arg, "_fields", ()):
            _name_field(name, getattr(arg, name))


def _name_field(name: str, value) -> None:
    if type(value) is tuple:
        for number, part in enumerate(value):
            if isinstance(part, Shared):
                part.name = name + "_right" * number
    elif isinstance(value, Shared | Barrier):
        value.name = name
    elif isinstance(value, Barriers):
        value.named(name)
    else:
        for inner in getattr(value, "_fields", ()):
            _name_field(f"{name}_{inner}", getattr(value, inner))


# ---------------------------------------------------------------- functions of values


def _cdiv(a: int, b: int) -> Int:
    return (Int(a) + (b - 1)) // b


def _arange(start: int, end: int, layout: object = None) -> Tensor:
    return Tensor(torch.arange(int(start), int(end), dtype=torch.int32))


def _full(shape: list[int], value, dtype: gl.dtype, layout: object = None) -> Tensor:
    return Tensor(torch.full([int(n) for n in shape], plain(value), dtype=TORCH[dtype]), dtype)


def _zeros(shape: list[int], dtype: gl.dtype, layout: object = None) -> Tensor:
    return _full(shape, 0, dtype)


def _where(condition, a, b):
    if not isinstance(condition, Tensor):
        return a if condition else b
    numbers = torch.float32 if any(isinstance(x, float) for x in (a, b)) else torch.int32
    like = next((x.data.dtype for x in (a, b) if isinstance(x, Tensor)), numbers)
    values = (plain(x) if isinstance(x, Tensor) else torch.tensor(plain(x), dtype=like) for x in (a, b))
    return result(torch.where(condition.data, *values), a, b)


def _pairwise(tiles, scalars):
    def function(a, b):
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            return scalars(a, b)
        a, b = (torch.as_tensor(plain(x)) for x in (a, b))
        return Tensor(tiles(a, b))

    return function


_minimum = _pairwise(torch.fmin, min)
_maximum = _pairwise(torch.fmax, max)


def _exp2(x):
    return Tensor(torch.exp2(x.data)) if isinstance(x, Tensor) else 2.0**x


def _fma(a, b, c) -> Tensor:
    """Rounded once."""
    a, b, c = (torch.as_tensor(plain(x)).double() for x in (a, b, c))
    return Tensor((a * b + c).float())


def _ceil(x: Tensor) -> Tensor:
    return Tensor(torch.ceil(x.data))


def _log2(x: Tensor) -> Tensor:
    return Tensor(torch.log2(x.data))


def _reduced(data: torch.Tensor):
    if data.dim():
        return Tensor(data)
    return Int(data.item()) if not data.is_floating_point() else data.item()


def _max(x: Tensor, axis: int):
    data = x.data
    if data.is_floating_point():  # NaN only where there is nothing else
        numbers = torch.where(data.isnan(), -torch.inf, data)
        data = torch.where(data.isnan().all(axis, keepdim=True), data, numbers)
    return _reduced(data.amax(axis))


def _sum(x: Tensor, axis: int):
    return _reduced(x.data.sum(axis, dtype=x.data.dtype))


def _broadcast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(Tensor(x) for x in torch.broadcast_tensors(a.data, b.data))


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    return Tensor(x.data[..., 0]), Tensor(x.data[..., 1])


def _join(a: Tensor, b: Tensor) -> Tensor:
    return Tensor(torch.stack([a.data, b.data], -1))


def _load(pointer: Pointer, mask: Tensor | None = None, other=None):
    if mask is not None:
        assert other is not None, "what is not loaded has no value"
        wanted = mask.data.expand(tuple(pointer.offset.shape))
        found = torch.full(wanted.shape, other, dtype=pointer.memory.dtype)
        found[wanted] = pointer.memory[pointer.places(Tensor(wanted))]
        return Tensor(found)
    found = pointer.memory[pointer.places()]
    if found.dim():
        return Tensor(found)
    return Int(found.item()) if not found.is_floating_point() else found.item()


def _store(pointer: Pointer, value, mask: Tensor | Int | None = None) -> None:
    if mask is not None and not isinstance(mask, Tensor):
        if not mask:
            return
        mask = None
    if isinstance(value, Tensor) and mask is not None:
        value = value.data.expand(mask.data.shape)[mask.data]
    value = plain(value) if not isinstance(value, torch.Tensor) else value
    pointer.memory[pointer.places(mask)] = torch.as_tensor(value).to(pointer.memory.dtype)
