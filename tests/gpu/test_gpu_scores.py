"""attention(score=) on a GPU: the calls of the interpreter's tests in both kernels, and drawn ones."""

from __future__ import annotations

from dataclasses import replace

import mask_draws
import pytest
import torch
from score_cases import CASES, ScoreCase, bent, check_scored
from sparse_cases import FUNCTIONS

from attnlib import BlockMask, Score, attention, explain
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.kernels.sparse import hopper
from attnlib.params import MaskWindow, Params
from attnlib.scores import parts_of

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize("label", CASES)
def test_portable(label):
    check_scored(CASES[label], "cuda")


ON_HOPPER = [x for x, case in CASES.items() if case.call.shape.dtype != "float32"]


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.x")
@pytest.mark.parametrize("label", ON_HOPPER)
def test_hopper(label):
    case = CASES[label]
    if case.call.sm_scale == 0.0 and "alibi" in case.score and "cap" not in case.score:
        pytest.skip("refused by name")
    check_scored(case, "cuda", "hopper")


DRAWN = ["-".join(map(str, form)) for form in mask_draws.FORMS]


@pytest.mark.parametrize("form", range(len(DRAWN)), ids=[f"{i}-{name}" for i, name in enumerate(DRAWN)])
def test_drawn(form):
    """One of the calls that random_draws.py checks by the thousand, of each form, and without gradients."""
    drawn = mask_draws.draw(form * mask_draws.TOGETHER)
    if drawn.impl == "hopper" and not HOPPER:
        pytest.skip("needs a GPU of compute capability 9.x")
    if isinstance(drawn.case, ScoreCase):
        check_scored(drawn.case, "cuda", drawn.impl, backward=False)
    mask_draws.check(drawn, "cuda")


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.x")
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_a_copied_bias_gives_the_bits_of_a_loaded_one(head_dim):
    rng = torch.Generator("cuda").manual_seed(0)
    for B, S_q, S_k, sizes, dtype, mask, scale in (
        (1, 1024, 1024, (1024, 1024), torch.float16, "causal", 0.1),
        (2, 700, 1304, (2, 4, 700, 1304), torch.bfloat16, "dots", -0.1),
        (2, 333, 264, (2, 1, 333, 264), torch.float16, "all", 0.1),
        (1, 5000, 4096, (4, 5000, 4096), torch.float16, "causal", 0.1),
    ):
        q, k, v = (torch.randn(B, h, S, head_dim, generator=rng, device="cuda").half()
                   for h, S in ((4, S_q), (2, S_k), (2, S_k)))  # fmt: skip
        bias = torch.randn(sizes, generator=rng, device="cuda").to(dtype)
        bias[..., :7, :] = -torch.inf
        parts = parts_of(Score(bias=bias), q, k)
        made = BlockMask.from_function(FUNCTIONS[mask], S_q, S_k, device="cuda")
        params = Params(MaskWindow(None, None), scale, return_lse=True, block_mask=made, score=parts)
        config = hopper.configuration(q, k, v, params)
        assert config.copies_bias
        found = [
            hopper.forward(q, k, v, params._replace(config=replace(config, copies_bias=copied)))
            for copied in (False, True, True, True)
        ]
        for other in found[1:]:
            assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))
        truth, truth_lse = attention_fp64(q, k, v, sm_scale=scale, mask=made.to_dense(), score=parts)
        torch.testing.assert_close(found[1][0].double(), truth, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(found[1][1].double(), truth_lse, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["all places", "each head", "each", "one row", "relative"])
def test_the_gradient_of_a_bias_of_many_tiles(kind, head_dim):
    """Beside fp64; twice, as the second launch takes another way. Where no program adds to what another one
    has, the bits are the same."""
    B, H, S_q, S_k = 2, 4, 1500, 1704
    rng = torch.Generator("cuda").manual_seed(0)
    q, k, v, d_out = (torch.randn(B, h, S, head_dim, generator=rng, device="cuda").half()
                      for h, S in ((H, S_q), (2, S_k), (2, S_k), (H, S_q)))  # fmt: skip
    sizes = {"all places": (S_q, S_k), "each head": (H, S_q, S_k), "each": (B, H, S_q, S_k),
             "one row": (H, 1, S_k), "relative": (H, 2 * S_k + 1)}[kind]  # fmt: skip
    given = torch.randn(sizes, generator=rng, device="cuda").half().requires_grad_()
    score = Score(**{"relative" if kind == "relative" else "bias": given})
    mask = BlockMask.from_function(FUNCTIONS["causal"], S_q, S_k, device="cuda")
    how = {"mask": mask.to_dense(), "score": parts_of(score, q, k)}
    oracle, found = GradientOracle(d_out, q, k, v, **how), []
    for _ in range(2):
        x = [y.clone().requires_grad_() for y in (q, k, v)]
        out = attention(*x, block_mask=mask, score=score)
        gradients = list(torch.autograd.grad(out, (*x, given), d_out))
        found.append(gradients[3])
        gradients[3] = gradients[3].float()
        if kind == "relative":
            gradients[3] = gradients[3][:, 1 : 1 + S_q + S_k - 1]
        else:  # the oracle has a bias with all its four dimensions
            gradients[3] = gradients[3][(None,) * (4 - given.ndim)]
        for verdict in oracle.judge(*gradients).values():
            verdict.raise_if_bad(f"{kind} D{head_dim}")
    assert kind in ("one row", "relative") or torch.equal(*found)


def test_what_runs():
    q = torch.zeros(1, 2, 256, 128, device="cuda", dtype=torch.float16)
    expected = "hopper" if HOPPER else "triton"
    assert explain(q, q, q, score=Score(soft_cap=30.0), causal=True).kernel == expected
    for added in ({"bias": torch.zeros(256, device="cuda")}, {"relative": torch.zeros(2, 9, device="cuda")}):
        assert explain(q, q, q, score=Score(**added)).kernel == expected
    turned = torch.zeros(256, 256, device="cuda").T
    assert explain(q, q, q, score=Score(bias=turned)).kernel == "triton"
    assert explain(q, q, q, score=Score(function=bent)).kernel == expected


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
