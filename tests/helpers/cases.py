"""The calls that the forward kernel is judged on, and the judgement.

test_attention runs every case; test_mutations shows that the same cases reject kernels with a planted bug.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from attnlib import attention
from attnlib.bench.oracle import INPUTS, Oracle, make_inputs
from attnlib.bench.shapes import DTYPES, Shape

# The interpreter computes with NumPy, which remarks on log2(0) and inf - inf where the kernel discards the
# result; and its own code has a deprecated conversion.
INTERPRETER_REMARKS = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton"),
]


@dataclass(frozen=True)
class Case:
    """One call: its shape, the kind of its inputs (see `make_inputs`), and its scale."""

    shape: Shape
    kind: str = "normal"
    sm_scale: float | None = None

    @property
    def label(self) -> str:
        kind = "" if self.kind == "normal" else f" {self.kind}"
        scale = "" if self.sm_scale is None else f" scale {self.sm_scale:g}"
        return f"{self.shape.label}{kind}{scale}"


def check_forward(case: Case, device: str, impl: str = "triton") -> None:
    """AssertionError unless the kernel's output and LSE are within the error budget and no input changed."""
    shape = case.shape
    q, k, v = make_inputs(shape, case.kind, device=device)
    before = q.clone(), k.clone(), v.clone()
    out, lse = attention(q, k, v, causal=shape.causal, sm_scale=case.sm_scale, return_lse=True, impl=impl)
    judge_forward(out, lse, Oracle(q, k, v, shape.causal, case.sm_scale), case.label)
    for name, now, then in zip("qkv", (q, k, v), before, strict=True):
        assert torch.equal(now, then), f"{case.label} is wrong: {name} was written to"


def judge_forward(out: torch.Tensor, lse: torch.Tensor, oracle: Oracle, name: str) -> None:
    """AssertionError unless `out` and `lse` are what the oracle says."""
    oracle.judge(out, lse).raise_if_bad(name)
    assert lse.dtype == torch.float32, f"{name} is wrong: LSE: expected float32, got {lse.dtype}"
    # A budget would let small values pass where exactly 0 is promised.
    nothing_to_see = oracle.lse == -math.inf
    assert not out[nothing_to_see].any(), f"{name} is wrong: a row that sees no key is not 0"


# At D = 64 tiles are 64 keys wide and row blocks 64 rows tall: lengths at, just under, just over their edges.
SQUARE = [1, 17, 63, 64, 128, 129]
# Causal calls see the keys up to the bottom-right diagonal. 128x192: the diagonal still runs through tile
# corners. 129x63, 200x17, 64x1: the first rows see no key at all; of 200x17 whole row blocks do not.
RECTANGULAR = [(1, 129), (17, 200), (128, 192), (129, 63), (200, 17), (64, 1)]
HEAD_DIMS = [8, 40, 64, 72, 128, 256]
# Heads, key/value heads. At D = 64, where a section of the launch order has up to 4 heads: one, one, two.
HEADS = [(3, 3), (4, 2), (6, 1)]
SCALES = [0.0, 1e-30, -0.1, -2.0, 2.0, 30.0]


def _cases() -> list[Case]:
    cases = []
    for causal in (True, False):
        for seqlen in SQUARE:
            cases.append(Case(Shape(1, 2, seqlen, 64, causal)))
        for seqlen, keys in RECTANGULAR:
            cases.append(Case(Shape(1, 2, seqlen, 64, causal, seqlen_k=keys)))
        for heads, kv_heads in HEADS:
            cases.append(Case(Shape(2, heads, 70, 64, causal, heads_kv=kv_heads)))
        for scale in SCALES:
            cases.append(Case(Shape(1, 2, 90, 64, causal, seqlen_k=70), sm_scale=scale))
        for dtype in DTYPES:
            for head_dim in HEAD_DIMS:
                cases.append(Case(Shape(1, 2, 33, head_dim, causal, dtype, heads_kv=1, seqlen_k=70)))
            for kind in INPUTS:
                cases.append(Case(Shape(1, 2, 129, 64, causal, dtype), kind))
        cases.append(Case(Shape(1, 1, 129, 256, causal)))  # row blocks twice as tall as a tile is wide
    cases.append(Case(Shape(1, 1, 1000, 64)))  # the long loop without a mask runs many times
    return cases


CASES: dict[str, Case] = {case.label: case for case in _cases()}
"""Label -> case: causal and dense, all dtypes, all kinds of input."""
