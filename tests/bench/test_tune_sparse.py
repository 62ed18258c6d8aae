"""tests/gpu/tune_sparse.py without a GPU: forms run in the emulator, and a wrong one has no time."""

from __future__ import annotations

import pytest
import torch
import tune_sparse
import tuned_forms
from cases import INTERPRETER_REMARKS
from emulated import on_the_cpu
from timed_cpu import gpu  # noqa: F401  (a fixture)

pytestmark = [
    *INTERPRETER_REMARKS,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU"),
]


@pytest.fixture
def run(gpu, monkeypatch, capsys):  # noqa: F811
    """Runs the script with few, short heads; times are made up."""
    monkeypatch.setattr(tuned_forms, "DEVICE", "cpu")
    for name, number in {"JUDGED": 256, "HEADS": 2, "TOKENS": 512, "KINDS": ("rising",)}.items():
        monkeypatch.setattr(tune_sparse, name, number)
    monkeypatch.setattr(tuned_forms, "side_by_side", lambda function, jobs: [])
    monkeypatch.setattr(
        tuned_forms, "times",
        lambda calls, rounds: {form: [4.0 if form == "dense" else 2.0] for form in calls},
    )  # fmt: skip

    def main(*options):
        with on_the_cpu():
            status = tune_sparse.main(options)
        return status, capsys.readouterr().out

    return main


@pytest.mark.parametrize("cell", ["64-25", "128-50"])
def test_of_random_blocks_the_ideal_is_told(run, cell):
    """The dense kernel's 4 ms, times the part that is kept."""
    status, told = run(cell, "--vary", "l2_bytes=8M")
    assert status == 0 and "the ideal's or the default's over a form's" in told, told
    part = float(cell.partition("-")[2]) / 100
    rows = [line for line in told.split("over a form's")[1].splitlines() if "2.000 ms" in line]
    forms = [line for line in rows if "ideal" not in line]
    assert len(forms) == 2 and all(f"{2 * part:.3f} (" in line for line in forms), told


@pytest.mark.parametrize("cell", ["64-documents", "128-window", "64-softcap", "128-sinks"])
def test_others_stand_beside_the_default(run, cell):
    status, told = run(cell, "--vary", "keep_shift=0")
    assert status == 0 and f"{cell}: best default" in told and "keep_shift=False" in told, told


def test_a_wrong_form_has_none(run, monkeypatch):
    right = tune_sparse.hopper.forward

    def forward(q, k, v, params):
        out, lse = right(q, k, v, params)
        return out * (2 if params.config.l2_bytes == 8 << 20 else 1), lse

    monkeypatch.setattr(tune_sparse.hopper, "forward", forward)
    status, told = run("64-causal", "--vary", "l2_bytes=8M")
    assert status == 1 and "WRONG 64-causal l2_bytes=8388608: rising: " in told
    assert told.count("2.000 ms") == 2


@pytest.mark.parametrize(("cell", "said"), [
    ("96-25", "expected 64 or 128 and what is asked for, such as 64-25, got 96-25"),
    ("64-all", "expected a percentage or one of causal, documents, window, softcap, sinks, got 64-all"),
    ("64-0", "expected more than 0 and at most 100 percent, got 64-0"),
])  # fmt: skip
def test_a_wrong_cell_is_named(run, cell, said, capsys):
    with pytest.raises(SystemExit):
        tune_sparse.main([cell])
    assert said in capsys.readouterr().err


def test_pairs_are_counted(monkeypatch):
    monkeypatch.setattr(tuned_forms, "DEVICE", "cpu")
    for name in tune_sparse.MASKS:
        assert tune_sparse.mask_of(name, 2304).to_dense().sum() == tune_sparse.pairs_of(name, 2304)
