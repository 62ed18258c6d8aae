"""BSFA for Hopper, in Gluon."""

from attnlib.kernels.bsfa.launch_hopper import forward
from attnlib.kernels.common import hopper_gpu
from attnlib.kernels.common.descriptors import describable
from attnlib.params import BsfaParams

__all__ = ["forward", "unsupported"]


def unsupported(q, k, v, params: BsfaParams) -> str | None:
    """What the kernel needs and a call with valid arguments does not have; None if it has all."""
    lacks = hopper_gpu.unsupported_here(q)
    if lacks is not None:
        return lacks
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not describable(tensor):
            return f"needs layouts that TMA can read; {name} has strides {tuple(tensor.stride())}"
    return None
