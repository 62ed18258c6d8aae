"""Where kernels run: the interpreter or a GPU, and which one."""

from functools import cache

import torch


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


def overlaps(device: int) -> bool:
    """Whether a launch may begin before the one ahead of it is done, and wait for it: from Hopper on."""
    return device >= 0 and not interpreted() and capability(device)[0] >= 9


def current_stream(device: int) -> int:
    """The handle of PyTorch's current stream, without an object around it; Triton reads it so too."""
    return torch._C._cuda_getCurrentRawStream(device)


def make_context_current() -> None:
    """Give this thread PyTorch's CUDA context if it has none: threads begin without one, autograd's too, and
    Triton describes tensors to the copy engine before it asks for a context. Nothing is launched, and a CUDA
    graph may be under capture."""
    torch.cuda.is_current_stream_capturing()
