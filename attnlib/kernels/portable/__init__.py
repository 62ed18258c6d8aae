"""Exact attention in plain Triton, for every GPU that Triton knows, and for its interpreter."""

from attnlib.kernels.common import device
from attnlib.kernels.common.backward_plan import BackwardPlan
from attnlib.kernels.common.forward_plan import ForwardPlan
from attnlib.kernels.common.signature import Signature, mean_keys, signature
from attnlib.kernels.portable import launch, launch_backward
from attnlib.kernels.portable.configs import ForwardConfig, forward_config, upwards
from attnlib.kernels.portable.configs_backward import BackwardConfig, backward_config
from attnlib.kernels.portable.launch import forward
from attnlib.kernels.portable.launch_backward import backward
from attnlib.params import Params

__all__ = ["FITS", "backward", "configuration", "forward", "prepare", "slower", "unsupported"]
FITS = "a CUDA GPU, or Triton's interpreter"


def unsupported(q, k, v, params: Params, backward: bool = False) -> str | None:
    """What the kernels need and a call with valid arguments does not have; None if it has all."""
    return device.unsupported_on(q.device)


def slower(q, k, params: Params, backward: bool = False) -> None:
    """Where they run, they are preferred to the reference."""


def configuration(q, k, v, params: Params, backward: bool = False) -> ForwardConfig | BackwardConfig:
    """How the kernels are compiled and launched for queries, keys and values like these: as for the wider
    head dimension."""
    head_dim = max(q.shape[-1], v.shape[-1])
    arch = None if device.interpreted() else device.capability(q.get_device())
    dtype = str(q.dtype).removeprefix("torch.")
    if backward:
        return backward_config(head_dim, dtype, arch)
    _, _, _, S_q, S_k = signature(params, q, k).dimensions()
    config = forward_config(head_dim, dtype, arch, mean_keys(S_q, S_k, params.window))
    return config if params.window.left is None else upwards(config)


def prepare(call: Signature, backward: bool = False) -> ForwardPlan | BackwardPlan | None:
    """The launches of all calls with this signature; None if an input has to be copied."""
    return launch_backward.prepare(call) if backward else launch.prepare(call)
