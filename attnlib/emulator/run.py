"""From a kernel and its arguments to a run: the kernel's Python functions, with other globals."""

from __future__ import annotations

import builtins
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from itertools import product
from types import FunctionType, ModuleType, SimpleNamespace

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma as gluon_tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import is_builtin
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction

from attnlib.emulator.cores import on_one_core
from attnlib.emulator.language import Language, named
from attnlib.emulator.machine import Machine, Order, Program
from attnlib.emulator.memory import Descriptor
from attnlib.emulator.values import Int, Pointer
from attnlib.kernels.common import tma


@dataclass(frozen=True)
class Report:
    """What a run came across that is no error.

    unwaited: (program, barrier, phase) that completed without anybody waiting for it.
    """

    unwaited: tuple[tuple[int, str, int], ...]


@on_one_core()
def run(
    kernel: JITFunction,
    grid: Iterable[int],
    *args,
    order: Order = "random",
    seed: int = 0,
    sms: int = 2,
    num_warps: int = 4,
    in_order: bool = False,
    **kwargs,
) -> Report:
    """Run the programs of a grid in an order drawn from `seed`, `sms` of them at a time. `in_order`: programs
    start in the order of their numbers, as on a GPU, for those that wait for each other; see `machine`.

    Arguments are those of `kernel[grid](...)`, with CPU tensors. `order`: see `machine`. Raises `Race`,
    `Deadlock`, and whatever else goes wrong.
    """
    grid = (*grid, 1, 1)[:3]
    rng = random.Random(seed)
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    places = list(product(*map(range, grid)))
    if in_order:  # `product` has the last of the three numbers first
        places.sort(key=lambda place: place[::-1])
    else:
        rng.shuffle(places)
    unwaited = []
    for start in range(0, len(places), sms):
        machine = Machine(order, rng, in_order)
        programs = []
        for place in places[start : start + sms]:
            program = Program(machine, place[0] + grid[0] * (place[1] + grid[1] * place[2]))
            translation = _Translation(Language(program, place, grid))
            function = translation.function(kernel)
            given = {name: value for name, value in values.items() if name in kernel.arg_names}
            arguments = {name: _argument(value, translation) for name, value in given.items()}
            name = named(function, 0, num_warps)
            program.start(name, 0, num_warps, lambda f=function, a=arguments: f(**a))
            programs.append(program)
        machine.run()
        unwaited += [
            (program.number, barrier.name, phase)
            for program in programs
            for barrier in program.barriers
            for phase in sorted(set(range(barrier.phase)) - barrier.waited)
        ]
    return Report(tuple(unwaited))


class Emulated:
    """Takes the place of a kernel: `kernel[grid](...)` runs in the emulator and compiles nothing."""

    def __init__(
        self, kernel: JITFunction, order: Order = "random", seed: int = 0, sms: int = 2,
        in_order: bool = False,
    ) -> None:  # fmt: skip
        self.kernel = kernel
        self.options = {"order": order, "seed": seed, "sms": sms, "in_order": in_order}
        self.reports: list[Report] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*args, maxnreg: int | None = None, num_stages: int | None = None, **kwargs) -> None:
            self.reports.append(run(self.kernel, grid, *args, **self.options, **kwargs))

        return launch


def _argument(value, translation: _Translation):
    if isinstance(value, JITFunction | InterpretedFunction):  # of a kernel's caller
        return translation.function(value)
    if isinstance(value, TensorDescriptor):
        return Descriptor(value)
    if isinstance(value, torch.Tensor):
        return Pointer.to_tensor(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return Int(value)
    return _unwrapped(value)


def _unwrapped(value):
    """Without the compiler's wrapping of constants, of a dataclass in every attribute."""
    if isinstance(value, gl.constexpr):
        return _unwrapped(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        names = [field.name for field in fields(kind)]
        names += [name for name in dir(kind) if isinstance(getattr(kind, name), property | gl.constexpr)]
        return SimpleNamespace(**{name: _unwrapped(getattr(value, name)) for name in names})
    return value


def _range(*bounds: int) -> Iterator[Int]:
    return map(Int, range(*bounds))


class _Translation:
    """The functions of kernels with the emulator's language instead of Gluon's."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self.functions: dict[int, FunctionType] = {}
        self.globals: dict[int, dict] = {}

    def function(self, kernel: JITFunction | InterpretedFunction) -> FunctionType:
        python = kernel.fn
        if id(python) not in self.functions:
            own = self.globals.setdefault(id(python.__globals__), {"__builtins__": builtins, "range": _range})
            defaults = tuple(_unwrapped(x) for x in python.__defaults__ or ())
            translated = FunctionType(python.__code__, own, python.__name__, defaults, python.__closure__)
            self.functions[id(python)] = translated
            for name in python.__code__.co_names:
                if name in python.__globals__ and name not in own:
                    own[name] = self.value(name, python.__globals__[name])
        return self.functions[id(python)]

    def value(self, name: str, value):
        if value is gl or value is tl:  # tl: in a function of a kernel's caller
            return self.language.gl
        if value is tma or value is gluon_tma:
            return self.language.tma
        if value is mbarrier:
            return self.language.mbarrier
        if isinstance(value, JITFunction | InterpretedFunction):
            return self.function(value)
        if isinstance(value, ConstexprFunction):  # what it gives may be a plan of constants
            return lambda *given: _unwrapped(value.fn(*given))
        if name in self.language.hopper and is_builtin(value):
            return self.language.hopper[name]
        if isinstance(value, ModuleType):
            return _Module(value, self)
        return _unwrapped(value)


class _Module:
    """A module of kernels that another one refers to by its name."""

    def __init__(self, module: ModuleType, translation: _Translation) -> None:
        self._module, self._translation = module, translation

    def __getattr__(self, name: str):
        return self._translation.value(name, getattr(self._module, name))
