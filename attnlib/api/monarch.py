"""`attention_monarch()` and `monarch_matrix()`: check the arguments, then run; for inference, so without a
gradient."""

from __future__ import annotations

from typing import Literal

import torch

from attnlib.api.inference import refuse_derivatives, refuse_transformations
from attnlib.arguments.monarch import MonarchOptions, check_monarch
from attnlib.kernels import MONARCH
from attnlib.params import MonarchParams, default_block

__all__ = ["attention_monarch", "monarch_matrix"]


def attention_monarch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block: int | None = None,
    steps: int = 1,
    pad: Literal["post", "pre"] = "post",
    key_mask: torch.Tensor | None = None,
    sm_scale: float | None = None,
    impl: Literal["triton", "reference"] | None = None,
) -> torch.Tensor:
    """An approximation of `attention(q, k, v)` in N * sqrt(N) time (MonarchAttention, arXiv 2505.18698).

    N tokens stand as a matrix of M rows of `block`, and the softmax is approximated by a product of two
    matrices of blocks, fitted in `steps` rounds: see `attnlib.kernels.monarch.monarch_kernels`. The result is
    no rounding of softmax attention; how far it is from it depends on the inputs, and chapter 35 measures
    it: where neighbors are alike, as in pictures, the error is small; for N(0, 1) it is about as large as the
    output. It is exact where `block` is 1 or at least N. Queries and keys are of the same tokens, every token
    sees every other: there is no causal form. Time grows with N * (block + N / block), memory with N: mean
    keys and values of all tokens, in the dtype of q, and one or two float32 numbers for each. Scores, sums
    and maxima are float32. Equal calls have equal bits, nothing is read by the host, and CUDA graphs can
    capture a call.

    On one H200 (12 heads, D 64, float16) one round takes less time than dense attention at all lengths that
    were measured, 256 to 65536 tokens, and two rounds from 2048 on. With 16384 tokens they take a sixteenth
    and a sixth of its time.

    Inference only: no gradient, no torch.func, and not under torch.compile. `torch.autocast` has no effect.

    Args:
        q: (B, H, N, D); float16, bfloat16 or float32; D a multiple of 8 up to 256. Rows that are not
            contiguous, or do not begin at multiples of 16 bytes, are copied first.
        k: (B, Hkv, N, D), same dtype and device. Hkv divides H: query heads h*H/Hkv ... share key head h.
        v: like `k`.
        block: tokens of a block; None for the largest power of two up to sqrt(N). N need not be a multiple.
            Powers of two fill the tiles of the kernels.
        steps: rounds of the fit. Each raises its objective; the first is the cheapest.
        pad: which block is short where `block` does not divide N: "post" the last, "pre" the first. Nothing
            is copied or computed for what is missing.
        key_mask: (B, N) bool: False for tokens that do not count. No query attends to them, and the fit
            leaves out their queries. The rows of the other tokens are as if these were missing, as long as
            the others keep their places. Rows of tokens that do not count are computed too, but from a fit
            without their queries: no `block` makes them exact.
        sm_scale: factor on the scores, default 1/sqrt(D), from -1e26 to 1e26.
        impl: "triton"; "reference", which is PyTorch in fp64; None for "triton".

    Returns:
        out, (B, H, N, D) in the dtype of `q`, contiguous. Where no token of a sequence counts, 0.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit, or a tensor is on a device that no kernel is for.
        RuntimeError: a derivative was asked for.
        NotImplementedError: it is called under a compiler, a dispatch mode or a transformation of
            torch.func.

    Example:
        >>> q, k, v = (torch.randn(1, 12, 4096, 64, device="cuda", dtype=torch.float16) for _ in range(3))
        >>> out = attention_monarch(q, k, v, block=64, steps=2)
    """
    refuse_transformations("attention_monarch")
    check_monarch(q, k, v, MonarchOptions(block, steps, pad, key_mask, sm_scale, impl))
    refuse_derivatives("attention_monarch", q=q, k=k, v=v, **_given(key_mask))
    params = _params(q, block, steps, pad, key_mask, sm_scale)
    family = MONARCH[impl or "triton"]
    lacks = family.unsupported(q, params)
    if lacks is not None:
        what = "q: attention_monarch" if impl is None else f"impl: {impl!r}"
        raise ValueError(f"{what} {lacks}; impl='reference' runs on any device")
    if not q.numel():
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    return family.forward(q.resolve_neg(), k.resolve_neg(), v.resolve_neg(), params)


def monarch_matrix(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    block: int | None = None,
    steps: int = 1,
    pad: Literal["post", "pre"] = "post",
    key_mask: torch.Tensor | None = None,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """The matrix of weights by which `attention_monarch` approximates the softmax, for small N.

    Computed by PyTorch in fp64, with N * N numbers for each head.

    Args:
        q, k, block, steps, pad, key_mask, sm_scale: as in `attention_monarch`.

    Returns:
        (B, H, N, N) float64: out = matrix @ v. Rows sum to 1, or to 0 where no token of a sequence counts.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as `attention_monarch`.
    """
    refuse_transformations("monarch_matrix")
    check_monarch(q, k, k, MonarchOptions(block, steps, pad, key_mask, sm_scale))
    refuse_derivatives("monarch_matrix", q=q, k=k, **_given(key_mask))
    if not q.numel():
        return torch.zeros(*q.shape[:3], q.shape[2], dtype=torch.float64, device=q.device)
    return MONARCH["reference"].matrix(q, k, _params(q, block, steps, pad, key_mask, sm_scale))


def _given(key_mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {} if key_mask is None else {"key_mask": key_mask}


def _params(q, block, steps, pad, key_mask, sm_scale) -> MonarchParams:
    tokens = q.shape[2]
    block = default_block(tokens) if block is None else min(block, max(1, tokens))
    first = -tokens % block if pad == "pre" else 0
    scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    return MonarchParams(block, steps, first, scale, key_mask)
