"""Gradients of dense attention in PyTorch: in fp64, the truth of every test, and in other dtypes."""

import math

import torch

from attnlib.kernels.reference.scores import by_diagonals, scored, summed, with_sinks
from attnlib.params import MaskWindow, mask_window
from attnlib.scores import ScoreParts


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
    out_dtype: torch.dtype | None = None, score: ScoreParts | None = None,
    given: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dq, dk, dv, and the gradients of a score's sinks, by rows (1, H, Sq), and bias, as plain PyTorch
    computes them in the dtype of the inputs, P kept whole.

    sizes: instead of each gradient the sum of the absolute values of its terms, which is what rounding errors
    are relative to: dP - delta may cancel, as it does in a row with a single key. P itself counts for more
    where the LSE is large, because a rounding of the LSE in float32 is |LSE| roundings of P.
    out_dtype: delta from dO and an output that was rounded to it, which is all that a kernel is given.
    given: (out, LSE) of the forward pass. Rows whose LSE says that there were more keys than these get the
    part of the gradient that these keys have.
    """
    group = q.shape[1] // k.shape[1]
    if isinstance(seen, MaskWindow):
        seen = visible(q.shape[2], k.shape[2], seen, q.device)
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scores, slope = q @ keys.mT * scale, 1.0  # [B, H, S_q, S_k]
    if score is not None:
        scores, slope = scored(scores, score, 0, (q.shape[2], k.shape[2]))
    scores = with_sinks(scores.masked_fill(~seen, -math.inf), score)
    weights, length = torch.softmax(scores, -1), k.shape[2]
    # Rows that see nothing: 0, not NaN. A bias may hide keys, too.
    p = weights[..., :length].masked_fill(~seen | (scores[..., :length] == -math.inf), 0.0)
    p_sink = weights[..., length:].masked_fill(scores[..., length:] == -math.inf, 0.0)
    if sizes:
        lse = torch.logsumexp(scores, -1, keepdim=True)
        more = 1 + torch.where(lse.isfinite(), lse.abs(), 0.0)
        p, p_sink = p * more, p_sink * more
        d_out, q, keys, values, scale = d_out.abs(), q.abs(), keys.abs(), values.abs(), abs(scale)
    dp = d_out @ values.mT
    if out_dtype is None:
        delta = (p * dp).sum(-1, keepdim=True)
    else:
        delta = (d_out * (p @ values).to(out_dtype).to(p.dtype)).sum(-1, keepdim=True)
    if given is not None:
        p, delta = _of_more_keys(p, delta, torch.logsumexp(scores, -1, keepdim=True), d_out, *given)
    ds = p * (dp + delta if sizes else dp - delta)
    more = ()
    if score is not None:
        d_sinks = None if score.sinks is None else (p_sink * (delta if sizes else -delta)).squeeze(3)
        more = d_sinks, None if score.bias is None else summed(ds, (q.shape[0], *score.sizes[1:]))
        ds = ds * slope
    dk, dv = ds.mT @ q * scale, p.mT @ d_out
    dk, dv = (x.unflatten(1, (k.shape[1], group)).sum(2) for x in (dk, dv))
    return ds @ keys * scale, dk, dv, *more


def _of_more_keys(p, delta, own, d_out, out, lse) -> tuple[torch.Tensor, torch.Tensor]:
    """P and delta with the LSE and the output of all keys, in rows that saw more of them: those whose LSE is
    not `own`, by more than float32 rounds it."""
    lse = lse.to(p.dtype)[..., None]
    more = (own - lse).abs() > 3e-7 * lse.abs().clamp_min(1)
    more |= own.isneginf() & ~lse.isneginf()
    weight = torch.exp(own - lse.masked_fill(lse.isneginf(), 0))
    return torch.where(more, p * weight, p), torch.where(more, (d_out * out).sum(-1, keepdim=True), delta)


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
    score: ScoreParts | None = None,
    given: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv of dense attention in fp64, the truth of every test of a backward; with a score the
    gradients of its sinks and its bias as well, None where it has none.

    q is (B, H, Sq, D), k (B, Hkv, Sk, D); d_out and v likewise with columns Dv; any float dtype. `mask`: bool
    (B, H, Sq, Sk), B and H or 1, instead of causal and window. One batch entry at a time, whose scores it
    holds whole: 8 * H * Sq * Sk bytes some four times over. given, without a score: out and LSE of the
    forward pass, which may have seen more keys; then these are the parts of the gradients that k and v have.
    """
    seen = mask_window(causal, window) if mask is None else mask
    return gradients_by_batch(d_out, q, k, v, seen, sm_scale, torch.float64, score, given=given)


def gradients_by_batch(
    d_out, q, k, v, seen, sm_scale, dtype, score: ScoreParts | None = None, given=None, *, by_rows=False,
    **options,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """`seen`: a `MaskWindow`, or a mask, bool (B, H, Sq, Sk), B and H or 1. by_rows: of sinks not the
    gradient (H) but what each row adds to it (B, H, Sq)."""
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    d_out, q, k, v = (x.to(dtype) for x in (d_out, q, k, v))
    parts = [
        _gradient(
            *(x[b : b + 1] for x in (d_out, q, k, v)), _of_batch(seen, b), scale,
            score=_score_of_batch(score, b), given=given and tuple(x[b : b + 1].to(dtype) for x in given),
            **options,
        )
        for b in range(q.shape[0])
    ]  # fmt: skip
    found = [None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)]
    if score is not None and score.sinks is not None and not by_rows:
        found[3] = found[3].sum((0, 2))
    if score is not None and score.bias is not None:
        found[4] = summed(found[4], score.sizes)
        if score.diagonal:
            found[4] = by_diagonals(found[4])
    return tuple(found)


def _score_of_batch(score: ScoreParts | None, b: int) -> ScoreParts | None:
    if score is None:
        return None
    if score.reference is not None:
        whole = score.reference
        score = score._replace(reference=lambda s, i, j, h, own: whole(s, i, j, h, own + b))
    if score.bias is None or score.diagonal:
        return score
    return score._replace(bias=score.bias[b : b + 1])


def _of_batch(seen: MaskWindow | torch.Tensor, b: int) -> MaskWindow | torch.Tensor:
    return seen if isinstance(seen, MaskWindow) else seen[b : b + 1] if len(seen) > 1 else seen
