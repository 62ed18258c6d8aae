"""Shared memory, and the tensors that TMA copies from and to."""

from __future__ import annotations

import math

import torch
from triton.experimental.gluon import language as gl

from attnlib.emulator.barriers import Barrier
from attnlib.emulator.clocks import COMPONENTS, NEVER
from attnlib.emulator.errors import Race
from attnlib.emulator.machine import Program
from attnlib.emulator.values import GLUON, TORCH, Tensor, check_inside, storage


class History:
    """What happened to each element of a buffer. Flat, as its memory is; see `clocks` for events."""

    def __init__(self, elements: int) -> None:
        self.written = torch.zeros(elements, dtype=torch.int32)  # event of the last store or copy
        self.fenced = torch.zeros(elements, dtype=torch.int32)  # from when on copies and products find it
        self.reading = torch.zeros(elements, dtype=torch.int8)  # products and copies out not waited for
        self.read: dict[int, torch.Tensor] = {}  # partition -> event of its last read
        self.loaded: dict[int, torch.Tensor] = {}  # partition -> event of its fence after its last load
        self.stored = False  # by a partition, at some place, some time


class Shared:
    """A buffer in shared memory, or a part of one."""

    def __init__(self, program: Program, values: torch.Tensor, history: History, name: str) -> None:
        self.program, self.values, self.history, self.name = program, values, history, name
        self._lies: tuple | None = None  # shape, strides and start of `values`, as memory lies

    @classmethod
    def allocate(cls, program: Program, dtype: gl.dtype, shape: list[int]) -> Shared:
        values = torch.zeros(shape, dtype=TORCH[dtype])
        values.fill_(math.nan if dtype.is_floating() else torch.iinfo(values.dtype).max)
        return cls(program, values, History(values.numel()), "shared memory")

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    @property
    def dtype(self) -> gl.dtype:
        return GLUON[self.values.dtype]

    def _view(self, values: torch.Tensor, name: str = "") -> Shared:
        return Shared(self.program, values, self.history, name or self.name)

    def index(self, i: int) -> Shared:
        if not 0 <= i < len(self.values):
            raise IndexError(f"{self.name}: buffer {int(i)} of {len(self.values)}")
        return self._view(self.values[int(i)], f"{self.name}[{int(i)}]")

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        if not 0 <= start <= start + length <= self.values.shape[dim]:
            raise IndexError(f"{self.name}: {int(start)} and {int(length)} more of {self.values.shape[dim]}")
        return self._view(self.values.narrow(int(dim), int(start), int(length)))

    def reshape(self, shape: list[int]) -> Shared:
        return self._view(self.values.view([int(n) for n in shape]))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self._view(self.values.permute(order))

    def _reinterpret(self, dtype: gl.dtype, shape: list[int], layout: object) -> Shared:
        """A buffer under another shape. Which of its elements are where depends on layouts on a GPU, so
        whoever uses both shapes has to order all of it."""
        shape = [int(n) for n in shape]
        if dtype != self.dtype or math.prod(shape) != self.values.numel():
            raise TypeError(f"{self.name}: {self.shape} of {self.dtype} as {shape} of {dtype}")
        return self._view(self.values.view(shape))

    # ------------------------------------------------------------ by the warps themselves

    def load(self, layout: object = None) -> Tensor:
        self.program.machine.pause()
        self._see_writes("a load")
        self._note_read()
        self._of(self._events(self.history.loaded)).fill_(NEVER)
        self.program.current.loads.append(self)
        return Tensor(self.values.clone())

    def store(self, value: Tensor) -> None:
        self.program.machine.pause()
        if list(value.data.shape) != self.shape or value.dtype != self.dtype:
            raise TypeError(f"{self.name}: {self.shape} of {self.dtype}, got {value.shape} of {value.dtype}")
        self._see_writes("a store")
        self._see_reads("a store")
        self.values.copy_(value.data)
        now = self.program.current.now
        self._of(self.history.written).fill_(now)
        self._of(self.history.fenced).fill_(NEVER)
        self.history.stored = True
        self.program.to_fence(_Store(self, now), now)

    # ------------------------------------------------------------ by others: copies and products

    def begin_reading(self, what: str) -> None:
        self._see_writes(what)
        self._see_fence(what)
        self._of(self.history.reading).add_(1)

    def end_reading(self) -> None:
        """The current partition has waited for what read."""
        self._of(self.history.reading).sub_(1)
        self._note_read()

    def begin_writing(self) -> None:
        self._see_writes("a copy")
        self._see_fence("a copy")
        self._see_reads("a copy")
        self._see_fences_after_loads()
        self._of(self.history.written).fill_(NEVER)
        self._of(self.history.fenced).zero_()
        if self.values.is_floating_point():
            self.values.fill_(math.nan)

    def fence_load(self) -> None:
        """The current partition executes a fence after it loaded."""
        fenced = self._of(self._events(self.history.loaded))
        fenced[fenced == NEVER] = self.program.current.now

    def end_writing(self, values: torch.Tensor, landed: int) -> None:
        self.values.copy_(values.view(self.shape))
        self._of(self.history.written).fill_(landed)

    # ------------------------------------------------------------ history

    def _of(self, history: torch.Tensor) -> torch.Tensor:
        """The part of a history that is this buffer's."""
        if self._lies is None:
            values = self.values
            by_stride = sorted(zip(values.stride(), values.shape, strict=True), reverse=True)
            strides, shape = zip(*by_stride, strict=True)
            self._lies = shape, strides, values.storage_offset()
        return history.as_strided(*self._lies)

    def _unseen(self, history: torch.Tensor) -> int | None:
        """An event of this buffer's history that the current partition has not seen."""
        events = self._of(history)
        low, high = (int(x) for x in torch.aminmax(events))
        clock = self.program.current.clock
        return clock.first_unseen([low] if low == high else torch.unique(events).tolist())

    def _events(self, history: dict[int, torch.Tensor]) -> torch.Tensor:
        """Those of the current partition."""
        component = self.program.current.component
        if component not in history:
            history[component] = torch.zeros_like(self.history.written)
        return history[component]

    def _note_read(self) -> None:
        self._of(self._events(self.history.read)).fill_(self.program.current.now)

    def _see_writes(self, what: str) -> None:
        unseen = self._unseen(self.history.written)
        if unseen is None:
            return
        owner = self.program.owners.get(unseen % COMPONENTS)
        how = "a copy writes it" if owner is None else f"{owner} has stored to it"
        raise Race(f"{what} of {self.program.current} touches {self.name}: {how}, which was not waited for")

    def _see_reads(self, what: str) -> None:
        current = self.program.current
        if bool(self._of(self.history.reading).any()):
            raise Race(f"{what} of {current} overwrites {self.name} while a product or copy out reads it")
        for component, events in self.history.read.items():
            if component != current.component and self._unseen(events) is not None:
                reader = self.program.owners[component]
                raise Race(f"{what} of {current} overwrites {self.name}: {reader} has not said that it read")

    def _see_fence(self, what: str) -> None:
        if self.history.stored and self._unseen(self.history.fenced) is not None:
            current = self.program.current
            raise Race(f"{what} of {current} finds {self.name} stored without fence_async_shared")

    def _see_fences_after_loads(self) -> None:
        """A barrier says that a load is over, but does not order it and a copy: a load goes through the
        generic proxy, a copy through the async proxy. So each reader executes a fence between its load and
        its arrival at a barrier. docs/lab/hopper-backward.md has the sources."""
        for component, events in self.history.loaded.items():
            if self._unseen(events) is not None:
                what = f"a copy of {self.program.current} overwrites {self.name}"
                raise Race(f"{what}: {self.program.owners[component]} loaded it without fence_async_shared")


class _Store:
    """Elements that were stored at one time, for a fence to come."""

    def __init__(self, buffer: Shared, when: int) -> None:
        self.buffer, self.when = buffer, when

    def fence(self, event: int) -> None:
        history = self.buffer.history
        still = self.buffer._of(history.written) == self.when  # not what was written since
        self.buffer._of(history.fenced)[still] = event


class Barriers:
    """An array of mbarriers in shared memory."""

    def __init__(self, program: Program, n: int) -> None:
        self.all = [Barrier(program) for _ in range(n)]
        self.shape = [n, 1]

    def named(self, name: str) -> None:
        for i, barrier in enumerate(self.all):
            barrier.name = f"{name}[{i}]"

    def index(self, i: int) -> Barrier:
        if not 0 <= i < len(self.all):
            raise IndexError(f"barrier {int(i)} of {len(self.all)}")
        return self.all[int(i)]


class Descriptor:
    """A tensor in global memory, of which TMA copies blocks; outside of its shape there are zeros."""

    def __init__(self, descriptor) -> None:
        self.memory = storage(descriptor.base)
        self.origin = descriptor.base.storage_offset()
        self.shape = [int(n) for n in descriptor.shape]
        self.strides = [int(n) for n in descriptor.strides]
        self.block_shape = [int(n) for n in descriptor.block_shape]
        self.elements = math.prod(self.block_shape)
        self.dtype = GLUON[descriptor.base.dtype]
        self.layout = descriptor.layout
        self.block_type = gl.block_type(self.dtype, self.block_shape)

    def _box(self, coordinates: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]] | None:
        """(what of a block lies in the tensor, and where in the block), None if there is nothing."""
        if len(coordinates) != len(self.shape):
            raise TypeError(f"expected {len(self.shape)} coordinates, got {len(coordinates)}")
        starts = [max(-int(c), 0) for c in coordinates]
        bounds = zip(self.block_shape, self.shape, coordinates, strict=True)
        ends = [min(n, bound - int(c)) for n, bound, c in bounds]
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        if min(sizes) <= 0:
            return None
        first = sum((int(c) + i) * s for c, i, s in zip(coordinates, starts, self.strides, strict=True))
        # Addresses wrap around, of which packed sequences make use.
        element = self.memory.element_size()
        first = self.origin + ((first * element + 2**63) % 2**64 - 2**63) // element
        last = first + sum((n - 1) * stride for n, stride in zip(sizes, self.strides, strict=True))
        check_inside(self.memory, first, last)
        strides = [stride if n > 1 else 1 for n, stride in zip(sizes, self.strides, strict=True)]
        where = tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))
        return self.memory.as_strided(sizes, strides, first), where

    def read(self, coordinates: list[int]) -> torch.Tensor:
        block = torch.zeros(self.block_shape, dtype=self.memory.dtype)
        found = self._box(coordinates)
        if found is not None:
            block[found[1]] = found[0]
        return block

    def write(self, coordinates: list[int], block: torch.Tensor, added: bool = False) -> None:
        found = self._box(coordinates)
        if found is not None:
            block = block.reshape(self.block_shape)[found[1]]
            found[0].add_(block) if added else found[0].copy_(block)
