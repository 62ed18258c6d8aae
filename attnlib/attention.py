"""`attention()`: check the arguments, choose a kernel and configuration, launch it. `explain()`: which."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, overload

import torch

from attnlib import launch, launch_hopper
from attnlib.band import band
from attnlib.configs import ForwardConfig, HopperConfig

Implementation = Literal["hopper", "triton", "reference"]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    return_lse: Literal[False] = False,
    impl: Implementation | None = None,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    return_lse: Literal[True],
    impl: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(q, k, v, *, causal=False, sm_scale=None, return_lse=False, impl=None):
    """Exact scaled dot-product attention, forward only: softmax(sm_scale * Q K^T) V.

    Scores, running row maximum, row sum and output are accumulated in float32. The kernel reads its inputs
    through TMA descriptors where they lie; an input that a descriptor cannot express (last dimension not
    contiguous, another stride or the address not a multiple of 16 bytes, an expanded dimension) is copied
    once.

    Args:
        q: (B, H, Sq, D); float16, bfloat16 or float32; D a multiple of 8 up to 256. Any Sq from 0 on.
        k: (B, Hkv, Sk, D), same dtype and device as `q`. Hkv divides H: query heads h*H/Hkv ... share key
            head h.
        v: (B, Hkv, Sk, D).
        causal: query i attends to keys 0 .. i + Sk - Sq (aligned at the bottom right, as in FlashAttention
            2.1 on).
        sm_scale: factor on the scores, default 1/sqrt(D). Any number finite in float32.
        return_lse: also return log(sum(exp(sm_scale * Q K^T))) of each row, natural logarithm.
        impl: "hopper" (float16 or bfloat16 on a GPU of compute capability 9.x, in layouts that TMA can read;
            triton 3.6), "triton" (a CUDA GPU, or a CPU with TRITON_INTERPRET=1), "reference" (PyTorch in
            float64, any device), or None: the first of these that can run the call. An explicit choice never
            falls back to another. `explain` tells what a call would run.

    Returns:
        out, (B, H, Sq, D) in the dtype of `q`; with `return_lse` the pair (out, lse), lse (B, H, Sq) float32.
        A row with nothing to attend to gives output 0 and LSE -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices, `sm_scale` or `impl` do not fit.
        NotImplementedError: an input requires grad: there is no backward pass yet.

    Example:
        >>> q, k, v = (torch.randn(2, 16, 1024, 128, device="cuda", dtype=torch.float16) for _ in range(3))
        >>> out = attention(q, k, v, causal=True)
    """
    _check(q, k, v, causal, sm_scale, return_lse, impl)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    kernel, _ = _choose(q, k, v, impl)
    if q.numel() == 0 or k.shape[2] == 0:  # no row, or none with anything to attend to
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
    elif kernel == "hopper":
        out, lse = launch_hopper.forward(q, k, v, band(causal, None), scale, return_lse)
    elif kernel == "triton":
        out, lse = launch.forward(q, k, v, band(causal, None), scale, return_lse)
    else:
        from attnlib.reference import attention_fp64

        out, lse = attention_fp64(q, k, v, causal=causal, sm_scale=scale)
        out, lse = out.to(q.dtype), lse.float()
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class Choice:
    """What a call of `attention` runs.

    Attributes:
        kernel: "hopper", "triton" or "reference", as in `impl`.
        configuration: how the kernel is compiled and launched; None for the reference.
        reason: why this kernel.
    """

    kernel: Implementation
    configuration: HopperConfig | ForwardConfig | None
    reason: str

    def __str__(self) -> str:
        how = "" if self.configuration is None else f"\n  with {self.configuration}"
        return f"{self.kernel}: {self.reason}{how}"


def explain(q, k, v, *, causal=False, sm_scale=None, return_lse=False, impl=None) -> Choice:
    """Which kernel `attention` would run with these arguments, with which configuration, and why.

    Nothing is computed or compiled. Arguments and errors are those of `attention`.

    Example:
        >>> print(explain(*torch.zeros(3, 1, 1, 64, 128)))
        reference: triton needs CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported; q is on cpu
    """
    _check(q, k, v, causal, sm_scale, return_lse, impl)
    kernel, reason = _choose(q, k, v, impl)
    configuration = None
    if kernel == "hopper":
        configuration = launch_hopper.configuration(q.shape, q.get_device())
    elif kernel == "triton":
        configuration = launch.configuration(q, k, band(causal, None))
    if q.numel() == 0 or k.shape[2] == 0:
        reason += "; nothing to compute, so nothing is launched"
    return Choice(kernel, configuration, reason)


def _choose(q, k, v, impl: Implementation | None) -> tuple[Implementation, str]:
    """(what runs a call with valid arguments, why). ValueError if that is asked for and can't."""
    if impl == "reference":
        return impl, "asked for"
    lacks = None
    if impl != "triton":
        lacks = launch_hopper.unsupported(q, k, v)
        if lacks is None:
            return "hopper", _HOPPER_FITS if impl is None else "asked for"
        if impl == "hopper":
            raise ValueError(f"impl: 'hopper' {lacks}")
    if q.is_cuda or launch.interpreted():
        return "triton", "asked for" if impl == "triton" else f"hopper {lacks}"
    if impl == "triton":
        raise ValueError(f"impl: 'triton' {_TRITON_NEEDS}; q is on {q.device}")
    return "reference", f"triton {_TRITON_NEEDS}; q is on {q.device}"


_HOPPER_FITS = "compute capability 9.x, a half precision, layouts that TMA can read"
_TRITON_NEEDS = "needs CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported"


def _check(q, k, v, causal, sm_scale, return_lse, impl) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions (B, H, S, D), got shape {tuple(tensor.shape)}")
    dtype, device = q.dtype, q.device
    if dtype not in DTYPES:
        raise TypeError(f"q: expected dtype float16, bfloat16 or float32, got {dtype}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: expected dtype {dtype} as q has, got {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name}: expected device {device} as q has, got {tensor.device}")
    _check_shapes(q.shape, k.shape, v.shape)
    if causal is not True and causal is not False:
        raise TypeError(f"causal: expected a bool, got {type(causal).__name__}")
    if return_lse is not True and return_lse is not False:
        raise TypeError(f"return_lse: expected a bool, got {type(return_lse).__name__}")
    if sm_scale is not None:
        if isinstance(sm_scale, bool) or not isinstance(sm_scale, int | float):
            raise TypeError(f"sm_scale: expected a number or None, got {type(sm_scale).__name__}")
        if not abs(sm_scale) <= torch.finfo(torch.float32).max:
            raise ValueError(f"sm_scale: expected a number finite in float32, got {sm_scale}")
    if impl not in (None, "hopper", "triton", "reference"):
        raise ValueError(f"impl: expected 'hopper', 'triton', 'reference' or None, got {impl!r}")
    if torch.is_grad_enabled():
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.requires_grad:
                raise NotImplementedError(
                    f"{name}: requires grad, but attnlib.attention is forward only; "
                    f"call it under torch.no_grad() or pass {name}.detach()"
                )


@lru_cache(1024)  # lengths may change from call to call without an end
def _check_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> None:
    batch, heads, _, head_dim = q
    for name, shape in (("k", k), ("v", v)):
        if shape[0] != batch:
            raise ValueError(f"{name}: expected batch size {batch} as q has, got {shape[0]}")
        if shape[3] != head_dim:
            raise ValueError(f"{name}: expected head dimension {head_dim} as q has, got {shape[3]}")
    if v != k:
        raise ValueError(f"v: expected shape {tuple(k)} as k has, got {tuple(v)}")
    if not 8 <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(
            f"q: expected a head dimension that is a multiple of 8 from 8 to {MAX_HEAD_DIM}, got {head_dim}"
        )
    if heads and (not k[1] or heads % k[1]):
        raise ValueError(f"k: expected a number of heads that divides q's {heads}, got {k[1]}")
