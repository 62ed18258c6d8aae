"""BSFA in plain Triton, for every GPU that it knows, and for its interpreter; and what thresholds are made
from."""

from attnlib.kernels.bsfa.launch import forward, maxima
from attnlib.kernels.common import device
from attnlib.params import BsfaParams

__all__ = ["forward", "maxima", "unsupported"]


def unsupported(q, k, v, params: BsfaParams) -> str | None:
    """What the kernels need and a call with valid arguments does not have; None if it has all."""
    return device.unsupported_on(q.device)
