"""tests/gpu/time_monarch.py without a GPU: its judge, its FLOPs, its tiles; and the record of quality."""

from __future__ import annotations

import json
from dataclasses import astuple
from itertools import product

import pytest
import time_monarch
import torch
import torch.nn.functional as F

from attnlib import attention_monarch
from attnlib.bench import monarch_quality, records
from attnlib.bench.shapes import Shape

TENSORS = [torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(i)).half() for i in range(3)]


@pytest.mark.parametrize("steps", [1, 3])
def test_right_outputs_pass_and_wrong_ones_do_not(steps: int) -> None:
    judge = time_monarch.Judge(TENSORS, steps)
    out = attention_monarch(*TENSORS, steps=steps, impl="reference")
    assert judge.judge(out).ok
    assert not judge.judge(out * 1.1).ok and not judge.judge(out * float("nan")).ok
    assert not judge.judge(attention_monarch(*TENSORS, steps=steps + 1, impl="reference")).ok


def test_dense_outputs_are_judged_against_softmax() -> None:
    judge, out = time_monarch.Judge(TENSORS, None), F.scaled_dot_product_attention(*TENSORS)
    assert judge.judge(out).ok and not judge.judge(out * 1.1).ok
    assert not judge.judge(attention_monarch(*TENSORS, impl="reference")).ok


def test_flops_are_those_of_the_products() -> None:
    """One head of 256 tokens in 16 blocks of 16: 16 products of 16 x 16 scores and 64 columns each."""
    product = 16 * 2 * 16 * 16 * 64
    shape = Shape(1, 1, 256, 64, False)
    assert [time_monarch.monarch_flops(shape, steps) for steps in (1, 2)] == [5 * product, 9 * product]
    assert time_monarch.monarch_flops(time_monarch.shape_of(256), 1) == 12 * 5 * product


def test_another_block_is_another_function() -> None:
    judge, shape = time_monarch.Judge(TENSORS, 1, 16), Shape(1, 1, 256, 64, False)
    assert judge.judge(attention_monarch(*TENSORS, block=16, impl="reference")).ok
    assert not judge.judge(attention_monarch(*TENSORS, block=4, impl="reference")).ok
    assert time_monarch.monarch_flops(shape, 1, 4) == (6 * 4 + 4 * 64) * 256 * 64


def test_times_are_of_the_blocks_and_rounds_that_have_an_accuracy() -> None:
    rows = json.loads((records.data_dir() / "monarch_quality.json").read_text())["tables"]["vision"]["rows"]
    timed = set(product(time_monarch.PICTURE_BLOCKS, time_monarch.ROUNDS))
    assert timed == {(row["block"], row["rounds"]) for row in rows if row["attention"] == "monarch"}


def test_the_small_model_is_judged_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, instead in {
        "DEVICE": "cpu", "captured": lambda call: call, "PICTURES": Shape(1, 2, 144, 16, False, "float16"),
        "PICTURE_BLOCKS": (36,), "ROUNDS": (1,), "dense_runs": lambda *_: [],
    }.items():  # fmt: skip
        monkeypatch.setattr(time_monarch, name, instead)
    monkeypatch.setattr(time_monarch.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(time_monarch.harness, "time_rounds", lambda *_: None)
    for factor, status in (1, "ok"), (2, "wrong"):

        def forward(q, k, v, params, factor=factor):
            return attention_monarch(q, k, v, block=factor * params.block, steps=1, impl="reference")

        monkeypatch.setattr(time_monarch.monarch, "forward", forward)
        rows = list(time_monarch.vision_rows(None))
        assert [row["status"] for row in rows] == 2 * [status] and rows[0]["block"] == 36


def test_tiles_that_are_tried_differ() -> None:
    for tokens in time_monarch.TUNED:
        found = list(time_monarch.variants(tokens).values())
        assert len(set(map(astuple, found))) == len(found) > 4


def test_distances_of_equal_and_of_other_weights() -> None:
    q, k = (x[:, :, :96] for x in monarch_quality.tensors_of("iid"))
    softmax = torch.softmax(q @ k.mT / 8, -1)
    assert monarch_quality.distance(softmax, softmax) == (0.0, 0.0)
    frobenius, divergence = monarch_quality.distance(torch.full_like(softmax, 1 / 96), softmax)
    assert 0.3 < frobenius < 1.2 and divergence > 0.1


def test_the_record_of_quality_is_of_these_inputs() -> None:
    """One cell of the table anew, and that all ways to attend are there."""
    tables = json.loads((records.data_dir() / "monarch_quality.json").read_text())["tables"]
    errors = {(row["kind"], row["block"], row["rounds"]): row for row in tables["errors"]["rows"]}
    kinds, blocks, rounds = monarch_quality.KINDS, monarch_quality.BLOCKS, monarch_quality.ROUNDS
    assert errors.keys() == {(kind, block, n) for kind in kinds for block in blocks for n in rounds}
    q, k = monarch_quality.tensors_of("smooth image")
    weights = monarch_quality.model.matrix(q, k, monarch_quality.MonarchParams(32, 1, 0, 64**-0.5))
    found = monarch_quality.distance(weights, torch.softmax(q @ k.mT / 8, -1))
    row = errors["smooth image", 32, 1]
    assert found == pytest.approx((row["frobenius"], row["kl"]), rel=1e-3)
    ways = {row["attention"] for row in tables["vision"]["rows"]}
    assert ways == {"softmax", "monarch", "all alike", "own block"}


def test_pictures_are_of_all_shapes_and_the_same_every_time() -> None:
    pictures, label = monarch_quality.pictures(64, 0)
    assert pictures.shape == (64, monarch_quality.SIDE, monarch_quality.SIDE)
    assert set(label.tolist()) == set(range(monarch_quality.CLASSES))
    assert len(monarch_quality.SHAPES) == monarch_quality.CLASSES
    assert torch.equal(monarch_quality.pictures(64, 0)[0], pictures)
    assert monarch_quality.Vision()(pictures[:2]).shape == (2, monarch_quality.CLASSES)
