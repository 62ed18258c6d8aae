"""tests/gpu/time_head_dims.py without a GPU: its record, and no time for a wrong result."""

from __future__ import annotations

import json

import pytest
import time_head_dims
import torch
from emulated import on_the_cpu
from timed_cpu import good, gpu  # noqa: F401  (gpu is a fixture)

from attnlib.bench import records
from attnlib.bench.records import Table
from attnlib.bench.setting import Setting
from attnlib.bench.shapes import Shape
from attnlib.bench.verdict import judge
from attnlib.kernels.hopper import configs_backward

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
SMALL = [Shape(1, 1, 70, 72, False), Shape(1, 1, 70, 112, False)]


def calls_are(monkeypatch, shapes: list[Shape]) -> None:
    passes = {name: one._replace(shapes=shapes) for name, one in time_head_dims.PASSES.items()}
    monkeypatch.setattr(time_head_dims, "PASSES", passes)


@pytest.fixture
def small(gpu, monkeypatch):
    calls_are(monkeypatch, SMALL)
    monkeypatch.setattr(time_head_dims, "compile_all", lambda calls: None)
    monkeypatch.setattr(time_head_dims, "ROUNDS", Setting("small", 2, 0, 0, 1))
    monkeypatch.setattr(time_head_dims, "ours", good)


def test_the_record(small, tmp_path, monkeypatch, capsys):
    path = tmp_path / "head_dims.json"
    with on_the_cpu():  # the padded kernel, in the emulator
        assert time_head_dims.main(["--pass", "forward", "--out", str(path)]) == 0, capsys.readouterr().out
    record = json.loads(path.read_text())
    table = Table.of("calls", record["tables"]["calls"]["rows"], record, False)
    assert {row["impl"] for row in table.rows} == {"attnlib", "padded", "fa3", "cudnn"}
    for shape in SMALL:
        assert table.one(shape, impl="padded")["status"] == "ok"
        assert judge(table, shape, "attnlib", "padded").noise is not None
    assert "against it" in capsys.readouterr().out


def test_a_wrong_result_is_said(small, tmp_path, monkeypatch, capsys):
    calls_are(monkeypatch, SMALL[:1])
    monkeypatch.setattr(time_head_dims, "ours", lambda q, k, v, causal, sm_scale: torch.zeros_like(q))
    with on_the_cpu():
        assert time_head_dims.main(["--pass", "forward", "--out", str(tmp_path / "x.json")]) == 1
    assert "attnlib: wrong" in capsys.readouterr().out


def test_the_table_of_the_backward_pass(small, tmp_path, monkeypatch, capsys):
    """The padded kernel in the emulator, and a table that is there already stays."""
    calls_are(monkeypatch, SMALL[:1])
    path = tmp_path / "head_dims.json"
    header = records.provenance({"timed": "something else"})
    records.add_table(path, header, "calls", [{"impl": "attnlib", "ms": 1.0}])
    with on_the_cpu():
        arguments = ["--pass", "backward", "--out", str(path)]
        assert time_head_dims.main(arguments) == 0, capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["tables"]["calls"]["method"] == {"timed": "something else"}
    table = Table.of("backward", record["tables"]["backward"]["rows"], record, False)
    assert {row["impl"] for row in table.rows} == {"attnlib", "padded", "fa3", "cudnn"}
    assert table.one(SMALL[0], impl="padded")["status"] == "ok"
    assert record["method"]["timed"] == "the backward alone"


def test_a_wrong_gradient_is_said(small, tmp_path, monkeypatch, capsys):
    calls_are(monkeypatch, SMALL[:1])
    monkeypatch.setattr(time_head_dims, "ours", lambda q, k, v, causal, sm_scale: good(q, k, v, causal, 0.5))
    with on_the_cpu():
        assert time_head_dims.main(["--pass", "backward", "--out", str(tmp_path / "x.json")]) == 1
    assert "attnlib: wrong" in capsys.readouterr().out


def test_gradients_in_order_are_timed_at_each_width_that_has_a_kernel():
    def width(head_dim: int) -> int:
        return configs_backward.hopper_backward_config(head_dim, deterministic=True).width(head_dim)

    shapes = time_head_dims.TOKENS
    assert {width(shape.head_dim) for shape in shapes} == {width(d) for d in range(8, 257, 8)}
    for shape in shapes:
        assert shape.batch * shape.seqlen == 16384


def test_values_of_another_width(small, tmp_path, monkeypatch, capsys):
    """Their own tables, whose FLOPs are those of both widths."""
    shape, path = Shape(1, 1, 70, 72, False, head_dim_v=40), tmp_path / "head_dims.json"
    calls_are(monkeypatch, [shape])
    assert time_head_dims.main(["--pass", "values", "values_backward", "--out", str(path)]) == 0, (
        capsys.readouterr().out
    )
    record = json.loads(path.read_text())
    assert set(record["tables"]) == {"values", "values_backward"}
    assert record["method"]["flops"] == "2*B*H*Sq*Sk*(3*D + 2*Dv), halved when causal"  # of the last one
    for name, flops in (("values", 2 * 112), ("values_backward", 2 * (3 * 72 + 2 * 40))):
        table = Table.of(name, record["tables"][name]["rows"], record, False)
        row = table.one(shape, impl="padded")
        assert row["status"] == "ok" and row["head_dim_v"] == 40
        assert row["tflops"] == pytest.approx(70 * 70 * flops / row["ms"] * 1e-9)
