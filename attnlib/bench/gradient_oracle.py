"""The fp64 oracle of the gradients, and the budget that a backward kernel has to keep."""

import math

import torch

from attnlib.bench.oracle import Budget, Judgement, max_and_rms, over_budget
from attnlib.kernels.reference.gradients import gradients_by_batch
from attnlib.params import mask_window
from attnlib.scores import ScoreParts

FP32 = torch.finfo(torch.float32).eps


def _of_rows(errors: torch.Tensor) -> torch.Tensor:
    """(B, H, Sq) -> (H): the errors' sum, or what it is with random signs if that is more."""
    return torch.maximum(errors.sum((0, 2)).abs(), errors.square().sum((0, 2)).sqrt())


class GradientOracle:
    """The truth and the budget of one backward call, to judge gradients.

        GradientOracle(d_out, q, k, v, causal=True).judge(dq, dk, dv)["dk"].raise_if_bad("my kernel")

    The rule is that of `reference`: at most twice the error of plain PyTorch in the same dtype, plus a
    rounding of the result, plus what comes of computing delta from an output that was rounded. The gradient
    of a sink is one number, the sum of what all rows add. Their errors may cancel in one calculation and not
    in another, so what is granted is no less than the root of the sum of their squares.
    Attributes: `truth` and `budget`, by name ("dq", "dk", "dv", "dsinks", "dbias").
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
        *,
        mask: torch.Tensor | None = None,
        score: ScoreParts | None = None,
    ) -> None:
        seen, self.dtype = mask_window(causal, window) if mask is None else mask, q.dtype
        with torch.no_grad():
            call = d_out, q, k, v, seen, sm_scale
            more = {"score": score, "by_rows": True}
            truth = gradients_by_batch(*call, torch.float64, **more)
            plain = gradients_by_batch(*call, q.dtype, **more)
            sizes = gradients_by_batch(*call, torch.float64, sizes=True, **more)
            given = gradients_by_batch(*call, torch.float64, out_dtype=q.dtype, **more)
        results = [
            [x for x in found if x is not None] for found in (truth, plain, sizes, given)
        ]
        truth, plain, sizes, given = results
        names = ["dq", "dk", "dv"]
        if score is not None:
            names += ["dsinks"] * (score.sinks is not None) + ["dbias"] * (score.bias is not None)
        self.truth, self.budget = {}, {}
        for name, exact, rough, size, best in zip(names, truth, plain, sizes, given, strict=True):
            errors = rough - exact, best - exact
            if name == "dsinks":
                errors = tuple(_of_rows(error) for error in errors)
                exact, size = exact.sum((0, 2)), size.sum((0, 2))
            self.truth[name] = exact
            # Kernels accumulate in fp32; that much is granted where a rounding of the result is less.
            errors = *errors, exact.to(self.dtype) - exact, size * FP32
            largest, rms = zip(*map(max_and_rms, errors), strict=True)
            self.budget[name] = Budget(*(2 * (x[0] + x[1] + max(x[2:])) for x in (largest, rms)))

    @torch.no_grad()
    def judge(self, *gradients: torch.Tensor) -> dict[str, Judgement]:
        """A verdict on each gradient: dq, dk, dv, and of a score the gradients of sinks and of bias in
        float32, where it has them. Never raises for a wrong one."""
        found = dict(zip(self.truth, gradients, strict=True))
        return {name: self.judge_one(name, gradient) for name, gradient in found.items()}

    def judge_one(self, name: str, gradient: torch.Tensor) -> Judgement:
        """Of "dq", say."""
        exact, budget = self.truth[name], self.budget[name]
        dtype = self.dtype if name in ("dq", "dk", "dv") else torch.float32
        if gradient.shape != exact.shape or gradient.dtype != dtype:
            reason = (
                f"{name}: expected shape {tuple(exact.shape)} {dtype}, "
                f"got {tuple(gradient.shape)} {gradient.dtype}"
            )
            return Judgement(math.nan, math.nan, budget, False, reason)
        largest, rms = max_and_rms(gradient.double() - exact)
        fault = over_budget(largest, rms, budget)
        return Judgement(largest, rms, budget, not fault, f"{name}: {fault}" if fault else "")
