"""tests/gpu/time_order.py without a GPU: its forms, its record, and no time for a wrong form."""

from __future__ import annotations

import json
import types
from dataclasses import replace

import pytest
import time_order
import torch
import tune_backward
from timed_cpu import gpu  # noqa: F401  (a fixture)

from attnlib.bench import peers, timing
from attnlib.bench.plane import Cell
from attnlib.bench.shapes import Shape
from attnlib.kernels.reference.gradients import gradient_fp64

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
SMALL = [Cell("causal", Shape(1, 2, 40, 16, True, "bfloat16"))]
FORMS = "one tile", "stays", "stays, in turns"


@pytest.mark.parametrize("cell", time_order.CELLS, ids=lambda cell: cell.label)
def test_forms_differ_in_the_kind_of_program_and_in_the_order_of_consumers_alone(cell):
    forms = time_order.forms_of(cell)
    order = {"persistent": False, "alternate": False, "stagger": 0, "masked_stagger": 0}
    assert len({replace(form, **order) for form in forms.values()}) == 1
    assert len(set(forms.values())) == len(forms) == 5


@pytest.fixture
def small(gpu, monkeypatch, tmp_path):  # noqa: F811
    """Runs the script; its argument is a form that is wrong. Returns the status, and the record's tables."""

    def calls_of(wrong):
        def of_cell(cell, forms, d_out, q, k, v):
            right = [x.to(q.dtype) for x in gradient_fp64(d_out, q, k, v, causal=True)]
            off = [right[0] + 1, *right[1:]]
            return {form: (lambda form=form: off if form == wrong else right) for form in FORMS}

        return of_cell

    def run(wrong=None):
        monkeypatch.setattr(tune_backward, "calls_of", calls_of(wrong))
        path = tmp_path / "order.json"
        status = time_order.main(["--out", str(path)])
        return status, {name: table["rows"] for name, table in json.loads(path.read_text())["tables"].items()}

    monkeypatch.setattr(tune_backward, "DEVICE", "cpu")
    monkeypatch.setattr(time_order, "CELLS", SMALL)
    monkeypatch.setattr(time_order, "LONG", SMALL)
    monkeypatch.setattr(time_order, "compile_all", lambda: [])
    monkeypatch.setattr(tune_backward, "times", lambda calls, rounds: {form: [2.0, 4.0] for form in calls})
    monkeypatch.setattr(timing, "sustained", lambda call, ms: timing.Sustained(3.0, 1500.0, 700.0))
    monkeypatch.setattr(peers, "_no_fa3", lambda: "not here")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *a: types.SimpleNamespace(multi_processor_count=132)
    )
    return run


def test_the_record(small):
    status, tables = small()
    assert status == 0
    flops = SMALL[0].flops("backward")
    assert [row["form"] for row in tables["bursts"]] == list(FORMS)
    for row in tables["bursts"]:
        assert row["ms"] == 3.0 and row["tflops"] == pytest.approx(flops / 3e9, rel=1e-3)
    for row in tables["sustained"]:
        assert (row["sm_mhz"], row["watts"]) == (1500.0, 700.0) and row["clocks"] > 0


def test_a_wrong_form_has_no_time(small):
    status, tables = small("stays")
    assert status == 1
    for rows in tables.values():
        assert [row["form"] for row in rows] == ["one tile", "stays, in turns"]
