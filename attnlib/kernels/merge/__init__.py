"""Join two parts of a result in one pass over the rows, in plain Triton: attention to disjoint sets of keys,
and parts of a gradient."""

import torch

from attnlib.kernels.common import device
from attnlib.kernels.merge.launch import add, merge

__all__ = ["add", "merge", "unsupported"]


def unsupported(where: torch.device) -> str | None:
    """What the kernels need and a device does not have; None if it has all."""
    if where.type == "cuda" or device.interpreted():
        return None
    return f"needs CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported; q is on {where}"
