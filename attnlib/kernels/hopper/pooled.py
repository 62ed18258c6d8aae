"""The forward pass that also keeps what a pooled attention map is made of; see `maxima`."""

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common.counters import counter
from attnlib.kernels.common.descriptors import Made, lse_for
from attnlib.kernels.common.forward_plan import TENSORS
from attnlib.kernels.common.launcher import LIMIT, Launches, Part
from attnlib.kernels.common.signature import PREPARED, Signature, signature
from attnlib.kernels.common.tiles import UNIT, tile_width
from attnlib.kernels.hopper import configuration, launch
from attnlib.kernels.hopper.configs import hopper_config
from attnlib.kernels.hopper.support import unsupported
from attnlib.params import Params

__all__ = ["bytes_kept", "forward", "unsupported"]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, maxima) of a call that `unsupported` accepts, without varlen sequences, no argument
    empty. maxima: float32 (B, H, blocks of 64 keys, rows), both padded: of each row and 64 keys the
    largest score that the row sees, times sm_scale * log2(e); undefined where it sees none of these keys.

    ValueError if a length, the tiles or the maxima of a head are beyond 2^31.
    """
    params = _configured(q, k, v, params)
    plan = prepare(signature(params, q, k, q, k, v))
    out, lse = plan.out.like(q), lse_for(q, params)
    maxima = torch.empty(plan.maxima, dtype=torch.float32, device=q.device)
    plan.launches(q, k, v, out, lse, counter(q.get_device()), None, None, maxima)
    return out, lse, maxima


def bytes_kept(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params) -> int:
    """How many bytes of maxima `forward` gives."""
    return 4 * math.prod(_shape(signature(_configured(q, k, v, params), q, k)))


def _configured(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params) -> Params:
    params = params._replace(return_lse=True)
    if params.config is None:
        config = configuration(q, k, v, params)
        if config.columns:  # maxima are of tiles in one part
            config = hopper_config(tile_width(q.shape[-1]))
        params = params._replace(config=config)
    return params


def _shape(call: Signature) -> tuple[int, int, int, int]:
    """Of the maxima: whole tiles of rows, and of keys an even number of blocks."""
    B, H, _, S_q, S_k = call.dimensions()
    block_m = 64 * call.config.warpgroups
    return B, H, 2 * -(-S_k // (2 * UNIT)), -(-S_q // block_m) * block_m


class Plan(NamedTuple):
    """The launch of a call, the layout of its output, and the shape of what it keeps."""

    launches: Launches
    out: Made
    maxima: tuple[int, ...]


@lru_cache(PREPARED)
def prepare(call: Signature) -> Plan:
    """The launches of all calls with this signature."""
    plain = launch.prepare(call)
    (kernel,) = plain.launches.launches
    pointers = {**kernel.pointers, "maxima": Part("maxima")}
    kernel = replace(kernel, pointers=pointers, constants={"plan": plan_of(call)})
    shape = _shape(call)
    if shape[2] * shape[3] >= LIMIT:
        raise ValueError(f"q, k: expected fewer than 2^37 scores of a head, got {call.q[2]} x {call.k[2]}")
    launches = Launches([kernel], call.device, (*TENSORS, "maxima"))
    return Plan(launches, plain.out, shape)


def plan_of(call: Signature):
    """The kernel's constants for a call."""
    from attnlib.kernels.hopper.plan import PooledPlan

    _, _, _, S_q, S_k = call.dimensions()
    mask = launch.mask_of(call.window, S_q, S_k, call.config, varlen=False)
    return PooledPlan(**launch.plan_fields(
        call.config.width(call.head_dim), call.config, mask, call.sm_scale < 0, call.return_lse, False
    ))  # fmt: skip
