"""attention_distr(): every wrong argument is named, with what was expected and what came; what is not
supported says so."""

from __future__ import annotations

import inspect

import numpy
import pytest
import torch
from cases import INTERPRETER_REMARKS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from attnlib import attention_distr

pytestmark = [
    *INTERPRETER_REMARKS,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning"),
]


def zeros(*shape, dtype=torch.float16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


GOOD = {"q": zeros(2, 4, 8, 16), "k": zeros(2, 2, 8, 16), "v": zeros(2, 2, 8, 16), "group": 2,
        "impl": "reference"}  # fmt: skip
DENSE = "expected a dense tensor (layout torch.strided), got"
DIMS = "expected a head dimension that is a multiple of 8 from 8 to 128, got"
GROUP, SEED = "expected an int from 1 to 16, got", "expected an int from 0 to 2147483647, got"
ROWS = "expected None or a multiple of 128, got"
IMPL = "expected 'hopper', 'triton', 'reference' or None, got"

# What is changed in a good call; the error; its message.
CHANGES = [
    ({"q": None}, TypeError, "q: expected a torch.Tensor, got NoneType"),
    ({"v": numpy.zeros((2, 2, 8, 16))}, TypeError, "v: expected a torch.Tensor, got numpy.ndarray"),
    ({"k": zeros(2, 2, 8, 16).to_sparse()}, TypeError, f"k: {DENSE} torch.sparse_coo"),
    ({"q": zeros(8, 4, 16)}, ValueError, "q: expected 4 dimensions (B, H, S, D), got shape (8, 4, 16)"),
    ({"q": zeros(2, 4, 8, 16, dtype=torch.float64)}, TypeError,
     "q: expected dtype float16, bfloat16 or float32, got torch.float64"),
    ({"k": zeros(2, 2, 8, 16, dtype=torch.bfloat16)}, TypeError,
     "k: expected dtype torch.float16 as q has, got torch.bfloat16"),
    ({"k": zeros(2, 2, 8, 16, device="meta")}, ValueError, "k: expected device cpu as q has, got meta"),
    ({"q": zeros(2, 4, 8, 12)}, ValueError, f"q: {DIMS} 12"),
    ({"q": zeros(2, 4, 8, 136)}, ValueError, f"q: {DIMS} 136"),
    ({"k": zeros(3, 2, 8, 16)}, ValueError, "k: expected batch size 2 as q has, got 3"),
    ({"v": zeros(2, 2, 8, 24)}, ValueError, "v: expected head dimension 16 as q has, got 24"),
    ({"v": zeros(2, 2, 9, 16)}, ValueError, "v: expected shape (2, 2, 8, 16) as k has, got (2, 2, 9, 16)"),
    ({"k": zeros(2, 3, 8, 16), "v": zeros(2, 3, 8, 16)}, ValueError,
     "k: expected a number of heads that divides q's 4, got 3"),
    ({"group": None}, TypeError, f"group: {GROUP} NoneType"),
    ({"group": 2.0}, TypeError, f"group: {GROUP} float"),
    ({"group": True}, TypeError, f"group: {GROUP} bool"),
    ({"group": 0}, ValueError, f"group: {GROUP} 0"),
    ({"group": 32}, ValueError, f"group: {GROUP} 32"),
    ({"group": 3}, ValueError, "group: expected a number that divides the head dimension 16, got 3"),
    ({"causal": 1}, TypeError, "causal: expected a bool, got int"),
    ({"seed": None}, TypeError, f"seed: {SEED} NoneType"),
    ({"seed": -1}, ValueError, f"seed: {SEED} -1"),
    ({"seed": 2**31}, ValueError, f"seed: {SEED} 2147483648"),
    ({"sm_scale": "1"}, TypeError, "sm_scale: expected a number or None, got str"),
    ({"sm_scale": float("nan")}, ValueError, "sm_scale: expected a number from -1e26 to 1e26, got nan"),
    ({"hashed": None}, TypeError, "hashed: expected 'q' or 'k', got NoneType"),
    ({"hashed": "v"}, ValueError, "hashed: expected 'q' or 'k', got 'v'"),
    ({"rows": "128", "hashed": "q"}, TypeError, f"rows: {ROWS} str"),
    ({"rows": 64, "hashed": "q"}, ValueError, f"rows: {ROWS} 64"),
    ({"rows": 0, "hashed": "q"}, ValueError, f"rows: {ROWS} 0"),
    ({"rows": 128}, ValueError, "rows: expected None where keys are hashed (hashed='k'), got 128"),
    ({"impl": 1}, TypeError, f"impl: {IMPL} int"),
    ({"impl": "decode"}, ValueError, f"impl: {IMPL} 'decode'"),
    ({"impl": "hopper"}, ValueError, "impl: 'hopper' needs CUDA tensors; q is on cpu"),
]  # fmt: skip


@pytest.mark.parametrize("change, error, message", CHANGES, ids=[row[-1] for row in CHANGES])
def test_wrong_arguments(change: dict, error: type, message: str) -> None:
    with pytest.raises(error) as raised:
        attention_distr(**(GOOD | change))
    assert str(raised.value) == message


def test_good_arguments() -> None:
    for change in ({}, {"hashed": "q"}, {"hashed": "q", "rows": 256}, {"group": 16}, {"seed": 2**31 - 1}):
        assert attention_distr(**(GOOD | change)).shape == (2, 4, 8, 16)


def test_every_argument_has_a_row() -> None:
    changed = {name for change, *_ in CHANGES for name in change}
    assert set(inspect.signature(attention_distr).parameters) == changed


# ---------------------------------------------------------------- not supported


def test_a_gradient_is_refused() -> None:
    for name in "qkv":
        given = GOOD | {name: GOOD[name].clone().requires_grad_()}
        message = rf"^{name}: expected a tensor that does not require grad.*attention_distr has no gradient"
        with pytest.raises(RuntimeError, match=message):
            attention_distr(**given)
        with torch.no_grad():
            assert not attention_distr(**given).requires_grad


def test_a_tangent_is_refused() -> None:
    with forward_ad.dual_level():
        q = forward_ad.make_dual(GOOD["q"].float(), torch.ones(GOOD["q"].shape))
        with pytest.raises(RuntimeError, match="forward-mode"):
            attention_distr(**(GOOD | {"q": q, "k": GOOD["k"].float(), "v": GOOD["v"].float()}))


def test_transformations_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"^attention_distr under torch\.func: not supported"):
        torch.func.vmap(lambda q: attention_distr(**(GOOD | {"q": q})))(GOOD["q"][None])
    with pytest.raises(NotImplementedError, match=r"^attention_distr under torch\.compile"), FakeTensorMode():
        attention_distr(**GOOD)
    with pytest.raises(NotImplementedError, match="^q: expected a tensor with values, got one on device"):
        attention_distr(**{name: x.to("meta") if name in "qkv" else x for name, x in GOOD.items()})
