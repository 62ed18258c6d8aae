"""tests/gpu/tune_backward.py without a GPU: its cells, the forms that a command line asks for, what is
compiled for them, and no time for a wrong form."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import tune_backward
import tuned_forms
from timed_cpu import gpu  # noqa: F401  (a fixture)
from tune_backward import KINDS, cell_of, default_of
from tuned_forms import DEFAULT, forms_of, table_of, varied

from attnlib.bench import peers, plane
from attnlib.bench.plane import Cell
from attnlib.bench.shapes import Shape
from attnlib.kernels.common import device
from attnlib.kernels.hopper import launch_backward
from attnlib.kernels.hopper.configs_backward import BackwardKind, hopper_backward_config, keys96_config
from attnlib.kernels.reference.gradients import gradient_fp64

SHARED = BackwardKind(masked=True, varlen=True, alone=False)


def test_cells_by_name():
    cell = cell_of("192/128-causal-2048-float16")
    assert (cell.shape.head_dim, cell.shape.value_dim, cell.shape.seqlen) == (192, 128, 2048)
    assert cell.shape.dtype == "float16" and cell_of("64-gqa8-512").shape.kv_heads == 2


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("256-window-4096", hopper_backward_config(256, kind=BackwardKind(True, True, short=False))),
        ("192-dense-4096", hopper_backward_config(192)),
        ("192-varlen-1024", keys96_config(BackwardKind(masked=True, varlen=True))),
        ("192/128-varlendense-1024", keys96_config(BackwardKind(varlen=True), value_columns=128)),
        ("128-varlengqa8-1024", replace(hopper_backward_config(128, stays=True, kind=SHARED), visited=2)),
        ("128-varlengqa8-4096", replace(hopper_backward_config(128, stays=True, kind=SHARED), visited=1)),
    ],
)
def test_the_default_is_what_calls_get(name, config):
    assert default_of(cell_of(name)) == config


def test_forms_are_all_combinations():
    config = default_of(cell_of("192-causal-4096"))
    found, refused = forms_of(config, varied(["pause_every=0,4", "early_mask=0,1", "l2_bytes=8M"]))
    assert list(found)[0] == DEFAULT and found[DEFAULT] == config and len(found) == 5 and not refused
    wanted = replace(config, pause_every=4, early_mask=True, l2_bytes=8 << 20)
    assert found["pause_every=4, early_mask=True, l2_bytes=8388608"] == wanted
    assert forms_of(config, varied(["visited=none"]))[0]["visited=None"] == config


def test_the_default_alone():
    config = default_of(cell_of("64-causal-512"))
    assert forms_of(config, varied([])) == ({DEFAULT: config}, [])


def test_what_a_configuration_refuses_is_told():
    found, refused = forms_of(default_of(cell_of("256-causal-4096")), varied(["bulk=0,1"]))
    assert list(found) == [DEFAULT, "bulk=False"]
    assert refused == ["bulk=True: bulk: expected False with block_n=64, got True"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["pause_every"], "--vary: expected FIELD=VALUE,VALUE, got pause_every"),
        (["speed=1"], "--vary: expected fields of HopperBackwardConfig, block_m, .*; got speed"),
    ],
)
def test_a_wrong_option_is_named(options, reason, capsys):
    with pytest.raises(SystemExit):
        tune_backward.main(["256-causal-4096", *(part for one in options for part in ("--vary", one))])
    assert re.search(reason, capsys.readouterr().err)


def test_a_kernel_is_compiled_once():
    """Lengths and budgets of L2 share one, dtypes and orders of the mask don't."""
    config = default_of(cell_of("64-causal-512"))
    other = replace(config, early_mask=not config.early_mask)
    forms = {DEFAULT: config, "l2": replace(config, l2_bytes=8 << 20), "other": other}
    names = "64-causal-512", "64-causal-1024", "64-causal-512-float16"
    assert tune_backward.kernels_of(dict.fromkeys(names, forms)) == [
        (name, form) for name in (names[0], names[2]) for form in (config, other)
    ]


@pytest.mark.parametrize("name", ["192-dense-4096", "160-gqa2-4096", "64-gqa8-512", "128-window-4096"])
def test_what_is_compiled_is_what_is_timed(name, monkeypatch):
    """A tail of the keys, and programs that share a key head, make kernels of their own."""
    monkeypatch.setattr(device, "num_sms", lambda index: 132)
    monkeypatch.setattr(device, "bandwidth", lambda index: 37.0)
    monkeypatch.setattr(device, "overlaps", lambda index: True)
    asked = []

    def calls_of(small, forms):
        asked.extend((small, form) for form in forms.values())
        return dict.fromkeys(forms, lambda: ())

    monkeypatch.setattr(tune_backward, "calls_of", calls_of)
    monkeypatch.setattr(tune_backward, "inputs", lambda small: ())
    monkeypatch.setattr(tune_backward, "failure", lambda name, form, call: call())
    cell = cell_of(name)
    tune_backward.compile_one(name, default_of(cell))
    small, timed = (
        launch_backward.prepare(tune_backward.call_of(*one)).launches.launches[1]
        for one in (*asked, (cell, default_of(cell)))
    )
    assert small.kernel == timed.kernel and small.constants == timed.constants
    assert (small.scalars["LAST"] is None) == (timed.scalars["LAST"] is None)


def gradients(cell, d_out, q, k, v):
    """Of each sequence."""
    lengths = cell.lengths if KINDS[cell.kind].varlen else (cell.shape.seqlen,)
    parts = zip(*(x.split(lengths, 2) for x in (d_out, q, k, v)), strict=True)
    found = zip(*(gradient_fp64(*part, causal=cell.shape.causal) for part in parts), strict=True)
    return [torch.cat(of, 2).to(q.dtype) for of in found]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
@pytest.mark.parametrize(
    "small",
    [
        Cell("causal", Shape(1, 2, 40, 64, True, "bfloat16")),
        Cell("gqa2", Shape(1, 4, 40, 64, True, "bfloat16", 2)),
        Cell("varlen", Shape(2, 2, 20, 64, True, "bfloat16")),
    ],
    ids=lambda cell: cell.kind,
)
def test_a_wrong_form_has_no_time(small, gpu, monkeypatch, capsys):  # noqa: F811
    def calls_of(cell, forms, *tensors):
        right = gradients(cell, *tensors)

        def call(config):
            if config.l2_bytes == 8:
                raise RuntimeError("out of memory")
            return [right[0], right[1] * (1.5 if config.l2_bytes == 4 else 1.0), right[2]]

        return {name: (lambda config=config: call(config)) for name, config in forms.items()}

    monkeypatch.setattr(tuned_forms, "DEVICE", "cpu")
    monkeypatch.setattr(tune_backward, "calls_of", calls_of)
    monkeypatch.setattr(tune_backward, "compile_all", lambda forms: [])
    monkeypatch.setattr(tuned_forms, "times", lambda calls, rounds: {form: [2.0, 4.0] for form in calls})
    monkeypatch.setattr(peers, "_no_fa3", lambda: "not here")
    monkeypatch.setattr(plane, "cell", lambda *name: small)
    name = f"64-{small.kind}-40"
    status = tune_backward.main([name, "--vary", "l2_bytes=2,4,8"])
    told = capsys.readouterr().out
    assert status == 1 and f"WRONG {name} l2_bytes=4: dk: " in told
    assert f"WRONG {name} l2_bytes=8: " in told and "out of memory" in told
    tables = told.split("Behind the times")[1].split("WRONG")[0]
    assert f"{name}: best default" in tables and "l2_bytes=2 " in tables and tables.count("3.000 ms") == 2
    assert "l2_bytes=4 " not in tables and "l2_bytes=8 " not in tables
    assert ("model: " in tables) == (small.kind == "gqa2")


def test_a_cell_without_a_right_form():
    assert table_of("64-causal-512", {tune_backward.FA3: [1.0]}, 1e9, tune_backward.FA3) == (
        "64-causal-512: no form is right"
    )
