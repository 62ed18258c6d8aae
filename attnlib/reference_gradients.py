"""The fp64 oracle of the gradients, and the budget that a backward kernel has to keep."""

import math

import torch

from attnlib.band import Band, band
from attnlib.reference import Budget, Verdict

FP32 = torch.finfo(torch.float32).eps


def visible(S_q: int, S_k: int, bounds: Band, device: torch.device | str = "cpu") -> torch.Tensor:
    """Bool (S_q, S_k): whether a query sees a key."""
    offset = torch.arange(S_k, device=device) - torch.arange(S_q, device=device)[:, None] - (S_k - S_q)
    seen = torch.ones_like(offset, dtype=torch.bool)
    if bounds.right is not None:
        seen &= offset <= bounds.right
    if bounds.left is not None:
        seen &= offset >= -bounds.left
    return seen


def _gradient(
    d_out, q, k, v, bounds: Band, scale: float, sizes: bool = False, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv as plain PyTorch computes them in the dtype of the inputs, P kept whole.

    sizes: instead of each gradient the sum of the absolute values of its terms, which is what rounding errors
    are relative to: dP - delta may cancel, as it does in a row with a single key. P itself counts for more
    where the LSE is large, because a rounding of the LSE in float32 is |LSE| roundings of P.
    out_dtype: delta from dO and an output that was rounded to it, which is all that a kernel is given.
    """
    group = q.shape[1] // k.shape[1]
    seen = visible(q.shape[2], k.shape[2], bounds, q.device)
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
    sm_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of dense attention in fp64, the truth of every test of a backward.

    d_out and q are (B, H, Sq, D); k and v (B, Hkv, Sk, D); any float dtype. One batch entry at a time, whose
    scores it holds whole: 8 * H * Sq * Sk bytes some four times over.
    """
    return _by_batch(d_out, q, k, v, band(causal, window), sm_scale, torch.float64)


def _by_batch(d_out, q, k, v, bounds, sm_scale, dtype, **options) -> tuple[torch.Tensor, ...]:
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    d_out, q, k, v = (x.to(dtype) for x in (d_out, q, k, v))
    parts = [
        _gradient(*(x[b : b + 1] for x in (d_out, q, k, v)), bounds, scale, **options)
        for b in range(q.shape[0])
    ]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


class GradientOracle:
    """The truth and the budget of one backward call, to judge gradients.

        GradientOracle(d_out, q, k, v, causal=True).judge(dq, dk, dv)["dk"].raise_if_bad("my kernel")

    The rule is that of `reference`: at most twice the error of plain PyTorch in the same dtype, plus a
    rounding of the result, plus what comes of computing delta from an output that was rounded. Attributes:
    `truth` and `budget`, by name ("dq", "dk", "dv").
    """

    def __init__(
        self,
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        sm_scale: float | None = None,
    ) -> None:
        bounds, self.dtype = band(causal, window), q.dtype
        with torch.no_grad():
            call = d_out, q, k, v, bounds, sm_scale
            truth = _by_batch(*call, torch.float64)
            plain = _by_batch(*call, q.dtype)
            sizes = _by_batch(*call, torch.float64, sizes=True)
            given = _by_batch(*call, torch.float64, out_dtype=q.dtype)
        self.truth = dict(zip(("dq", "dk", "dv"), truth, strict=True))
        self.budget = {}
        for (name, exact), rough, size, best in zip(self.truth.items(), plain, sizes, given, strict=True):
            # Kernels accumulate in fp32; that much is granted where a rounding of the result is less.
            errors = rough - exact, best - exact, exact.to(self.dtype) - exact, size * FP32
            largest, rms = zip(*map(_max_rms, errors), strict=True)
            self.budget[name] = Budget(*(2 * (x[0] + x[1] + max(x[2:])) for x in (largest, rms)))

    @torch.no_grad()
    def judge(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> dict[str, Verdict]:
        """A verdict on each gradient; never raises for a wrong one."""
        found = {"dq": dq, "dk": dk, "dv": dv}
        return {name: self._judge(name, gradient) for name, gradient in found.items()}

    def _judge(self, name: str, gradient: torch.Tensor) -> Verdict:
        exact, budget = self.truth[name], self.budget[name]
        if gradient.shape != exact.shape or gradient.dtype != self.dtype:
            reason = (
                f"{name}: expected shape {tuple(exact.shape)} {self.dtype}, "
                f"got {tuple(gradient.shape)} {gradient.dtype}"
            )
            return Verdict(math.nan, math.nan, budget, False, reason)
        largest, rms = _max_rms(gradient.double() - exact)
        ok = largest <= budget.max and rms <= budget.rms  # False for NaN
        reason = "" if ok else (
            f"{name}: max error {largest:.2e} (budget {budget.max:.2e}), "
            f"RMS error {rms:.2e} (budget {budget.rms:.2e})"
        )  # fmt: skip
        return Verdict(largest, rms, budget, ok, reason)


def _max_rms(error: torch.Tensor) -> tuple[float, float]:
    return (error.abs().max().item(), error.square().mean().sqrt().item()) if error.numel() else (0.0, 0.0)
