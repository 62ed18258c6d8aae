"""The product of DistrAttention in plain Triton: the forward kernel with fewer columns in queries and keys
than in values."""

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.descriptors import readable
from attnlib.kernels.common.distr import Grouped, narrow_call
from attnlib.kernels.common.signature import mean_keys
from attnlib.kernels.portable.configs import forward_config
from attnlib.kernels.portable.launch import prepare
from attnlib.params import Params

__all__ = ["forward", "unsupported"]


def unsupported(q: torch.Tensor) -> str | None:
    """What the kernel needs and a call with valid arguments does not have; None if it has all."""
    return device.unsupported_on(q.device)


def forward(grouped: Grouped, v: torch.Tensor, params: Params) -> torch.Tensor:
    """out, (B, H, Sq, D), of what `distr.group` made and values (B, Hkv, Sk, D), none of them empty."""
    if device.widened(v.dtype):
        wide = grouped._replace(q=grouped.q.float(), k=grouped.k.float())
        return forward(wide, v.float(), params).bfloat16()
    v = readable(v)
    call, narrow = narrow_call(grouped, v, params)
    if call.config is None:
        arch = None if device.interpreted() else device.capability(v.get_device())
        keys = mean_keys(grouped.q.shape[2], v.shape[2], params.window)
        dtype = str(v.dtype).removeprefix("torch.")
        call = call._replace(config=forward_config(v.shape[-1], dtype, arch, keys))
    out = torch.empty(call.q, dtype=v.dtype, device=v.device)
    prepare(call, narrow).launches(grouped.q, grouped.k, v, out, None, None, None, None)
    return out
