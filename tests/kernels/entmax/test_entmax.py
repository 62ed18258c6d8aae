"""attention_entmax() against fp64, and what must hold of it whatever the numbers are."""

from __future__ import annotations

import math

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import more, with_more
from entmax_cases import CASES, EntmaxCase, check, make, offsets_of
from layouts import LAYOUTS

from attnlib import attention, attention_entmax, attention_entmax_varlen
from attnlib.bench import entmax_oracle
from attnlib.kernels.entmax import configs, list_kernels
from attnlib.kernels.reference import entmax as reference
from attnlib.params import EntmaxParams

pytestmark = INTERPRETER_REMARKS
BOTH = pytest.mark.parametrize("impl", ["triton", "reference"])


ALIKE = "one key", "any alpha above", "outliers", "no room, dense", "varlen, dense", "one varlen sequence"


@pytest.mark.parametrize("name", with_more((name for name in CASES if name not in ALIKE), CASES))
def test_case(name, device):
    check(CASES[name], device)


def tensors(device, *, queries=20, keys=70, dtype=torch.float32, head_dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = queries, keys, keys
    return [torch.randn(1, 1, n, head_dim, generator=generator).to(device, dtype) for n in sizes]


# ---------------------------------------------------------------- the reference


def sparsemax_by_sorting(z: torch.Tensor) -> torch.Tensor:
    """Martins and Astudillo, 2016: the largest k with 1 + k z_(k) > z_(1) + ... + z_(k)."""
    ordered = z.sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    ranks = torch.arange(1, z.shape[-1] + 1)
    size = (1 + ranks * ordered > sums).sum(-1, keepdim=True)
    return (z - (sums.gather(-1, size - 1) - 1) / size).clamp(min=0)


def test_alpha_2_is_sparsemax():
    z = torch.randn(50, 90, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(reference.entmax(z, 2.0)[0], sparsemax_by_sorting(z), rtol=0, atol=1e-12)


def test_weights_solve_their_equation():
    z = 2 * torch.randn(40, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for alpha in (1.1, 1.5, 1.9, 2.0):
        p, tau = reference.entmax(z, alpha)
        raw = ((alpha - 1) * z - tau[:, None]).clamp(min=0) ** (1 / (alpha - 1))
        torch.testing.assert_close(raw.sum(1), torch.ones(40, dtype=torch.float64), rtol=0, atol=1e-9)
        torch.testing.assert_close(p, raw, rtol=0, atol=1e-9)


class _Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, params):
        ctx.params = params
        out, tau, flags = reference.forward(q, k, v, params)
        ctx.save_for_backward(q, k, v, out, tau, flags)
        return out

    @staticmethod
    def backward(ctx, d_out):
        return *reference.backward(d_out, *ctx.saved_tensors, ctx.params), None


@pytest.mark.parametrize(("alpha", "causal"), [(1.25, False), (1.5, True), *more([(1.75, True)])])
def test_gradcheck(alpha, causal):
    """The implicit derivative against finite differences of the bisection, both in fp64."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, heads, n, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for heads, n in ((2, 3), (1, 5), (1, 5))
    )
    params = EntmaxParams(alpha, causal, 0.7)
    assert torch.autograd.gradcheck(lambda *x: _Reference.apply(*x, params), (q, k, v), eps=1e-6, atol=1e-5)


def test_gradcheck_of_sparsemax():
    """Its derivative jumps where a weight becomes 0: here none is near to that."""
    z = torch.tensor([[0.3, 0.1, -2.0, 0.2]], dtype=torch.float64)
    p, _ = reference.entmax(z, 2.0)
    dp = torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.float64)
    found = reference.entmax_gradient(p, dp, 2.0)
    step = 1e-6
    for j in range(4):
        moved = [reference.entmax(z + sign * step * torch.eye(4)[j], 2.0)[0] for sign in (1, -1)]
        expected = ((moved[0] - moved[1]) * dp).sum() / (2 * step)
        assert abs(found[0, j] - expected) < 1e-6


# ---------------------------------------------------------------- what holds of every implementation


@BOTH
def test_zeros_give_the_mean(impl, device):
    q, k, v = tensors(device)
    out = attention_entmax(q * 0, k, v, impl=impl)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_rows_sum_to_1(alpha, impl, device):
    q, k, v = tensors(device)
    out = attention_entmax(q, k, torch.ones_like(v), alpha=alpha, causal=True, impl=impl)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-5)


@BOTH
def test_alpha_near_1_tends_to_softmax(impl, device):
    q, k, v = tensors(device)
    softmax = attention(q, k, v, impl="reference")
    errors = [
        (attention_entmax(q, k, v, alpha=alpha, impl=impl) - softmax).abs().max().item()
        for alpha in (1.1, 1.01, 1.001)
    ]
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert errors[2] < 5e-3  # of the limit, not of rounding: it goes with alpha - 1


@BOTH
def test_a_low_score_has_no_weight(impl, device):
    """Not a small one: values of which nobody wants to know may be huge."""
    q, k, v = tensors(device, head_dim=16)
    q = torch.ones_like(q)
    k[:, :, 50:] = -1.0
    k[:, :, :50] = 1.0
    v[:, :, 50:] = 1e30
    out = attention_entmax(q, k, v, impl=impl)
    torch.testing.assert_close(out, v[:, :, :50].mean(2, keepdim=True).expand_as(out), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_nan_reaches_the_rows_that_see_it_and_no_other(number, alpha, device):
    q, k, v = (x.requires_grad_() for x in tensors(device, queries=30, keys=30))
    right = attention_entmax(q, k, v, alpha=alpha, causal=True, impl="triton")
    spoiled = k.detach().clone()
    spoiled[0, 0, 20, 1] = number
    out, tau = attention_entmax(q, spoiled, v, alpha=alpha, causal=True, return_tau=True, impl="triton")
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    torch.testing.assert_close(out[:, :, :20], right[:, :, :20], rtol=1e-5, atol=1e-5)
    assert tau[:, :, :20].isfinite().all() and dq[:, :, :20].isfinite().all()
    rows = slice(20, None) if math.isnan(number) else (q[0, 0, :, 1] > 0).nonzero().flatten()
    rows = torch.arange(30, device=device)[rows]
    rows = rows[rows >= 20]  # of infinity those whose score with it is not -inf
    for found in (out, tau[..., None], dq):
        assert found[:, :, rows].isnan().any(-1).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_without_a_threshold_is_nan(device):
    """No float32 lies between the highest score, 2e7, and 1 below it; 0 would be a wrong answer."""
    q, k, v = (torch.zeros(1, 1, n, 8, device=device) for n in (1, 2, 2))
    q[...], k[0, 0, :, 0] = 2e7, torch.tensor([1.1, 0.5])
    assert attention_entmax(q, k, v + 1, alpha=2.0, sm_scale=1.0, impl="triton").isnan().all()
    assert attention_entmax(q / 1e5, k, v + 1, alpha=2.0, sm_scale=1.0, impl="triton").eq(1).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layouts(layout, device):
    q, k, v = (layout(x) for x in tensors(device, dtype=torch.float16, queries=20, keys=40))
    expected = attention_entmax(q, k, v, causal=True, impl="reference")
    found = attention_entmax(q, k, v, causal=True, impl="triton")
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_nothing_to_do(shape, device):
    B, H, S_q, S_k = shape
    q = torch.ones(B, H, S_q, 16, device=device, requires_grad=True)
    k, v = (torch.ones(B, H, S_k, 16, device=device, requires_grad=True) for _ in range(2))
    out, tau = attention_entmax(q, k, v, return_tau=True)
    assert out.shape == q.shape and not out.any()
    assert tau.shape == q.shape[:3] and (tau == math.inf).all()
    out.sum().backward()
    assert not any(x.grad.any() for x in (q, k, v))


@BOTH
def test_varlen_is_each_sequence_by_itself(impl, device):
    """With longer lengths than there are, too."""
    lengths = [(20, 33), (0, 7), (65, 65), (9, 0)]
    generator = torch.Generator().manual_seed(3)
    sizes = (4, sum(n for n, _ in lengths)), (2, sum(n for _, n in lengths)), (2, sum(n for _, n in lengths))
    q, k, v = (torch.randn(n, h, 16, generator=generator).to(device) for h, n in sizes)
    offsets = [offsets_of(of, device) for of in zip(*lengths, strict=True)]
    out, tau = attention_entmax_varlen(q, k, v, *offsets, 80, 200, causal=True, return_tau=True, impl=impl)
    first = [0, 0]
    for rows, keys in lengths:
        of_q, of_k = slice(first[0], first[0] + rows), slice(first[1], first[1] + keys)
        first = [of_q.stop, of_k.stop]
        own = (x.transpose(0, 1)[None] for x in (q[of_q], k[of_k], v[of_k]))
        expected, threshold = attention_entmax(*own, causal=True, return_tau=True, impl=impl)
        torch.testing.assert_close(out[of_q].transpose(0, 1)[None], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(tau[None, :, of_q], threshold, rtol=0, atol=1e-5)


def test_varlen_without_keys_or_rows(device):
    q, k = torch.ones(5, 2, 16, device=device, requires_grad=True), torch.ones(0, 2, 16, device=device)
    out, tau = attention_entmax_varlen(
        q, k, k, offsets_of([2, 3], device), offsets_of([0, 0], device), 3, 0, return_tau=True
    )
    assert not out.any() and tau.shape == (2, 5) and (tau == math.inf).all()
    out.sum().backward()
    assert not q.grad.any()


def test_equal_bits(device):
    q, k, v, d_out = make(EntmaxCase("bits", 70, 70, causal=True, head_dim=16), device)
    q.requires_grad_()
    runs = []
    for _ in range(2):
        out = attention_entmax(q, k, v, causal=True)
        runs.append((out, *torch.autograd.grad(out, q, d_out)))
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


# ---------------------------------------------------------------- lists


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_lists(causal, columns, device):
    """Numbers, counts and middles of random flags, beside plain Python; one block has no room."""
    S_q, S_k, room, chunk = 130, 150, 64, 2
    shift = S_k - S_q
    blocks, words = (3, 5) if columns else (3, 6)
    generator = torch.Generator().manual_seed(0)
    seen = torch.rand(2 * blocks, words * 32, generator=generator) < 0.3
    seen[1] = True
    seen[:, (S_q if columns else S_k) :] = False
    for number, row in enumerate(seen if causal else ()):
        start = number % blocks * configs.LIST
        row[slice(max(start - shift, 0)) if columns else slice(start + configs.LIST + shift, None)] = False
    weights = 2 ** torch.arange(32, dtype=torch.int64)
    packed = (seen.unflatten(1, (words, 32)) * weights).sum(2)
    flags = torch.where(packed >= 2**31, packed - 2**32, packed).int().to(device)
    steps = -(-words // chunk)
    lists = torch.full((2 * blocks * room + steps * chunk * 32,), -7, dtype=torch.int32, device=device)
    records = torch.zeros(2 * blocks, 4, dtype=torch.int32, device=device)
    list_kernels.entmax_lists[(2 * blocks + steps,)](
        flags,
        lists,
        records,
        words,
        room,
        blocks,
        S_q,
        S_k,
        None,
        None,
        None,
        2 * blocks * room,
        causal,
        columns,
        chunk,
    )
    identity = lists[2 * blocks * room :].tolist()
    assert identity == list(range(steps * chunk * 32))
    for number, row in enumerate(seen):
        named = row.nonzero().flatten().tolist()
        start = number % blocks * configs.LIST
        if columns:
            edge = min(max(start + 63 - shift, 0), S_q) if causal else 0
        else:
            edge = min(start + 1 + shift, S_k) if causal else S_k
        count, middle, first, _ = records[number].tolist()
        if len(named) > room:
            assert first >= 0 and count > 0
            reach = range(first, first + count)
            assert reach.stop <= (S_q if columns else S_k) and middle == edge - first
        else:
            assert (count, middle, first) == (len(named), sum(x < edge for x in named), -1)
            assert lists[number * room :][:count].tolist() == named


# ---------------------------------------------------------------- the budget


@pytest.mark.parametrize("seed", [0, 3])
def test_the_budget_of_few_rounding_errors(seed, monkeypatch):
    """Equal keys and one query: dQ is 0 but for rounding."""
    case = EntmaxCase("equal keys", 1, 300, heads=6, kv_heads=6, head_dim=16, kind="constant")
    q, k, v, d_out = make(case, "cpu", seed)
    p, _ = reference.entmax((q.double() @ k.double().mT) * case.params.sm_scale, case.alpha)
    dz = reference.entmax_gradient(p, d_out.double() @ v.double().mT, case.alpha)

    def rounded(dtype):
        return (dz.to(dtype).double() @ k.double() * case.params.sm_scale).half()

    oracle = entmax_oracle.EntmaxOracle(q, k, v, case.params, d_out)
    assert oracle.judge("dq", rounded(torch.float16)).ok
    assert not oracle.judge("dq", rounded(torch.bfloat16)).ok
    monkeypatch.setattr(entmax_oracle, "ROUNDINGS", 1)
    one = entmax_oracle.EntmaxOracle(q, k, v, case.params, d_out)
    assert not one.judge("dq", rounded(torch.float16)).ok
