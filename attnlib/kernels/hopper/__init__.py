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
    backward_config,
)
from attnlib.kernels.hopper.launch import forward
from attnlib.kernels.hopper.launch_backward import backward
from attnlib.kernels.hopper.sharing import in_order, of_sequences, staying
from attnlib.kernels.hopper.support import slower, unsupported
from attnlib.params import Params

__all__ = ["FITS", "backward", "configuration", "forward", "prepare", "slower", "unsupported"]
FITS = "compute capability 9.x, a half precision, layouts that TMA can read"


def configuration(q, k, v, params: Params, backward: bool = False) -> HopperConfig | HopperBackwardConfig:
    """How the kernels are compiled and launched for queries, keys and values like these; varlen sequences
    count as the longest, where nothing else is said."""
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
            tail=params.varlen is None and S_k % 128 != 0,
            float16=q.dtype is torch.float16,
        )
        columns = q.shape[-1], v.shape[-1]
        chosen = backward_config(*columns, params.deterministic, stays=True, kind=kind)
        if H == H_kv:
            return chosen
        width = max(chosen.widths(*columns))
        how = H // H_kv, mean_rows(*call.mean_lengths(), params.window), kind
        if params.deterministic:
            return in_order(chosen, width, *how)
        if kind.varlen:
            return of_sequences(chosen, *how)
        if not chosen.persistent:
            return chosen
        return staying(chosen, width, *how) or backward_config(*columns, kind=kind)
    keys = seen = None
    if params.window.left is None and not params.window.right:
        keys, seen = S_k, mean_keys(S_q, S_k, params.window)
    return hopper_config(q.shape[-1], S_q, B * H, device.num_sms(q.get_device()), keys, seen)


def prepare(call: Signature, backward: bool = False) -> ForwardPlan | BackwardPlan | None:
    """The launches of all calls with this signature; None if an input has to be copied."""
    return launch_backward.prepare(call) if backward else launch.prepare(call)
