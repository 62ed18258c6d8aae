"""tests/gpu/tune_backward.py without a GPU: its cells, and the forms that a command line asks for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import tune_backward
from tune_backward import cell_of, default_of
from tuned_forms import DEFAULT, forms_of, varied

from attnlib.kernels.hopper.configs_backward import BackwardKind, hopper_backward_config, keys96_config

SHARED = BackwardKind(masked=True, varlen=True, alone=False)


def test_cells_by_name():
    cell = cell_of("192/128-causal-2048-float16")
    assert (cell.shape.head_dim, cell.shape.value_dim, cell.shape.seqlen) == (192, 128, 2048)
    assert cell.shape.dtype == "float16" and cell_of("64-gqa8-512").shape.kv_heads == 2


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("256-window-4096", hopper_backward_config(256, kind=BackwardKind(True, True, short=False))),
        ("192-dense-4096", keys96_config()),
        ("192-varlen-1024", keys96_config(BackwardKind(masked=True, varlen=True))),
        ("192/128-varlendense-1024", keys96_config(BackwardKind(varlen=True), value_columns=128)),
        ("128-varlengqa8-1024", hopper_backward_config(128, kind=SHARED)),
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
    assert refused == ["bulk=True: bulk: expected False with deterministic=False, block_n=64, got True"]


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
