"""Add two parts of a gradient in one pass over the rows, in plain Triton."""

import torch

from attnlib.kernels.add.launch import add
from attnlib.kernels.common import device

__all__ = ["add", "unsupported"]


def unsupported(where: torch.device) -> str | None:
    """What the kernels need and a device does not have; None if it has all."""
    return device.unsupported_on(where)
