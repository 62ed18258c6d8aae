"""What tests/gpu/time_kept_shift.py times on a GPU: wrong kernels have no time, and the record says it."""

from __future__ import annotations

import json

import pytest
import time_kept_shift
import torch
from timed_cpu import gpu  # noqa: F401  (a fixture)

from attnlib.bench.setting import Setting
from attnlib.bench.shapes import Shape
from attnlib.kernels.reference.dense import attention_fp64

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")


@pytest.fixture
def small(gpu, monkeypatch):  # noqa: F811
    """The script on a CPU, whose kernel is the reference, or wrong where shifts are kept."""
    monkeypatch.setattr(time_kept_shift, "DEVICE", "cpu")
    monkeypatch.setattr(time_kept_shift, "JUDGED", 128)
    monkeypatch.setattr(time_kept_shift, "SHAPES", [Shape(1, 1, 128, 64), Shape(1, 1, 128, 128)])
    monkeypatch.setattr(time_kept_shift, "ROUNDS", Setting("small", 1, 0, 0, 1))
    monkeypatch.setattr(time_kept_shift, "compile_all", lambda dims: None)

    def use(wrong: bool) -> None:
        def call(config, q, k, v, causal, sm_scale, lse=False):
            out, found = attention_fp64(q, k, v, causal=causal, sm_scale=sm_scale)
            out = out.to(q.dtype) * (1.5 if wrong and config.keep_shift else 1)
            return (out, found.float()) if lse else out

        monkeypatch.setattr(time_kept_shift, "with_config", call)

    return use


def test_the_record(small, tmp_path, capsys):
    small(wrong=False)
    path = tmp_path / "kept_shift.json"
    assert time_kept_shift.main(["--out", str(path), "--dims", "64"]) == 0, capsys.readouterr().out
    tables = json.loads(path.read_text())["tables"]
    assert {row["inputs"] for row in tables["judged"]["rows"]} == set(time_kept_shift.KINDS)
    names = [row["impl"] for row in tables["calls"]["rows"]]
    tiles = [name for tile in time_kept_shift.TILES[64] for name in (tile, f"{tile}, kept")]
    assert names == [*tiles, "fa3", "M256N64 (control)"]
    assert all(row["status"] == "ok" for row in tables["rising"]["rows"])


def test_what_is_wrong_has_no_time(small, tmp_path, capsys):
    small(wrong=True)
    path = tmp_path / "kept_shift.json"
    assert time_kept_shift.main(["--out", str(path), "--dims", "128"]) == 1
    rows = json.loads(path.read_text())["tables"]["calls"]["rows"]
    assert ["ms" in row for row in rows] == [True, False, False, False, True]
    assert "WRONG" in capsys.readouterr().out


def test_scores_rise_from_block_to_block_as_rows_visit_them(monkeypatch):
    monkeypatch.setattr(time_kept_shift, "DEVICE", "cpu")
    q, k, _ = time_kept_shift.tensors_of(Shape(1, 1, 256, 64), time_kept_shift.RISING)
    scores = (q.double() @ k.double().mT)[0, 0] * 64**-0.5 * 1.4427  # exponents of 2
    top = scores.unflatten(1, (-1, 64)).amax(2)  # of a row and a block
    assert bool((top[:, :-1] - top[:, 1:] > 8).all())
