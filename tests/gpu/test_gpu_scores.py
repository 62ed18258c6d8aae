"""attention(score=) on a GPU: the calls of the interpreter's tests in both kernels, and random ones."""

from __future__ import annotations

import random

import pytest
import torch
from score_cases import BIASES, CASES, ScoreCase, bent, check_scored
from sparse_cases import FUNCTIONS, SparseCase

from attnlib import Score, attention, explain
from attnlib.bench.shapes import Shape

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DRAWS = 200


@pytest.mark.parametrize("label", CASES)
def test_portable(label):
    check_scored(CASES[label], "cuda")


ON_HOPPER = [x for x, case in CASES.items() if "own" not in x and case.call.shape.dtype != "float32"]


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.x")
@pytest.mark.parametrize("label", ON_HOPPER)
def test_hopper(label):
    """The forward pass, and the backward pass where there is one."""
    case = CASES[label]
    if case.call.sm_scale == 0.0 and "alibi" in case.score and "cap" not in case.score:
        pytest.skip("refused by name")
    biased = "bias" in case.score or "relative" in case.score
    check_scored(case, "cuda", "hopper", backward=case.call.shape.head_dim <= 128 and not biased)


def drawn(seed: int) -> ScoreCase:
    draw = random.Random(seed)
    group, H_kv = draw.choice([1, 1, 2, 4]), draw.choice([1, 2, 3])
    D, dtype = draw.choice([64, 64, 128, 128, 72, 256]), draw.choice(["float16", "bfloat16"])
    B, S_q, S_k = draw.choice([1, 2]), draw.randint(1, 700), draw.randint(1, 700)
    causal, block_mask = draw.random() < 0.4, draw.random() < 0.6
    shape = Shape(B, group * H_kv, S_q, D, causal, dtype, heads_kv=H_kv, seqlen_k=S_k)
    names = sorted(set(FUNCTIONS) - {"documents"})
    call = SparseCase(shape, draw.choice(names), draw.choice(["normal", "normal", "outlier"]))
    if draw.random() < 0.1:
        return ScoreCase(call, draw.choice(["own", "own + cap 5", "own + sinks"]), block_mask)
    parts = [f"cap {draw.choice([1, 5, 30])}", "alibi", f"sinks {draw.choice([-3, 0, 4])}"]
    parts = draw.sample(parts, draw.randint(0, 3))
    if not parts or draw.random() < 0.3:
        biases = ["relative", *(f"bias {name}".strip() for name in sorted(BIASES))]
        parts.append(draw.choice(biases))
    return ScoreCase(call, " + ".join(parts), block_mask)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_drawn(seed):
    """Whatever kernel is chosen, forward without and with gradients."""
    case = drawn(seed)
    check_scored(case, "cuda", None, backward=False)
    check_scored(case, "cuda", None)


def test_what_runs():
    q = torch.zeros(1, 2, 256, 128, device="cuda", dtype=torch.float16)
    expected = "hopper" if HOPPER else "triton"
    assert explain(q, q, q, score=Score(soft_cap=30.0), causal=True).kernel == expected
    for added in ({"bias": torch.zeros(256, device="cuda")}, {"relative": torch.zeros(2, 9, device="cuda")}):
        assert explain(q, q, q, score=Score(**added)).kernel == expected
    turned = torch.zeros(256, 256, device="cuda").T
    for score in Score(bias=turned), Score(function=bent):
        assert explain(q, q, q, score=score).kernel == "triton"


def test_in_a_cuda_graph():
    q, k, v = (torch.randn(1, 4, 1024, 64, device="cuda").half() for _ in range(3))
    score = Score(soft_cap=20.0, sinks=torch.randn(4, device="cuda"))
    expected = attention(q, k, v, causal=True, score=score)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True, score=score)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
