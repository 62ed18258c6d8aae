"""Decoding calls that go to `node.cpp`: the first of a kind goes through Python, those after it only launch,
and what is not such a call goes through Python each time. As in test_node.py launches compute their results,
so that a call that was taken for another one shows in them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import INTERPRETER_REMARKS
from differentiated import OTHERS, built, launcher  # noqa: F401
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode
from triton import knobs

from attnlib import attention_decode, dispatch, node
from attnlib.params import DecodeParams, mask_window

pytestmark = [
    *INTERPRETER_REMARKS,
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches that compute on a CPU"),
]
B, H, HKV, S, D = 2, 4, 2, 32, 16
FP8 = torch.float8_e4m3fn


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32)


def scales(*shape):
    return torch.rand(shape) + 0.5


def inputs(**changed) -> dict:
    """Arguments of a call; what is None is left out."""
    q, k, v = torch.randn(B, H, 1, D), torch.randn(B, HKV, S, D), torch.randn(B, HKV, S, D)
    given = {"q": q.half(), "k_cache": k.half(), "v_cache": v.half(), "lengths": numbers(20, 7)}
    return {name: value for name, value in (given | changed).items() if value is not None}


def fp8(**changed) -> dict:
    caches = (torch.randn(B, HKV, S, D).to(FP8) for _ in range(2))
    named = dict(zip(("k_cache", "v_cache"), caches, strict=True))
    return inputs(**(named | {"k_scale": scales(B, HKV), "v_scale": scales(B, HKV)} | changed))


def paged(**changed) -> dict:
    pages = (torch.randn(5, HKV, 16, D).half() for _ in range(2))
    named = dict(zip(("k_cache", "v_cache"), pages, strict=True))
    return inputs(**(named | {"page_table": numbers(1, 0, 4, 2).view(2, 2)} | changed))


def in_python(**given):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "shortcut", lambda *args: None)
        patch.setattr(node, "keep", lambda *args: None)
        return attention_decode(**given)


def equal(found, expected) -> bool:
    pairs = [(found, expected)] if isinstance(found, torch.Tensor) else zip(found, expected, strict=True)
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)


# ---------------------------------------------------------------- the second call of a kind

KINDS = {
    "lengths": inputs,
    "full caches": lambda: inputs(lengths=None),
    "starts": lambda: inputs(starts=numbers(3, 0)),
    "pages": paged,
    "FP8": fp8,
    "FP8, one scale": lambda: fp8(k_scale=torch.tensor(0.5), v_scale=None),
    "FP8, scales of heads": lambda: fp8(k_scale=scales(HKV).expand(B, HKV)),
    "LSE": lambda: inputs(return_lse=True),
    "window": lambda: inputs(window=(9, 0)),
    "scale": lambda: inputs(sm_scale=-0.3),
    "split": lambda: inputs(split="fixed"),
    "a number of splits": lambda: inputs(split=2),
    "rows before heads": lambda: inputs(k_cache=torch.randn(B, S, HKV, D).half().transpose(1, 2)),
    "lengths at an odd address": lambda: inputs(lengths=numbers(0, 20, 7)[1:]),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_second_call_of_a_kind_only_launches(name, launcher):
    attention_decode(**KINDS[name]())
    assert not launcher.forwards
    given = KINDS[name]()
    found = attention_decode(**given)
    [launched] = launcher.forwards
    assert (launched["device"], launched["stream"]) == (-1, 0)
    names = {"q": "q", "k": "k_cache", "v": "v_cache"} | {other: other for other in OTHERS}
    addresses = {ours: given[theirs].data_ptr() for ours, theirs in names.items() if theirs in given}
    assert {ours: launched[ours] for ours in addresses} == addresses
    assert equal(found, in_python(**given))


ANOTHER_KIND = {
    "batch": lambda: inputs(q=torch.randn(1, H, 1, D).half(), lengths=numbers(9))
    | {name: torch.randn(1, HKV, S, D).half() for name in ("k_cache", "v_cache")},
    "queries": lambda: inputs(q=torch.randn(B, H, 2, D).half()),
    "heads": lambda: inputs(q=torch.randn(B, 2 * H, 1, D).half()),
    "dtype": lambda: {n: x if n == "lengths" else x.bfloat16() for n, x in inputs().items()},
    "layout of the values": lambda: inputs(v_cache=torch.randn(B, S, HKV, D).half().transpose(1, 2)),
    **{name: make for name, make in KINDS.items() if name not in ("lengths", "lengths at an odd address")},
    "no bound": lambda: inputs(causal=False, window=(9, 4)),
    "another window": lambda: inputs(window=(8, 0)),
    "another split": lambda: inputs(split="none"),
    "another number of splits": lambda: inputs(split=3),
}


@pytest.mark.parametrize("name", ANOTHER_KIND)
def test_another_kind_goes_through_python_once(name, launcher):
    for make in (inputs, fp8, paged, KINDS["a number of splits"]):
        if name not in KINDS or KINDS[name] is not make:
            attention_decode(**make())
    given = ANOTHER_KIND[name]()
    expected = in_python(**given)
    assert equal(attention_decode(**given), expected) and not launcher.forwards
    assert equal(attention_decode(**given), expected) and len(launcher.forwards) == 1


def test_scales_of_another_form_are_another_kind(launcher):
    forms = [{}, {"k_scale": None}, {"v_scale": None}, {"k_scale": torch.tensor(0.7)}]
    forms += [{"v_scale": scales(HKV, B).T}, {"k_scale": scales(HKV).expand(B, HKV)}]
    for number, form in enumerate(forms):
        for known in (False, True):
            given = fp8(**form)
            assert equal(attention_decode(**given), in_python(**given))
            assert len(launcher.forwards) == number + known


# ---------------------------------------------------------------- calls for Python


def observed(**given):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
        return attention_decode(**given)


def counted(**given):
    with FlopCounterMode(display=False):
        return attention_decode(**given)


def misaligned(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


FOR_PYTHON = {
    "a FLOP counter": counted,
    "a profiler": observed,
    "torch.compile": lambda **given: torch.compile(
        attention_decode, fullgraph=True, backend="eager"
    )(**given),
    "a misaligned cache": lambda **given: attention_decode(
        **given | {"v_cache": misaligned(given["v_cache"])}
    ),
    "a sign that is not in memory": lambda **given: attention_decode(
        **given | {"k_cache": torch._neg_view(given["k_cache"])}
    ),
    "elements of q apart": lambda **given: attention_decode(
        **given | {"q": torch.stack([given["q"]] * 2, -1)[..., 0]}
    ),
    "lengths apart": lambda **given: attention_decode(
        **given | {"lengths": torch.stack([given["lengths"]] * 2, -1)[:, 0]}
    ),
    "a window as a list": lambda **given: attention_decode(**given, window=[9, 0]),
}


@pytest.mark.parametrize("name", FOR_PYTHON)
def test_calls_for_python(name, launcher):
    """Each of these on tensors whose kind is known, and again."""
    attention_decode(**inputs())
    given, call = inputs(), FOR_PYTHON[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "shortcut", lambda *args: None)
        patch.setattr(node, "keep", lambda *args: None)
        expected = call(**given)
    for _ in range(2):
        torch.testing.assert_close(call(**given), expected, rtol=0, atol=0)
    assert not launcher.forwards
    attention_decode(**given)
    assert len(launcher.forwards) == 1, "the kind was not known"


def test_what_is_refused_is_refused_each_time(launcher):
    """Checks that the second call of a kind does not repeat, on calls that differ in what they look at."""
    attention_decode(**inputs())
    attention_decode(**fp8())
    given = inputs()
    wrong = [
        (inputs(lengths=numbers(20, 7, 1)), ValueError, "lengths: expected batch size 2"),
        (inputs(lengths=numbers(20, 7).long()), TypeError, "lengths: expected dtype int32"),
        (inputs(lengths=numbers(20, 7).to("meta")), ValueError, "lengths: expected device cpu"),
        (inputs(causal=1), TypeError, "causal: expected a bool"),
        (inputs(split="stream-k"), ValueError, "split: expected 'none'"),
        (inputs(split="hopper"), ValueError, "split: expected 'none'"),
        (inputs(split=True), TypeError, "split: expected 'none'"),
        (inputs(k_scale=scales(B, HKV)), ValueError, "k_scale: expected None beside a k_cache in"),
        (fp8(k_scale=scales(B)), ValueError, "k_scale: expected shape"),
        (fp8(v_scale=scales(B, HKV).double()), TypeError, "v_scale: expected dtype float32"),
        (fp8(v_scale=0.5), TypeError, "v_scale: expected a torch.Tensor or None, got float"),
        (given | {"q": given["q"].clone().requires_grad_()}, RuntimeError, "q: expected a tensor that does"),
        (fp8(k_scale=scales(B, HKV).requires_grad_()), RuntimeError, "k_scale: expected a tensor that does"),
    ]
    for _ in range(2):
        for arguments, error, message in wrong:
            with pytest.raises(error, match=f"^{message}"):
                attention_decode(**arguments)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"), forward_ad.dual_level():
        dual = forward_ad.make_dual(given["q"], given["q"])
        attention_decode(**given | {"q": dual})
    assert not launcher.forwards


def test_no_gradient_is_wanted_under_no_grad(launcher):
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(2):
                given = inputs()
                given["q"].requires_grad_(mode is torch.no_grad)
                assert not attention_decode(**given).requires_grad
    assert len(launcher.forwards) == 3


def test_nothing_to_do_is_not_launched(launcher):
    for _ in range(2):
        empty = inputs(k_cache=torch.zeros(B, HKV, 0, D).half(), v_cache=torch.zeros(B, HKV, 0, D).half(),
                       lengths=None)  # fmt: skip
        assert not attention_decode(**empty).any()
    assert not launcher.forwards


def test_what_is_known_is_kept_once(launcher):
    given = inputs()
    tensors = tuple(given.get(name) for name in ("q", "k_cache", "v_cache", *OTHERS))
    options = True, None, None, False, False, None
    assert built().lacks(*tensors, options)
    attention_decode(**given)
    assert not built().lacks(*tensors, options)
    with pytest.raises(TypeError, match="expected 4 or 9 arguments, got 6"):
        built().lacks(*tensors[:5], options)


def test_what_python_has_prepared_is_what_is_kept(launcher, monkeypatch):
    """`node.learn` keeps a call when its launches are packed, and gives them a buffer for partial results."""
    monkeypatch.setattr(node, "keep", partial(node.learn, built()))
    caches = {name: torch.randn(B, HKV, 600, D).half() for name in ("k_cache", "v_cache")}
    given = inputs(**caches, lengths=numbers(600, 7), split="fixed", return_lse=True)
    expected = attention_decode(**given)
    q, k, v = (given[name] for name in ("q", "k_cache", "v_cache"))
    params = DecodeParams(mask_window(True, None), D**-0.5, given["lengths"], None, True, "fixed")
    plan = dispatch.prepared_decode(q, k, v, params)
    assert plan is not None and plan.scratch and not attention_decode(**given)[0].isnan().any()
    assert not launcher.forwards, "kept without launches"
    named = {"q": q, "k": k, "v": v, "out": expected[0], "lse": expected[1], "lengths": given["lengths"]}
    named |= {name: None for name in OTHERS if name not in named}
    tensors = q, k, v, given["lengths"], None, None, None, None
    with monkeypatch.context() as patch:
        patch.setattr(plan.launches, "packed", launcher._described(params, **named))
        node.keep(tensors, (True, None, None, True, False, "fixed"), params, expected[0])
    assert equal(attention_decode(**given), expected) and len(launcher.forwards) == 1
