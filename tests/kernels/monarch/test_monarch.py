"""`attention_monarch`: the kernels against the model in fp64, and the model against what is known of it."""

from __future__ import annotations

import math

import monarch_cases
import pytest
import torch
from cases import INTERPRETER_REMARKS
from monarch_cases import MonarchCase, check, make, run

from attnlib import attention_monarch, monarch_matrix
from attnlib.kernels.monarch.configs import monarch_config
from attnlib.kernels.reference import monarch as model
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.params import default_block

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")]

CASES = {
    case.name: case
    for case in [
        MonarchCase("one round", 64, 8),
        MonarchCase("two rounds", 64, 16, 2, dtype="float32", heads=1),
        MonarchCase("three rounds, bfloat16", 48, 8, 3, dtype="bfloat16", heads=1),
        MonarchCase("short last block", 50, 8, 2),
        MonarchCase("short first block", 50, 8, 2, "pre"),
        MonarchCase("block of 7", 40, 7, 2, "pre", head_dim=40),
        MonarchCase("one token", 1, 1, 2),
        MonarchCase("masked", 60, 8, 2, batch=2, masked=0.5, head_dim=16),
        MonarchCase("few left", 60, 8, 3, "pre", batch=2, masked=0.9, head_dim=16),
        MonarchCase("transposed", 33, 6, 2, batch=2, transposed=True, head_dim=32),
        MonarchCase("negative scale", 40, 8, 2, sm_scale=-0.3, kind="large"),
        MonarchCase("scale 0", 40, 8, 2, sm_scale=0.0),
        MonarchCase("large", 64, 8, 2, kind="large", dtype="float32"),
        MonarchCase("low scores", 64, 8, 2, kind="sink", sm_scale=-2.0, dtype="float32"),
        MonarchCase("tiles of a block", 40, 40, 2, tile=16, heads=1),
        MonarchCase("tiles of a column", 40, 1, 2, tile=16, heads=1, head_dim=16),
        MonarchCase("tiles, short, masked", 75, 2, 2, "pre", masked=0.3, tile=16, heads=1, head_dim=16),
    ]
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernels_are_the_model(case: MonarchCase, device: str) -> None:
    check(case, device)


@pytest.mark.parametrize("seed", [7, 16, 45, 54, 94])
def test_luck_with_a_near_tie_is_no_error(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of these calls hangs on a near tie, and roundings move it further than twice what they do in
    another run; a row that does not may not be as far off."""
    case = MonarchCase("ties", 200, 8, 3, "pre", heads=1, kind="large", dtype="float32", sm_scale=0.25)
    (q, k, v), _ = make(case, "cpu", seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    noise = torch.randn(k.shape, generator=generator, dtype=torch.float64)
    out = model.output(q, k.double() * (1 + torch.finfo(k.dtype).eps * noise), v, case.params, k.dtype)
    monkeypatch.setattr(monarch_cases, "run", lambda *_: out)
    check(case, "cpu", seed)
    errors = monarch_cases.row_errors(out, model.output(q, k, v, case.params))
    out[0, 0, errors.argmin()] += errors.max()
    with pytest.raises(AssertionError, match="max error"):
        check(case, "cpu", seed)


@pytest.mark.parametrize("block", [20, 1, 1000])
def test_one_block_or_blocks_of_one_are_exact_softmax(block: int, device: str) -> None:
    """With one block L is 1 and R the softmax; with blocks of one key it is the other way round. A block of
    more keys than there are is one block, for the kernels too: they are called with so many."""
    tensors, _ = make(MonarchCase("exact", 20, block, dtype="float32", head_dim=16), device)
    truth, _ = attention_fp64(*tensors)
    for impl in ("triton", "reference") if block <= 20 else ("reference",):
        for steps in (1, 2):
            out = attention_monarch(*tensors, block=block, steps=steps, impl=impl)
            assert (out.double() - truth).abs().max() < 1e-5


def test_no_better_objective_than_that_of_softmax_and_none_falls() -> None:
    for seed, kind in enumerate(("normal", "sink", "large", "outlier")):
        (q, k, _), _ = make(MonarchCase("objective", 60, 7, 6, "pre", kind=kind, kv_heads=2), "cpu", seed)
        found = model.factors(q, k, MonarchCase("", 60, 7, 6, "pre").params).objective
        assert (found.diff() >= -1e-9 * found[..., 1:].abs()).all(), "a round lowers the objective"
        scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
        best = scores.logsumexp(-1).sum(-1)[..., None]
        assert (found <= best + 1e-9 * best.abs()).all()


def test_the_objective_is_that_of_the_matrix() -> None:
    """sum(A * scores) + entropy of A: what the two steps raise in turn."""
    case = MonarchCase("objective", 30, 7, 3, kv_heads=2)
    (q, k, _), _ = make(case, "cpu")
    weights = monarch_matrix(q, k, block=7, steps=3)
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    value = (weights * scores).sum((-1, -2)) - torch.special.xlogy(weights, weights).sum((-1, -2))
    assert torch.allclose(value, model.factors(q, k, case.params).objective[..., -1])


@pytest.mark.parametrize("pad", ["post", "pre"])
def test_rows_of_the_matrix_sum_to_1_and_it_times_v_is_the_output(pad: str) -> None:
    tensors, mask = make(MonarchCase("matrix", 50, 8, batch=2, masked=0.4), "cpu")
    options = {"block": 8, "steps": 2, "pad": pad, "key_mask": mask}
    weights = monarch_matrix(*tensors[:2], **options)
    sums = torch.tensor([1.0, 0.0]).double()[:, None, None].expand(2, 2, 50)  # of the second, no token counts
    assert torch.allclose(weights.sum(-1), sums, atol=1e-12)
    assert (weights >= 0).all() and not weights.transpose(2, 3)[~mask[:, None].expand(2, 2, 50)].any()
    out = attention_monarch(*tensors, **options, impl="reference")
    assert (weights @ tensors[2].double() - out).abs().max() < 2e-3
    assert not out[1].any()


@pytest.mark.parametrize("pad", ["post", "pre"])
def test_tokens_that_do_not_count_are_as_if_missing(pad: str, device: str) -> None:
    """A sequence that is filled up to whole blocks gives what the short one gives."""
    case = MonarchCase("filled", 40, 8, 2, pad, dtype="float32")
    tensors, _ = make(case, device)
    there = slice(0, 37) if pad == "post" else slice(3, 40)
    mask = torch.zeros(1, 40, dtype=torch.bool, device=device)
    mask[:, there] = True
    short = run(MonarchCase("short", 37, 8, 2, pad), [x[:, :, there] for x in tensors], None)
    assert (run(case, tensors, mask)[:, :, there] - short).abs().max() < 1e-5
    options = {"block": 8, "steps": 2, "pad": pad, "key_mask": mask}
    for impl in ("triton", "reference"):
        expected = attention_monarch(*tensors, **options, impl=impl)[:, :, there]
        spoiled = [x.masked_fill(~mask[:, None, :, None], math.nan) for x in tensors]
        assert torch.equal(attention_monarch(*spoiled, **options, impl=impl)[:, :, there], expected), impl


def test_nothing_is_written_to_the_inputs_and_bits_repeat(device: str) -> None:
    case = MonarchCase("bits", 50, 8, 2)
    tensors, _ = make(case, device)
    before = [x.clone() for x in tensors]
    first = run(case, tensors, None)
    assert torch.equal(run(case, tensors, None), first)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def test_rows_that_are_not_aligned_are_copied(device: str) -> None:
    case = MonarchCase("views", 20, 4, 2, dtype="float32")
    tensors, _ = make(case, device)
    views = [torch.cat([x[..., :1], x], -1)[..., 1:] for x in tensors]
    strided = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in tensors]
    expected = run(case, tensors, None)
    assert torch.equal(run(case, views, None), expected)
    assert torch.equal(run(case, strided, None), expected)


@pytest.mark.parametrize("shape", [(0, 2, 8, 16), (1, 2, 0, 16), (1, 0, 8, 16)])
def test_empty(shape: tuple[int, ...], device: str) -> None:
    empty = torch.zeros(shape, device=device)
    assert attention_monarch(empty, empty, empty).shape == shape
    assert monarch_matrix(empty, empty).shape == (*shape[:3], shape[2])


def test_default_block() -> None:
    found = [default_block(tokens) for tokens in (1, 3, 4, 256, 2048, 4096, 16384, 65536)]
    assert found == [1, 1, 2, 16, 32, 64, 128, 256]
    tensors, _ = make(MonarchCase("default", 70, 8), "cpu")
    expected = attention_monarch(*tensors, block=8, impl="reference")
    assert torch.equal(attention_monarch(*tensors, impl="reference"), expected)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_hold_the_scores_of_small_blocks(itemsize: int) -> None:
    for head_dim in (8, 64, 72, 128, 256):
        for size in (1, 16, 17, 45, 64, 1000):
            config = monarch_config(size, size, head_dim, itemsize)
            for tile in (config.r_step, config.l_step, config.center_step):
                assert tile.rows >= 16 and tile.columns >= 16 and tile.num_warps in (4, 8)
                assert tile.rows < max(32, 2 * size), "more than half of the rows are empty"
