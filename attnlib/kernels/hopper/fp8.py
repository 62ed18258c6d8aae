"""FP8 attention in Gluon, for GPUs of compute capability 9.x."""

from attnlib.kernels.hopper.launch_fp8 import forward
from attnlib.kernels.hopper.support import unsupported_on as unsupported

__all__ = ["forward", "unsupported"]
