"""tests/gpu/tune_fp8.py without a GPU: the kernel runs in the emulator, and a wrong form has no time."""

from __future__ import annotations

import pytest
import torch
import tune_fp8
import tuned_forms
from emulated import on_the_cpu
from timed_cpu import gpu  # noqa: F401  (a fixture)

from attnlib.bench import plane
from attnlib.bench.plane import Cell
from attnlib.bench.shapes import Shape

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")


@pytest.fixture
def run(gpu, monkeypatch, capsys):  # noqa: F811
    """Runs the script over one small cell."""
    small = Cell("causal", Shape(1, 2, 150, 64, True, "bfloat16"))
    cell = plane.cell
    monkeypatch.setattr(plane, "cell", lambda kind, *more: small if kind == "causal" else cell(kind, *more))
    monkeypatch.setattr(tune_fp8, "SMALL", (1, 1, 200))
    monkeypatch.setattr(tuned_forms, "DEVICE", "cpu")
    monkeypatch.setattr(tuned_forms, "side_by_side", lambda function, jobs: [])
    monkeypatch.setattr(tuned_forms, "times", lambda calls, rounds: {form: [2.0, 4.0] for form in calls})
    monkeypatch.delenv("ATTNLIB_FA3_FP8", raising=False)

    def main(*options):
        with on_the_cpu():
            status = tune_fp8.main(["64-causal-150", *options])
        return status, capsys.readouterr().out

    return main


def test_right_forms_have_times(run):
    status, told = run("--vary", "keep_shift=1", "--vary", "pin=0")
    assert status == 0 and told.count("3.000 ms") == 2 * 3, told
    assert "keep_shift=True, pin=False" in told and tune_fp8.HALF in told


def test_a_wrong_form_has_none(run, monkeypatch):
    forward = tune_fp8.launch.forward

    def less_of_it(q, k, v, params, dtype):
        out, lse = forward(q, k, v, params, dtype)
        return out * (0.9 if params.config.stages == 2 else 1.0), lse

    monkeypatch.setattr(tune_fp8.launch, "forward", less_of_it)
    status, told = run("--vary", "stages=2")
    assert status == 1 and "WRONG 64-causal-150 stages=2: normal, 200 tokens: RMS error" in told
    assert told.count("3.000 ms") == 2 * 2


@pytest.mark.parametrize("cell", ["96-dense-4096", "64-window-4096", "64/128-dense-4096", "128-gqa4-1024"])
def test_other_cells_are_refused(run, cell, capsys):
    with pytest.raises(SystemExit):
        tune_fp8.main([cell])
    assert f"such as 64-dense-4096, got {cell}" in capsys.readouterr().err


def test_steps_of_more_keys_than_a_scale_has_are_refused(run, capsys):
    with pytest.raises(SystemExit):
        tune_fp8.main(["64-dense-4096", "--vary", "block_n=256"])
    assert "--vary: expected block_n of at most 128 keys, got 256" in capsys.readouterr().err
