"""The oracle, the budget and the inputs: a judge that passes wrong kernels makes other tests worthless."""

import math

import pytest
import torch
import torch.nn.functional as F

from attnlib.bench.oracle import INPUTS, Oracle, error_budget, judge, make_inputs, poisoned_empty
from attnlib.bench.shapes import Shape
from attnlib.kernels.reference import dense as reference
from attnlib.kernels.reference.dense import attention_fp64, attention_math, attention_varlen_fp64

SHAPES = [
    Shape(1, 1, 1, 16),
    Shape(2, 4, 17, 16, causal=False),
    Shape(2, 4, 129, 32),
    Shape(1, 4, 33, 16, heads_kv=2, seqlen_k=100),
    Shape(1, 4, 1, 16, heads_kv=1, seqlen_k=64),
    Shape(1, 2, 100, 16, seqlen_k=33),
    Shape(1, 2, 100, 16, causal=False, seqlen_k=33),
]


WINDOWS = [(0, 0), (5, 0), (0, 7), (20, 3), (-1, 4), (30, -1), (-1, -1), (1000, 1000)]


def dense_fp64(q, k, v, causal, scale, window=(-1, -1)):
    """The definition, with the whole score matrix and no blocks."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scale
    visible, shift = torch.ones(scores.shape[-2:], dtype=torch.bool), k.shape[2] - q.shape[2]
    left, right = window
    if left >= 0:
        visible = visible.triu(shift - left)
    if right >= 0:
        visible = visible.tril(shift + right)
    if causal:
        visible = visible.tril(shift)
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.nan_to_num(torch.exp(scores - lse[..., None])) @ v, lse


def fused(q, k, v, causal, scale):
    """A good kernel: fp32 inside, one rounding of the output."""
    out, lse = dense_fp64(q.float(), k.float(), v.float(), causal, scale)
    return out.float().to(q.dtype), lse.float()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.label)
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_fp64_agrees_with_the_definition_in_blocks_of_any_size(shape, rows, monkeypatch):
    row_bytes = shape.batch * shape.heads * shape.keys * 8
    monkeypatch.setitem(reference._BLOCK_BYTES, "cpu", rows * row_bytes)
    q, k, v = make_inputs(shape, device="cpu")
    out, lse = attention_fp64(q, k, v, causal=shape.causal, sm_scale=0.3)
    want_out, want_lse = dense_fp64(q, k, v, shape.causal, 0.3)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
def test_windows_agree_with_the_definition(window, causal, monkeypatch):
    for shape in SHAPES:
        q, k, v = make_inputs(shape, device="cpu")
        want_out, want_lse = dense_fp64(q, k, v, causal, 0.3, window)
        row_bytes = shape.batch * shape.heads * shape.keys * 8
        for rows in (7, 1000):
            monkeypatch.setitem(reference._BLOCK_BYTES, "cpu", rows * row_bytes)
            out, lse = attention_fp64(q, k, v, causal=causal, window=window, sm_scale=0.3)
            torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)
        plain = attention_math(q, k, v, causal=causal, window=window, sm_scale=0.3)
        torch.testing.assert_close(plain.double(), want_out, rtol=0, atol=0.01)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("function", [attention_fp64, attention_math])
def test_what_a_row_does_not_see_does_not_reach_it(function, bad):
    q, k, v = make_inputs(Shape(1, 4, 40, 16, heads_kv=2, dtype="float32"), device="cpu")
    arguments = {"causal": True, "window": (9, -1)}
    want = function(q, k, v, **arguments)
    k[0, 1, 20], v[0, 1, 20], v[0, 1, 23, 5] = math.nan, bad, bad
    got = function(q, k, v, **arguments)
    if function is attention_fp64:
        want, got = want[0], got[0]
    reached = (got != want).any(-1)  # [B, H, S]
    assert reached[0, 2:, 20:33].all() and reached.sum() == 2 * 13, "rows 20 to 32 of the heads of key head 1"
    assert got[0, 2:, 20:30].isnan().all()
    row = got[0, 2:, 31]
    assert not row[:, torch.arange(16) != 5].isnan().any(), "only column 5 of the values of key 23"
    assert row[:, 5].isnan().all() if math.isnan(bad) else (row[:, 5] == bad).all()


def packed_inputs(lengths_q, lengths_k, heads=4, kv_heads=2, dtype=torch.float16):
    """q, k, v packed, and both cu_seqlens."""
    generator = torch.Generator().manual_seed(0)
    ends = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (lengths_q, lengths_k)]
    sizes = (sum(lengths_q), heads), (sum(lengths_k), kv_heads), (sum(lengths_k), kv_heads)
    return [torch.randn(*size, 16, generator=generator).to(dtype) for size in sizes], ends


@pytest.mark.parametrize("window", [None, (5, 2)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
def test_packed_sequences_are_so_many_calls(causal, window):
    (q, k, v), ends = packed_inputs([3, 0, 17, 1, 6, 9], [3, 4, 30, 0, 2, 9])
    out, lse = attention_varlen_fp64(q, k, v, *ends, causal=causal, window=window)
    assert out.shape == q.shape and lse.shape == (4, 36) and out.dtype == lse.dtype == torch.float64
    for rows, keys in [((0, 3), (0, 3)), ((3, 20), (7, 37)), ((21, 27), (37, 39)), ((27, 36), (39, 48))]:
        parts = (x[slice(*part)].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys)))
        want_out, want_lse = attention_fp64(*parts, causal=causal, window=window)
        assert torch.equal(out[slice(*rows)].transpose(0, 1), want_out[0])
        assert torch.equal(lse[:, slice(*rows)], want_lse[0])
    assert not out[20].any() and (lse[:, 20] == -math.inf).all(), "a row of a sequence without keys"


def test_an_oracle_of_packed_sequences_judges():
    (q, k, v), ends = packed_inputs([3, 17, 1, 6], [3, 30, 0, 2])
    oracle = Oracle(q, k, v, True, window=(8, -1), cu_seqlens=ends)
    good, lse = oracle.out.half(), oracle.lse.float()
    assert oracle.judge(good, lse).ok
    assert 0 < oracle.budget.rms < oracle.budget.max < 0.1
    fewer = [end.clamp(max=20) for end in ends]
    assert not oracle.judge(attention_varlen_fp64(q, k, v, *fewer, causal=True, window=(8, -1))[0].half()).ok
    assert not oracle.judge(good, lse.flip(1)).ok
    assert "expected shape (27, 4, 16)" in oracle.judge(good[None]).reason


def test_default_scale_and_strided_inputs():
    shape = Shape(2, 4, 50, 32)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in make_inputs(shape, device="cpu"))
    assert not q.is_contiguous()
    want, _ = dense_fp64(q, k, v, True, 32**-0.5)
    torch.testing.assert_close(attention_fp64(q, k, v, causal=True)[0], want, rtol=1e-12, atol=1e-12)


def test_rows_without_a_visible_key_are_zero():
    q, k, v = make_inputs(Shape(1, 2, 10, 16, seqlen_k=4), device="cpu")
    out, lse = attention_fp64(q, k, v, causal=True)
    assert (out[:, :, :6] == 0).all() and (lse[:, :, :6] == -math.inf).all()
    assert out[:, :, 6:].abs().min() > 0 and lse[:, :, 6:].isfinite().all()
    assert (attention_math(q, k, v, causal=True)[:, :, :6] == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_math_path_rounds_at_every_step(dtype):
    """It is eager code in the dtype of the inputs, so its error is above one rounding."""
    shape = Shape(1, 2, 65, 32, dtype=dtype)
    q, k, v = make_inputs(shape, device="cpu")
    mask = torch.ones(65, 65, dtype=torch.bool).triu(1)
    scores = ((q * 32**-0.5) @ k.transpose(-1, -2)).masked_fill(mask, -math.inf)
    out = attention_math(q, k, v, causal=True)
    assert out.dtype == q.dtype
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ v, rtol=1e-2, atol=torch.finfo(q.dtype).eps)
    truth, _ = attention_fp64(q, k, v, causal=True)
    rounding = (truth.to(q.dtype).double() - truth).abs().max()
    assert (out.double() - truth).abs().max() > rounding


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[5]], ids=lambda s: s.label)
def test_a_good_kernel_passes_on_all_inputs(shape, dtype, kind):
    shape = Shape.from_dict({**shape.to_dict(), "dtype": dtype})
    q, k, v = make_inputs(shape, kind, device="cpu")
    out, lse = fused(q, k, v, shape.causal, shape.head_dim**-0.5)
    verdict = judge(out, q, k, v, causal=shape.causal, lse=lse)
    assert verdict.ok, verdict.reason
    assert verdict.max_error <= verdict.budget.max and verdict.rms_error <= verdict.budget.rms
    verdict.raise_if_bad("fused")


@pytest.fixture(scope="module")
def case():
    shape = Shape(1, 2, 96, 32)
    q, k, v = make_inputs(shape, device="cpu")
    return q, k, v, Oracle(q, k, v, causal=True)


def wrong_outputs(q, k, v):
    """Kernels with one mistake each, as they happen."""
    scale = 32**-0.5
    good, _ = fused(q, k, v, True, scale)
    nan, inf, off = good.clone(), good.clone(), good.clone()
    nan[0, 1, 95, 31] = math.nan
    inf[0, 0, 0, 0] = math.inf
    off[0, 0, 50] += 0.02
    return {
        "one NaN": nan,
        "all NaN": torch.full_like(good, math.nan),
        "one inf": inf,
        "one row off": off,
        "not causal": fused(q, k, v, False, scale)[0],
        "wrong scale": fused(q, k, v, True, scale * 1.02)[0],
        "zeros": torch.zeros_like(good),
        "small bias everywhere": (good.float() + 6e-4).half(),  # within the budget of max, not of RMS
        "wrong dtype": good.float(),
        "wrong shape": good[:, :, :-1],
        "no tensor": None,
    }


@pytest.mark.parametrize("mistake", list(wrong_outputs(*make_inputs(Shape(1, 2, 96, 32), device="cpu"))))
def test_a_wrong_kernel_fails(case, mistake):
    q, k, v, oracle = case
    verdict = oracle.judge(wrong_outputs(q, k, v)[mistake])
    assert not verdict.ok and verdict.reason
    with pytest.raises(AssertionError, match="my kernel is wrong: "):
        verdict.raise_if_bad("my kernel")


def test_the_reason_says_what_is_wrong(case):
    q, k, v, oracle = case
    outputs = wrong_outputs(q, k, v)
    assert oracle.judge(outputs["one NaN"]).reason == "1 of 6144 values are not finite"
    assert oracle.judge(outputs["one row off"]).reason.startswith("max error 2.")
    assert "expected shape (1, 2, 96, 32) torch.float16" in oracle.judge(outputs["wrong shape"]).reason


def large_elements(count):
    """(oracle, a good output) of a row that is the mean of two keys' values, 64 columns. The first `count`
    are 2.5 and 15% of an ulp, which every path rounds to 2.5, and column 4 is 2.5; the others are small."""
    v = torch.rand(1, 1, 2, 64, generator=torch.Generator().manual_seed(0)) / 2 + 0.5
    v[..., :5] = torch.tensor([5.0, 0.0])[:, None]
    v[0, 0, 1, :count] = 0.3 * 2**-9
    q, k = torch.zeros(1, 1, 1, 64).half(), torch.zeros(1, 1, 2, 64).half()
    oracle = Oracle(q, k, v.half())
    return oracle, oracle.out.half()


@pytest.mark.parametrize("count", [1, 3])
def test_a_large_element_that_rounds_the_other_way_passes(count):
    """A weight that was rounded before moves it over the middle, and the budget does not know."""
    oracle, out = large_elements(count)
    out[..., :count] += 2**-9
    verdict = oracle.judge(out)
    assert verdict.max_error > oracle.budget.max, "the largest error of two paths, which were lucky"
    assert verdict.ok and verdict.max_error <= verdict.budget.max < 1.5 * 2**-9, verdict.reason
    assert verdict.budget.rms == oracle.budget.rms
    assert not oracle.judge(out, torch.zeros(1, 1, 1)).ok, "an LSE is judged as ever"


@pytest.mark.parametrize(
    ("count", "columns", "off"),
    [(1, slice(0, 1), 2**-8), (4, slice(0, 4), 2**-9), (1, slice(4, 5), 2**-9), (1, slice(9, 10), 2**-9)],
    ids=["two ulps", "four elements", "representable", "a small element"],
)
def test_other_errors_of_few_elements_fail(count, columns, off):
    oracle, out = large_elements(count)
    assert oracle.judge(out).ok
    out[..., columns] += off
    verdict = oracle.judge(out)
    assert verdict.rms_error <= verdict.budget.rms and verdict.budget == oracle.budget
    assert not verdict.ok and verdict.reason.startswith("max error")


def test_lse_is_judged(case):
    q, k, v, oracle = case
    out, lse = fused(q, k, v, True, 32**-0.5)
    assert oracle.judge(out, lse).ok
    assert "LSE: max error" in oracle.judge(out, lse / math.log(2)).reason
    assert "LSE: max error" in oracle.judge(out, lse * math.nan).reason
    assert "LSE: expected shape" in oracle.judge(out, lse[..., None]).reason


def test_lse_of_an_empty_row_must_be_minus_infinity():
    q, k, v = make_inputs(Shape(1, 1, 8, 16, seqlen_k=4), device="cpu")
    out, lse = fused(q, k, v, True, 0.25)
    oracle = Oracle(q, k, v, True, 0.25)
    assert oracle.judge(out, lse).ok
    lse[0, 0, 0] = 0
    assert "-inf" in oracle.judge(out, lse).reason


def test_budget_scales_with_the_dtype():
    budgets = {}
    for dtype in ("float16", "bfloat16", "float32"):
        q, k, v = make_inputs(Shape(1, 2, 64, 32, dtype=dtype), device="cpu")
        budgets[dtype] = error_budget(q, k, v, causal=True)
        assert 0 < budgets[dtype].rms < budgets[dtype].max
    assert budgets["float32"].max < 1e-5 < budgets["float16"].max < budgets["bfloat16"].max


def test_budget_that_is_not_finite_passes_nothing():
    """fp16 scores of 1e6 overflow in the math path: then there is no yardstick, and no output may pass."""
    q = torch.full((1, 1, 4, 16), 250.0, dtype=torch.float16)
    oracle = Oracle(q, q, q, causal=True, sm_scale=4.0)
    assert not math.isfinite(oracle.budget.max)
    assert not oracle.judge(oracle.out.half()).ok


def test_sdpa_of_this_pytorch_passes():
    shape = Shape(1, 4, 100, 64)
    q, k, v = make_inputs(shape, device="cpu")
    verdict = judge(F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v, causal=True)
    assert verdict.ok, verdict.reason


def test_poisoned_empty_and_only_within_the_block(monkeypatch):
    x = torch.zeros(4, 4)
    # conftest.py poisons already: start from clean memory here
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch, "empty_strided", lambda size, stride: torch.zeros(size))
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    assert not torch.empty_like(x).isnan().any()
    originals = torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty
    with pytest.raises(KeyError), poisoned_empty():
        floats = torch.empty(3), torch.empty_like(x), torch.empty_strided((2,), (1,)), x.half().new_empty(5)
        assert all(f.isnan().all() for f in floats)
        assert torch.empty(3, dtype=torch.int32).dtype == torch.int32
        raise KeyError
    assert (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty) == originals


def test_inputs_are_what_they_say():
    shape = Shape(2, 4, 512, 64, heads_kv=2, seqlen_k=600, dtype="float32")
    inputs = {kind: make_inputs(shape, kind, device="cpu") for kind in INPUTS}
    for q, k, v in inputs.values():
        assert q.shape == (2, 4, 512, 64) and k.shape == v.shape == (2, 2, 600, 64)
        assert q.is_contiguous() and q.dtype == torch.float32
    q, k, v = inputs["normal"]
    assert not torch.equal(k, v)
    assert q.std() == pytest.approx(1, abs=0.02)
    assert torch.equal(inputs["large"][0], 20 * q)
    assert inputs["outlier"][0].abs().max() > 8 and inputs["outlier"][0].median().abs() < 0.1
    assert (inputs["constant"][1] == inputs["constant"][1][:, :, :1]).all()
    q, k, _ = inputs["sink"]
    weight = torch.softmax(q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 8, -1)[..., 0]
    assert weight.mean() > 0.7


def test_inputs_repeat_by_seed():
    shape = Shape(1, 1, 8, 16)
    a, b, c = (make_inputs(shape, seed=seed, device="cpu")[0] for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    with pytest.raises(ValueError, match="kind: expected one of normal, .* got 'gaussian'"):
        make_inputs(shape, "gaussian", device="cpu")


@pytest.mark.parametrize(
    ("q", "k", "v", "error", "message"),
    [
        ((1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 9, 16), ValueError, "v: expected the shape of k"),
        ((1, 2, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16), ValueError, "k: expected batch 1 and head_dim 16"),
        ((1, 3, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16), ValueError, "k: expected a number of heads"),
        ((2, 8, 16), (2, 8, 16), (2, 8, 16), ValueError, "q: expected 4 dimensions"),
    ],
)
def test_bad_arguments_are_named(q, k, v, error, message):
    with pytest.raises(error, match=message):
        attention_fp64(torch.zeros(q), torch.zeros(k), torch.zeros(v))


def test_mixed_dtypes_are_rejected():
    x = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match="v: expected torch.float32 on cpu like q, got torch.float16"):
        attention_fp64(x, x, x.half())
    with pytest.raises(TypeError, match="k: expected a torch.Tensor, got list"):
        attention_fp64(x, x.tolist(), x)
