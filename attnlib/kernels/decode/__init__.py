"""Exact attention of few queries to many keys in a cache, contiguous or in pages, split over the keys; in
plain Triton, for every GPU that it knows, and for its interpreter. `few_queries` is the same as a family of
`attention`."""

from attnlib.kernels.common import device
from attnlib.kernels.decode.launch import forward, prepared
from attnlib.params import DecodeParams

__all__ = ["forward", "prepared", "unsupported"]


def unsupported(q, params: DecodeParams) -> str | None:
    """What the kernels need and a call with valid arguments does not have; None if it has all."""
    return device.unsupported_on(q.device)
