"""Shared memory, and the tensors that TMA copies from and to."""

from __future__ import annotations

import math

import torch
from triton.experimental.gluon import language as gl

from attnlib.emulator.machine import Barrier, Machine, Race
from attnlib.emulator.values import GLUON, TORCH, Tensor, inside, storage

NOTHING, LANDING, UNFENCED = 0, 1, 2  # what is the matter with an element
ALL = slice(None)


class Shared:
    """A buffer in shared memory, or a part of one.

    Three tensors of its shape: the values; the state of each, see above; how many read it, products and
    copies out that were started and are not over.
    """

    def __init__(
        self, machine: Machine, values: torch.Tensor, state: torch.Tensor, readers: torch.Tensor, name: str
    ) -> None:
        self.machine, self.values, self.state, self.readers, self.name = machine, values, state, readers, name

    @classmethod
    def allocate(cls, machine: Machine, dtype: gl.dtype, shape: list[int]) -> Shared:
        values = torch.empty(shape, dtype=TORCH[dtype])
        values.fill_(math.nan if dtype.is_floating() else torch.iinfo(values.dtype).max)
        flags = torch.zeros(shape, dtype=torch.int8)
        return cls(machine, values, flags, flags.clone(), "shared memory")

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    @property
    def dtype(self) -> gl.dtype:
        return GLUON[self.values.dtype]

    def _view(self, function) -> Shared:
        views = (function(x) for x in (self.values, self.state, self.readers))
        return Shared(self.machine, *views, self.name)

    def index(self, i: int) -> Shared:
        if not 0 <= i < len(self.values):
            raise IndexError(f"{self.name}: buffer {int(i)} of {len(self.values)}")
        view = self._view(lambda x: x[int(i)])
        view.name = f"{self.name}[{int(i)}]"
        return view

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        if not 0 <= start <= start + length <= self.values.shape[dim]:
            raise IndexError(f"{self.name}: {int(start)} and {int(length)} more of {self.values.shape[dim]}")
        return self._view(lambda x: x.narrow(int(dim), int(start), int(length)))

    def reshape(self, shape: list[int]) -> Shared:
        return self._view(lambda x: x.view([int(n) for n in shape]))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self._view(lambda x: x.permute(order))

    # ------------------------------------------------------------ by the warps themselves

    def load(self, layout: object = None) -> Tensor:
        self.machine.pause()
        self._not_landing("a load")
        return Tensor(self.values.clone())

    def store(self, value: Tensor) -> None:
        self.machine.pause()
        self._not_landing("a store")
        self._not_read("a store")
        if list(value.data.shape) != self.shape or value.dtype != self.dtype:
            raise TypeError(f"{self.name}: {self.shape} of {self.dtype}, got {value.shape} of {value.dtype}")
        self.values.copy_(value.data)
        self.state.fill_(UNFENCED)
        self.machine.current.unfenced.append(self.state)

    # ------------------------------------------------------------ by others: copies and products

    def begin_reading(self, what: str) -> None:
        self._not_landing(what)
        if bool((self.state == UNFENCED).any()):
            raise Race(f"{what} reads {self.name}, stored without fence_async_shared")
        self.readers += 1

    def end_reading(self) -> torch.Tensor:
        self.readers -= 1
        return self.values

    def begin_writing(self) -> None:
        self._not_landing("a copy")
        self._not_read("a copy")
        self.state.fill_(LANDING)
        if self.values.is_floating_point():
            self.values.fill_(math.nan)

    def end_writing(self, values: torch.Tensor) -> None:
        self.values.copy_(values.view(self.shape))
        self.state.fill_(NOTHING)

    def _not_landing(self, what: str) -> None:
        if bool((self.state == LANDING).any()):
            raise Race(f"{what} of {self.machine.current} touches {self.name} while a copy writes it")

    def _not_read(self, what: str) -> None:
        if bool(self.readers.any()):
            raise Race(f"{what} of {self.machine.current} overwrites {self.name} while it is read")


class Barriers:
    """An array of mbarriers in shared memory."""

    def __init__(self, machine: Machine, n: int) -> None:
        self.all = [Barrier(machine) for _ in range(n)]

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
        self.dtype = GLUON[descriptor.base.dtype]
        self.layout = descriptor.layout
        self.block_type = gl.block_type(self.dtype, self.block_shape)

    def _places(self, coordinates: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(elements of the memory, whether they belong to the tensor), in the shape of a block."""
        if len(coordinates) != len(self.shape):
            raise TypeError(f"expected {len(self.shape)} coordinates, got {len(coordinates)}")
        # Addresses wrap around, of which packed sequences make use.
        start = self.origin + sum(int(c) * s for c, s in zip(coordinates, self.strides, strict=True))
        size = self.memory.element_size()
        start = ((start * size + 2**63) % 2**64 - 2**63) // size
        places = torch.full(self.block_shape, start)
        valid = torch.ones(self.block_shape, dtype=torch.bool)
        for i, (n, first, bound, stride) in enumerate(
            zip(self.block_shape, coordinates, self.shape, self.strides, strict=True)
        ):
            along = [1] * len(self.shape)
            along[i] = n
            numbers = torch.arange(n)
            if n > 1:
                places += (numbers * stride).view(along)
            valid &= ((numbers + int(first) >= 0) & (numbers + int(first) < bound)).view(along)
        return places, valid

    def read(self, coordinates: list[int]) -> torch.Tensor:
        places, valid = self._places(coordinates)
        block = torch.zeros(self.block_shape, dtype=self.memory.dtype)
        block[valid] = self.memory[inside(self.memory, places[valid])]
        return block

    def write(self, coordinates: list[int], block: torch.Tensor) -> None:
        places, valid = self._places(coordinates)
        self.memory[inside(self.memory, places[valid])] = block.reshape(self.block_shape)[valid]
