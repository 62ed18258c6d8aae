"""Where kernels in Gluon for Hopper run: on which GPUs, for which dtypes, with which Triton."""

from functools import cache

import torch

from attnlib.kernels.common import device

TRITON = "3.6.", "3.7.", "3.8.", "3.9."
"""The versions whose Gluon the kernels are written for; CONTRIBUTING.md says what was tested with which."""
HALF = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def unsupported_here(q: torch.Tensor) -> str | None:
    """What such kernels need and `q` does not have, apart from its layout: a device and a dtype. None if it
    has all."""
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
        known = f"{TRITON[0]}x to {TRITON[-1]}x"
        return f"needs the Gluon of triton {known}; this is triton {triton.__version__}"
    return None
