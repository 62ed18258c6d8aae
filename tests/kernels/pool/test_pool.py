"""attention_pooled() in Triton's interpreter, and its Hopper kernel in the emulator, against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import INTERPRETER_REMARKS
from emulated import on_the_cpu
from families import fresh_launches  # noqa: F401  (a fixture)
from pooled_cases import CASES, PooledCase, check

from attnlib import attention, attention_pooled
from attnlib.api import pooled
from attnlib.kernels import hopper
from attnlib.kernels.hopper.configs import hopper_config

pytestmark = INTERPRETER_REMARKS

EMULATED = {
    "causal": PooledCase(S=260, D=64, impl="hopper"),
    "128": PooledCase(S=200, keys=330, D=128, block=128, impl="hopper"),
    "256": PooledCase(S=70, keys=130, D=256, causal=False, impl="hopper"),
    "more queries": PooledCase(S=300, keys=100, D=128, impl="hopper"),
    "negative scale": PooledCase(S=140, D=128, sm_scale=-0.2, dtype="bfloat16", impl="hopper"),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    check(CASES[name])


@pytest.mark.parametrize("name", ["causal", "blocks of 128", "more queries", "bfloat16"])
def test_reference(name):
    check(replace(CASES[name], impl="reference"))


@pytest.mark.parametrize("name", EMULATED)
def test_hopper(name):
    with on_the_cpu("random", 1) as kernels:
        check(EMULATED[name])
    assert kernels["attention_forward_hopper"].reports


@pytest.mark.parametrize("keep_shift", [False, True])
@pytest.mark.parametrize("S", [330, 320])
def test_keeping_maxima_changes_no_bit(S, keep_shift, fresh_launches, monkeypatch):  # noqa: F811
    """Of the kernel that takes a maximum in each step, and of that which keeps its shifts."""
    config = replace(hopper_config(128), keep_shift=keep_shift)
    monkeypatch.setattr(hopper, "hopper_config", lambda *call: config)
    q, k, v = PooledCase(S=S, D=128, kind="large").tensors("cpu")
    with on_the_cpu():
        plain = attention(q, k, v, causal=True, impl="hopper")
        out, _ = attention_pooled(q, k, v, causal=True, impl="hopper")
    assert torch.equal(out, plain)


def test_heads_one_after_the_other(monkeypatch):
    """Where the maxima of all heads are too many: the same result."""
    case = PooledCase(S=130, D=64, heads=4, kv_heads=2, batch=2, impl="hopper")
    q, k, v = case.tensors("cpu")
    with on_the_cpu():
        whole = attention_pooled(q, k, v, causal=True, impl="hopper")
        monkeypatch.setattr(pooled, "MOST_BYTES", 1)
        parts = attention_pooled(q, k, v, causal=True, impl="hopper")
    assert all(torch.equal(x, y) for x, y in zip(whole, parts, strict=True))


def test_nothing_to_see():
    out, found = attention_pooled(*(torch.zeros(1, 2, n, 16) for n in (70, 0, 0)), block=128)
    assert out.shape == (1, 2, 70, 16) and found.shape == (1, 2, 1, 0) and not out.any()


def test_a_row_of_weights_adds_up_to_no_less_than_one():
    """The largest weight of a block is at least that of any row: so over the blocks of a row of blocks, times
    the keys of a block, no row's weights are lost."""
    q, k, v = PooledCase(S=256).tensors("cpu")
    _, found = attention_pooled(q, k, v, causal=True)
    assert (64 * found.sum(-1) > 1 - 1e-5).all() and (found <= 1 + 1e-5).all()
