"""`attention()`: check the arguments, choose a kernel and its configuration, launch it."""

import math
from functools import cache
from typing import Literal, overload

import torch

from attnlib.configs import ForwardConfig, block_d, forward_config

Implementation = Literal["triton", "reference"]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
LOG2_E = 1.4426950408889634


@overload
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, sm_scale: float | None = None,
              return_lse: Literal[False] = False, impl: Implementation | None = None) -> torch.Tensor: ...
@overload
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, sm_scale: float | None = None,
              return_lse: Literal[True], impl: Implementation | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(q, k, v, *, causal=False, sm_scale=None, return_lse=False, impl=None):
    """Exact scaled dot-product attention, forward only: softmax(sm_scale * Q K^T) V.

    Scores, running row maximum, row sum and output are accumulated in float32. The kernel reads its inputs through
    TMA descriptors where they lie; an input that a descriptor cannot express (last dimension not contiguous, another
    stride or the address not a multiple of 16 bytes, an expanded dimension) is copied once.

    Args:
        q: (B, H, Sq, D); float16, bfloat16 or float32; D a multiple of 8 up to 256. Any Sq from 0 on.
        k: (B, Hkv, Sk, D), same dtype and device as `q`. Hkv divides H: query heads h*H/Hkv ... share key head h.
        v: (B, Hkv, Sk, D).
        causal: query i attends to keys 0 .. i + Sk - Sq (aligned at the bottom right, as in FlashAttention 2.1 on).
        sm_scale: factor on the scores, default 1/sqrt(D). Any finite number.
        return_lse: also return log(sum(exp(sm_scale * Q K^T))) of each row, natural logarithm.
        impl: "triton" (a CUDA GPU, or a CPU with TRITON_INTERPRET=1), "reference" (PyTorch in float64, any device), or
            None: "triton" where it can run, else "reference". An explicit choice never falls back to the other.

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
    if impl is None:
        impl = "triton" if q.is_cuda or _interpreted() else "reference"
    if impl == "reference":
        from attnlib.reference import attention_fp64

        out, lse = attention_fp64(q, k, v, causal=bool(causal), sm_scale=scale)
        out, lse = out.to(q.dtype), lse.float()
    elif q.is_cuda or _interpreted():
        out, lse = _launch(q, k, v, bool(causal), scale, bool(return_lse))
    else:
        raise ValueError(
            f"impl: 'triton' needs CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported; q is on {q.device}"
        )
    return (out, lse) if return_lse else out


def _check(q, k, v, causal, sm_scale, return_lse, impl) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions (B, H, S, D), got shape {tuple(tensor.shape)}")
    if q.dtype not in DTYPES:
        raise TypeError(f"q: expected dtype float16, bfloat16 or float32, got {q.dtype}")
    heads, head_dim = q.shape[1], q.shape[3]
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {q.dtype} as q has, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} as q has, got {tensor.device}")
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected batch size {q.shape[0]} as q has, got {tensor.shape[0]}")
        if tensor.shape[3] != head_dim:
            raise ValueError(f"{name}: expected head dimension {head_dim} as q has, got {tensor.shape[3]}")
    if v.shape != k.shape:
        raise ValueError(f"v: expected shape {tuple(k.shape)} as k has, got {tuple(v.shape)}")
    if not 8 <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(f"q: expected a head dimension that is a multiple of 8 from 8 to {MAX_HEAD_DIM}, got {head_dim}")
    if heads and (not k.shape[1] or heads % k.shape[1]):
        raise ValueError(f"k: expected a number of heads that divides q's {heads}, got {k.shape[1]}")
    for name, flag in (("causal", causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}")
    if sm_scale is not None:
        if isinstance(sm_scale, bool) or not isinstance(sm_scale, int | float):
            raise TypeError(f"sm_scale: expected a number or None, got {type(sm_scale).__name__}")
        if not math.isfinite(sm_scale):
            raise ValueError(f"sm_scale: expected a finite number, got {sm_scale}")
    if impl not in (None, "triton", "reference"):
        raise ValueError(f"impl: expected 'triton', 'reference' or None, got {impl!r}")
    if torch.is_grad_enabled():
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.requires_grad:
                raise NotImplementedError(
                    f"{name}: requires grad, but attnlib.attention is forward only; "
                    f"call it under torch.no_grad() or pass {name}.detach()"
                )


@cache
def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def _arch(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def _launch(q, k, v, causal: bool, sm_scale: float, return_lse: bool, config: ForwardConfig | None = None):
    """Run the portable kernel; arguments are valid. `config` replaces the chosen configuration (for experiments)."""
    B, H, S_q, D = q.shape
    S_k = k.shape[2]
    if q.dtype == torch.bfloat16 and _interpreted():  # its bfloat16 dot is wrong (triton 3.6)
        out, lse = _launch(q.float(), k.float(), v.float(), causal, sm_scale, return_lse, config)
        return out.bfloat16(), lse
    out = torch.empty_like(q)
    if not _describable(out):
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, S_q), dtype=torch.float32, device=q.device) if return_lse else None
    if out.numel() == 0 or S_k == 0:
        return out.zero_(), lse.fill_(-math.inf) if return_lse else None

    from attnlib.kernels.forward import attention_forward

    if config is None:
        arch = None if _interpreted() else _arch(q.device.index)
        config = forward_config(D, str(q.dtype).removeprefix("torch."), arch)
    M, N, width = config.block_m, config.block_n, block_d(D)
    programs = -(-S_q // M) * B * H
    if programs >= 2**31:
        raise ValueError(f"q: expected fewer than 2^31 blocks of {M} rows over all heads, got {programs}")
    # exp2 takes the scores times |sm_scale| * log2(e). Zero would turn a masked score, -inf, into NaN; a factor this
    # small leaves every weight at exactly 1.
    qk_scale = max(abs(sm_scale) * LOG2_E, 2.0**-100)
    with _on_device(q):
        attention_forward[(programs,)](
            _descriptor(q, M, width), _descriptor(k, N, width), _descriptor(v, N, width), _descriptor(out, M, width),
            lse, qk_scale, S_q, S_k, H, H // k.shape[1], B * H,
            BLOCK_M=M, BLOCK_N=N, BLOCK_D=width, CAUSAL=causal, HAS_TAIL=S_k % N != 0,
            ONE_MASKED_TILE=M == N and (S_k - S_q) % N == 0, FLIP=sm_scale < 0, STORE_LSE=return_lse,
            Q_IN_REGISTERS=config.q_in_registers, SECTION=config.heads_per_section, NUM_STAGES=config.num_stages,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=config.num_warps, num_stages=config.num_stages,
        )
    return out, lse


class _Nothing:
    def __enter__(self): ...
    def __exit__(self, *_): ...


def _on_device(tensor: torch.Tensor):
    """Triton launches on the current device, which need not be the tensor's. Switching costs host time: only if needed."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _Nothing()


def _describable(tensor: torch.Tensor) -> bool:
    """Whether a TMA descriptor can express this layout."""
    size = tensor.element_size()
    return (
        tensor.stride(3) == 1
        and tensor.data_ptr() % 16 == 0
        and all(n == 1 or (s > 0 and s * size % 16 == 0) for n, s in zip(tensor.shape[:3], tensor.stride()[:3], strict=True))
    )


def _descriptor(tensor: torch.Tensor, rows: int, width: int):
    """A (1, 1, rows, width) window over a (B, H, S, D) tensor. What lies outside reads as 0 and is not written."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not _describable(tensor):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    # The stride of a dimension of size 1 may be anything: it is never used, but has to be a multiple of 16 bytes.
    strides = [s if n > 1 else max(width, tensor.shape[3]) for n, s in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, width])
