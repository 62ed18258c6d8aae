"""Exact attention in Gluon, for GPUs of compute capability 9.x. Chapters 10 to 15 build the forward kernel,
chapter 20 derives the backward pass, and chapter 21 builds its kernels."""

from dataclasses import replace

from attnlib.kernels.common import device
from attnlib.kernels.common.backward_plan import BackwardPlan
from attnlib.kernels.common.forward_plan import ForwardPlan
from attnlib.kernels.common.signature import Signature, mean_keys, signature
from attnlib.kernels.hopper import launch, launch_backward
from attnlib.kernels.hopper.configs import HopperConfig, hopper_config, own_values_config
from attnlib.kernels.hopper.configs_backward import (
    HopperBackwardConfig,
    hopper_backward_config,
    own_values_backward_config,
)
from attnlib.kernels.hopper.launch import forward
from attnlib.kernels.hopper.launch_backward import backward
from attnlib.kernels.hopper.sharing import visited_by_staying
from attnlib.kernels.hopper.support import slower, unsupported
from attnlib.params import Params

__all__ = ["FITS", "backward", "configuration", "forward", "prepare", "slower", "unsupported"]
FITS = "compute capability 9.x, a half precision, layouts that TMA can read"


def configuration(
    q, k, v, params: Params, backward: bool = False
) -> HopperConfig | HopperBackwardConfig:
    """How the kernels are compiled and launched for queries, keys and values like these; varlen sequences
    count as the longest."""
    own_values = v.shape[-1] != q.shape[-1]
    if backward and own_values:
        how = params.deterministic, params.varlen is not None
        return own_values_backward_config(q.shape[-1], v.shape[-1], *how)
    if own_values:
        return own_values_config(q.shape[-1], v.shape[-1])
    B, H, H_kv, S_q, S_k = signature(params, q, k).dimensions()
    if backward:
        window = params.window.clipped(S_q, S_k)
        masked, left_bound = window != (None, None), window[0] is not None
        asked = {"masked": masked, "left_bound": left_bound, "varlen": params.varlen is not None}
        chosen = hopper_backward_config(q.shape[-1], params.deterministic, **asked)
        stays = hopper_backward_config(q.shape[-1], stays=True, **asked)
        if params.varlen is not None or params.deterministic or not stays.persistent:
            return chosen
        if H == H_kv:
            return stays
        rows = mean_keys(S_q, S_k, params.window) * S_q / max(S_k, 1)
        visited = visited_by_staying(stays.width(q.shape[-1]), H // H_kv, rows, masked, left_bound)
        return chosen if visited is None else replace(stays, visited=visited)
    keys = seen = None
    if params.window.left is None and not params.window.right:
        keys, seen = S_k, mean_keys(S_q, S_k, params.window)
    return hopper_config(q.shape[-1], S_q, B * H, device.num_sms(q.get_device()), keys, seen)


def prepare(call: Signature, backward: bool = False) -> ForwardPlan | BackwardPlan | None:
    """The launches of all calls with this signature; None if an input has to be copied."""
    return launch_backward.prepare(call) if backward else launch.prepare(call)
