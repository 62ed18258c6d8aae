"""Inline assembly: the few instructions of PTX that the kernels use, for all threads of a partition at once.

A register is an array with one value for each thread. Threads that have come less far go first.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from attnlib.emulator.barriers import NamedBarrier
from attnlib.emulator.machine import Partition, Work
from attnlib.emulator.values import Pointer, check_inside

ADDRESS = re.compile(r"\[(\S+?)(?: \+ (\d+))?\]")


class Line(NamedTuple):
    """`@guard operation names`, or a label."""

    label: str = ""
    guard: str = ""
    operation: str = ""
    rest: str = ""
    names: tuple[str, ...] = ()


@cache
def parsed(asm: str) -> tuple[Line, ...]:
    lines = []
    inside = asm.strip().startswith("{")  # registers that are declared there end with the braces
    for text in re.split(r";|(?<=:)\s|\{(?=\s*\.reg)", re.sub(r"\}\s*$", "", asm.strip())):
        text = text.strip()
        if not text or (inside and text.startswith(".reg")):
            continue
        if text.endswith(":"):
            lines.append(Line(label=text[:-1]))
            continue
        guard = ""
        if text.startswith("@"):
            guard, text = text[1:].split(maxsplit=1)
        operation, _, rest = text.partition(" ")
        lines.append(Line("", guard, operation, rest, tuple(name.strip() for name in rest.split(","))))
    return tuple(lines)


def _place(lines: tuple[Line, ...], label: str) -> int:
    return next(i for i, line in enumerate(lines) if line.label == label)


def _insert(low: np.ndarray, into: np.ndarray, first: int, bits: int) -> np.ndarray:
    """The lowest bits of one number into another."""
    hole = ((1 << bits) - 1) << first
    return (into & ~hole) | ((low << first) & hole)


def _e4m3x2(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    high, low = (
        torch.from_numpy(np.ascontiguousarray(x, np.float32)).clamp(-448, 448).to(torch.float8_e4m3fn)
        for x in (high, low)
    )
    return (high.view(torch.uint8).long() << 8 | low.view(torch.uint8)).numpy()


def _halves(dtype: torch.dtype) -> Callable:
    """Two numbers rounded to 16 bits, in a word."""

    def pack(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        words = (torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(dtype) for x in (high, low))
        high, low = (word.view(torch.int16).long().numpy() & 0xFFFF for word in words)
        return high << 16 | low

    return pack


def _exp2(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.exp2(x)


def _log2(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log2(x)


def _unordered_above(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return ~(a <= b)


def _butterfly(x: np.ndarray, lanes: np.ndarray, *_) -> np.ndarray:
    """From the thread whose number differs in these bits."""
    return x[np.arange(len(x)) ^ int(lanes)]


def _exp2_of_halves(dtype: torch.dtype) -> Callable:
    """Powers of the two numbers of 16 bits in a word."""

    def exp2(word: np.ndarray) -> np.ndarray:
        halves = torch.from_numpy(np.stack([word & 0xFFFF, word >> 16]).astype(np.uint16).view(np.int16))
        powers = torch.exp2(halves.view(dtype).double()).to(dtype)
        low, high = powers.view(torch.int16).numpy().astype(np.int64) & 0xFFFF
        return high << 16 | low

    return exp2


OPERATIONS: dict[str, Callable] = {
    **dict.fromkeys(["mov.b32", "mov.u32", "mov.u64", "cvt.u64.u32"], lambda a: a),
    "cvt.u32.u64": lambda a: a & 0xFFFFFFFF,
    "and.b32": operator.and_,
    "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
    "shr.b32": operator.rshift,
    "tanh.approx.f32": np.tanh,
    "ex2.approx.f16x2": _exp2_of_halves(torch.float16),
    "ex2.approx.ftz.bf16x2": _exp2_of_halves(torch.bfloat16),
    "shl.b64": lambda a, b: (a << b) & (1 << 63) - 1,
    "bfi.b32": _insert,
    "mul.f32": operator.mul,
    "add.f32": operator.add,
    "sub.f32": operator.sub,
    "max.f32": np.fmax,
    "max.s32": np.maximum,
    "neg.f32": operator.neg,
    "fma.rn.f32": lambda a, b, c: a * b + c,
    "ex2.approx.ftz.f32": _exp2,
    "lg2.approx.ftz.f32": _log2,
    "cvt.rn.f16x2.f32": _halves(torch.float16),
    "cvt.rn.bf16x2.f32": _halves(torch.bfloat16),
    "shfl.sync.bfly.b32": _butterfly,
    "setp.gt.s32": operator.gt,
    "setp.gtu.f32": _unordered_above,
    "setp.gtu.or.f32": lambda a, b, c: _unordered_above(a, b) | c,
    "cvt.rn.satfinite.e4m3x2.f32": _e4m3x2,
    "sub.u32": lambda a, b: (a - b) & 0xFFFFFFFF,
    **dict.fromkeys(["setp.lt.u32", "setp.lt.s32"], operator.lt),
    "setp.nan.f32": lambda a, b: np.isnan(a) | np.isnan(b),
    "setp.eq.b32": operator.eq,
    "setp.ne.b32": operator.ne,
    "setp.ne.or.b32": lambda a, b, c: (a != b) | c,
    "selp.b32": lambda a, b, c: np.where(c, a, b),
    "vote.sync.any.pred": lambda a, mask: np.repeat(a.reshape(-1, 32).any(1), 32),
}


class Threads:
    """Registers of the threads, and which of them execute."""

    def __init__(self, partition: Partition, operands: list[np.ndarray | Pointer], threads: int) -> None:
        self.partition = partition
        self.threads = threads
        self.registers = {f"${i}": value for i, value in enumerate(operands)}
        self.registers["%tid.x"] = np.arange(threads, dtype=np.int64) + partition.first_thread
        self.registers["%smid"] = np.zeros(threads, np.int64)
        self.seen: dict[str, np.ndarray] = {}  # by a load: what it found the last time

    def value(self, name: str):
        if name in self.registers:
            return self.registers[name]
        if name in self.partition.registers:
            return self._declared(name)
        if name in ("%globaltimer", "%clock"):
            now = time.perf_counter_ns()
            return np.full(self.threads, now if name == "%globaltimer" else now & 0xFFFFFFFF)
        if name.startswith("0f"):  # the bits of a float
            return np.uint32(int(name[2:], 16)).view(np.float32)
        try:
            return np.int64(int(name, 0))
        except ValueError:
            raise NameError(f"{self.partition} reads {name}, which nothing has declared") from None

    def set(self, name: str, value) -> None:
        if not self.all_active and not isinstance(value, _Address):
            value = np.where(self.active, value, self.registers.get(name, np.zeros_like(value)))
        if name in self.partition.registers:
            self.partition.registers[name] = value
        else:
            self.registers[name] = value

    def _declared(self, name: str) -> np.ndarray:
        """What a register of the partition has, in all threads or in the one that stands for them."""
        value = self.partition.registers[name]
        if value is None:
            raise ValueError(f"{self.partition} reads {name}, which it has not written")
        if self.threads == 1:
            if (value != value[0]).any():
                raise ValueError(f"{self.partition} reads {name} as a number, but its threads differ in it")
            value = value[:1]
        return value

    def run(self, asm: str) -> None:
        """As long as all threads are at the same line they have one number; see `_apart`."""
        lines, number = parsed(asm), 0
        everyone = np.ones(self.threads, bool)
        while number < len(lines):
            line = lines[number]
            number += 1
            self.active, self.all_active = everyone, True
            if line.guard:
                self.active = self._guarded(line)
                self.all_active = bool(self.active.all())
            if line.operation == "bra":
                target = _place(lines, line.rest)
                if not self.all_active and self.active.any():
                    return self._apart(lines, np.where(self.active, target, number))
                number = target if self.all_active else number
            elif not line.label and (self.all_active or self.active.any()):
                self._execute(line)

    def _apart(self, lines: tuple[Line, ...], at: np.ndarray) -> None:
        """To the end, from the line that each thread has come to."""
        while (number := int(at.min())) < len(lines):
            line, chosen = lines[number], at == number
            at[chosen] += 1
            if line.guard:
                chosen &= self._guarded(line)
            if line.operation == "bra":
                at[chosen] = _place(lines, line.rest)
            elif not line.label and chosen.any():
                self.active, self.all_active = chosen, bool(chosen.all())
                self._execute(line)

    def _guarded(self, line: Line) -> np.ndarray:
        """Threads for which a line's guard holds."""
        return self.value(line.guard.lstrip("!")).astype(bool) ^ line.guard.startswith("!")

    def _execute(self, line: Line) -> None:
        operation, names = line.operation, line.names
        if operation == "red.global.add.v4.f32":
            return self._add(line.rest)
        if operation == "st.global.v4.f32":
            return self._store(line.rest)
        if operation == "red.relaxed.gpu.global.add.u32":
            return self._count(line.rest)
        if operation == "ld.acquire.gpu.global.b32":
            return self._poll(*names)
        if operation == "fence.acq_rel.gpu":
            return self.partition.program.machine.fence_additions()
        if operation == "cp.async.bulk.wait_group" and names == ("0",):
            return self.partition.program.machine.wait_for_landing()
        if operation == "fence.proxy.async.global":  # memory that is added to has one proxy here
            return None
        if operation.startswith("griddepcontrol."):  # launches are emulated one after the other
            return None
        if operation == ".reg":  # outside of braces: of the partition, from here on
            return self._declare(line.rest.split()[-1])
        if operation == "bar.red.or.pred":
            return self._any(*names)
        if operation == "bar.warp.sync":  # the lanes of a warp are here together
            return None
        if operation.startswith("bar."):
            return self._bar(operation, names)
        if operation == "pmevent":
            return None
        if operation == "nanosleep.u32":  # others go on
            return self.partition.program.machine.pause()
        target, *sources = names
        if operation == "elect.sync":  # all threads of a warp are here, and the first is chosen
            lane, chosen = target.split("|")
            self.set(lane, np.zeros(self.threads, np.int64))
            return self.set(chosen, np.arange(self.threads) % 32 == 0)
        if operation == "mov.b32" and len(sources) == 2:  # of two halves
            low, high = (self.value(name.strip("{ }")) for name in sources)
            return self.set(target, high << 16 | low)
        values = [self.value(name) for name in sources]
        if operation == "add.s64" and isinstance(values[1], Pointer):
            self.set(target, _Address(values[1], values[0]))
        elif operation in OPERATIONS:
            self.set(target, OPERATIONS[operation](*values))
        else:
            raise NotImplementedError(f"the emulator does not know {operation} {line.rest}")
        return None

    def _bar(self, operation: str, names: tuple[str, ...]) -> None:
        number, threads = int(np.ravel(self.value(names[0]))[0]), int(names[1])
        if not 0 <= number < 16:
            raise IndexError(f"barrier {number} of 16")
        barrier = self.partition.program.named.setdefault(number, NamedBarrier(number))
        if operation == "bar.sync":
            barrier.sync(self.partition, threads)
        else:
            barrier.arrive(self.partition, threads)
            self.partition.program.machine.pause()

    def _declare(self, name: str) -> None:
        if name in self.partition.registers:
            raise NameError(f"{self.partition} declares {name} twice")
        self.partition.registers[name] = None

    def _any(self, target: str, number: str, threads: str, source: str) -> None:
        """Meet at a barrier, which tells all whether one has said yes."""
        if int(threads) != self.threads:
            raise NotImplementedError(f"the emulator knows bar.red of one partition alone, got {threads}")
        self._bar("bar.sync", (number, threads))
        self.set(target, np.full(self.threads, bool(self.value(source).any())))

    def _add(self, operands: str) -> None:
        self.partition.program.machine.add_to_memory(_Addition(*self._vectors(operands)))

    def _store(self, operands: str) -> None:
        address, *rest = self._vectors(operands)
        address.write(*rest, added=False)

    def _vectors(self, operands: str) -> tuple[_Address, int, np.ndarray, np.ndarray]:
        """(address, bytes beyond it, [threads, 4] values, the threads that act)."""
        name, constant = ADDRESS.search(operands).groups()
        sources = re.findall(r"\$\d+", operands[operands.index("{") :])
        values = np.stack([self.value(source) for source in sources], 1)
        return self.value(name), int(constant or 0), values, self.active

    def _words(self, operand: str) -> tuple[np.ndarray, np.ndarray]:
        address = self.value(ADDRESS.search(operand).group(1))
        if isinstance(address, Pointer):
            address = _Address(address, np.zeros(self.threads, np.int64))
        return address.words(self.active)

    def _count(self, operands: str) -> None:
        address, number = (part.strip() for part in operands.split(","))
        words, places = self._words(address)
        self.partition.program.machine.pause()
        np.add.at(words, places, int(number))

    def _poll(self, target: str, operand: str) -> None:
        """A load of what others count. One that comes again, in a loop, waits for something else; where
        nobody is left who could change it, that is a deadlock."""
        words, places = self._words(operand)
        before = self.seen.get(operand)

        def changed() -> bool:
            return before is None or not np.array_equal(words[places], before)

        def what() -> str:
            return f"word {int(places[0])} of global memory, which is {int(words[places[0]])}"

        self.partition.program.machine.wait(changed, what)
        self.seen[operand] = words[places]
        found = np.zeros(self.threads, np.int64)
        found[self.active] = self.seen[operand]
        self.set(target, found)


class _Address:
    """An address for each thread: bytes beyond a pointer."""

    def __init__(self, pointer: Pointer, offset: np.ndarray) -> None:
        self.memory, self.start, self.offset = pointer.memory, int(pointer.offset), offset

    def words(self, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Memory as 32-bit words, and the one of each active thread."""
        places = self.start + self.offset[active] // self.memory.element_size()
        check_inside(self.memory, int(places.min()), int(places.max()))
        return self.memory.view(torch.int32).numpy(), places

    def write(self, constant: int, values: np.ndarray, active: np.ndarray, added: bool = True) -> None:
        """Add neighboring values, as many as a row of `values` has, or put them there, for each active
        thread."""
        offset, size = self.offset + constant, self.memory.element_size()
        if ((self.start * size + offset) % (size * values.shape[1])).any():
            raise IndexError("a vector at an address that is not a multiple of its size")
        first, n = self.start + offset[active] // size, values.shape[1]
        values = values[active].astype(np.float32)
        if not len(first):
            return
        check_inside(self.memory, int(first.min()), int(first.max()) + n - 1)
        if (first == first[0] + n * np.arange(len(first))).all():  # threads follow each other
            places = slice(first[0], first[0] + values.size)
        else:
            places = (first[:, None] + np.arange(n)).ravel()
        if not added:
            self.memory.numpy()[places] = values.ravel()
        elif isinstance(places, slice):
            self.memory.numpy()[places] += values.ravel()
        else:
            np.add.at(self.memory.numpy(), places, values.ravel())


class _Addition(Work):
    def __init__(self, address: _Address, constant: int, values: np.ndarray, active: np.ndarray) -> None:
        super().__init__()
        self.given = address, constant, values, active

    def do(self) -> None:
        address, *rest = self.given
        address.write(*rest)


# ---------------------------------------------------------------- which thread has which element


@cache
def elements_of_threads(shape: tuple[int, ...]) -> np.ndarray:
    """[128, elements of a thread], numbers of elements in a tile of a warpgroup.

    [64, N]: an accumulator of wgmma, in the order of registers. [64]: a value for each of its rows. [64, 4]:
    a value for each row and each of the threads that share it. [64, n, 4]: n of these.
    """
    t = np.arange(128)[:, None]
    row = 16 * (t // 32) + t % 32 // 4
    if len(shape) == 1:
        return row + 8 * np.arange(2)[None, :]
    if len(shape) == 3:
        register = np.arange(2 * shape[1])[None, :]
        return ((row + 8 * (register % 2)) * shape[1] + register // 2) * 4 + t % 4
    if shape[1] == 4:
        return (row + 8 * np.arange(2)[None, :]) * 4 + t % 4
    register = np.arange(shape[1] // 2)[None, :]
    column = 8 * (register // 4) + 2 * (t % 4) + register % 2
    return (row + 8 * (register // 2 % 2)) * shape[1] + column
