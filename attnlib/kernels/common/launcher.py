"""One way to launch every kernel: described once for each signature of a call, compiled once for each kind,
and from then on launched in little host time.

`kernel[grid](...)` of Triton binds and hashes every argument at every call, which takes longer than all the
rest. So the first launch of a kind goes that way, and later ones go straight to what it compiled (`direct`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from attnlib.kernels.common import direct
from attnlib.kernels.common.descriptors import Window
from attnlib.kernels.common.device import current_stream, make_context_current
from attnlib.kernels.common.direct import Place
from attnlib.kernels.common.signature import Signature

LIMIT = 2**31  # numbers of blocks, rows and keys are int32
GRID_YZ = 65535  # programs that a grid may have along y and z
FUSED = {"enable_fp_fusion": True}
"""Option of the compiler: a product and a sum in one instruction. Triton 3.10 will do so only where asked."""

_compiled: dict[tuple, Any] = {}
"""The kind of a launch -> the kernel that Triton compiled for it."""
_set_aside: list[dict[tuple, Any]] = []
"""What `replaced` had compiled: from triton 3.8 on a kernel is unloaded with its object, and what was packed
for `direct` may be launched again."""


def check_size(call: Signature, programs: int, work: str = "blocks of rows") -> None:
    """That rows, keys and programs of a launch can be counted in int32. ValueError if they can't. work: what
    a program is for."""
    _, _, _, S_q, S_k = call.dimensions()
    if max(programs, S_q, S_k) >= LIMIT:
        raise ValueError(
            f"q, k: expected fewer than 2^31 rows, keys and {work} over all heads, got {S_q}, {S_k} and "
            f"{programs}"
        )


def compiled_kernels() -> dict[str, list[Any]]:
    """What was compiled in this process so far, as Triton's compiled kernels, by the kernel's name."""
    found: dict[str, list[Any]] = {}
    for (kernel, *_), compiled in _compiled.items():
        found.setdefault(kernel.rpartition(".")[2], []).append(compiled)
    return found


class Part(NamedTuple):
    """A tensor among those of a call: its name, and the element that it begins with."""

    name: str
    start: int = 0


class Descriptor(NamedTuple):
    """A tensor as a kernel gets it through TMA: what one copy moves, and the window that it is cut from.

    layout: how Gluon has it in shared memory; None in plain Triton, whose compiler decides that.
    """

    tensor: Part
    window: Window
    block: tuple[int, ...]
    layout: Any = None


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel with all that it is launched with but the addresses of its tensors.

    Attributes:
        kernel: where it is, such as "attnlib.kernels.portable.forward_kernel.attention_forward".
        grid: how many programs.
        descriptors: name of a parameter -> its descriptor.
        pointers: name of a parameter that is a plain pointer -> its tensor.
        scalars: name -> a number that the compiled code does not depend on.
        constants: name -> what it does depend on.
        options: of the compiler.
    """

    kernel: str
    grid: tuple[int, int, int]
    descriptors: Mapping[str, Descriptor]
    pointers: Mapping[str, Part]
    scalars: Mapping[str, float | None]
    constants: Mapping[str, Any]
    options: Mapping[str, int]

    def kind(self, device: int, tensors: Mapping[str, torch.Tensor | None]) -> tuple:
        """What the compiled code depends on."""
        described = tuple((tensors[d.tensor.name].dtype, d.block) for d in self.descriptors.values())
        pointers = (tensors[part.name] for part in self.pointers.values())
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in pointers)
        forms = tuple(_form(value) for value in self.scalars.values())
        constants, options = tuple(self.constants.items()), tuple(self.options.items())
        return self.kernel, device, described, dtypes, forms, constants, options

    def through_triton(self, tensors: Mapping[str, torch.Tensor | None]) -> Any:
        """Launch it as Triton does; returns what was compiled, None from an interpreter or emulator."""
        module, _, name = self.kernel.rpartition(".")
        kernel = getattr(importlib.import_module(module), name)
        described = {name: _tensor_descriptor(tensors, *d) for name, d in self.descriptors.items()}
        pointers = {name: _from(tensors, part) for name, part in self.pointers.items()}
        options = self.options | FUSED
        return kernel[self.grid](**described, **pointers, **self.scalars, **self.constants, **options)

    def pack(self, compiled: Any, tensors: Mapping[str, torch.Tensor | None]) -> bytes | None:
        """What `direct` launches; None where it can't."""
        if direct.launcher() is None:
            return None
        numbers = {name: number for number, name in enumerate(tensors)}

        def place(part: Part) -> Place:
            tensor = tensors[part.name]
            return Place(numbers[part.name], 0 if tensor is None else part.start * tensor.element_size())

        parts = {name: d.tensor for name, d in self.descriptors.items()} | dict(self.pointers)
        places = {name: place(part) for name, part in parts.items()}
        windows = {name: d.window for name, d in self.descriptors.items()}
        return direct.pack(compiled, self.grid, places, windows | dict(self.scalars))


class Launches:
    """Kernels that a call runs one after the other on one device.

    launches: in order. device: a CUDA device's index, -1 for a CPU. tensors: the names by which the launches
    refer to what each call is given. packed: the bytes that `direct` launches; None before the first call,
    and for launches that have to go through Triton.
    """

    def __init__(self, launches: list[Launch], device: int, tensors: tuple[str, ...]) -> None:
        if len(tensors) > direct.LIMITS["MAX_TENSORS"]:
            raise ValueError(f"tensors: expected at most {direct.LIMITS['MAX_TENSORS']}, got {len(tensors)}")
        self.launches, self.device, self.tensors = launches, device, tensors
        self.packed: bytes | None = None

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch them on the current stream of their device. `tensors` in the order of the names; None for
        what the kernels do without."""
        if self.device >= 0 and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):  # Triton and the driver launch on the current one
                return self(*tensors)
        if self.packed is None or observed():
            self._first(dict(zip(self.tensors, tensors, strict=True)))
        else:
            self._launch_directly(self.packed, tensors)

    def _first(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Launch them, compile what is new, and pack them for `direct`."""
        packed, listened = [], observed()
        for launch in self.launches:
            kind = launch.kind(self.device, tensors)
            compiled = None if listened else _compiled.get(kind)
            description = None if compiled is None else launch.pack(compiled, tensors)
            if description is None:
                if any(tensor is not None and tensor.is_cuda for tensor in tensors.values()):
                    make_context_current()
                compiled = launch.through_triton(tensors)
                if compiled is not None:
                    _compiled[kind] = compiled
                    description = launch.pack(compiled, tensors)
            else:
                self._launch_directly(description, tuple(tensors.values()))
            packed.append(description)
        if None not in packed:
            self.packed = b"".join(packed)

    def _launch_directly(self, descriptions: bytes, tensors: tuple[torch.Tensor | None, ...]) -> None:
        direct.launcher().launch(descriptions, self.device, current_stream(self.device), tensors)


def _form(scalar: float | None) -> str:
    """What of a number the compiled code depends on: whether there is one, and in how many bits it fits."""
    if scalar is None:
        return "none"
    return "wide" if isinstance(scalar, int) and not -LIMIT <= scalar < LIMIT else "given"


def _from(tensors: Mapping[str, torch.Tensor | None], part: Part) -> torch.Tensor | None:
    tensor = tensors[part.name]
    if tensor is None or not part.start:
        return tensor
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in strides)  # that it reaches over, as they lie
    return tensor.as_strided((elements - part.start,), (1,), tensor.storage_offset() + part.start)


def _tensor_descriptor(
    tensors: Mapping[str, torch.Tensor | None], part: Part, window: Window, block: tuple[int, ...], layout
):
    shape, strides = (list(part) for part in window)
    tensor = _from(tensors, part)
    if layout is None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(tensor, shape, strides, list(block))
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(tensor, shape, strides, list(block), layout)


@contextmanager
def through_triton() -> Iterator[None]:
    """Within it launches go through Triton, as they do where a profiler listens: to compare the two ways."""

    def listener(metadata) -> None:
        """Does nothing."""

    hook = _triton_knobs().runtime.launch_enter_hook
    hook.add(listener)
    try:
        yield
    finally:
        hook.remove(listener)


@contextmanager
def replaced(kernel: str, function: Any) -> Iterator[None]:
    """Launches that are prepared within it run `function`, compiled separately, instead of the kernel that
    they name: for ablations. Those prepared before stay as they are."""
    global _compiled
    module, _, name = kernel.rpartition(".")
    owner, before = importlib.import_module(module), _compiled
    original, _compiled = getattr(owner, name), {}
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)
        _set_aside.append(_compiled)
        _compiled = before


def observed() -> bool:
    """Whether a profiler has asked to hear of launches."""
    runtime = _triton_knobs().runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@cache
def _triton_knobs():
    """Imported as late as the first kernel, because Triton's interpreter has to be chosen before."""
    from triton import knobs

    return knobs
