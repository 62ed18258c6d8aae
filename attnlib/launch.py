"""Launch the portable forward kernel: describe the tensors, compile once, then launch in little host time.

`kernel[grid](...)` of Triton binds and hashes every argument at every call, which takes longer than all the
rest. The compiled kernel that it returns launches without that. So the first call of a kind goes the long
way, and later ones go straight to what it compiled (notebook 07 has the times).
"""

import contextlib
from functools import cache
from typing import NamedTuple

import torch

from attnlib.configs import ForwardConfig, block_d, forward_config

LOG2_E = 1.4426950408889634
LIMIT = 2**31  # numbers of blocks, rows and keys are int32

_compiled: dict[tuple, object] = {}
"""(device, dtype, constants, configuration) -> compiled kernel."""


class Window(NamedTuple):
    """A tensor as a launch reads it: fields of Triton's TensorDescriptor, without its checks."""

    base: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"  # what lies outside of the tensor reads as 0


@cache
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def capability(device_index: int) -> tuple[int, int]:
    """CUDA compute capability of a device, such as (9, 0)."""
    return torch.cuda.get_device_capability(device_index)


def outputs(q: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memory for out, (B, H, Sq, D) in a layout that a descriptor can express, and for the LSE if asked."""
    out = torch.empty_like(q)
    if not describable(out):  # a copy of q's odd layout
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    return out, lse


def exp2_scale(sm_scale: float) -> float:
    """What the kernels multiply scores with before exp2: |sm_scale| * log2(e), positive. Zero would turn a
    masked score, -inf, into NaN; a factor as small as this one leaves every weight at exactly 1."""
    return max(abs(sm_scale) * LOG2_E, 2.0**-100)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    sm_scale: float,
    return_lse: bool,
    config: ForwardConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `kernels.forward.attention_forward` on valid arguments, none of them empty; see `attention`.

    q: (B, H, Sq, D); k, v: (B, Hkv, Sk, D). `config` replaces the one that `forward_config` chooses. Returns
    (out, lse); lse is None unless it was asked for. ValueError if a length or the grid is beyond 2^31.
    """
    if q.dtype == torch.bfloat16 and interpreted():  # its bfloat16 dot is wrong (triton 3.6)
        out, lse = forward(q.float(), k.float(), v.float(), causal, sm_scale, return_lse, config)
        return out.bfloat16(), lse
    B, H, S_q, D = q.shape
    _, H_kv, S_k, _ = k.shape
    out, lse = outputs(q, return_lse)
    if config is None:
        config = configuration(q)
    width = block_d(D)
    programs = -(-S_q // config.block_m) * B * H
    if max(programs, S_q, S_k) >= LIMIT:
        raise ValueError(
            f"q, k: expected fewer than 2^31 rows, keys and blocks of {config.block_m} rows over all heads, "
            f"got {S_q}, {S_k} and {programs}"
        )
    scalars = (exp2_scale(sm_scale), S_q, S_k, H, H // H_kv, B * H)
    constants = (
        config.block_m,
        config.block_n,
        width,
        causal,
        not causal and S_k % config.block_n != 0,  # HAS_TAIL: the causal mask covers it
        causal and config.block_m == config.block_n and (S_k - S_q) % config.block_n == 0,  # ONE_MASKED_TILE
        sm_scale < 0,  # FLIP
        return_lse,
        config.q_in_registers,
        config.heads_per_section,
        config.num_stages,
        "ieee" if q.dtype == torch.float32 else "tf32",
    )
    windows = [window(tensor) for tensor in (q, k, v, out)]
    with on_device(q):
        key = (q.device.index, q.dtype, constants, config)
        kernel = _compiled.get(key)
        if kernel is None:
            kernel = _first_launch(windows, lse, programs, scalars, constants, config)
            if not interpreted():
                _compiled[key] = kernel
        else:
            kernel[(programs, 1, 1)](*windows, lse, *scalars, *constants)
    return out, lse


def configuration(q: torch.Tensor) -> ForwardConfig:
    """What `forward` chooses for queries like these."""
    return _choose(q.shape[-1], q.dtype, q.device.index)


@cache
def _choose(head_dim: int, dtype: torch.dtype, device_index: int | None) -> ForwardConfig:
    arch = None if interpreted() else capability(device_index)
    return forward_config(head_dim, str(dtype).removeprefix("torch."), arch)


def _first_launch(windows, lse, programs: int, scalars: tuple, constants: tuple, config: ForwardConfig):
    """Compile, launch, and return the compiled kernel."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from attnlib.kernels.forward import attention_forward

    rows = (config.block_m, config.block_n, config.block_n, config.block_m)
    width = constants[2]
    descriptors = [
        TensorDescriptor(w.base, list(w.shape), list(w.strides), [1, 1, n, width])
        for w, n in zip(windows, rows, strict=True)
    ]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    return attention_forward[(programs,)](*descriptors, lse, *scalars, *constants, **options)


def describable(tensor: torch.Tensor) -> bool:
    """Whether a TMA descriptor can express this (B, H, S, D) layout."""
    return _strides(tensor) is not None


def _strides(tensor: torch.Tensor) -> tuple[int, int, int, int] | None:
    """Strides for a descriptor, or None if there are none.

    The hardware wants the last dimension contiguous, and the address and the other strides in multiples of 16
    bytes. The stride of a dimension of size 1 may be anything: it is never used, and becomes a legal one.
    """
    b, h, s, d = tensor.stride()
    batch, heads, rows, width = tensor.shape
    unit = 16 // tensor.element_size()
    legal = -(-width // unit) * unit
    b, h, s = (b if batch > 1 else legal), (h if heads > 1 else legal), (s if rows > 1 else legal)
    if d != 1 or b % unit or h % unit or s % unit or min(b, h, s) <= 0 or tensor.data_ptr() % 16:
        return None
    return b, h, s, 1


def window(tensor: torch.Tensor) -> Window:
    strides = _strides(tensor)
    if strides is None:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        strides = _strides(tensor)
    return Window(tensor, tensor.shape, strides)


_HERE = contextlib.nullcontext()


def on_device(tensor: torch.Tensor):
    """Triton launches on the current device, which need not be the tensor's; switching costs host time."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _HERE
