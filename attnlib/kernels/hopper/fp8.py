"""FP8 attention in Gluon, for GPUs of compute capability 9.x. Chapter 22 builds it."""

from attnlib.kernels.common.hopper_gpu import unsupported_on as unsupported
from attnlib.kernels.hopper.launch_fp8 import forward

__all__ = ["forward", "unsupported"]
