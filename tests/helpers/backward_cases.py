"""The calls that the backward kernels are judged on, and the judgement.

test_backward runs every case; test_backward_mutations shows that the same cases reject planted bugs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import families
import torch

from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import INPUTS, make_inputs
from attnlib.bench.shapes import DTYPES, Shape
from attnlib.kernels import portable
from attnlib.kernels.reference.gradients import visible
from attnlib.params import MaskWindow, Params, mask_window

Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class BackwardCase:
    """One call: its shape, the kind of its inputs (see `make_inputs`), its scale and its window."""

    shape: Shape
    kind: str = "normal"
    sm_scale: float | None = None
    window: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        kind = "" if self.kind == "normal" else f" {self.kind}"
        scale = "" if self.sm_scale is None else f" scale {self.sm_scale:g}"
        window = "" if self.window is None else f" window {self.window[0]},{self.window[1]}"
        return f"{self.shape.label}{kind}{scale}{window}"


def portable_backward(*arguments) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) of (d_out, q, k, v, out, lse, params), by the portable kernels."""
    return families.backward(portable, *arguments)


def exact_forward(q, k, v, bounds: MaskWindow, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in the dtype of q, LSE in float32), computed in fp64: what a backward is given."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    seen = visible(q.shape[2], k.shape[2], bounds, q.device)
    scores = (q.double() @ keys.mT * scale).masked_fill(~seen, -math.inf)
    p = torch.softmax(scores, -1).masked_fill(~seen, 0.0)
    return (p @ values).to(q.dtype), torch.logsumexp(scores, -1).float()


def check_backward(case: BackwardCase, device: str, run: Backward = portable_backward) -> None:
    """AssertionError unless all gradients are within the error budget and no input changed."""
    shape = case.shape
    q, k, v = make_inputs(shape, case.kind, device=device)
    generator = torch.Generator(device).manual_seed(1)
    d_out = torch.randn((*q.shape[:3], v.shape[3]), generator=generator, device=device).to(q.dtype)
    bounds = mask_window(shape.causal, case.window)
    scale = shape.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    out, lse = exact_forward(q, k, v, bounds, scale)
    given = {"d_out": d_out, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    before = {name: tensor.clone() for name, tensor in given.items()}
    gradients = run(d_out, q, k, v, out, lse, Params(bounds, scale))
    oracle = GradientOracle(d_out, q, k, v, shape.causal, case.window, case.sm_scale)
    for verdict in oracle.judge(*gradients).values():
        verdict.raise_if_bad(case.label)
    for name, tensor in given.items():
        assert torch.equal(tensor, before[name]), f"{case.label} is wrong: {name} was written to"


# Tiles are 32 or 64 wide at the head dimensions up to 128: lengths at, just under, just over their edges.
SQUARE = [1, 63, 64, 129]
# 129x63, 200x17: the first queries see no key at all. 17x200: the diagonal misses the corners of tiles.
RECTANGULAR = [(17, 200), (129, 63), (200, 17), (1, 130)]
WINDOWS = [(0, 0), (10, -1), (-1, 10), (40, 20), (64, 64), (150, 0)]
SCALES = [0.0, -0.1, 2.0]


def _cases() -> list[BackwardCase]:
    cases = []
    for causal in (True, False):
        for seqlen in SQUARE:
            cases.append(BackwardCase(Shape(1, 1, seqlen, 64, causal)))
        for seqlen, keys in RECTANGULAR:
            cases.append(BackwardCase(Shape(1, 1, seqlen, 64, causal, seqlen_k=keys)))
        for scale in SCALES:
            cases.append(BackwardCase(Shape(1, 1, 70, 64, causal, seqlen_k=90), sm_scale=scale))
        for dtype in DTYPES:
            cases.append(BackwardCase(Shape(2, 4, 40, 64, causal, dtype, heads_kv=2, seqlen_k=70)))
        for head_dim in (8, 72, 128, 256):
            cases.append(BackwardCase(Shape(1, 2, 65, head_dim, causal, heads_kv=1, seqlen_k=100)))
        for window in WINDOWS:
            cases.append(BackwardCase(Shape(1, 1, 150, 64, causal, seqlen_k=170), window=window))
        cases.append(BackwardCase(Shape(1, 1, 170, 64, causal, seqlen_k=150), window=(30, 30)))
    for kind in INPUTS:
        cases.append(BackwardCase(Shape(1, 1, 129, 64), kind))
        cases.append(BackwardCase(Shape(1, 1, 129, 64, dtype="bfloat16"), kind))
    cases.append(BackwardCase(Shape(1, 1, 64, 64, False, seqlen_k=1), "large", 2.0))
    return cases


CASES: dict[str, BackwardCase] = {case.label: case for case in _cases()}
"""Label -> case: causal, dense and windows, all dtypes, all kinds of input."""
