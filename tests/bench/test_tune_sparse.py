"""What tests/gpu/tune_sparse.py judges and times on a GPU: every form is right on the CPU, and a wrong one is
named."""

from __future__ import annotations

import pytest
import tune_sparse
from cases import INTERPRETER_REMARKS
from emulated import on_the_cpu

pytestmark = INTERPRETER_REMARKS


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(tune_sparse, "DEVICE", "cpu")
    monkeypatch.setattr(tune_sparse, "JUDGED", 256)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_kept_shifts_are_judged(head_dim):
    config = tune_sparse.configs(head_dim)["kept"]
    assert config.keep_shift and not tune_sparse.configs(head_dim)[tune_sparse.CHOSEN].keep_shift
    with on_the_cpu():
        assert list(tune_sparse.wrong(head_dim, config)) == []


def test_a_wrong_form_is_named(monkeypatch):
    right = tune_sparse.called

    def doubled(*args):
        out, lse = right(*args)
        return out * 2, lse

    monkeypatch.setattr(tune_sparse, "called", doubled)
    monkeypatch.setattr(tune_sparse, "KINDS", ("normal",))
    with on_the_cpu():
        said = list(tune_sparse.wrong(64, tune_sparse.configs(64)["kept"]))
    assert [line.partition(": ")[0] for line in said] == [
        "blocks, float16, normal", "causal, float16, normal", "causal, bfloat16, normal",
    ]  # fmt: skip
