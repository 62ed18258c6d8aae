"""tests/gpu/time_accumulate.py without a GPU: its judges notice what is wrong in any row, and its record."""

from __future__ import annotations

import json

import pytest
import time_accumulate
import torch
from cases import INTERPRETER_REMARKS
from timed_cpu import gpu  # noqa: F401  (a fixture)

from attnlib.bench.setting import Setting
from attnlib.bench.shapes import Shape

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU as the GPU")]
SHAPE = Shape(1, 2, 40, 16, False, "bfloat16")


@pytest.fixture
def small(gpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(time_accumulate, "DEVICE", "cpu")
    monkeypatch.setattr(time_accumulate, "JUDGED", 30)
    monkeypatch.setattr(time_accumulate, "SHAPES", [(40, 16)])
    monkeypatch.setattr(time_accumulate, "shape_of", lambda *x: SHAPE)
    monkeypatch.setattr(time_accumulate, "BOOK", Setting("small", 1, 0, 0, 1))


def test_the_record(small, tmp_path, capsys):
    path = tmp_path / "accumulate.json"
    assert time_accumulate.main(["--out", str(path)]) == 0, capsys.readouterr().out
    [(name, table)] = json.loads(path.read_text())["tables"].items()
    rows = table["rows"]
    assert name == "forward" and [row["impl"] for row in rows if "control_of" not in row] == [
        "attention", "attention that merges, float32", "attention, then a merge, float32",
        "attention that merges, bfloat16", "attention, then a merge, bfloat16",
    ]  # fmt: skip
    assert [row["control_of"] for row in rows if "control_of" in row] == ["attention"]
    assert all("ms" in row for row in rows)


def statuses() -> dict[str, str]:
    rows = time_accumulate.rows_of(SHAPE, time_accumulate.BOOK)
    assert all(("ms" in row) == (row["status"] == "ok") for row in rows)
    return {row["impl"]: row["status"] for row in rows}


def test_an_epilogue_that_does_nothing_is_noticed(small, monkeypatch):
    monkeypatch.setattr(time_accumulate.dispatch, "accumulate", lambda *args: None)
    found = statuses()
    assert {name for name, status in found.items() if status == "wrong"} == {
        "attention that merges, float32", "attention that merges, bfloat16",
    }  # fmt: skip


def test_a_kernel_that_does_nothing_is_noticed(small, monkeypatch):
    class Idle:
        merge = staticmethod(lambda *args: None)

    monkeypatch.setattr(time_accumulate, "merging_kernel", Idle)
    found = statuses()
    assert {name for name, status in found.items() if status == "wrong"} == {
        "attention, then a merge, float32", "attention, then a merge, bfloat16",
    }  # fmt: skip


def test_a_wrong_lse_is_noticed(small, monkeypatch):
    right = time_accumulate.dispatch.accumulate

    def wrong(q, k, v, into, params):
        right(q, k, v, into, params)
        into.lse.add_(0.5)

    monkeypatch.setattr(time_accumulate.dispatch, "accumulate", wrong)
    assert statuses()["attention that merges, float32"] == "wrong"
