"""Join attention to two disjoint sets of keys, in plain Triton, in one pass over the rows."""

import torch

from attnlib.kernels.common import device
from attnlib.kernels.merge.launch import merge

__all__ = ["merge", "unsupported"]


def unsupported(where: torch.device) -> str | None:
    """What the kernel needs and a device does not have; None if it has all."""
    if where.type == "cuda" or device.interpreted():
        return None
    return f"needs CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported; q is on {where}"
