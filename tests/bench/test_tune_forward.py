"""tests/gpu/tune_forward.py without a GPU: its tables, and no time for a form that is wrong or fails."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import tune_forward
import tuned_forms
from timed_cpu import good, gpu  # noqa: F401  (a fixture)

from attnlib.bench import peers, plane
from attnlib.bench.plane import Cell
from attnlib.bench.shapes import Shape
from attnlib.kernels.common import device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")


@pytest.fixture
def run(gpu, monkeypatch, capsys):  # noqa: F811
    """Runs the script over one small cell; forms whose number of stages is in `faults` are wrong or fail."""

    def calls_of(cell, forms, q, k, v):
        def call(config):
            if config.stages == 3:
                raise RuntimeError("out of memory")
            return good(q, k, v, True, cell.shape.head_dim**-0.5) * (1.5 if config.stages == 8 else 1.0)

        return {name: (lambda config=config: call(config)) for name, config in forms.items()}

    monkeypatch.setattr(tune_forward, "calls_of", calls_of)
    monkeypatch.setattr(tuned_forms, "DEVICE", "cpu")
    monkeypatch.setattr(device, "num_sms", lambda index: 132)
    monkeypatch.setattr(tuned_forms, "side_by_side", lambda function, jobs: [])
    monkeypatch.setattr(tuned_forms, "times", lambda calls, rounds: {form: [2.0, 4.0] for form in calls})
    monkeypatch.setattr(peers, "_no_fa3", lambda: "not here")
    small = Cell("causal", Shape(1, 2, 40, 96, True, "bfloat16"))
    cell = plane.cell
    monkeypatch.setattr(plane, "cell", lambda kind, *more: small if kind == "causal" else cell(kind, *more))

    def main(*options):
        status = tune_forward.main(["96-causal-40", *options])
        return status, capsys.readouterr().out

    return main


def test_right_forms_have_times(run):
    status, told = run("--vary", "q_columns=0,64")
    assert status == 0 and told.count("3.000 ms") == 2 * 3, told
    assert "96-causal-40: best default" in told and "q_columns=64" in told


def test_a_wrong_form_has_none(run):
    status, told = run("--vary", "stages=2,3,8")
    assert status == 1 and "WRONG 96-causal-40 stages=8: " in told
    assert "WRONG 96-causal-40 stages=3: " in told and "out of memory" in told
    tables = told.split("Behind the times")[1]
    assert "stages=2 " in tables and "stages=8 " not in tables and "stages=3 " not in tables


def test_a_peer_that_refuses_is_left_out(run, monkeypatch):
    def refuse(*tensors):
        raise RuntimeError("V headdim is different")

    refusing = dataclasses.replace(peers.fa3(None), available=lambda: None, make=lambda *call: refuse)
    monkeypatch.setattr(peers, "fa3", lambda window: refusing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    status, told = run("--vary", "q_columns=64")
    assert status == 0 and "V headdim is different" in told and told.count("3.000 ms") == 2 * 2, told


def test_varlen_sequences_are_refused(run, capsys):
    with pytest.raises(SystemExit):
        tune_forward.main(["96-varlen-1024"])
    assert "cells: expected none of varlen sequences, got 96-varlen-1024" in capsys.readouterr().err
