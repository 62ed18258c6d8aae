"""Exact attention in Gluon, for GPUs of compute capability 9.x. Chapters 10 to 15 build the forward kernel,
chapter 20 derives the backward pass, and chapter 21 builds its kernels."""

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.backward_plan import BackwardPlan
from attnlib.kernels.common.forward_plan import ForwardPlan
from attnlib.kernels.common.signature import Signature, mean_keys, mean_rows, signature
from attnlib.kernels.hopper import launch, launch_backward
from attnlib.kernels.hopper.configs import HopperConfig, hopper_config, own_values_config
from attnlib.kernels.hopper.configs_backward import (
    LONG_ROWS,
    SHORT_KEYS,
    SHORT_SHARED_KEYS,
    BackwardKind,
    HopperBackwardConfig,
    hopper_backward_config,
    own_values_backward_config,
)
from attnlib.kernels.hopper.filled import cut_off, filled_up
from attnlib.kernels.hopper.launch import forward
from attnlib.kernels.hopper.sharing import in_order, of_sequences, staying
from attnlib.kernels.hopper.support import slower, unsupported
from attnlib.params import Params

__all__ = ["FITS", "backward", "configuration", "forward", "prepare", "slower", "unsupported"]
FITS = "compute capability 9.x, a half precision, layouts that TMA can read"


def backward(d_out, q, k, v, out, lse, params: Params) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `launch_backward.backward`. Where values have columns of their own that no kernel is for, narrower
    tensors are filled up with zeros."""
    if q.shape[-1] == v.shape[-1] or params.config is not None:
        return launch_backward.backward(d_out, q, k, v, out, lse, params)
    filled = filled_up(d_out, q, k, v, out)
    params = params._replace(config=configuration(*filled[1:4], params, backward=True), plan=None)
    return cut_off(launch_backward.backward(*filled, lse, params), (q, k, v))


def configuration(
    q, k, v, params: Params, backward: bool = False
) -> HopperConfig | HopperBackwardConfig | None:
    """How the kernels are compiled and launched for queries, keys and values like these; varlen sequences
    count as the longest, where nothing else is said. None for a backward pass with values whose columns no
    kernel is for, see `filled`."""
    own_values = v.shape[-1] != q.shape[-1]
    if own_values and not backward:
        return own_values_config(q.shape[-1], v.shape[-1])
    call = signature(params, q, k)
    B, H, H_kv, S_q, S_k = call.dimensions()
    if backward:
        window = params.window.clipped(S_q, S_k)
        kind = BackwardKind(
            masked=window != (None, None),
            left_bound=window[0] is not None,
            varlen=params.varlen is not None,
            alone=H == H_kv,
            short=S_k < (SHORT_KEYS if H == H_kv else SHORT_SHARED_KEYS),
            long=H == H_kv and S_q >= LONG_ROWS,
            float16=q.dtype is torch.float16,
        )
        if own_values:
            chosen = own_values_backward_config(q.shape[-1], v.shape[-1], params.deterministic, kind)
        else:
            chosen = hopper_backward_config(q.shape[-1], params.deterministic, stays=True, kind=kind)
        if chosen is None or H == H_kv:
            return chosen
        width = chosen.width(q.shape[-1])
        how = H // H_kv, mean_rows(*call.mean_lengths(), params.window), kind
        if params.deterministic:
            return in_order(chosen, width, *how)
        if kind.varlen:
            return of_sequences(chosen, *how)
        if not chosen.persistent:
            return chosen
        return staying(chosen, width, *how) or hopper_backward_config(q.shape[-1], kind=kind)
    keys = seen = None
    if params.window.left is None and not params.window.right:
        keys, seen = S_k, mean_keys(S_q, S_k, params.window)
    return hopper_config(q.shape[-1], S_q, B * H, device.num_sms(q.get_device()), keys, seen)


def prepare(call: Signature, backward: bool = False) -> ForwardPlan | BackwardPlan | None:
    """The launches of all calls with this signature; None if an input has to be copied."""
    return launch_backward.prepare(call) if backward else launch.prepare(call)
