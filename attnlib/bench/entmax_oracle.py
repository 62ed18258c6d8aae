"""The fp64 oracle of entmax attention and of its gradients, and the budgets that a kernel has to keep."""

import math

import torch

from attnlib.bench.oracle import Budget, Judgement, max_and_rms, over_budget
from attnlib.kernels.reference import entmax as reference
from attnlib.params import EntmaxParams

FP32 = torch.finfo(torch.float32).eps
NAMES = "out", "dq", "dk", "dv"
ROUNDINGS = 16
"""Units, between 1/2 and 1, in which the gradients dZ of scores are rounded to the dtype of q, as every
kernel has to before a product on tensor cores. Each draws other errors of the same size, and a kernel's are
one more draw. Where keys are equal, a row of dZ adds up to 0, dQ is 0, and its error is one random number for
each row: the sum of its rounding errors. Of few rows the largest of one draw is often less than half of that
of another. With six, exact arithmetic and one rounding broke a budget from one draw in 6 to 9% of the inputs,
and one from 16 draws in none of 3600. Where errors are many, all draws have much the same maximum and RMS.
In float32 it is the scores whose rounding counts, so there each draw also sums them in another order: with
scores of hundreds, the largest error of six rows was 6e-7 to 2e-5 in twelve orders."""


class EntmaxOracle:
    """The truth and the budget of one call, to judge an output and gradients of d_out.

        oracle = EntmaxOracle(q, k, v, EntmaxParams(1.5, True, 0.125), d_out)
        oracle.judge("out", attention_entmax(q, k, v, causal=True, sm_scale=0.125)).raise_if_bad("my kernel")

    The rule is that of `oracle`: twice the error of plain PyTorch in the same dtype, which rounds scores and
    weights, plus a rounding of the result; and a rounding in fp32 of the numbers that cancel on the way to a
    gradient: of a row with one key it is 0. Of gradients PyTorch's error is the worst of `ROUNDINGS` ways to
    round the gradients of scores. Attributes: `truth` and `budget`, by name ("out", "dq", "dk", "dv"), `tau`
    in fp64.
    """

    @torch.no_grad()
    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: EntmaxParams,
        d_out: torch.Tensor | None = None,
    ) -> None:
        self.dtype = q.dtype
        exact = [x.double() for x in (q, k, v)]
        out, self.tau, flags = reference.forward(*exact, params)
        truth = [out]
        plain = {"out": [plain_entmax(q[..., order], k[..., order], v, params) for order in _orders(q)]}
        if d_out is not None:
            truth += reference.backward(d_out.double(), *exact, out, self.tau, flags, params)
            plain |= plain_gradients(d_out, q, k, v, params)
        self.truth = dict(zip(NAMES, truth, strict=False))
        cancelled = dict.fromkeys(NAMES, 0.0) if d_out is None else _cancelled(*exact, d_out.double(), params)
        self.budget = {}
        for name, right in self.truth.items():
            # Kernels accumulate in fp32: two orders of adding D products differ by about sqrt(D) roundings,
            # and rows of dK and dV add as many again.
            order = right * (math.sqrt(q.shape[-1]) * FP32 * (1 if name == "out" else 4))
            rough = zip(*(max_and_rms(x.double() - right) for x in plain[name]), strict=True)
            last = zip(max_and_rms(right.to(self.dtype).double() - right), max_and_rms(order), strict=True)
            floor = FP32 * cancelled[name]
            parts = zip(map(max, rough), last, strict=True)
            self.budget[name] = Budget(*(2 * (worst + max(*other, floor)) for worst, other in parts))

    @torch.no_grad()
    def judge(self, name: str, found: torch.Tensor) -> Judgement:
        """Of "out", or one of the gradients; never raises for a wrong one."""
        right, budget = self.truth[name], self.budget[name]
        if found.shape != right.shape or found.dtype != self.dtype:
            expected, came = (tuple(right.shape), self.dtype), (tuple(found.shape), found.dtype)
            return Judgement(math.nan, math.nan, budget, False, f"{name}: expected {expected}, got {came}")
        largest, rms = max_and_rms(found.double() - right)
        finite = bool(found.isfinite().all())
        fault = over_budget(largest, rms, budget) if finite else "values are not finite"
        return Judgement(largest, rms, budget, not fault, f"{name}: {fault}" if fault else "")

    def judge_tau(self, tau: torch.Tensor) -> Judgement:
        """fp32 in every kernel: this separates fp32 arithmetic from a wrong threshold."""
        seen = self.tau.isfinite()
        size = self.tau[seen].abs().max().item() if bool(seen.any()) else 0.0
        budget = Budget(1e-4 * max(1.0, size), math.inf)
        if not torch.equal(tau.isfinite(), seen):
            return Judgement(math.nan, math.nan, budget, False, "tau: expected +inf where a row sees no key")
        largest, rms = max_and_rms((tau.double() - self.tau)[seen])
        reason = "" if largest <= budget.max else f"tau: max error {largest:.2e}, tolerance {budget.max:.2e}"
        return Judgement(largest, rms, budget, not reason, reason)


def plain_entmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: EntmaxParams) -> torch.Tensor:
    """What plain PyTorch gives: scores and weights in the dtype of q, the threshold in fp32."""
    p = _plain_weights(q, k, params)
    return p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def plain_gradients(d_out, q, k, v, params: EntmaxParams) -> dict[str, list[torch.Tensor]]:
    """"dq", "dk" and "dv" likewise; the first two as often as dZ is rounded, see `ROUNDINGS`."""
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    keys, values = (x.repeat_interleave(groups[1], 1) for x in (k, v))
    dp, found = d_out @ values.mT, {"dq": [], "dk": [], "dv": []}
    orders = _orders(q)
    for number in range(ROUNDINGS):
        unit = 2 ** (-number / ROUNDINGS)  # of the first 1: plain PyTorch
        if number < len(orders):
            p = _plain_weights(q[..., orders[number]], k[..., orders[number]], params)
            dz = reference.entmax_gradient(p.float(), dp.float(), params.alpha) * params.sm_scale
            found["dv"].append((p.mT @ d_out).unflatten(1, groups).sum(2))
        rounded = (dz * unit).to(q.dtype)
        found["dq"].append((rounded @ keys).double() / unit)
        found["dk"].append((rounded.mT @ q).unflatten(1, groups).sum(2).double() / unit)
    return found


def _orders(q: torch.Tensor) -> list:
    """Of the columns, in which plain PyTorch sums scores: as they are, and for float32 others."""
    others = range(1, ROUNDINGS if q.dtype == torch.float32 else 1)
    made = (torch.Generator().manual_seed(number) for number in others)
    return [slice(None), *(torch.randperm(q.shape[-1], generator=one).to(q.device) for one in made)]


def _plain_weights(q: torch.Tensor, k: torch.Tensor, params: EntmaxParams) -> torch.Tensor:
    z = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT).mul(params.sm_scale).float()
    if params.causal:
        S_q, S_k = z.shape[-2:]
        seen = torch.ones(S_q, S_k, dtype=torch.bool, device=z.device).tril(S_k - S_q)
        z = z.masked_fill(~seen, -torch.inf)
    return reference.entmax(z, params.alpha)[0].to(q.dtype)


def _cancelled(q, k, v, d_out, params: EntmaxParams) -> dict[str, float]:
    """How large the numbers are whose differences are gradients: of dQ and dK the gradients of weights, times
    what they are multiplied with; of dV the scores, of which a threshold is subtracted."""
    inputs = {"q": q, "k": k, "v": v, "d": d_out}
    largest = {name: x.abs().max().item() if x.numel() else 0.0 for name, x in inputs.items()}
    width, scale = math.sqrt(q.shape[-1]), abs(params.sm_scale)
    weights = width * largest["d"] * largest["v"] * scale
    scores = width * largest["q"] * largest["k"] * scale
    gradients = {"dq": weights * largest["k"], "dk": weights * largest["q"]}
    return {"out": 0.0, **gradients, "dv": largest["d"] * max(1.0, scores)}
