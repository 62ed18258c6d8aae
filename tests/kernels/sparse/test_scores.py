"""attention(score=) by the portable kernels, forward and backward, against fp64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from cases import INTERPRETER_REMARKS
from chosen import with_more
from score_cases import CASES, bent, bent_reference, check_scored, of_place, of_place_derivative

from attnlib import BlockMask, Score, attention, explain
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.kernels.reference.gradients import gradient_fp64
from attnlib.scores import parts_of

pytestmark = INTERPRETER_REMARKS


SCALED = [label for label, case in CASES.items() if case.call.sm_scale in (0.0, 2.0)]


@pytest.mark.parametrize("label", with_more((label for label in CASES if label not in SCALED), CASES))
def test_forward_and_backward(label, device):
    check_scored(CASES[label], device)


def test_the_reference_is_what_autograd_makes_of_the_formula():
    """The fp64 reference beside a softmax in plain PyTorch, forward and all gradients."""
    rng = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(2, 4, 20, 16, generator=rng).double().requires_grad_() for _ in range(4))
    sinks = torch.randn(4, generator=rng).requires_grad_()
    bias = torch.randn(2, 1, 20, 20, generator=rng).requires_grad_()
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    seen = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]
    scores = 3 * torch.tanh(q @ k.mT * 0.4 / 3) + bias.double()
    distance = (torch.arange(20)[:, None] - torch.arange(20)).abs()
    scores = (scores - slopes[:, None, None] * distance).masked_fill(~seen, -torch.inf)
    logits = torch.cat([scores, sinks.double()[:, None, None].expand(2, 4, 20, 1)], -1)
    out = torch.softmax(logits, -1)[..., :20] @ v
    expected = torch.autograd.grad(out, (q, k, v, sinks, bias), d_out)
    score = parts_of(Score(soft_cap=3.0, alibi=slopes, sinks=sinks, bias=bias), q, k)
    plain = [x.detach() for x in (q, k, v)]
    ours, lse = attention_fp64(*plain, sm_scale=0.4, mask=seen, score=score)
    torch.testing.assert_close(ours, out.detach())
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1).detach())
    found = gradient_fp64(d_out.detach(), *plain, sm_scale=0.4, mask=seen, score=score)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=1e-6, atol=1e-6)


def tensors(*shape, device):
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng).half().to(device) for _ in range(3)]


def test_a_bias_of_minus_infinity_is_a_mask(device):
    q, k, v = tensors(1, 2, 70, 64, device=device)
    mask = torch.rand(1, 1, 70, 70, generator=torch.Generator().manual_seed(3)).to(device) < 0.3
    mask[:, :, 5] = False  # a row that sees nothing
    bias = torch.zeros(mask.shape, device=device).masked_fill(~mask, -torch.inf)
    x = [y.clone().requires_grad_() for y in (q, k, v)]
    out, lse = attention(*x, score=Score(bias=bias), return_lse=True, impl="triton")
    y = [z.clone().requires_grad_() for z in (q, k, v)]
    made = BlockMask.from_mask(mask)
    expected, expected_lse = attention(*y, block_mask=made, return_lse=True, impl="triton")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(lse, expected_lse)
    found = zip(*(torch.autograd.grad(o.sum(), z) for o, z in ((out, x), (expected, y))), strict=True)
    for a, b in found:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_sink_of_minus_infinity_is_none(device):
    q, k, v = tensors(1, 2, 70, 64, device=device)
    sinks = torch.full((2,), -torch.inf, device=device, requires_grad=True)
    out, lse = attention(q, k, v, causal=True, score=Score(sinks=sinks), return_lse=True, impl="triton")
    plain, plain_lse = attention(q, k, v, causal=True, return_lse=True, impl="triton")
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-3)
    torch.testing.assert_close(lse, plain_lse)
    assert not torch.autograd.grad(out.sum(), sinks)[0].any()


def test_a_bias_of_any_layout_and_dtype(device):
    q, k, v = tensors(1, 2, 40, 64, device=device)
    bias = torch.randn(40, 2, 40, generator=torch.Generator().manual_seed(4)).bfloat16().to(device)
    turned = bias.permute(1, 2, 0).requires_grad_()
    out = attention(q, k, v, score=Score(bias=turned), impl="triton")
    found = torch.autograd.grad(out.sum(), turned)[0]
    own = turned.detach().float().contiguous().requires_grad_()
    same = attention(q, k, v, score=Score(bias=own), impl="triton")
    assert torch.equal(out, same)
    assert found.dtype == torch.bfloat16 and found.shape == turned.shape
    torch.testing.assert_close(found.float(), torch.autograd.grad(same.sum(), own)[0], rtol=1e-2, atol=1e-3)


def test_the_gradient_of_a_bias_does_not_depend_on_the_default_dtype(device):
    q, k, v = tensors(1, 2, 20, 64, device=device)
    bias = torch.randn(20, generator=torch.Generator().manual_seed(4)).to(device).requires_grad_()
    out = attention(q, k, v, score=Score(bias=bias), impl="triton")
    expected = torch.autograd.grad(out.sum(), bias, retain_graph=True)[0]
    torch.set_default_dtype(torch.float16)
    try:
        found = torch.autograd.grad(out.sum(), bias)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_slopes_that_change_before_the_backward_pass_are_an_error(device):
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 20, 64, device=device))
    slopes = torch.tensor([0.5, 0.25], device=device)
    out = attention(q, k, v, score=Score(alibi=slopes), impl="reference")
    slopes.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_slopes_that_require_grad_by_now_are_an_error(device):
    q, k, v = tensors(1, 2, 20, 64, device=device)
    slopes = torch.tensor([0.5, 0.25], device=device)
    score = Score(alibi=slopes)
    slopes.requires_grad_()
    with pytest.raises(ValueError, match="^score.alibi: expected slopes that do not require grad"):
        attention(q, k, v, score=score, impl="reference")


@pytest.mark.parametrize("part", ["alibi", "sinks", "bias", "relative"])
def test_a_tangent_of_a_score_is_an_error(part, device):
    q, k, v = tensors(1, 2, 20, 64, device=device)
    given = torch.ones(2, 1, device=device) if part == "relative" else torch.ones(2, device=device)
    given = given[:, None, None] if part == "bias" else given
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode"):
        dual = torch.autograd.forward_ad.make_dual(given, given)
        attention(q, k, v, score=Score(**{part: dual}), impl="reference")


def test_a_table_by_distance_is_that_bias(device):
    """Shorter than the distances: its ends stand for what is farther, and their gradients are sums."""
    q, k, v = tensors(1, 2, 40, 64, device=device)
    k, v = k[:, :, :30], v[:, :, :30]
    table = torch.randn(2, 11, generator=torch.Generator().manual_seed(5)).to(device).requires_grad_()
    distance = torch.arange(30, device=device) - (torch.arange(40, device=device)[:, None] - 10)
    bias = table[:, distance.clamp(-5, 5) + 5]
    found, expected = (
        attention(q, k, v, score=score, impl="triton") for score in (Score(relative=table), Score(bias=bias))
    )
    assert torch.equal(found, expected)
    gradients = (torch.autograd.grad(out.sum(), table)[0] for out in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def test_a_function_of_ones_own(device):
    """The reference of a call has to keep the shape; a function without a derivative computes no gradient."""
    q, k, v = tensors(1, 2, 20, 64, device=device)
    wrong = Score(function=bent, reference=lambda s, i, j, h, b: s[0])
    expected = r"score.reference: expected shape \(1, 2, 20, 20\), as it was given, got \(2, 20, 20\)"
    with pytest.raises(ValueError, match=expected):
        attention(q, k, v, score=wrong, impl="reference")
    forward = Score(function=bent, reference=bent_reference)
    theirs = attention(q, k, v, score=forward, impl="reference")
    torch.testing.assert_close(attention(q, k, v, score=forward), theirs, rtol=2e-3, atol=2e-3)
    hidden = explain(q, k, v, score=forward)
    assert hidden.kernel == "triton"
    with torch.no_grad():
        attention(q.clone().requires_grad_(), k, v, score=forward)
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v, score=forward, impl="reference"), theirs)


@triton.jit
def of_few_queries(s, i, j, h, b):
    return s * tl.log((20 - i).to(tl.float32))  # NaN from query 20 on


@triton.jit
def its_derivative(s, i, j, h, b):
    return 0 * s + tl.log((20 - i).to(tl.float32))


def test_a_function_may_be_nan_for_queries_that_do_not_exist(device):
    q, k, v = (x[:, :, :20].float().requires_grad_() for x in tensors(1, 1, 70, 16, device=device))
    factors = torch.log(20.0 - torch.arange(20, device=device))[:, None]
    own = Score(function=of_few_queries, derivative=its_derivative, reference=lambda s, i, j, h, b: s)
    out = attention(q, k, v, score=own, impl="triton")
    expected = torch.softmax(q @ k.mT * 0.25 * factors, -1) @ v
    found, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
    # And a bias that these queries share.
    bias = torch.zeros(1, 1, 1, k.shape[2], device=device, requires_grad=True)
    with_bias = replace(own, bias=bias)
    found = torch.autograd.grad(attention(q, k, v, score=with_bias, impl="triton").square().sum(), bias)[0]
    out = torch.softmax(q @ k.mT * 0.25 * factors + bias, -1) @ v
    torch.testing.assert_close(found, torch.autograd.grad(out.square().sum(), bias)[0], rtol=1e-3, atol=1e-3)


def test_a_function_that_takes_no_scores(device):
    """Its number for a query is that of all keys."""
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 256, 64, device=device))
    own = Score(function=of_place, derivative=of_place_derivative)
    out, lse = attention(q, k, v, score=own, impl="triton", return_lse=True)
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), rtol=2e-3, atol=2e-3)
    expected = 0.1 * torch.arange(256, device=device) + math.log(256)
    torch.testing.assert_close(lse, expected.expand_as(lse))
    assert not dq.any() and not dk.any()
    torch.testing.assert_close(dv, torch.ones_like(dv), rtol=2e-3, atol=2e-3)


REFERENCES = {
    "of the place alone": (
        lambda s, i, j, h, b: 0.1 * (i - j).expand(s.shape),
        lambda s, i, j: 0 * s + 0.1 * (i - j),
    ),
    "written into": (lambda s, i, j, h, b: s.mul_(2), lambda s, i, j: 2 * s),
    # Its derivative is infinite where it hides a key.
    "hidden by a division": (
        lambda s, i, j, h, b: -s.square() / (j != 3),
        lambda s, i, j: (-s.square()).masked_fill(j == 3, -torch.inf),
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_the_derivative_of_a_reference(name):
    """That autograd takes of it: 0 where it has none, and where a key is hidden."""
    q, k, v = (x.float().requires_grad_() for x in tensors(1, 2, 20, 16, device="cpu"))
    reference, formula = REFERENCES[name]
    own = Score(function=bent, derivative=its_derivative, reference=reference)
    i, j = torch.arange(20)[:, None], torch.arange(20)
    out = attention(q, k, v, score=own, impl="reference")
    expected = torch.softmax(formula(q @ k.mT * 0.25, i, j), -1) @ v
    found, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    for x, y in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_a_reference_gives_a_tensor():
    q, k, v = tensors(1, 1, 20, 16, device="cpu")
    own = Score(function=bent, reference=lambda s, i, j, h, b: 1.0)
    with pytest.raises(TypeError, match=r"score.reference: expected a torch.Tensor, got float"):
        attention(q, k, v, score=own, impl="reference")
