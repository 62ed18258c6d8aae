"""What tests/gpu/tune_sparse.py judges and times on a GPU: every form is right on the CPU, and a wrong one is
named."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import tune_sparse
from cases import INTERPRETER_REMARKS
from emulated import on_the_cpu

pytestmark = INTERPRETER_REMARKS


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(tune_sparse, "DEVICE", "cpu")
    monkeypatch.setattr(tune_sparse, "JUDGED", 256)
    monkeypatch.setattr(tune_sparse, "HEADS", 2)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", tune_sparse.GROUPS)
def test_forms_are_judged(head_dim, group, monkeypatch):
    monkeypatch.setattr(tune_sparse, "KINDS", ("rising",))
    names = tune_sparse.names_of(head_dim, group)
    assert names[0] == tune_sparse.CHOSEN and len(names) > 1
    with on_the_cpu():
        for name in names[1:3]:
            assert list(tune_sparse.wrong(head_dim, group, name)) == []


def test_what_is_compared():
    """Two buffers for Q under blocks; kept shifts with bits, under a soft cap, and with sinks."""
    for head_dim, group in product((64, 128), tune_sparse.GROUPS):
        q = torch.zeros(1, 2, 256, head_dim, dtype=torch.float16)
        mask = tune_sparse.mask_of(tune_sparse.GROUPS[group][0], 256)
        chosen = tune_sparse.params_of(q, mask, tune_sparse.score_of(group, q)).config
        found = tune_sparse.forms(head_dim, group, chosen)
        if group == "blocks":
            two = [config for name, config in found.items() if name.startswith("two Q")]
            assert len(two) == 2 * (head_dim == 128)
            assert all(config.q_buffers == 2 and config.keep_shift for config in two)
            assert chosen.q_buffers == head_dim // 64 and chosen not in list(found.values())[1:]
        else:
            assert chosen.keep_shift and not found["not kept"].keep_shift


def test_a_wrong_form_is_named(monkeypatch):
    right = tune_sparse.hopper.forward

    def doubled(*args):
        out, lse = right(*args)
        return out * 2, lse

    monkeypatch.setattr(tune_sparse.hopper, "forward", doubled)
    monkeypatch.setattr(tune_sparse, "KINDS", ("normal",))
    with on_the_cpu():
        said = list(tune_sparse.wrong(64, "blocks", "apart"))
    assert [line.partition(": ")[0] for line in said] == ["half, normal", "one block, normal"]
