"""alpha-entmax attention (AdaSplash, arXiv 2502.12082) in plain Triton, for every GPU that it knows, and for
its interpreter. Scores that are low enough get no weight at all, and the work after the first two passes over
Q K^T goes by the keys that have some."""

from attnlib.kernels.common import device
from attnlib.kernels.entmax.call import flags_size
from attnlib.kernels.entmax.launch import forward
from attnlib.kernels.entmax.launch_backward import backward

__all__ = ["backward", "flags_size", "forward", "unsupported"]


def unsupported(q) -> str | None:
    """What the kernels need and a call with valid arguments does not have; None if it has all."""
    return device.unsupported_on(q.device)
