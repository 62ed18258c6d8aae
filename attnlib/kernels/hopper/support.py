"""What the Hopper kernels need, and for which calls other kernels are faster."""

from attnlib.kernels.common import hopper_gpu
from attnlib.kernels.common.descriptors import describable
from attnlib.kernels.common.tiles import tile_width
from attnlib.params import Params

SHORT_FORWARD, SHORT_BACKWARD, SHORT_BACKWARD_VARLEN = 64, 128, 64
"""Sequences of up to so many rows and keys run in the portable kernels: a program of the Hopper kernels has
an SM for itself, and little to do between its beginning and its end. The times are in docs/lab/hopper.md and
docs/lab/hopper-backward.md."""
WIDEST = 128
"""Columns of a tile, up to which they do."""


def unsupported(q, k, v, params: Params, backward: bool = False) -> str | None:
    """What the kernels need and a call with valid arguments does not have; None if it has all.

    The backward pass copies layouts that TMA can't read.
    """
    lacks = hopper_gpu.unsupported_here(q)
    if lacks is not None:
        return lacks
    if backward:
        return None
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not describable(tensor):
            return (
                f"needs layouts that TMA can read (last dimension contiguous, the address and other strides "
                f"positive multiples of 16 bytes); {name} has strides {tuple(tensor.stride())} and "
                f"address {tensor.data_ptr() % 16} mod 16"
            )
    return None


def slower(q, k, params: Params, backward: bool = False) -> str | None:
    """Why another family is faster for sequences as short as these; None if none is."""
    rows, keys = (q.shape[2], k.shape[2]) if params.varlen is None else params.varlen[2:]
    of_backward = SHORT_BACKWARD if params.varlen is None else SHORT_BACKWARD_VARLEN
    limit, width = of_backward if backward else SHORT_FORWARD, tile_width(q.shape[-1])
    if width > WIDEST or max(rows, keys) > limit:
        return None
    return f"is slower for sequences of at most {limit} rows and keys, with D at most {width}"
