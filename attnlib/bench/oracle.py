"""The fp64 oracle, the error budget, and the inputs that kernels are judged on.

A kernel passes when its largest and its RMS error against dense attention in fp64 both stay within

    2 x (error of PyTorch's same-dtype dense path + one rounding of the output dtype)

The rule is relative, so it needs no tolerance per shape or dtype: where fp16 arithmetic itself is inaccurate
the kernel may be too, and where it is accurate the kernel must be. In float32 the rounding is that of a sum
of D products in another order, sqrt(D) ulp. Output that is not finite fails, because every comparison is
written `not (error <= budget)`.

One rounding is that of the truth, and the error of PyTorch's path is one draw. Where one element is far
larger than all others, both may be small by luck, while a kernel that is as good is rounded to the number on
the other side. So if an output is beyond the largest error in no more than three elements, each of these is
judged once more, with half an ulp of its own truth as the one rounding. The RMS error gets nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attnlib import node
from attnlib.bench.shapes import Shape
from attnlib.kernels.reference.dense import (
    attention_fp64,
    attention_math,
    attention_varlen_fp64,
    attention_varlen_math,
)
from attnlib.scores import ScoreParts

FEW = 3
"""Elements that luck may put beyond the budget of the largest error; of more it is no luck."""
INPUTS = ("normal", "large", "outlier", "constant", "sink")
"""Kinds of input, see `make_inputs`."""


@dataclass(frozen=True)
class Budget:
    """The largest absolute error and the largest RMS error that a kernel may have."""

    max: float
    rms: float


@dataclass(frozen=True)
class Judgement:
    """What the oracle says of one output: its errors, the budget they had to meet, and why it failed."""

    max_error: float
    rms_error: float
    budget: Budget
    ok: bool
    reason: str = ""

    def raise_if_bad(self, name: str) -> None:
        """AssertionError that names the kernel, the errors and the budget, unless the output is good."""
        if not self.ok:
            raise AssertionError(f"{name} is wrong: {self.reason}")


def max_and_rms(error: torch.Tensor) -> tuple[float, float]:
    """Largest absolute value and root mean square, 0 of nothing; `error` is overwritten."""
    if not error.numel():
        return 0.0, 0.0
    largest = error.abs_().max().item()
    return largest, error.square_().mean().sqrt().item()


def over_budget(largest: float, rms: float, budget: Budget) -> str:
    """How these errors break the budget; "" if they keep it. NaN breaks it."""
    if largest <= budget.max and rms <= budget.rms:
        return ""
    return f"max error {largest:.2e} (budget {budget.max:.2e}), RMS error {rms:.2e} (budget {budget.rms:.2e})"


class Oracle:
    """The truth and the budget of one input, computed once, to judge many outputs.

        oracle = Oracle(q, k, v, causal=True)
        oracle.judge(attention(q, k, v, causal=True)).raise_if_bad("my kernel")

    With cu_seqlens=(cu_seqlens_q, cu_seqlens_k) the input is varlen sequences, see `attention_varlen_fp64`;
    with a mask, bool (B, H, Sq, Sk), that alone says which keys a query sees, and a score may say what
    becomes of scores.

    Attributes: `out` (B, H, Sq, D) and `lse` (B, H, Sq) in fp64, or (Tq, H, D) and (H, Tq), `budget`,
    `lse_tolerance` (absolute). A Judgement's budget is that one, or what luck widened it to.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        sm_scale: float | None = None,
        *,
        window: tuple[int, int] | None = None,
        cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None = None,
        mask: torch.Tensor | None = None,
        score: ScoreParts | None = None,
    ) -> None:
        self.dtype = q.dtype
        truth, yardstick = attention_fp64, attention_math
        if cu_seqlens is not None:
            truth, yardstick = attention_varlen_fp64, attention_varlen_math
        tensors = q, k, v, *(cu_seqlens or ())
        how = {"causal": causal, "window": window, "sm_scale": sm_scale}
        if mask is not None:
            how["mask"] = mask
        if score is not None:
            how["score"] = score
        self.out, self.lse = truth(*tensors, **how)
        plain = yardstick(*tensors, **how).double().sub_(self.out)
        math_max, math_rms = max_and_rms(plain)
        self._math_max = math_max
        rounding = self.out.to(self.dtype).double().sub_(self.out)
        round_max, round_rms = max_and_rms(rounding)
        # Kernels accumulate in fp32, and two orders of adding n numbers differ by about sqrt(n) roundings: of
        # the D products of a score, and of the blocks of 32 keys that a row may add one after the other. A
        # score of size s has an error of some s roundings, and so has its weight; the largest score is at
        # least an LSE less ln(keys). That much is granted where a rounding of the output is less: in fp32,
        # and where the truth happens to be representable (S = 1: out = v). In fp16 and bf16 it is hundreds
        # of times smaller than one.
        keys = k.shape[-2 if cu_seqlens is None else 0]
        seen = self.lse[self.lse.isfinite()]
        largest = max(0.0, seen.max().item() - math.log(keys)) if seen.numel() else 0.0
        order = (math.sqrt(q.shape[-1] + keys / 32) + largest) * torch.finfo(torch.float32).eps
        truth_max, truth_rms = max_and_rms(self.out.clone())
        self.budget = Budget(
            max=2 * (math_max + max(round_max, order * truth_max)),
            rms=2 * (math_rms + max(round_rms, order * truth_rms)),
        )
        # The LSE is fp32 in every kernel; this separates fp32 arithmetic (1e-6) from a wrong base or a lost
        # scale.
        self.lse_tolerance = 1e-4 * max(1.0, seen.abs().max().item() if seen.numel() else 0.0)

    @torch.no_grad()
    def judge(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> Judgement:
        """Compare an output, and its natural-log LSE when given, with the truth.

        Never raises for a wrong result: shape, dtype, non-finite values and errors above the budget all give
        a Judgement with ok=False and a reason.
        """
        if not isinstance(out, torch.Tensor):
            return self._bad(f"expected a torch.Tensor, got {type(out).__name__}")
        if out.shape != self.out.shape or out.dtype != self.dtype:
            return self._bad(
                f"expected shape {tuple(self.out.shape)} {self.dtype}, got {tuple(out.shape)} {out.dtype}"
            )
        if out.device != self.out.device:
            return self._bad(f"expected the output on {self.out.device}, got {out.device}")
        max_error, rms_error = max_and_rms(out.double() - self.out)
        broken = out.numel() - int(out.isfinite().sum())
        if broken:
            reason = f"{broken} of {out.numel()} values are not finite"
            return Judgement(max_error, rms_error, self.budget, False, reason)
        budget = self.budget
        if max_error > budget.max:
            budget = self._budget_of_few(out)
        reason = over_budget(max_error, rms_error, budget)
        if not reason and lse is not None:
            reason = self._lse_fault(lse)
        return Judgement(max_error, rms_error, budget, not reason, reason)

    def _budget_of_few(self, out: torch.Tensor) -> Budget:
        """The budget for an output with a larger error: a wider one if no more than `FEW` elements have it,
        and half an ulp explains each; see the module docstring."""
        errors = (out.double() - self.out).abs_()
        beyond = errors > self.budget.max
        if int(beyond.sum()) > FEW:
            return self.budget
        errors, truth = errors[beyond], self.out[beyond]
        half = torch.finfo(self.dtype).eps / 4 * torch.exp2(torch.frexp(truth).exponent.double())
        half[truth.to(self.dtype).double() == truth] = 0.0  # nothing to round
        allowed = 2 * (self._math_max + half)
        if not bool((errors <= allowed).all()):
            return self.budget
        return Budget(allowed.max().item(), self.budget.rms)

    def _bad(self, reason: str) -> Judgement:
        return Judgement(math.nan, math.nan, self.budget, False, reason)

    def _lse_fault(self, lse: torch.Tensor) -> str:
        """What is wrong with an LSE; empty when nothing is."""
        if lse.shape != self.lse.shape:
            return f"LSE: expected shape {tuple(self.lse.shape)}, got {tuple(lse.shape)}"
        empty = self.lse == -math.inf
        if not bool((lse[empty] == -math.inf).all()):
            return "LSE: expected -inf where a row sees no key"
        error = (lse.double() - self.lse)[~empty].abs()
        largest = error.max().item() if error.numel() else 0.0
        if not (largest <= self.lse_tolerance):
            return f"LSE: max error {largest:.2e}, tolerance {self.lse_tolerance:.2e}"
        return ""


def error_budget(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
) -> Budget:
    """The budget for these inputs; an `Oracle` gives it together with the truth."""
    return Oracle(q, k, v, causal, sm_scale, window=window).budget


def judge(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
    lse: torch.Tensor | None = None,
) -> Judgement:
    """Judge one output; use an `Oracle` for several outputs of the same input."""
    return Oracle(q, k, v, causal, sm_scale, window=window).judge(out, lse)


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within the block `torch.empty` and its relatives return NaN instead of whatever the memory held.

    A kernel that leaves part of its output unwritten then fails, rather than passing on what a good call
    left behind. Integer tensors stay as they are. Of the calls and the backward passes within, the first of
    each kind is sure to see it: those after it allocate in C++.
    """
    node.forget()
    functions = {
        torch: ("empty", "empty_like", "empty_strided"),
        torch.Tensor: ("new_empty", "new_empty_strided"),
    }
    originals = [(owner, name, getattr(owner, name)) for owner, names in functions.items() for name in names]

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
            x = allocate(*args, **kwargs)
            with torch.no_grad():  # a leaf that requires grad may not be written to otherwise
                return x.fill_(math.nan) if x.is_floating_point() else x

        return wrapper

    try:
        for owner, name, original in originals:
            setattr(owner, name, poisoned(original))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def make_inputs(
    shape: Shape, kind: str = "normal", seed: int = 0, device: str | torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q (B, H, Sq, D), k and v (B, H_kv, Sk, D), contiguous, v with the shape's own columns if it has
    any, in `shape.dtype`; on the GPU when there is one.

    normal    N(0, 1)
    large     q is 20 times larger: scores far beyond what exp takes without a running max
    outlier   N(0, 1) + N(0, 100) * Bernoulli(0.001), the mix of the FlashAttention-3 paper (arXiv 2407.08608)
    constant  all keys are the same vector: the scores of a row tie, and out is the mean of the visible values
    sink      key 0 draws most of the weight of every row, so the running max is found at once and stays
    """
    if kind not in INPUTS:
        raise ValueError(f"kind: expected one of {', '.join(INPUTS)}, got {kind!r}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)

    def randn(heads: int, length: int, columns: int = shape.head_dim) -> torch.Tensor:
        size = (shape.batch, heads, length, columns)
        x = torch.randn(size, generator=generator, device=device)
        if kind == "outlier":
            hit = torch.rand(size, generator=generator, device=device) < 0.001
            x += 10 * torch.randn(size, generator=generator, device=device) * hit
        return x

    q = randn(shape.heads, shape.seqlen)
    k, v = randn(shape.kv_heads, shape.keys), randn(shape.kv_heads, shape.keys, shape.value_dim)
    if kind == "large":
        q *= 20
    elif kind == "constant":
        k[:] = k[:, :, :1].clone()
    elif kind == "sink":
        # q.k0/sqrt(D) is about log(Sk) + 3, while exp of the other scores sums to about e * Sk: 9 tenths of
        # the weight.
        q += 1
        k[:, :, 0] = (math.log(shape.keys) + 3) * shape.head_dim**-0.5
    return q.to(shape.torch_dtype), k.to(shape.torch_dtype), v.to(shape.torch_dtype)
