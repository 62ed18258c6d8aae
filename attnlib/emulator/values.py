"""What a kernel computes with: integers as a GPU has them, tiles in registers, pointers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace

import torch
from triton.experimental.gluon import language as gl

TORCH = {
    gl.float16: torch.float16,
    gl.bfloat16: torch.bfloat16,
    gl.float32: torch.float32,
    gl.float8e4nv: torch.float8_e4m3fn,
    gl.int8: torch.int8,
    gl.int16: torch.int16,
    gl.int32: torch.int32,
    gl.int64: torch.int64,
    gl.uint32: torch.int64,  # torch computes with few operations in uint32
    gl.int1: torch.bool,
}
COMPARISONS = "lt", "le", "gt", "ge", "eq", "ne"
GLUON = {torch_type: gluon_type for gluon_type, torch_type in TORCH.items() if gluon_type != gl.uint32}


class Int(int):
    """An int32, or an int64 if `wide`: divided towards zero, and never silently beyond its range."""

    wide = False

    def __new__(cls, value: int, wide: bool = False) -> Int:
        self = super().__new__(cls, value)
        if wide:
            self.wide = True
        bound = _END_64 if wide else _END_32
        if not -bound <= value < bound:
            raise OverflowError(f"int{64 if wide else 32} overflow: {value}")
        return self

    def to(self, dtype: gl.dtype) -> Int | float:
        return float(self) if dtype.is_floating() else Int(self, dtype == gl.int64)


_END_32, _END_64 = 1 << 31, 1 << 63


def _integer(function: Callable[[int, int], int], swapped: bool = False) -> Callable:
    def method(self: Int, other: object):
        if not isinstance(other, int):
            return NotImplemented
        value = function(other, self) if swapped else function(self, other)
        return Int(value, self.wide or getattr(other, "wide", False))

    return method


def _comparison(function: Callable[[int, int], bool]) -> Callable:
    def method(self: Int, other: object):
        if not isinstance(other, int):
            return NotImplemented
        return _ONE if function(self, other) else _ZERO

    return method


def truncated(a: int, b: int) -> int:
    a, b = int(a), int(b)
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _remainder(a: int, b: int) -> int:
    return int(a) - int(b) * truncated(a, b)


# Those of Python's integers, which do not come back to these.
_PLAIN = "add", "sub", "mul", "and", "or", "xor", "lshift", "rshift"
_INTEGERS = {name: getattr(int, f"__{name}__") for name in _PLAIN}
for _name, _function in (_INTEGERS | {"floordiv": truncated, "mod": _remainder}).items():
    setattr(Int, f"__{_name}__", _integer(_function))
    setattr(Int, f"__r{_name}__", _integer(_function, swapped=True))
_ZERO, _ONE = Int(0), Int(1)  # what a comparison gives has the methods too
for _name in COMPARISONS:
    setattr(Int, f"__{_name}__", _comparison(getattr(int, f"__{_name}__")))
Int.__hash__ = int.__hash__
Int.__neg__ = lambda self: Int(int.__neg__(self), self.wide)


class Tensor:
    """A tile in registers. Layouts are not kept: they say where an element lies, not what it is."""

    type = SimpleNamespace(layout=None)

    def __init__(self, data: torch.Tensor, dtype: gl.dtype | None = None) -> None:
        self.data = data
        self.dtype = GLUON[data.dtype] if dtype is None else dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def to(self, dtype: gl.dtype, bitcast: bool = False) -> Tensor:
        data = self.data
        if bitcast:
            return Tensor(data.view(TORCH[dtype]), dtype)
        if dtype == gl.float8e4nv:  # cvt.rn.satfinite
            data = data.clamp(-448, 448)
        data = data.to(TORCH[dtype])
        return Tensor(data & 0xFFFFFFFF if dtype == gl.uint32 else data, dtype)

    def reshape(self, shape: list[int]) -> Tensor:
        return Tensor(self.data.reshape([int(n) for n in shape]), self.dtype)

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return Tensor(self.data.permute(order), self.dtype)

    def __getitem__(self, key: object) -> Tensor:
        return Tensor(self.data[key], self.dtype)

    def __bool__(self) -> bool:
        raise TypeError("a branch on a tile: only a scalar can be a condition")

    def __neg__(self) -> Tensor:
        return Tensor(-self.data, self.dtype)

    def __invert__(self) -> Tensor:
        return Tensor(~self.data, self.dtype)


def _elementwise(function: Callable, swapped: bool = False, grows: bool = False) -> Callable:
    def method(self: Tensor, other: object) -> Tensor:
        value = plain(other)
        if value is NotImplemented:
            return value
        found = function(value, self.data) if swapped else function(self.data, value)
        if grows and found.dtype == torch.int32:
            wide = self.data.long()
            wide = function(value, wide) if swapped else function(wide, value)
            if not torch.equal(wide, found.long()):
                raise OverflowError(f"int32 overflow in a tile: {int(wide.min())} .. {int(wide.max())}")
        return result(found, self, other)

    return method


def plain(value: object) -> torch.Tensor | int | float:
    """What torch computes with."""
    if isinstance(value, Tensor):
        return value.data
    if isinstance(value, Int):
        return int(value)
    return value if isinstance(value, int | float) else NotImplemented


def result(data: torch.Tensor, *operands: object) -> Tensor:
    """A tile computed from operands; unsigned where one of them is."""
    if data.dtype == torch.int64 and any(getattr(x, "dtype", None) == gl.uint32 for x in operands):
        return Tensor(data & 0xFFFFFFFF, gl.uint32)
    return Tensor(data)


_TILES = {name: getattr(operator, f"__{name}__") for name in _PLAIN} | {
    "truediv": operator.truediv,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "mod": torch.fmod,
}
for _name, _function in _TILES.items():
    _grows = _name in ("add", "sub", "mul")
    setattr(Tensor, f"__{_name}__", _elementwise(_function, grows=_grows))
    setattr(Tensor, f"__r{_name}__", _elementwise(_function, swapped=True, grows=_grows))
for _name in COMPARISONS:
    setattr(Tensor, f"__{_name}__", _elementwise(getattr(operator, _name)))
Tensor.__hash__ = None


class Pointer:
    """An address: a place in the memory of a tensor, or a tile of places."""

    def __init__(self, memory: torch.Tensor, offset: int | Tensor) -> None:
        self.memory = memory  # [elements of the storage]
        self.offset = offset

    @classmethod
    def to_tensor(cls, tensor: torch.Tensor) -> Pointer:
        return cls(storage(tensor), Int(tensor.storage_offset(), wide=True))

    def __add__(self, elements: int | Tensor) -> Pointer:
        if isinstance(elements, Tensor):
            elements = elements.to(gl.int64)
        return Pointer(self.memory, self.offset + elements)

    def to(self, dtype: gl.dtype) -> Pointer:
        """As an integer it stays what it is; as a pointer to int32 it is one to the same words of 32 bits."""
        if dtype == gl.pointer_type(gl.int32):
            assert self.memory.element_size() == 4
            return Pointer(self.memory.view(torch.int32), self.offset)
        assert dtype == gl.int64
        return self

    def places(self, mask: Tensor | None = None) -> torch.Tensor:
        """Offsets of the elements that are wanted; IndexError for one that is outside of the memory."""
        offsets = torch.as_tensor(plain(self.offset))
        if mask is not None:
            offsets = offsets.expand(mask.data.shape)[mask.data]
        return inside(self.memory, offsets)


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """All elements that lie in a tensor's memory, as they lie."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0)


def inside(memory: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    if places.numel():
        check_inside(memory, int(places.min()), int(places.max()))
    return places


def check_inside(memory: torch.Tensor, first: int, last: int) -> None:
    if not 0 <= first <= last < len(memory):
        raise IndexError(f"address outside of its tensor: elements {first} .. {last} of {len(memory)}")
