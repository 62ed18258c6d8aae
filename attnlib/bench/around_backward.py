"""What stands around the backward kernels of chapter 21: the forward pass, rows of LSE and delta before
them, dQ of its sums after them, and autograd. Chapter 20 teaches these."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from attnlib.api import attention
from attnlib.kernels.common.device import make_context_current
from attnlib.kernels.common.postprocess import attention_backward_postprocess
from attnlib.kernels.common.preprocess import attention_backward_preprocess

Tensor = torch.Tensor


def preprocess(d_out: Tensor, out: Tensor, lse: Tensor, block_m: int) -> tuple[Tensor, Tensor]:
    """Zeros for the sums of dQ (B * H, rows, D), and (2, B * H, rows) of LSE in base 2 and delta, in float32;
    rows are padded to whole blocks. d_out, out: (B, H, S, D), contiguous; lse: (B, H, S)."""
    B, H, S, D = out.shape
    padded = triton.cdiv(S, block_m) * block_m
    sums = torch.empty(B * H, padded, D, dtype=torch.float32, device=out.device)
    rows = torch.empty(2, B * H, padded, dtype=torch.float32, device=out.device)
    windows = [TensorDescriptor.from_tensor(x, [1, 1, 64, D]) for x in (out, d_out)]
    attention_backward_preprocess[(B * H * padded // 64,)](
        *windows, lse, rows, sums, None, S, None, H, B, padded, 64, D, block_m, D, num_warps=4
    )
    return sums, rows


def from_rows(sums: Tensor, dq: Tensor, sm_scale: float) -> None:
    """dq = sm_scale * sums, which lie row after row."""
    torch.mul(sums[:, : dq.shape[2]].view(dq.shape), sm_scale, out=dq)


def from_registers(sums: Tensor, dq: Tensor, sm_scale: float) -> None:
    """The same of sums that lie as an accumulator's registers, see `kernels.common.postprocess`."""
    B, H, S, D = dq.shape
    tiles = triton.cdiv(S, 64)
    window = TensorDescriptor.from_tensor(dq, [1, 1, 64, D])
    attention_backward_postprocess[(tiles * B * H,)](
        window, sums, None, sm_scale, H, B, sums.shape[1] // 64, tiles, D, 64, num_warps=D // 16
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradients, q, k, v, causal, sm_scale):
        out, lse = attention(q, k, v, causal=causal, sm_scale=sm_scale, return_lse=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = gradients, causal, sm_scale
        return out

    @staticmethod
    def backward(ctx, d_out):
        gradients, *call = ctx.call
        if d_out.is_cuda:
            make_context_current()
        return None, *gradients(d_out.contiguous(), *ctx.saved_tensors, *call), None, None


def differentiable(
    gradients: Callable, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float | None,
    head_dims: tuple[int, ...] = (64, 128),
) -> Tensor:  # fmt: skip
    """Attention, by the package, whose backward pass is `gradients(d_out, q, k, v, out, lse, causal,
    sm_scale)`. ValueError for a head dimension that the kernel does not have."""
    if q.shape[-1] not in head_dims:
        known = " or ".join(str(d) for d in head_dims)
        raise ValueError(f"q: expected a head dimension of {known}, got {q.shape[-1]}")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return _Attention.apply(
        gradients, q, k, v, causal, q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    )
