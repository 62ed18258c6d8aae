"""The quantizing kernels against the model, and the model against what the layouts promise."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from cases import INTERPRETER_REMARKS
from families import fresh_launches  # noqa: F401  (a fixture)
from fp8_cases import (
    CASES,
    LENGTHS,
    PLAIN,
    QuantizeCase,
    check_quantize,
    compare,
    compare_with_model,
    ordered,
)  # fmt: skip

from attnlib.kernels import fp8
from attnlib.kernels.common.fp8 import GROUP, ROWS, Recipe, first_block, num_blocks, padded_width
from attnlib.kernels.fp8 import launch_quantize
from attnlib.kernels.reference import fp8 as model

pytestmark = INTERPRETER_REMARKS


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_is_the_model(case: QuantizeCase, device: str) -> None:
    check_quantize(case, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("role, scaling", [("q", "block"), ("v", "tensor")])
def test_every_number(dtype: torch.dtype, role: str, scaling: str, device: str) -> None:
    """All 65536, those that are not finite too, among themselves and up to 448 alone, where most round."""
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 1, 1024, 64)
    for x in (numbers, numbers.where(numbers.float().abs() <= 448, 0.0)):
        x = x.to(device)
        recipe = Recipe(scaling, False)
        compare_with_model(fp8.quantize(x, role, recipe), x, recipe, "every number")


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_row_alone(rotate: bool, bad: float, device: str) -> None:
    x = torch.randn(1, 1, 150, 64, device=device).half()
    spoiled = x.clone()
    spoiled[0, 0, 17, 5] = bad
    for quantize in (fp8.quantize, model.quantize):
        found = quantize(spoiled, "q", Recipe("block", rotate))
        spoilt = found.data.float().isnan()
        assert spoilt.sum() == (64 if rotate else 1)
        assert spoilt[0, 0, 17, 5] and spoilt[0, 0, 17].sum() == spoilt.sum()
        assert found.scale.isfinite().all()
        found = quantize(spoiled, "v", Recipe())
        spoilt = found.data.float().isnan()
        assert spoilt.sum() == 1 and found.scale.isfinite().all()


def test_zeros_have_scale_one(device: str) -> None:
    x = torch.zeros(1, 2, 70, 64, device=device, dtype=torch.float16)
    for role in "qkv":
        for scaling in ("block", "head", "tensor"):
            for quantize in (fp8.quantize, model.quantize):
                found = quantize(x, role, Recipe(scaling))
                assert (found.scale == 1).all() and (found.data.float() == 0).all()


def test_a_row_of_zeros_with_a_scale_of_its_own_has_the_smallest() -> None:
    """As `hopper.queries` gives it: the kernel's product of scales is as small as the model says."""
    x = torch.randn(1, 2, 70, 128).half()
    x[:, :, 60:] = 0
    found = model.quantize(x, "q", Recipe("row"))
    assert (found.scale[..., 60:] / 2.0**-120 - 128**-0.5).abs().max() < 1e-6
    assert (found.scale[..., :60] > 1e-4).all() and (found.data[:, :, 60:].float() == 0).all()


def test_a_part_in_common_costs_no_precision(device: str) -> None:
    """What stays of values with a mean is quantized as if they had none."""
    x = torch.randn(1, 2, 150, 64, device=device)
    for quantize in (fp8.quantize, model.quantize):
        scales = [quantize(x + mean, "v", Recipe()).scale for mean in (0.0, 1.0, 100.0)]
        torch.testing.assert_close(scales[0], scales[1], rtol=1e-4, atol=0)
        torch.testing.assert_close(scales[0], scales[2], rtol=1e-2, atol=0)
        plain = quantize(x + 100, "v", Recipe(center=False))
        assert plain.mean is None and (plain.scale > 20 * scales[0]).all()


def test_a_mean_that_cannot_be_subtracted(device: str) -> None:
    """Numbers further apart than float32 has: their column is left as it is, the others are centered. And a
    sum of numbers as large as that is no larger than they are."""
    x = torch.randn(1, 1, 150, 64, device=device) + 3
    x[..., 5] = -3e38
    x[0, 0, 17, 5] = 3e38
    x[..., 6] = 3e38
    for quantize in (fp8.quantize, model.quantize):
        found = quantize(x, "v", Recipe())
        assert found.mean[0, 0, 5] == 0 and abs(found.mean[0, 0, 6] / 3e38 - 1) < 1e-5
        assert (found.mean[0, 0, 7:] > 2).all() and found.data.float().isfinite().all()
    compare_with_model(fp8.quantize(x, "v", Recipe()), x, Recipe(), "far apart")


def test_many_parts(device: str, monkeypatch: pytest.MonkeyPatch, fresh_launches) -> None:
    """More of them than are joined in one step."""
    monkeypatch.setattr(launch_quantize, "STEP", 2)
    for lengths in ((), (400, 0, 300)):
        check_quantize(QuantizeCase("v", S=700, B=1, H=1, lengths=lengths, mean=5.0), device)


def test_smallest_numbers(device: str) -> None:
    """Scales stay normal numbers, and nothing becomes infinite or NaN."""
    x = torch.full((1, 1, 64, 64), 1e-40, device=device).bfloat16()
    for quantize in (fp8.quantize, model.quantize):
        found = quantize(x, "q", PLAIN)
        assert (found.scale >= 2.0**-126).all() and found.data.float().isfinite().all()


@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (1, 0, 5, 64), (1, 2, 0, 64)])
def test_empty(shape: tuple[int, ...], device: str) -> None:
    x = torch.zeros(shape, device=device, dtype=torch.float16)
    for role in "qkv":
        for scaling in ("block", "head", "tensor"):
            recipe = Recipe(scaling)
            found = fp8.quantize(x, role, recipe)
            compare_with_model(found, x, recipe, f"empty {role} {scaling}")
            assert found.mean is None or (found.mean == 0).all()


def test_empty_with_strides_that_no_copy_changes(device: str) -> None:
    x = torch.zeros(1, 2, 0, 64, device=device).expand(3, 2, 0, 64)
    for role in "qkv":
        compare(fp8.quantize(x, role, Recipe()), model.quantize(x, role, Recipe()), f"empty {role}")


def test_layouts_that_are_copied(device: str) -> None:
    """An odd address, an expanded dimension, columns that are not side by side."""
    x = torch.randn(2, 2, 40, 64, device=device).half()
    odd = torch.empty(x.numel() + 1, dtype=x.dtype, device=device)[1:].view_as(x).copy_(x)
    for other in (odd, x.mT.contiguous().mT, x[:, :1].expand(2, 2, 40, 64)):
        compare(fp8.quantize(other, "k", Recipe()), model.quantize(other, "k", Recipe()), "layout")


@pytest.mark.parametrize("role", "qkv")
@pytest.mark.parametrize("rotate", [False, True])
def test_values_come_back(role: str, rotate: bool) -> None:
    """Each within half a step of what it was, rotated back: 2^-4 of it, without the mean, or 2^-10 of the
    scale's unit."""
    x = torch.randn(2, 2, 150, 72).double()
    found = model.quantize(x.float(), role, Recipe("block", rotate))
    mean = torch.stack(list(model.means_of(found)))
    values = torch.stack(list(model.values_of(found))) + mean
    assert values.shape == (2, 2, 150, 128)
    if found.rotated:
        values = values @ model.rotation(128).mT / 128**0.5
        assert (values[..., :72] - x).square().mean().sqrt() < 0.03
        assert (values[..., 72:].abs() < 0.5).all()
    else:
        steps = (x - mean[..., :72]).abs() * 2.0**-4 + found.scale.max() * 2.0**-10
        assert ((values[..., :72] - x).abs() <= steps + 1e-6).all()
        assert (values[..., 72:] == 0).all()


def test_varlen_is_each_sequence_alone() -> None:
    case = QuantizeCase("k", PLAIN, lengths=LENGTHS)
    x, offsets, longest = case.tensors("cpu")
    starts = offsets.tolist()
    for role in "qkv":
        found = list(model.values_of(model.quantize(x, role, PLAIN, offsets, longest)))
        for start, end, one in zip(starts, starts[1:], found, strict=False):
            assert one.shape == (2, end - start, 64)
            if role != "v" and end > start:
                part = x[start:end].transpose(0, 1)[None]
                assert torch.equal(one, next(model.values_of(model.quantize(part, role, PLAIN))))


@pytest.mark.parametrize(
    ("role", "recipe"), [("q", PLAIN), ("k", Recipe("head")), ("v", Recipe()), ("v", PLAIN)], ids=str
)
def test_offsets_need_not_be_contiguous(role: str, recipe: Recipe, device: str) -> None:
    """Such as a column of a table; the result names the tensor that was given."""
    x, offsets, longest = QuantizeCase(role, recipe, lengths=LENGTHS).tensors(device)
    column = torch.stack([offsets, offsets + 1], 1)[:, 0]
    compare_with_model(fp8.quantize(x, role, recipe, column, longest), x, recipe)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_rotation_is_orthogonal(width: int) -> None:
    matrix = model.rotation(width)
    assert torch.equal(matrix.abs(), torch.ones(width, width, dtype=torch.float64))
    assert torch.equal(matrix @ matrix.mT, width * torch.eye(width, dtype=torch.float64))
    assert matrix.sum(0).abs().max() <= width / 2, "the signs leave a row of equal entries in one column"


def test_key_order() -> None:
    """Position 4t + 2h + i has key 8h + 2t + i."""
    order = model.key_order().tolist()
    assert sorted(order) == list(range(GROUP))
    for t, h, i in product(range(4), (0, 1), (0, 1)):
        assert order[4 * t + 2 * h + i] == 8 * h + 2 * t + i


@pytest.mark.parametrize("rows", [GROUP, *ROWS.values()])
def test_sequences_have_room(rows: int) -> None:
    """Whatever the lengths are, blocks of different sequences don't meet, and all are inside."""
    for lengths in (LENGTHS, (1,) * 300, (0,) * 5, (127, 1, 129), (rows,) * 3, (rows - 1, rows + 1, 1)):
        begin, used = 0, 0
        for number, length in enumerate(lengths):
            first = first_block(begin, number, rows)
            assert first >= used
            used, begin = first + -(-length // rows), begin + length
        assert used <= num_blocks(begin, rows, len(lengths))


def test_widths() -> None:
    assert [padded_width(d) for d in (8, 64, 72, 128, 136, 256)] == [64, 64, 128, 128, 256, 256]


def test_a_difference_is_seen() -> None:
    x = torch.randn(1, 1, 64, 64).half()
    found = model.quantize(x, "q", PLAIN)
    data = found.data.clone()
    data.view(torch.uint8)[0, 0, 0, 0] ^= 1
    wrong = model.quantize(x, "q", PLAIN)
    object.__setattr__(wrong, "data", data)
    with pytest.raises(AssertionError, match="is wrong: data"):
        compare(wrong, found)
    assert ordered(torch.tensor([-1.0, 0.0, 1.0]).to(torch.float8_e4m3fn)).tolist() == [-56, 0, 56]
