"""What the Hopper kernels need, and which calls others compute faster."""

from functools import cache

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.descriptors import describable
from attnlib.kernels.common.tiles import tile_width
from attnlib.params import Params

TRITON = "3.6."
"""The version whose Gluon the kernels are written in."""
HALF = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
SHORT_FORWARD, SHORT_BACKWARD = {64: 64, 128: 64}, {64: 256, 128: 128}
"""Width of a tile -> sequences of up to so many rows and keys run in the portable kernels: a program of the
Hopper kernels has an SM for itself, and little to do between its beginning and its end. The times are in
docs/lab/hopper.md and docs/lab/hopper-backward.md."""


def unsupported(q, k, v, params: Params, backward: bool = False) -> str | None:
    """What the kernels need and a call with valid arguments does not have; None if it has all.

    The backward pass copies layouts that TMA can't read, and sums dQ in an order that changes.
    """
    lacks = unsupported_here(q)
    if lacks is not None:
        return lacks
    if backward:
        if params.deterministic:
            return "adds up dq in an order that changes; deterministic=True is asked for"
        return None
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not describable(tensor):
            return (
                f"needs layouts that TMA can read (last dimension contiguous, the address and other strides "
                f"positive multiples of 16 bytes); {name} has strides {tuple(tensor.stride())} and "
                f"address {tensor.data_ptr() % 16} mod 16"
            )
    return None


def unsupported_here(q: torch.Tensor) -> str | None:
    """The same for what does not depend on layouts: where `q` is, and of what dtype."""
    lacks = unsupported_on(q.device)
    if lacks is None and q.dtype not in HALF:
        return f"needs float16 or bfloat16; q is {str(q.dtype).removeprefix('torch.')}"
    return lacks


def unsupported_on(where: torch.device) -> str | None:
    """The same for what depends on the device of `q` alone."""
    if where.type != "cuda":
        return f"needs CUDA tensors; q is on {where}"
    if device.interpreted():
        return "needs compiled kernels; TRITON_INTERPRET=1 is set, and Gluon has no interpreter"
    major, minor = device.capability(where.index)
    if major != 9:
        return f"needs a GPU of compute capability 9.x; {where} has {major}.{minor}"
    return _gluon_amiss()


@cache
def _gluon_amiss() -> str | None:
    """What is wrong with this Triton's Gluon, which is experimental and changes from version to version."""
    import triton

    if not triton.__version__.startswith(TRITON):
        return f"needs the Gluon of triton {TRITON}x; this is triton {triton.__version__}"
    return None


def slower(q, k, params: Params, backward: bool = False) -> str | None:
    """Why another family is faster for sequences as short as these; None if none is."""
    rows, keys = (q.shape[2], k.shape[2]) if params.varlen is None else params.varlen[2:]
    limits, width = SHORT_BACKWARD if backward else SHORT_FORWARD, tile_width(q.shape[-1])
    if width not in limits or max(rows, keys) > limits[width]:
        return None
    return f"is slower for sequences of at most {limits[width]} rows and keys, with D at most {width}"
