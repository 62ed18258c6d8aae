"""DistrAttention's grouping of columns in plain Triton: what its product reads."""

from attnlib.kernels.distr.launch_group import group

__all__ = ["group"]
