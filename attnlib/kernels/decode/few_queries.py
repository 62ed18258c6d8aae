"""The decoding kernels as a family of `attention`: few queries, and keys that fill their tensors."""

import torch

from attnlib.arguments.decode import MOST_QUERIES
from attnlib.kernels.common import device
from attnlib.kernels.common.signature import Signature
from attnlib.kernels.decode import launch
from attnlib.kernels.decode.configs import DecodeConfig, pays_to_split
from attnlib.params import DecodeParams, Params

__all__ = ["FITS", "configuration", "forward", "prepare", "slower", "unsupported"]
FITS = "few queries, whose keys all multiprocessors read"


def unsupported(q, k, v, params: Params, backward: bool = False) -> str | None:
    """What the kernels need and a call with valid arguments does not have; None if it has all."""
    lacks = device.unsupported_on(q.device)
    if lacks is not None:
        return lacks
    if params.varlen is not None:
        return "needs sequences in one batch; attention_decode takes lengths"
    if params.into is not None:
        return "merges into no existing result"
    if params.score is not None:
        return "takes no score"
    if params.block_mask is not None:
        return "takes no block mask"
    if backward:
        return "has no backward pass"
    if v.shape[-1] != q.shape[-1]:
        return f"needs values of head dimension {q.shape[-1]} as q has; v has {v.shape[-1]}"
    if not 1 <= q.shape[2] <= MOST_QUERIES:
        return f"needs 1 to {MOST_QUERIES} queries; q has {q.shape[2]}"
    return None


def slower(q, k, params: Params, backward: bool = False) -> str | None:
    """Why another family is faster; None if none is."""
    work, heads = launch.work_of(_call(q, k, k, params)), q.shape[0] * q.shape[1]
    if pays_to_split(work, heads):
        return None
    return f"is slower for {heads} heads of {work.keys} keys on {work.sms} multiprocessors"


def configuration(q, k, v, params: Params, backward: bool = False) -> DecodeConfig:
    """How the kernels are compiled and launched for queries and keys like these."""
    return launch.configuration(_call(q, k, v, params))


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params) -> launch.Call:
    return launch.call_of(q, k, v, None, _asked(params))


def _asked(params: Params) -> DecodeParams:
    return DecodeParams(
        params.window, params.sm_scale, return_lse=params.return_lse, config=params.config
    )  # fmt: skip


def prepare(call: Signature, backward: bool = False) -> launch.Plan | None:
    """The launches of all calls with this signature; None if an input has to be copied."""
    if call.strides[0][-1] != 1 or device.widened(call.dtype):
        return None
    q, k, strides, dtype, index, window, sm_scale, _, return_lse, config, *_ = call
    asked = launch.Call(q, k, strides, None, 0, False, False, (True, True), dtype, index, window, sm_scale,
                        return_lse, None, config)  # fmt: skip
    return launch.without_counter(launch.prepare(asked))


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse); lse is None unless it was asked for."""
    if params.plan is not None:
        return launch.run(params.plan, q, k, v)
    return launch.forward(q, k, v, _asked(params))
