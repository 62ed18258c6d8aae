"""MonarchAttention in plain Triton: an approximation of softmax attention by a product of two block-diagonal
matrices, in N * sqrt(N) time. For every GPU that Triton knows, and for its interpreter."""

from attnlib.kernels.common import device
from attnlib.kernels.monarch.launch import forward
from attnlib.params import MonarchParams

__all__ = ["forward", "unsupported"]


def unsupported(q, params: MonarchParams) -> str | None:
    """What the kernels need and a call with valid arguments does not have; None if it has all."""
    return device.unsupported_on(q.device)
