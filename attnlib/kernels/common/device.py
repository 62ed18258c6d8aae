"""Where kernels run: the interpreter or a GPU, and which one."""

from functools import cache

import torch

H200_BANDWIDTH, SLOW_MEMORY = 37.0, 30.0
"""GB/s of memory for each multiprocessor: of an H200; and between that and an H100's, 25."""


@cache
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def capability(device: int) -> tuple[int, int]:
    """CUDA compute capability of a device, such as (9, 0)."""
    return torch.cuda.get_device_capability(device)


@cache
def num_sms(device: int) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def memory_gb_per_s(device: int) -> float:
    """Peak bandwidth of a device's memory, by its clock and the width of its bus: 3352 of an H100 with HBM3,
    4917 of an H200."""
    found = torch.cuda.get_device_properties(device)
    return 2 * found.memory_clock_rate * found.memory_bus_width / 8 * 1e-6  # kHz, two words a clock


def bandwidth(device: int) -> float:
    """GB/s of memory for each multiprocessor of a device; an H200's where kernels are interpreted."""
    if device < 0 or interpreted():
        return H200_BANDWIDTH
    return memory_gb_per_s(device) / num_sms(device)


def unsupported_on(where: torch.device, name: str = "q") -> str | None:
    """What kernels in plain Triton need and the device of a tensor does not have; None if it has all."""
    if where.type == "cuda" or interpreted():
        return None
    return f"needs CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported; {name} is on {where}"


def widened(dtype: torch.dtype) -> bool:
    """Whether kernels are given float32 instead: bfloat16 in the interpreter of triton 3.6, whose dot product
    is wrong there and whose conversion rounds toward zero."""
    return dtype == torch.bfloat16 and interpreted()


def capturing(device: int) -> bool:
    """Whether a CUDA graph is being captured on the device's current stream."""
    if device == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def overlaps(device: int) -> bool:
    """Whether a launch may begin before the one ahead of it is done, and wait for it: from Hopper on."""
    return device >= 0 and not interpreted() and capability(device)[0] >= 9


def begins_early(yes: bool) -> dict[str, bool]:
    """The option of a launch that may begin before the one ahead of it is done, or none."""
    return {"launch_pdl": True} if yes else {}


def current_stream(device: int) -> int:
    """The handle of PyTorch's current stream, without an object around it; Triton reads it so too."""
    return torch._C._cuda_getCurrentRawStream(device)


def make_context_current() -> None:
    """Give this thread PyTorch's CUDA context if it has none: threads begin without one, autograd's too, and
    Triton describes tensors to the copy engine before it asks for a context. Nothing is launched, and a CUDA
    graph may be under capture."""
    torch.cuda.is_current_stream_capturing()
