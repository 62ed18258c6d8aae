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
from attnlib.kernels.hopper import pooled as hopper_pooled
from attnlib.kernels.hopper.configs import M256N64, hopper_config
from attnlib.kernels.pool import launch as pool_launch
from attnlib.params import Params, mask_window

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


def test_the_reference_rounds_no_scores():
    """Float32 has 1e8 to within 8: exp of what is left of a score less its LSE is no weight."""
    check(PooledCase(sm_scale=1e8, dtype="float32", impl="reference"))


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
    """Where the maxima of all heads are too many: the same result, and never more than those of a head."""
    case = PooledCase(S=20, D=64, heads=4, kv_heads=2, impl="hopper")
    q, k, v = case.tensors("cpu")
    kept, forward = [], hopper_pooled.forward

    def watched(*call):
        results = forward(*call)
        kept.append(results[2].shape[:2])
        return results

    with on_the_cpu():
        whole = attention_pooled(q, k, v, causal=True, impl="hopper")
        monkeypatch.setattr(pooled, "MOST_BYTES", 1)
        monkeypatch.setattr(hopper_pooled, "forward", watched)
        parts = attention_pooled(q, k, v, causal=True, impl="hopper")
    assert all(torch.equal(x, y) for x, y in zip(whole, parts, strict=True))
    assert kept == [(1, 1)] * 4


@pytest.mark.parametrize(("S_q", "S_k"), [(1, 1), (64, 64), (300, 200), (256, 128)])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_what_is_held_at_once_is_counted(D, S_q, S_k):
    """With the configuration of the call, and with that of the largest tile at D = 64."""
    q, k = (torch.zeros(2, 3, n, D, dtype=torch.float16) for n in (S_q, S_k))
    for config in (None, M256N64) if D == 64 else (None,):
        params = Params(mask_window(True, None), 0.1, config=config)
        with on_the_cpu():
            maxima = hopper_pooled.forward(q, k, k, params)[2]
            assert hopper_pooled.bytes_kept(q, k, k, params) == maxima.nbytes


def test_more_keys_than_maxima_are_pooled_of(monkeypatch):
    """As with 2^27 keys; without the Hopper kernel that keeps them, the call is computed."""
    case = PooledCase(S=65, keys=130)
    monkeypatch.setattr(pool_launch, "MOST_KEYS", 64)
    with on_the_cpu() as kernels:
        with pytest.raises(ValueError, match="^impl: 'hopper' needs at most 64 keys; k has 130$"):
            check(replace(case, impl="hopper"))
        check(replace(case, impl="triton"))
        q, k, v = case.tensors("cpu")
        assert pooled._implementation(q, k, v, Params(mask_window(True, None), 0.1), None) == "triton"
    assert not kernels["attention_forward_hopper"].reports
    assert pool_launch.GRID_YZ * pool_launch.COLUMNS * pool_launch.UNIT == 134_215_680


def test_nothing_to_see():
    out, found = attention_pooled(*(torch.zeros(1, 2, n, 16) for n in (70, 0, 0)), block=128)
    assert out.shape == (1, 2, 70, 16) and found.shape == (1, 2, 1, 0) and not out.any()


def test_a_row_of_weights_adds_up_to_no_less_than_one():
    """The largest weight of a block is at least that of any row: so over the blocks of a row of blocks, times
    the keys of a block, no row's weights are lost."""
    q, k, v = PooledCase(S=256).tensors("cpu")
    _, found = attention_pooled(q, k, v, causal=True)
    assert (64 * found.sum(-1) > 1 - 1e-5).all() and (found <= 1 + 1e-5).all()
