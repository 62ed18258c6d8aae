"""What tests/gpu/time_varlen.py times on a GPU: its calls, their FLOPs, and that wrong ones are refused."""

from __future__ import annotations

import types

import pytest
import time_varlen  # noqa: E402
import torch
from time_varlen import Case  # noqa: E402

from attnlib import dispatch
from attnlib.bench import peers
from attnlib.kernels.reference.gradients import visible
from attnlib.params import Params, Varlen, mask_window

SMALL = {
    "batch": Case("equal", (40, 40), 16, 2, False),
    "varlen": Case("lengths", (5, 60, 33), 16, 2, True),
    "window": Case("windows", (70,), 16, 2, False, 20),
    "dense": Case("equal", (30, 30), 16, 2, True, causal=False),
}


def test_calls_are_named_apart_and_fill_the_gpu():
    cases = list(time_varlen.cases(list(time_varlen.HEADS)))
    assert len({case.label for case in cases}) == len(cases)
    assert {case.table for case in cases} == {"equal", "short", "lengths", "windows"}
    assert all(time_varlen.TOKENS // 2 <= sum(case.lengths) <= time_varlen.TOKENS for case in cases)


def test_labels():
    assert Case("lengths", (64, 64, 300), 128, 1, True).label == "D128 2 x 64 + 1 x 300 varlen"
    assert Case("lengths", (1, 2, 3, 4), 64, 1, True).label == "D64 4 of 1 to 4 varlen"
    assert Case("windows", (70,), 64, 1, False, 20).label == "D64 1 x 70, 20 keys"


@pytest.mark.parametrize("name", SMALL)
def test_flops_are_those_of_the_pairs_that_see_each_other(name):
    case = SMALL[name]
    bounds = mask_window(case.causal, None if case.width is None else (case.width - 1, 0))
    pairs = sum(int(visible(n, n, bounds).sum()) for n in case.lengths)
    assert time_varlen.products(case) == 4 * case.heads * case.head_dim * pairs


@pytest.mark.parametrize("name", SMALL)
def test_a_right_call_can_be_timed_and_a_wrong_one_not(name, device, monkeypatch):
    case = SMALL[name]
    inputs = time_varlen.make_inputs(case, device)
    assert list(time_varlen.passes(case, inputs, "triton")) == ["forward", "backward"]
    forward, backward = time_varlen.dispatch.forward, time_varlen.dispatch.backward

    def wrong_forward(*args):
        out, lse = forward(*args)
        return out * 1.1, lse

    def wrong_backward(*args):
        dq, dk, dv = backward(*args)
        return dq, dk, torch.zeros_like(dv)

    for name, planted in (("forward", wrong_forward), ("backward", wrong_backward)):
        with monkeypatch.context() as patch:
            patch.setattr(time_varlen.dispatch, name, planted)
            with pytest.raises(AssertionError, match="is wrong"):
                time_varlen.passes(case, inputs, "triton")


@pytest.mark.parametrize("name", SMALL)
def test_fa3_is_asked_for_the_same_call(name, device, monkeypatch):
    """Its operators get offsets and longest lengths of varlen sequences, the mask and its own layout."""
    case, inputs = SMALL[name], time_varlen.make_inputs(SMALL[name], device)
    seen = []

    def ours(q, k, v, offsets, longest, causal, window):
        turned = (lambda x: x) if offsets[0] is not None else (lambda x: x.transpose(1, 2))
        varlen = Varlen(*offsets, *longest) if offsets[0] is not None else None
        params = Params(mask_window(causal, None if window == (-1, -1) else window), 16**-0.5, varlen,
                        return_lse=True, impl="reference")  # fmt: skip
        tensors = [turned(x) for x in (q, k, v)]
        out, lse = dispatch.forward(*tensors, params)
        return dispatch.Saved(*tensors, out, lse), params, turned

    def fwd(*call):
        seen.append(call[7:9])
        saved, _, turned = ours(*call[:3], call[7:9], call[12:14], call[24], call[25:27])
        return turned(saved.out), saved.lse

    def bwd(*call):
        q, k, v = call[1:4]
        saved, params, turned = ours(q, k, v, call[9:11], call[13:15], call[16], call[17:19])
        for target, one in zip(call[6:9], dispatch.backward(turned(call[0]), saved, params), strict=True):
            target.copy_(turned(one))

    fa3 = peers._FA3Operators.__new__(peers._FA3Operators)
    fa3.operators = types.SimpleNamespace(fwd=fwd, bwd=bwd)
    monkeypatch.setattr(peers, "_fa3_forward", lambda: fa3)
    assert list(time_varlen.passes(case, inputs, "fa3")) == ["forward", "backward"]
    assert seen and all((offsets[0] is None) == (inputs.varlen is None) for offsets in seen)


def test_fa3s_package_does_without_varlen_sequences(device, monkeypatch):
    """Its other calls are timed all the same."""
    monkeypatch.setattr(peers, "_no_fa3", lambda: None)
    monkeypatch.setattr(peers, "_fa3_forward", lambda: lambda *call, **options: None)
    varlen = next(time_varlen.make_inputs(case, device).varlen for case in SMALL.values() if case.varlen)
    assert peers.fa3().available() is None
    assert peers.fa3(varlen=varlen).available().startswith("takes varlen sequences by its library")
    with pytest.raises(ValueError, match="^varlen: expected None without the library"):
        peers.fa3(varlen=varlen).make(*[torch.zeros(1)] * 3, True, 1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu(capsys):
    assert time_varlen.main([]) == 2
    assert "compute capability 9.x" in capsys.readouterr().err
