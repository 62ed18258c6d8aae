"""The calls with a score that kernels are judged on, and the judgement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from cases import judge_forward
from draws import raise_if_bad
from sparse_cases import SparseCase

from attnlib import Score, attention
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels.reference.gradients import visible
from attnlib.params import mask_window
from attnlib.scores import parts_of


@triton.jit
def bent(s, i, j, h, b):
    """Every part of its place counts; one key is hidden."""
    s = s / (1 + tl.abs(s)) * (2 + h) - 0.1 * ((i + 2 * j) % 5) + 0.2 * b * (j % 3)
    return tl.where(j == 3, float("-inf"), s)


@triton.jit
def bent_derivative(s, i, j, h, b):
    """Infinite for the hidden key, where it may be anything."""
    found = (2 + h) / ((1 + tl.abs(s)) * (1 + tl.abs(s)))
    return tl.where(j == 3, float("inf"), found)


def bent_reference(s, i, j, h, b):
    s = s / (1 + s.abs()) * (2 + h) - 0.1 * ((i + 2 * j) % 5) + 0.2 * b * (j % 3)
    return torch.where(j == 3, -torch.inf, s)


@triton.jit
def of_place(s, i, j, h, b):
    """Takes no scores, and so has a number for each query alone."""
    return 0.1 * i


@triton.jit
def of_place_derivative(s, i, j, h, b):
    return 0.0


def of_place_reference(s, i, j, h, b):
    return (0.1 * i).expand(s.shape)


BIASES = {
    "": (1, 1, 1, 1), "by head and key": (1, 0, 1, 0), "by query": (1, 1, 0, 1), "by all": (0, 0, 0, 0),
    "by both places": (1, 1, 0, 0), "by key": (0, 1, 1, 0),
}  # fmt: skip
"""What a bias depends on -> its sizes, 0 for that of the call."""


@dataclass(frozen=True)
class ScoreCase:
    """A call, and its score: names of parts, of "cap" with a number, "alibi", "sinks", "relative", "own"
    (`bent`), and of "bias", or "half" for one in the dtype of q, with a key of `BIASES`, joined by " + "."""

    call: SparseCase
    score: str
    block_mask: bool = True

    @property
    def label(self) -> str:
        return f"{self.call.label}{'' if self.block_mask else ' without'}, {self.score}"

    def make(self, device: str) -> Score:
        """Sinks, bias and relative require grad. The table reaches all distances."""
        s, parts = self.call.shape, {}
        rng = torch.Generator().manual_seed(2)
        full = s.batch, s.heads, s.seqlen, s.keys
        for part in self.score.split(" + "):
            name, _, rest = part.partition(" ")
            if name == "cap":
                parts["soft_cap"] = float(rest)
            elif name == "alibi":
                parts["alibi"] = (2.0 ** -torch.arange(1, s.heads + 1)).to(device)
            elif name == "sinks":
                sinks = 2 * torch.randn(s.heads, generator=rng) + float(rest or 0)
                parts["sinks"] = sinks.to(device).requires_grad_()
            elif name == "own":
                parts |= {"function": bent, "derivative": bent_derivative, "reference": bent_reference}
            elif name == "relative":
                table = torch.randn(s.heads, 2 * max(s.seqlen, s.keys) + 1, generator=rng)
                parts["relative"] = table.to(device).requires_grad_()
            else:
                sizes = [x or y for x, y in zip(BIASES[rest], full, strict=True)]
                dtype = s.torch_dtype if name == "half" else torch.float32
                parts["bias"] = torch.randn(sizes, generator=rng).to(device, dtype).requires_grad_()
        return Score(**parts)

    def dense(self, device: str) -> torch.Tensor:
        if self.block_mask:
            return self.call.dense(device)
        s = self.call.shape
        return visible(s.seqlen, s.keys, mask_window(s.causal, self.call.window), device)[None, None]


def options_of(case: ScoreCase, device: str, impl: str) -> dict:
    call = case.call
    mask = call.block_mask(device) if case.block_mask else None
    return {
        "causal": call.shape.causal, "window": call.window, "sm_scale": call.sm_scale, "impl": impl,
        "block_mask": mask,
    }  # fmt: skip


def check_scored(
    case: ScoreCase, device: str, impl: str | None = "triton", backward: bool = True, slack: float = 1
) -> None:
    """AssertionError unless output, LSE and all gradients are within the error budget, gradients' times
    `slack`."""
    inputs = make_inputs(case.call.shape, case.call.kind, device=device)
    q, k, v = (x.requires_grad_(backward) for x in inputs)
    d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    score = case.make(device)
    with torch.set_grad_enabled(backward):
        out, lse = attention(q, k, v, score=score, return_lse=True, **options_of(case, device, impl))
    plain = [x.detach() for x in (q, k, v)]
    how = {"sm_scale": case.call.sm_scale, "mask": case.dense(device), "score": parts_of(score, q, k)}
    judge_forward(out.detach(), lse, Oracle(*plain, **how), case.label)
    if not backward:
        return
    inputs = [x for x in (q, k, v, score.sinks, score.bias, score.relative) if x is not None]
    gradients = list(torch.autograd.grad(out, inputs, d_out))
    if score.relative is not None:  # the oracle knows the distances that there are
        S_q, S_k = case.call.shape.seqlen, case.call.shape.keys
        first = score.relative.shape[1] // 2 - (S_k - 1)
        assert not gradients[-1][:, :first].any() and not gradients[-1][:, first + S_q + S_k - 1 :].any()
        gradients[-1] = gradients[-1][:, first : first + S_q + S_k - 1]
    gradients[3:] = [x.float() for x in gradients[3:]]  # a bias in half precision has a gradient likewise
    for verdict in GradientOracle(d_out, *plain, **how).judge(*gradients).values():
        raise_if_bad(verdict, slack, case.label)


def _cases() -> list[ScoreCase]:
    plain = SparseCase(Shape(1, 2, 130, 64, False, seqlen_k=170), "dots")
    causal = SparseCase(Shape(1, 2, 100, 64, True, seqlen_k=130))
    parts = ["cap 2", "alibi", "sinks", "relative", *(f"bias {name}".strip() for name in BIASES)]
    cases = [ScoreCase(plain, part) for part in (*parts, "cap 30 + alibi + sinks + bias by all")]
    aligned = SparseCase(Shape(1, 2, 150, 64, False, seqlen_k=176), "documents")  # which TMA can read
    cases += [ScoreCase(aligned, f"half {name}".strip()) for name in ("", "by both places", "by query")]
    wide = SparseCase(Shape(2, 4, 70, 128, False, "bfloat16", heads_kv=2, seqlen_k=136), "band by both")
    cases += [ScoreCase(wide, "half by all"), ScoreCase(wide, "cap 2 + alibi + sinks + half by both places")]
    cases += [ScoreCase(causal, part, False) for part in ("cap 2", "alibi", "sinks 5", "relative")]
    window = SparseCase(Shape(1, 2, 90, 64, False, seqlen_k=130), window=(30, 10))
    cases.append(ScoreCase(window, "cap 5 + sinks", False))
    grouped = SparseCase(Shape(2, 4, 70, 64, False, heads_kv=2, seqlen_k=140), "band by both")
    cases.append(ScoreCase(grouped, "cap 2 + alibi + sinks + bias by key"))
    cases.append(ScoreCase(grouped, "cap 2 + relative"))
    cases += [ScoreCase(call, "own") for call in (plain, grouped)]
    cases.append(ScoreCase(grouped, "own + cap 2 + sinks + bias by key"))
    cases.append(ScoreCase(SparseCase(Shape(1, 1, 150, 64, False, seqlen_k=330), "hole"), "relative"))
    for head_dim, dtype in ((40, "float16"), (256, "bfloat16"), (256, "float32")):
        call = SparseCase(Shape(1, 2, 40, head_dim, False, dtype, heads_kv=1, seqlen_k=70))
        cases.append(ScoreCase(call, "cap 2 + alibi + sinks + bias by all"))
    for mask in ("none", "corner"):  # rows that see nothing
        call = SparseCase(Shape(1, 2, 150, 64, False, seqlen_k=140), mask)
        cases += [ScoreCase(call, part) for part in ("sinks", "cap 2 + bias by both places")]
    for scale in (0.0, -0.3, 2.0):
        call = SparseCase(Shape(1, 1, 70, 64, False), sm_scale=scale)
        cases += [ScoreCase(call, part) for part in ("cap 2 + alibi", "sinks -3")]
    cases.append(ScoreCase(SparseCase(Shape(1, 1, 140, 64, False), "documents", "large"), "cap 50 + sinks"))
    # All scores are far below the cap, whose product with an error of tanh is one of the scores.
    cases.append(ScoreCase(SparseCase(Shape(1, 1, 70, 64, False)), "cap 1000000"))
    return cases


CASES: dict[str, ScoreCase] = {case.label: case for case in _cases()}
"""Label -> case."""
assert len(CASES) == len(_cases()), "two cases have one label"
