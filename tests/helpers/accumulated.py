"""Attention to keys in parts, each merged into the result of those before: `dispatch.accumulate` judged by
fp64 attention to all keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnlib import dispatch
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.params import Existing, MaskWindow, Params

NOT_FINITE, WRONG_OUTPUT, WRONG_LSE = "not finite", "output: off by", "LSE: off by"
BESIDE = "memory beside the rows was written"
PAD = 3
"""Rows of another result before and after, in the same memory."""


@dataclass(frozen=True)
class Parts:
    """A call in parts: keys from one of `cuts` to the next, in this order or the last ones first."""

    cuts: tuple[int, ...] = (0, 70, 200)
    D: int = 64
    H: int = 2
    H_kv: int = 1
    S_q: int = 150
    B: int = 1
    window: MaskWindow = MaskWindow(None, None)
    sm_scale: float | None = None
    dtype: torch.dtype = torch.float16
    out: torch.dtype = torch.float32
    backwards: bool = False

    def rows_and_window(self, begin: int, end: int) -> tuple[int, MaskWindow] | None:
        """How many rows a call over these keys has, from the first one on, and its window: positions shift,
        and rows beyond a left bound see none of them. None: no row does."""
        S_k, (left, right) = self.cuts[-1], self.window
        rows = self.S_q if left is None else min(self.S_q, end + left + self.S_q - S_k)
        shift = rows + S_k - self.S_q - end
        if rows <= 0 or (right is not None and right + shift < 0):
            return None
        return rows, MaskWindow(
            None if left is None else left - shift, None if right is None else right + shift
        )


CASES = {
    "two parts": Parts(),
    "one of one": Parts(cuts=(0, 90), S_q=37),
    "causal": Parts(cuts=(0, 64, 129, 200), window=MaskWindow(None, 0)),
    "causal, last first": Parts(cuts=(0, 128, 200), S_q=200, window=MaskWindow(None, 0), backwards=True),
    "rows without keys": Parts(cuts=(0, 40, 100), S_q=170, window=MaskWindow(None, 0)),
    "grouped heads": Parts(cuts=(0, 33, 90), H=6, H_kv=2, S_q=37, B=2),
    "window": Parts(cuts=(0, 60, 120, 150), window=MaskWindow(40, 9)),
    "left": Parts(cuts=(0, 60, 150), window=MaskWindow(70, None), backwards=True),
    "large scores": Parts(sm_scale=12.0, S_q=70),
    "negative scale": Parts(sm_scale=-0.3, S_q=70),
    "bfloat16": Parts(dtype=torch.bfloat16, out=torch.bfloat16, S_q=70),
    "float16": Parts(out=torch.float16, cuts=(0, 50, 100, 150), S_q=70),
    "narrow": Parts(D=40, S_q=70),
    "two parts of columns": Parts(D=72, S_q=70),
    "128": Parts(D=128, S_q=130),
    "256": Parts(D=256, S_q=70, H=1, cuts=(0, 50, 90)),
    "200": Parts(D=200, S_q=70, H=1, cuts=(0, 50, 90), out=torch.float16),
}


def check(case: Parts, impl: str, device: str = "cpu") -> None:
    """AssertionError if the result is not attention to all keys, or memory beside it has changed."""
    torch.manual_seed(0)
    S_k = case.cuts[-1]
    q, k, v = (
        torch.randn(case.B, heads, rows, case.D).to(device, case.dtype)
        for heads, rows in ((case.H, case.S_q), (case.H_kv, S_k), (case.H_kv, S_k))
    )
    scale = case.D**-0.5 if case.sm_scale is None else case.sm_scale
    # A slice of the rows, in memory as (B, S, H, D), and of the heads; nothing there is a number yet.
    padded = case.S_q + 2 * PAD
    outs = torch.full((case.B, padded, case.H + 1, case.D), torch.nan, dtype=case.out, device=device)
    lses = torch.full((case.B, case.H + 1, padded), -torch.inf, device=device)
    rows = slice(PAD, PAD + case.S_q)
    into = Existing(outs.transpose(1, 2)[:, 1:, rows], lses[:, 1:, rows])
    parts = list(zip(case.cuts, case.cuts[1:], strict=False))
    for begin, end in reversed(parts) if case.backwards else parts:
        here = case.rows_and_window(begin, end)
        if here is not None:
            count, window = here
            some = Existing(into.out[:, :, :count], into.lse[:, :, :count])
            keys = (x[:, :, begin:end] for x in (k, v))
            dispatch.accumulate(q[:, :, :count], *keys, some, Params(window, scale, impl=impl))
    bounds = tuple(-1 if bound is None else bound for bound in case.window)
    truth, true_lse = attention_fp64(q, k, v, window=bounds, sm_scale=scale)
    seen = torch.isfinite(true_lse)
    assert into.out.isfinite().all() and torch.equal(into.lse.isfinite(), seen), NOT_FINITE
    off, budget = (into.out - truth).abs().max().item(), 1e-2 if case.dtype == torch.bfloat16 else 2e-3
    assert off <= budget, f"{WRONG_OUTPUT} {off}"
    off = (into.lse - true_lse)[seen].abs().max().item()
    assert off <= 2e-5 * max(1, true_lse[seen].abs().max().item()), f"{WRONG_LSE} {off}"
    outs[:, rows, 1:], lses[:, 1:, rows] = torch.nan, -torch.inf
    assert outs.isnan().all() and (lses == -torch.inf).all(), BESIDE
