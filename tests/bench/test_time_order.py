"""tests/gpu/time_order.py and time_pauses.py without a GPU: their forms, their records, and no time for a
wrong form."""

from __future__ import annotations

import json
import types
from dataclasses import replace

import pytest
import time_order
import time_pauses
import torch
import tune_backward
import tuned_forms
from timed_cpu import gpu  # noqa: F401  (a fixture)

from attnlib.bench import peers, timing
from attnlib.bench.plane import Cell
from attnlib.bench.shapes import Shape
from attnlib.kernels.reference.gradients import gradient_fp64

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
SMALL = [Cell("causal", Shape(1, 2, 40, 16, True, "bfloat16"))]
FORMS = {time_order: ("one tile", "stays", "stays, in turns"), time_pauses: ("as calls get it", "0", "4")}
TABLES = {time_order: ("bursts", "sustained"), time_pauses: ("pauses",)}


@pytest.mark.parametrize("cell", time_order.CELLS, ids=lambda cell: cell.label)
def test_forms_differ_in_the_kind_of_program_and_in_the_order_of_consumers_alone(cell):
    forms = time_order.forms_of(cell)
    order = {"persistent": False, "alternate": False, "stagger": 0, "masked_stagger": 0}
    assert len({replace(form, **order) for form in forms.values()}) == 1
    assert len(set(forms.values())) == len(forms) == 5


@pytest.mark.parametrize("cell", time_pauses.CELLS, ids=lambda cell: cell.label)
def test_forms_differ_in_pauses_alone(cell):
    """And one of them is what the call gets."""
    chosen, *forms = time_pauses.forms_of(cell).values()
    assert chosen in forms and {replace(form, pause_every=chosen.pause_every) for form in forms} == {chosen}
    assert [form.pause_every for form in forms] == list(time_pauses.EVERY)


@pytest.fixture(params=FORMS, ids=lambda script: script.__name__)
def small(request, gpu, monkeypatch, tmp_path):  # noqa: F811
    """Runs a script; its argument is the place of a form that is wrong. Returns the script, its status, and
    the record's tables."""
    script, names = request.param, FORMS[request.param]

    def calls_of(wrong):
        def of_cell(cell, forms, d_out, q, k, v):
            right = [x.to(q.dtype) for x in gradient_fp64(d_out, q, k, v, causal=True)]
            off = [right[0] + 1, *right[1:]]
            return {form: (lambda i=i: off if i == wrong else right) for i, form in enumerate(names)}

        return of_cell

    def run(wrong=None):
        monkeypatch.setattr(tune_backward, "calls_of", calls_of(wrong))
        path = tmp_path / "order.json"
        status = script.main(["--out", str(path)])
        tables = json.loads(path.read_text())["tables"]
        return script, status, {name: table["rows"] for name, table in tables.items()}

    monkeypatch.setattr(tuned_forms, "DEVICE", "cpu")
    monkeypatch.setattr(script, "CELLS", SMALL)
    monkeypatch.setattr(script, "NAMES", ["16-causal-40"])
    monkeypatch.setattr(time_order, "LONG", SMALL)
    monkeypatch.setattr(time_pauses, "forms_of", lambda cell: {"as calls get it": None})
    monkeypatch.setattr(tune_backward, "compile_all", lambda forms: [])
    monkeypatch.setattr(tuned_forms, "times", lambda calls, rounds: {form: [2.0, 4.0] for form in calls})
    monkeypatch.setattr(timing, "sustained", lambda call, ms: timing.Sustained(3.0, 1500.0, 700.0))
    monkeypatch.setattr(peers, "_no_fa3", lambda: "not here")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *a: types.SimpleNamespace(multi_processor_count=132)
    )
    return run


def test_the_record(small):
    script, status, tables = small()
    assert status == 0
    flops = SMALL[0].flops("backward")
    assert set(tables) == set(TABLES[script])
    for rows in tables.values():
        assert tuple(row["form"] for row in rows) == FORMS[script]
    for row in tables.get("bursts", []) + tables.get("pauses", []):
        assert row["ms"] == 3.0 and row["tflops"] == pytest.approx(flops / 3e9, rel=1e-3)
    for row in tables.get("sustained", []):
        assert (row["sm_mhz"], row["watts"]) == (1500.0, 700.0) and row["clocks"] > 0


def test_a_wrong_form_has_no_time(small):
    script, status, tables = small(1)
    assert status == 1
    assert set(tables) == set(TABLES[script])
    first, _, last = FORMS[script]
    for rows in tables.values():
        assert tuple(row["form"] for row in rows) == (first, last)
