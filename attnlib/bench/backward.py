"""Compare backward passes of attention on a GPU, by the rules of `bench`: same tensors, shuffled rounds, cold
L2, and an fp64 oracle that judges dq, dk and dv before the timing and after it.

The forward runs once, outside of the timed span. What is timed is the backward alone, from d_out to the three
gradients; of a function of ours, through PyTorch's autograd, as a model runs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from attnlib.bench import harness, peers, records, roofline
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.harness import Attention, Run
from attnlib.bench.oracle import Budget, Judgement, make_inputs, poisoned_empty
from attnlib.bench.setting import BOOK, Setting, warming
from attnlib.bench.shapes import Shape

FLOPS = 2.5
"""FLOPs of a backward pass for each of its forward: five products instead of two. The convention of the
FlashAttention papers, whatever a kernel computes."""

GRADIENTS = ("dq", "dk", "dv")

_CHUNK_BYTES = 4 << 30  # of fp64 scores that the oracle holds at a time, several times over

Tensor = torch.Tensor


def make_gradient(shape: Shape, seed: int = 1, device: str | torch.device | None = None) -> Tensor:
    """A random d_out, N(0, 1), for a call of this shape; the inputs come from `oracle.make_inputs`."""
    own = {"heads_kv": None, "seqlen_k": None, "head_dim": shape.value_dim, "head_dim_v": None}
    one = dataclasses.replace(shape, **own)
    return make_inputs(one, "normal", seed, device)[0]


class Judge:
    """The `GradientOracle` of a call of any size: a few heads at a time, whose scores fit in memory."""

    def __init__(self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        self.parts: list[tuple[int, slice, slice, GradientOracle]] = []
        group = q.shape[1] // k.shape[1]
        for b, heads in _chunks(q, k):
            rows = slice(heads.start * group, heads.stop * group)
            tensors = d_out[b : b + 1, rows], q[b : b + 1, rows], k[b : b + 1, heads], v[b : b + 1, heads]
            self.parts.append((b, rows, heads, GradientOracle(*tensors, causal=causal)))

    def judge(self, dq: Tensor, dk: Tensor, dv: Tensor) -> dict[str, Judgement]:
        """A verdict on each gradient, good if that of every part is. Errors and budgets are those of the
        whole: the largest of the parts', and their root mean square."""
        found: dict[str, list[Judgement]] = {name: [] for name in GRADIENTS}
        for b, rows, heads, oracle in self.parts:
            part = dq[b : b + 1, rows], dk[b : b + 1, heads], dv[b : b + 1, heads]
            for name, verdict in oracle.judge(*part).items():
                found[name].append(verdict)
        weights = [heads.stop - heads.start for _, _, heads, _ in self.parts]
        return {name: _together(verdicts, weights) for name, verdicts in found.items()}


def _chunks(q: Tensor, k: Tensor) -> Iterator[tuple[int, slice]]:
    """(batch entry, key heads) of each part."""
    group, heads = q.shape[1] // k.shape[1], k.shape[1]
    head_bytes = 8 * group * q.shape[2] * k.shape[2]
    step = max(1, min(heads, _CHUNK_BYTES // head_bytes))
    for b in range(q.shape[0]):
        for first in range(0, heads, step):
            yield b, slice(first, min(heads, first + step))


def _together(verdicts: list[Judgement], weights: list[int]) -> Judgement:
    def rms(values: list[float]) -> float:
        return math.sqrt(sum(w * x * x for w, x in zip(weights, values, strict=True)) / sum(weights))

    bad = [verdict.reason for verdict in verdicts if not verdict.ok]
    return Judgement(
        max_error=max((v.max_error for v in verdicts), key=lambda x: (math.isnan(x), x)),
        rms_error=rms([v.rms_error for v in verdicts]),
        budget=Budget(max(v.budget.max for v in verdicts), rms([v.budget.rms for v in verdicts])),
        ok=not bad,
        reason=bad[0] if bad else "",
    )


def error_columns(verdicts: Mapping[str, Judgement]) -> dict[str, float]:
    """Columns of a row: dq_max, dq_rms, dq_budget_max, dq_budget_rms, and the same of dk and dv."""
    row: dict[str, float] = {}
    for name, verdict in verdicts.items():
        row |= {f"{name}_max": verdict.max_error, f"{name}_rms": verdict.rms_error}
        row |= {f"{name}_budget_max": verdict.budget.max, f"{name}_budget_rms": verdict.budget.rms}
    return row


class BackwardRun(Run):
    """One backward on one shape."""

    @property
    def flops(self) -> float:
        return roofline.backward_flops(self.shape)

    def prepare(self, function: Attention | None, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        causal, scale = self.shape.causal, self.shape.head_dim**-0.5
        self.is_peer = function is None
        if function is not None:
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            self.call = peers.through_autograd(function(q, k, v, causal, scale), d_out, q, k, v)
            return
        peer = self.peer()
        reason = peer.available()
        if reason:
            self.stop("not installed", reason)
        else:
            self.call = peer.make_backward(d_out, q, k, v, causal, scale)

    def gate(self, oracle: Judge | None) -> None:
        with contextlib.nullcontext() if self.is_peer else poisoned_empty():
            gradients = self.call()
        torch.cuda.synchronize()
        if oracle is None:
            return
        verdicts = oracle.judge(*gradients)
        self.row.update(error_columns(verdicts))
        bad = [verdict.reason for verdict in verdicts.values() if not verdict.ok]
        if bad:
            self.stop("wrong", "; ".join(bad))


def collect(
    implementations: Mapping[str, Attention | None],
    shapes: Iterable[Shape],
    *,
    setting: Setting = BOOK,
    control: str | None = None,
    gate: bool = True,
    kind: str = "normal",
) -> list[dict[str, Any]]:
    """Measure on this GPU; one row for each shape and implementation, see `measure`, and one for the control.
    Stores nothing."""

    def start(shape: Shape) -> tuple[tuple[Tensor, ...], Judge | None]:
        q, k, v = make_inputs(shape, kind, device=harness.DEVICE)
        tensors = make_gradient(shape, device=harness.DEVICE), q, k, v
        return tensors, Judge(*tensors, shape.causal) if gate and not warming() else None

    return harness.collect_runs(BackwardRun, start, implementations, shapes, setting, control)


def measure(
    name: str,
    implementations: Mapping[str, Attention | None],
    shapes: Iterable[Shape],
    *,
    notebook: str,
    **options: Any,
) -> records.Table:
    """Compare backward passes on shapes; measured and stored on a GPU, replayed without one.

    `implementations`: name -> f(q, k, v, causal, sm_scale) -> out, differentiable, or None for the peer of
    that name; the options are those of `bench.measure`. So are the rows, with two differences: tflops credits
    2.5 times the FLOPs of the forward, and the errors are those of `error_columns`.
    """
    harness.check_names(implementations, options.get("control"))
    shapes = list(shapes)
    how = harness.method(**options) | {"timed": "the backward alone"}
    how["flops"] = "2.5 x 4*B*H*Sq*Sk*D, halved when causal"
    table = records.table(notebook, name, lambda: collect(implementations, shapes, **options), method=how)
    rows = [table.one(shape, impl=impl) for shape in shapes for impl in implementations]
    return dataclasses.replace(table, rows=rows)
