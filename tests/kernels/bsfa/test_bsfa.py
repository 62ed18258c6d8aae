"""`attention_bsfa`: the portable kernel against fp64 attention to what it keeps, and the limits of the
threshold."""

from __future__ import annotations

import math

import pytest
import torch
from bsfa_cases import BsfaCase, check, make
from cases import INTERPRETER_REMARKS

from attnlib import attention, attention_bsfa, bsfa_threshold
from attnlib.kernels.common.bsfa import KEYS, ROWS, always_kept, element_mask
from attnlib.kernels.reference import bsfa as model
from attnlib.params import BsfaParams

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")]

CASES = {
    case.name: case
    for case in [
        BsfaCase("causal", 300, 300),
        BsfaCase("dense", 100, 520, causal=False),
        BsfaCase("D 128, bfloat16", 130, 390, dtype="bfloat16", head_dim=128, heads=1),
        BsfaCase("more keys than queries", 70, 600, "2", batch=2),
        BsfaCase("more queries than keys", 200, 130),
        BsfaCase("one query", 1, 700, "0.4"),
        BsfaCase("one key", 70, 1),
        BsfaCase("one number, groups", 150, 500, 0.9, heads=4, kv_heads=2),
        BsfaCase("negative scale", 150, 500, heads=1, sm_scale=-0.2),
        BsfaCase("rows past the end", 70, 400, -1e-4, kind="positive", heads=1, sm_scale=-1e-4),
        BsfaCase("structured", 512, 512, "2", kind="structured", heads=1, head_dim=128),
        BsfaCase("large, transposed", 130, 390, kind="large", transposed=True),
        BsfaCase("nothing skipped", 200, 400, -math.inf),
        BsfaCase("all skipped", 200, 400, math.inf),
    ]
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernel_is_attention_to_what_it_keeps(case: BsfaCase, device: str) -> None:
    check(case, device)


def test_the_reference_is_the_same_function() -> None:
    for name in ("causal", "dense", "more queries than keys", "one number, groups"):
        check(CASES[name], "cpu", impl="reference")


@pytest.mark.parametrize("causal", [True, False])
def test_a_threshold_of_minus_infinity_is_attention(causal: bool, device: str) -> None:
    q, k, v = make(BsfaCase("dense", 150, 400), device)
    out, lse = attention_bsfa(q, k, v, threshold=-math.inf, causal=causal, return_lse=True)
    expected, lse_expected = attention(q, k, v, causal=causal, return_lse=True, impl="reference")
    assert (out.float() - expected.float()).abs().max() < 2e-3
    assert (lse - lse_expected).abs().max() < 1e-3


def test_a_threshold_of_infinity_leaves_the_block_of_the_last_key(device: str) -> None:
    """Of aligned blocks: a query attends to the keys of its own block of 128 and no earlier one."""
    q, k, v = make(BsfaCase("diagonal", 384, 384), device)
    out, kept = attention_bsfa(q, k, v, threshold=math.inf, return_kept=True)
    assert torch.equal(kept[0, 0].nonzero()[:, 1], torch.arange(6, device=device) // 2)
    for i in range(3):
        part = slice(i * KEYS, (i + 1) * KEYS)
        own = attention(*(x[:, :, part] for x in (q, k, v)), causal=True, impl="reference")
        assert (out[:, :, part].float() - own.float()).abs().max() < 2e-3


@pytest.mark.parametrize("rows, keys", [(384, 384), (65, 257), (200, 130), (1, 128), (130, 700), (64, 1)])
def test_every_query_keeps_its_last_key(rows: int, keys: int) -> None:
    for causal in (True, False):
        first, end = always_kept(rows, keys, causal)
        number = torch.arange(-(-keys // KEYS))
        kept = ((number >= first[:, None]) & (number < end[:, None]))[None, None]
        seen = element_mask(kept, rows, keys, causal)[0, 0]
        for row in range(rows):
            last = row + keys - rows if causal else keys - 1
            assert bool(seen[row].any()) == (last >= 0)
            assert last < 0 or bool(seen[row, last])
            start = row // ROWS * ROWS
            whole = start + keys - rows if causal else keys - 1
            assert not causal or int(first[row // ROWS]) * KEYS <= max(whole, 0)


def test_thresholds_lie_between_the_last_block_kept_and_the_first_skipped(device: str) -> None:
    q, k, v = make(BsfaCase("halfway", 320, 320, batch=1), device)
    params = BsfaParams(torch.zeros(1, 1, 1), True, q.shape[-1] ** -0.5)
    maxima = model.maxima(q, k, params)[0]
    first, end = always_kept(320, 320, True)
    for kept in (0, 1, 2, 0.5, 1.0):
        found = bsfa_threshold(q, k, kept=kept)
        _, which = attention_bsfa(q, k, v, threshold=found, return_kept=True)
        for i, count in enumerate(first.tolist()):
            wanted = min(kept, count) if isinstance(kept, int) else round(kept * count)
            assert which[0, :, i].sum(-1).tolist() == [wanted + int(end[i]) - count] * 2
            top = maxima[:, i, :count].sort(-1, descending=True).values
            if wanted == count:
                assert (found[:, i] == -math.inf).all()
            elif wanted == 0:
                assert (found[:, i] == math.inf).all()
            else:
                halfway = (top[:, wanted - 1] + top[:, wanted]) / 2
                assert torch.allclose(found[:, i].double(), halfway, atol=1e-4)


def test_thresholds_of_several_examples_are_their_mean(device: str) -> None:
    q, k, _ = make(BsfaCase("examples", 200, 400, batch=2), device)
    alone = [bsfa_threshold(q[i : i + 1], k[i : i + 1], kept=1) for i in range(2)]
    assert torch.allclose(bsfa_threshold(q, k, kept=1), sum(alone) / 2)


@pytest.mark.parametrize(("name", "value"), [("q", math.nan), ("k", math.inf)])
def test_examples_that_are_not_finite_have_no_threshold(name: str, value: float, device: str) -> None:
    tensors = dict(zip("qk", make(BsfaCase("not finite", 200, 200, batch=2), device), strict=False))
    tensors[name][1, 0, 50, 3] = value
    with pytest.raises(ValueError, match=f"^{name}: expected finite elements, got NaN or .* in example 1$"):
        bsfa_threshold(**tensors, kept=1)


def test_forms_of_a_threshold(device: str) -> None:
    """A number for all, for each head, for some blocks of queries, and for each batch element."""
    q, k, v = make(BsfaCase("forms", 200, 300, batch=2), device)
    _, expected = attention_bsfa(q, k, v, threshold=0.8, return_kept=True)
    for shape in ((2,), (2, 2), (2, 9), (2, 2, 4)):
        limits = torch.full(shape, 0.8, device=device)
        for form in (limits, limits.repeat_interleave(2, -1)[..., ::2] if len(shape) > 1 else limits):
            _, kept = attention_bsfa(q, k, v, threshold=form, return_kept=True)
            assert torch.equal(kept, expected)
    heads = torch.tensor([-math.inf, math.inf], device=device)
    _, kept = attention_bsfa(q, k, v, threshold=heads, return_kept=True)
    assert kept[:, 0].sum() > kept[:, 1].sum() == 2 * 6
    early = torch.tensor([[math.inf, -math.inf]] * 2, device=device)  # the last one goes on
    _, kept = attention_bsfa(q, k, v, threshold=early, return_kept=True)
    assert kept.sum(-1)[0, 0].tolist() == [2, 2, 3, 3]
    batches = torch.full((2, 2, 1), -math.inf, device=device)
    batches[1] = math.inf
    _, kept = attention_bsfa(q, k, v, threshold=batches, return_kept=True)
    assert kept[0].sum() > kept[1].sum()


def test_nan_is_not_skipped_silently(device: str) -> None:
    """A query that is NaN gives NaN; so does a key in a block that is kept; a threshold of NaN keeps all."""
    q, k, v = make(BsfaCase("nan", 130, 400, heads=1), device)
    _, kept = attention_bsfa(q, k, v, threshold=torch.full((1,), math.nan, device=device), return_kept=True)
    assert kept[0, 0].sum(-1).tolist() == [3, 4, 4]
    q[0, 0, 100, 3] = math.nan
    out = attention_bsfa(q, k, v, threshold=math.inf)
    assert out[0, 0, 100].isnan().all() and out[0, 0, 99].isfinite().all()
    k[0, 0, 5] = math.nan
    assert attention_bsfa(q, k, v, threshold=-math.inf).isnan().all()


@pytest.mark.parametrize("shape", [(0, 2, 8, 64), (1, 2, 0, 64), (1, 0, 8, 64)])
def test_empty(shape: tuple[int, ...], device: str) -> None:
    empty = torch.zeros(shape, device=device, dtype=torch.float16)
    out, lse, kept = attention_bsfa(
        empty, empty, empty, threshold=0.0, return_lse=True, return_kept=True
    )
    assert out.shape == shape and lse.shape == shape[:3] and not kept.numel()
    torch.set_default_dtype(torch.bfloat16)
    try:
        threshold = bsfa_threshold(empty, empty, kept=3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert threshold.shape == (shape[1], -(-shape[2] // ROWS)) and threshold.dtype == torch.float32


def test_nothing_is_written_to_the_inputs(device: str) -> None:
    tensors = make(BsfaCase("inputs", 130, 300), device)
    before = [x.clone() for x in tensors]
    attention_bsfa(*tensors, threshold=0.5)
    bsfa_threshold(*tensors[:2], kept=1)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
