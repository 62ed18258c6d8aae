"""Quantizing to float8_e4m3fn in plain Triton: what FP8 attention reads."""

import torch

from attnlib.kernels.common import device
from attnlib.kernels.fp8.launch_quantize import quantize

__all__ = ["quantize", "unsupported"]


def unsupported(where: torch.device) -> str | None:
    """What the kernels need and a device does not have; None if it has all."""
    lacks = device.unsupported_on(where, "x")
    if lacks is not None or device.interpreted():
        return lacks
    major, minor = device.capability(where.index)
    if (major, minor) < (8, 9):
        return f"needs a GPU of compute capability 8.9 or later; {where} has {major}.{minor}"
    return None
