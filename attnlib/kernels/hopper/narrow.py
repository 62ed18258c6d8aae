"""The product of DistrAttention (chapter 36) on GPUs of compute capability 9.x: the forward kernel with fewer
columns in queries and keys than in values."""

from dataclasses import replace

import torch

from attnlib.kernels.common import device, hopper_gpu
from attnlib.kernels.common.counters import counter
from attnlib.kernels.common.descriptors import readable
from attnlib.kernels.common.distr import Grouped, Narrow, narrow_call
from attnlib.kernels.common.signature import Signature, mean_keys
from attnlib.kernels.common.tiles import tile_width
from attnlib.kernels.hopper.configs import M128N128, M192N128, M256N64, HopperConfig, hopper_config
from attnlib.kernels.hopper.launch import prepare
from attnlib.params import Params

__all__ = ["configuration", "forward", "unsupported"]

EARLY = replace(M192N128, late_wait=False, pin=True)
"""Instead of `M192N128`, whose late wait pays where shifts are kept."""


def unsupported(q: torch.Tensor) -> str | None:
    """What the kernel needs and a call with valid arguments does not have; None if it has all."""
    return hopper_gpu.unsupported_here(q)


def configuration(call: Signature, narrow: Narrow) -> HopperConfig:
    """How the kernel is compiled and launched: as for as many columns everywhere, but that no tile has rows
    of two blocks with keys of their own."""
    B, H, _, S_q, S_k = call.dimensions()
    seen, sms = mean_keys(S_q, S_k, call.window), device.num_sms(call.device)
    config = hopper_config(tile_width(call.head_dim), S_q, B * H, sms, S_k, seen)  # in one part
    if narrow.rows is not None and narrow.rows < S_q and narrow.rows % (64 * config.warpgroups):
        config = M128N128 if narrow.rows % (64 * M256N64.warpgroups) else M256N64
    config = EARLY if config == M192N128 else config
    # With kept shifts words would spill.
    return replace(config, q_columns=min(config.q_columns, narrow.columns), keep_shift=False)


def forward(grouped: Grouped, v: torch.Tensor, params: Params) -> torch.Tensor:
    """out, (B, H, Sq, D), of what `distr.group` made and values (B, Hkv, Sk, D), none of them empty."""
    v = readable(v)
    call, narrow = narrow_call(grouped, v, params)
    if call.config is None:
        call = call._replace(config=configuration(call, narrow))
    out = torch.empty(call.q, dtype=v.dtype, device=v.device)
    launches = prepare(call, narrow).launches
    launches(grouped.q, grouped.k, v, out, None, counter(v.get_device()), None, None)
    return out
