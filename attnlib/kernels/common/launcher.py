"""Launch a compiled kernel through TMA descriptors with as little Python as it takes.

`compiled[grid](...)` of Triton calls the hooks of profilers even where there are none, with a dictionary made
for them, and unpacks each descriptor through several calls. Where nobody listens, the same launch needs less:
fill the descriptors and call the function in C that Triton built for the kernel.
"""

import inspect
from functools import cache
from typing import NamedTuple

import torch

DIRECT_TRITON = "3.6."
"""The version whose launcher is known here; in another one launches go through `compiled[grid]`."""


class Window(NamedTuple):
    """A tensor as a launch reads it: fields of Triton's TensorDescriptor, without its checks."""

    base: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"  # what lies outside of the tensor reads as 0


def current_stream(device: int) -> int:
    """The handle of PyTorch's current stream, without an object around it; Triton reads it so too."""
    return torch._C._cuda_getCurrentRawStream(device)


class Launcher:
    """A compiled kernel whose first arguments are descriptors."""

    def __init__(self, compiled) -> None:
        self.compiled = compiled
        self._direct = _direct(compiled)

    def launch(
        self, grid: tuple[int, int, int], device: int, tensors: tuple, windows: tuple, rest: tuple
    ) -> None:
        """Run a grid of programs on `device`, the current one.

        windows: (shape, strides) of each of `tensors`, for their descriptors; rest: what follows these.
        """
        if self._direct is None or _observed():
            pairs = zip(tensors, windows, strict=True)
            self.compiled[grid](*(Window(tensor, *window) for tensor, window in pairs), *rest)
        else:
            self._direct(grid, current_stream(device), tensors, windows, rest)


def _observed() -> bool:
    """Whether a profiler has asked to hear of launches."""
    runtime = _triton_knobs().runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@cache
def _triton_knobs():
    """Imported when the first kernel is there: whoever wants Triton's interpreter says so before."""
    from triton import knobs

    return knobs


def _direct(compiled):
    """A function that launches what `compiled[grid](...)` would, or None where it has to be that."""
    import triton

    if not triton.__version__.startswith(DIRECT_TRITON):
        return None
    run, metadata = compiled.run, compiled.metadata
    descriptors = metadata.tensordesc_meta
    if not descriptors or None in descriptors or run.global_scratch_size or run.profile_scratch_size:
        return None  # descriptors that are no TMA descriptors, or memory to allocate for each launch
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    # Triton's Python around the function in C is a closure over it.
    function_in_c = inspect.getclosurevars(run.launch).nonlocals["launcher"]
    fill = triton.runtime.driver.active.utils.fill_tma_descriptor
    forms = [
        (d["swizzle"], d["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[d["elem_type"]], d["block_size"])
        for d in descriptors
    ]
    before = compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None  # no scratch memory
    after = compiled.packed_metadata, None, None, None  # no hooks

    def launch(grid: tuple[int, int, int], stream: int, tensors: tuple, windows: tuple, rest: tuple) -> None:
        arguments = []
        for tensor, form, (shape, strides) in zip(tensors, forms, windows, strict=True):
            arguments += (fill(tensor.data_ptr(), *form, shape, strides, 0), *shape, *strides)
        function_in_c(*grid, stream, *before, *after, *arguments, *rest)

    return launch
