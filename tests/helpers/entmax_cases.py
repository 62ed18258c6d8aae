"""The calls that `attention_entmax` is judged on, and the judgement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from attnlib import attention_entmax
from attnlib.bench.entmax_oracle import EntmaxOracle
from attnlib.bench.oracle import make_inputs, poisoned_empty
from attnlib.bench.shapes import Shape
from attnlib.kernels.entmax import call, launch, launch_backward
from attnlib.params import EntmaxParams


@dataclass(frozen=True)
class EntmaxCase:
    """One call. spread: what q is multiplied with. room: of a list, None for the usual one."""

    name: str
    queries: int
    keys: int
    alpha: float = 1.5
    causal: bool = False
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 32
    dtype: str = "float16"
    batch: int = 1
    sm_scale: float | None = None
    kind: str = "normal"
    spread: float = 1.0
    room: int | None = None
    backward: bool = True

    @property
    def params(self) -> EntmaxParams:
        scale = self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale
        return EntmaxParams(self.alpha, self.causal, scale, True)


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor


def make(case: EntmaxCase, device: str, seed: int = 0) -> Inputs:
    shape = Shape(
        case.batch, case.heads, case.queries, case.head_dim, False, case.dtype, case.kv_heads, case.keys
    )
    q, k, v = make_inputs(shape, case.kind, seed, device)
    d_out = make_inputs(shape, "normal", seed + 1000, device)[0]
    return Inputs(q * case.spread, k, v, d_out)


def forget_launches() -> None:
    launch.prepare.cache_clear()
    launch_backward.prepare.cache_clear()


def check(case: EntmaxCase, device: str, seed: int = 0) -> None:
    """AssertionError unless out, tau and gradients are right; memory is NaN before."""
    inputs = make(case, device, seed)
    oracle = EntmaxOracle(*inputs[:3], case.params, inputs.d_out if case.backward else None)
    q, k, v = (x.requires_grad_(case.backward) for x in inputs[:3])
    usual = call.ROOM
    try:
        if case.room is not None:
            call.ROOM = case.room
            forget_launches()
        with poisoned_empty():
            out, tau = attention_entmax(
                q, k, v, alpha=case.alpha, causal=case.causal, sm_scale=case.sm_scale, return_tau=True,
                impl="triton",
            )  # fmt: skip
            found = torch.autograd.grad(out, (q, k, v), inputs.d_out) if case.backward else ()
    finally:
        if case.room is not None:
            call.ROOM = usual
            forget_launches()
    oracle.judge("out", out).raise_if_bad(case.name)
    oracle.judge_tau(tau).raise_if_bad(case.name)
    for name, gradient in zip(("dq", "dk", "dv"), found, strict=False):
        oracle.judge(name, gradient).raise_if_bad(case.name)


CASES = {
    case.name: case
    for case in (
        EntmaxCase("dense", 70, 70),
        EntmaxCase("causal", 70, 100, causal=True, spread=3.0, head_dim=16),
        EntmaxCase("more keys", 20, 70, causal=True, heads=2, dtype="bfloat16", head_dim=40),
        EntmaxCase("rows without keys", 70, 20, causal=True, head_dim=16),
        EntmaxCase("groups", 20, 70, heads=2, batch=2, head_dim=16, causal=True),
        EntmaxCase("one", 1, 1),
        EntmaxCase("one key", 70, 1),
        EntmaxCase("one query", 1, 130, causal=True),
        EntmaxCase("sparsemax", 20, 40, alpha=2.0, dtype="float32"),
        EntmaxCase("any alpha below", 20, 40, alpha=1.25, causal=True, dtype="float32"),
        EntmaxCase("any alpha above", 20, 40, alpha=1.75, causal=True, dtype="float32"),
        EntmaxCase("nearly softmax", 20, 70, alpha=1.01),
        EntmaxCase("least alpha", 20, 40, alpha=1 + 2.0**-10, dtype="float32"),
        EntmaxCase("float32", 20, 40, causal=True, dtype="float32"),
        EntmaxCase("negative scale", 20, 70, sm_scale=-0.3),
        EntmaxCase("scale 0", 20, 70, sm_scale=0.0),
        EntmaxCase("times 100", 20, 70, spread=100.0, causal=True),
        EntmaxCase("outliers", 20, 70, kind="outlier", causal=True),
        EntmaxCase("constant", 20, 70, kind="constant"),
        EntmaxCase("sink", 20, 70, kind="sink", causal=True),
        EntmaxCase("no room", 100, 130, causal=True, room=64, spread=0.3, head_dim=16),
        EntmaxCase("no room, dense", 70, 70, room=64, spread=0.3),
        EntmaxCase("long", 10, 2300, head_dim=16),  # a list takes two steps of its flags
    )
}
