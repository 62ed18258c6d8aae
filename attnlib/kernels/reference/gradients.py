"""Gradients of dense attention in PyTorch: in fp64, the truth of every test, and in other dtypes."""

import math

import torch

from attnlib.params import MaskWindow, mask_window


def visible(S_q: int, S_k: int, bounds: MaskWindow, device: torch.device | str = "cpu") -> torch.Tensor:
    """Bool (S_q, S_k): whether a query sees a key."""
    offset = torch.arange(S_k, device=device) - torch.arange(S_q, device=device)[:, None] - (S_k - S_q)
    seen = torch.ones_like(offset, dtype=torch.bool)
    if bounds.right is not None:
        seen &= offset <= bounds.right
    if bounds.left is not None:
        seen &= offset >= -bounds.left
    return seen


def _gradient(
    d_out, q, k, v, seen: MaskWindow | torch.Tensor, scale: float, sizes: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dq, dk, dv as plain PyTorch computes them in the dtype of the inputs, P kept whole.

    sizes: instead of each gradient the sum of the absolute values of its terms, which is what rounding errors
    are relative to: dP - delta may cancel, as it does in a row with a single key. P itself counts for more
    where the LSE is large, because a rounding of the LSE in float32 is |LSE| roundings of P.
    out_dtype: delta from dO and an output that was rounded to it, which is all that a kernel is given.
    """
    group = q.shape[1] // k.shape[1]
    if isinstance(seen, MaskWindow):
        seen = visible(q.shape[2], k.shape[2], seen, q.device)
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ keys.mT * scale).masked_fill(~seen, -math.inf)  # [B, H, S_q, S_k]
    p = torch.softmax(scores, -1).masked_fill(~seen, 0.0)  # and rows that see nothing: 0, not NaN
    if sizes:
        lse = torch.logsumexp(scores, -1, keepdim=True)
        p = p * (1 + torch.where(lse.isfinite(), lse.abs(), 0.0))
        d_out, q, keys, values, scale = d_out.abs(), q.abs(), keys.abs(), values.abs(), abs(scale)
    dp = d_out @ values.mT
    if out_dtype is None:
        delta = (p * dp).sum(-1, keepdim=True)
    else:
        delta = (d_out * (p @ values).to(out_dtype).to(p.dtype)).sum(-1, keepdim=True)
    ds = p * (dp + delta if sizes else dp - delta)
    dk, dv = ds.mT @ q * scale, p.mT @ d_out
    dk, dv = (x.unflatten(1, (k.shape[1], group)).sum(2) for x in (dk, dv))
    return ds @ keys * scale, dk, dv


@torch.no_grad()
def gradient_fp64(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: torch.Tensor | None = None,
    sm_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of dense attention in fp64, the truth of every test of a backward.

    d_out and q are (B, H, Sq, D); k and v (B, Hkv, Sk, D); any float dtype. `mask`: bool (B, H, Sq, Sk), B
    and H or 1, instead of causal and window. One batch entry at a time, whose scores it holds whole: 8 * H *
    Sq * Sk bytes some four times over.
    """
    seen = mask_window(causal, window) if mask is None else mask
    return gradients_by_batch(d_out, q, k, v, seen, sm_scale, torch.float64)


def gradients_by_batch(d_out, q, k, v, seen, sm_scale, dtype, **options) -> tuple[torch.Tensor, ...]:
    """`seen`: a `MaskWindow`, or a mask, bool (B, H, Sq, Sk), B and H or 1."""
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    d_out, q, k, v = (x.to(dtype) for x in (d_out, q, k, v))
    parts = [
        _gradient(*(x[b : b + 1] for x in (d_out, q, k, v)), _of_batch(seen, b), scale, **options)
        for b in range(q.shape[0])
    ]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _of_batch(seen: MaskWindow | torch.Tensor, b: int) -> MaskWindow | torch.Tensor:
    return seen if isinstance(seen, MaskWindow) else seen[b : b + 1] if len(seen) > 1 else seen
