"""The portable family under a block mask: for every GPU that Triton knows, and for its interpreter."""

from attnlib.kernels.common import device
from attnlib.kernels.common.backward_plan import BackwardPlan
from attnlib.kernels.common.signature import Signature
from attnlib.kernels.sparse import launch_backward, launch_forward
from attnlib.kernels.sparse.configs import (
    SparseBackwardConfig,
    SparseTile,
    sparse_backward_config,
    sparse_forward_config,
)
from attnlib.kernels.sparse.launch_backward import backward
from attnlib.kernels.sparse.launch_forward import forward
from attnlib.params import Params

__all__ = ["FITS", "backward", "configuration", "forward", "prepare", "slower", "unsupported"]
FITS = "a CUDA GPU, or Triton's interpreter"


def unsupported(q, k, v, params: Params, backward: bool = False) -> str | None:
    """What the kernels need and a call with valid arguments does not have; None if it has all."""
    score = params.score
    added = score is not None and score.bias_gradient and score.places_shared
    if backward and params.deterministic and added:
        return (
            "adds up the gradient of a bias that queries or keys share in an order that changes; "
            "deterministic=True is asked for"
        )
    return device.unsupported_on(q.device)


def slower(q, k, params: Params, backward: bool = False) -> None:
    """Where they run, they are preferred to the reference."""


def configuration(q, k, v, params: Params, backward: bool = False) -> SparseTile | SparseBackwardConfig:
    """How the kernels are compiled and launched for queries and keys like these."""
    arch = None if device.interpreted() else device.capability(q.get_device())
    dtype = str(q.dtype).removeprefix("torch.")
    return (sparse_backward_config if backward else sparse_forward_config)(q.shape[-1], dtype, arch)


def prepare(call: Signature, backward: bool = False) -> launch_forward.Plan | BackwardPlan | None:
    """The launches of all calls with this signature; None if an input has to be copied."""
    return launch_backward.prepare(call) if backward else launch_forward.prepare(call)
