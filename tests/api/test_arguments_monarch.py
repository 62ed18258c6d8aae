"""attention_monarch() and monarch_matrix(): every wrong argument is named, with what was expected and what
came."""

from __future__ import annotations

import numpy
import pytest
import torch
from argument_rows import check_every_argument_has_a_row, check_mistake, mistakes
from cases import INTERPRETER_REMARKS

from attnlib import attention_monarch, monarch_matrix
from attnlib.kernels.common import device as where

pytestmark = INTERPRETER_REMARKS


def zeros(*shape, dtype=torch.float16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def ones(*shape, dtype=torch.bool, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


GOOD = {"q": zeros(2, 4, 8, 16), "k": zeros(2, 2, 8, 16), "v": zeros(2, 2, 8, 16), "impl": "reference"}
GOOD_MATRIX = {name: GOOD[name] for name in "qk"}
DTYPES = "expected dtype float16, bfloat16 or float32, got"
DIMS = "expected a head dimension that is a multiple of 8 from 8 to 256, got"
BLOCK = "expected a number of tokens from 1 on, or None, got"
STEPS = "expected a number of rounds from 1 on, got"
PAD, IMPL = "expected 'post' or 'pre', got", "expected 'triton', 'reference' or None, got"

# What is changed in a good call; the error; its message.
TENSORS = [
    ({"q": None}, TypeError, "q: expected a torch.Tensor, got NoneType"),
    ({"k": [[1.0]]}, TypeError, "k: expected a torch.Tensor, got list"),
    ({"q": zeros(8, 4, 16)}, ValueError, "q: expected 4 dimensions (B, H, N, D), got shape (8, 4, 16)"),
    ({"q": zeros(2, 4, 8, 16, dtype=torch.float64)}, TypeError, f"q: {DTYPES} torch.float64"),
    ({"k": zeros(2, 2, 8, 16, dtype=torch.bfloat16)}, TypeError,
     "k: expected dtype torch.float16 as q has, got torch.bfloat16"),
    ({"k": zeros(2, 2, 8, 16, device="meta")}, ValueError, "k: expected device cpu as q has, got meta"),
    ({"q": zeros(2, 4, 8, 12)}, ValueError, f"q: {DIMS} 12"),
    ({"q": zeros(2, 4, 8, 264)}, ValueError, f"q: {DIMS} 264"),
    ({"k": zeros(3, 2, 8, 16)}, ValueError, "k: expected batch size 2 as q has, got 3"),
    ({"k": zeros(2, 2, 9, 16)}, ValueError,
     "k: expected 8 tokens as q has, which are its queries too, got 9"),
    ({"k": zeros(2, 2, 8, 24)}, ValueError, "k: expected head dimension 16 as q has, got 24"),
    ({"k": zeros(2, 3, 8, 16)}, ValueError, "k: expected a number of heads that divides q's 4, got 3"),
    ({"k": zeros(2, 0, 8, 16)}, ValueError, "k: expected a number of heads that divides q's 4, got 0"),
]  # fmt: skip
VALUES = [
    ({"v": numpy.zeros((2, 2, 8, 16))}, TypeError, "v: expected a torch.Tensor, got numpy.ndarray"),
    ({"v": zeros(2, 2, 8, 16).to_sparse()}, TypeError,
     "v: expected a dense tensor (layout torch.strided), got torch.sparse_coo"),
    ({"v": zeros(2, 2, 8, 24)}, ValueError, "v: expected shape (2, 2, 8, 16) as k has, got (2, 2, 8, 24)"),
    ({"impl": 1}, TypeError, f"impl: {IMPL} int"),
    ({"impl": "hopper"}, ValueError, f"impl: {IMPL} 'hopper'"),
]  # fmt: skip
OPTIONS = [
    ({"block": 2.0}, TypeError, f"block: {BLOCK} float"),
    ({"block": True}, TypeError, f"block: {BLOCK} bool"),
    ({"block": 0}, ValueError, f"block: {BLOCK} 0"),
    ({"steps": None}, TypeError, f"steps: {STEPS} NoneType"),
    ({"steps": "2"}, TypeError, f"steps: {STEPS} str"),
    ({"steps": 0}, ValueError, f"steps: {STEPS} 0"),
    ({"pad": None}, TypeError, f"pad: {PAD} NoneType"),
    ({"pad": "left"}, ValueError, f"pad: {PAD} 'left'"),
    ({"key_mask": [True]}, TypeError, "key_mask: expected a torch.Tensor or None, got list"),
    ({"key_mask": ones(2, 8, dtype=torch.int32)}, TypeError,
     "key_mask: expected dtype bool, got torch.int32"),
    ({"key_mask": ones(2, 8).to_sparse()}, TypeError,
     "key_mask: expected a dense tensor (layout torch.strided), got torch.sparse_coo"),
    ({"key_mask": ones(2, 9)}, ValueError,
     "key_mask: expected shape (B, N) = (2, 8) as q has, got (2, 9)"),
    ({"key_mask": ones(2, 8, device="meta")}, ValueError,
     "key_mask: expected device cpu as q has, got meta"),
    ({"sm_scale": "1"}, TypeError, "sm_scale: expected a number or None, got str"),
    ({"sm_scale": float("nan")}, ValueError, "sm_scale: expected a number from -1e26 to 1e26, got nan"),
]  # fmt: skip
TABLES = [(attention_monarch, GOOD, TENSORS + VALUES + OPTIONS)]
TABLES += [(monarch_matrix, GOOD_MATRIX, TENSORS + OPTIONS)]


@mistakes(TABLES)
def test_wrong_arguments(mistake) -> None:
    check_mistake(mistake)


def test_every_argument_has_a_row() -> None:
    check_every_argument_has_a_row(TABLES)


@pytest.mark.parametrize("function, good", [(attention_monarch, GOOD), (monarch_matrix, GOOD_MATRIX)])
def test_gradients_are_refused(function, good: dict) -> None:
    told = f"does: {function.__name__} has no gradient; attention has one"
    for name in good.keys() & {"q", "k", "v"}:
        change = {name: good[name].clone().requires_grad_()}
        with pytest.raises(RuntimeError, match=f"^{name}: expected a tensor that does not .* {told}$"):
            function(**(good | change))
        with torch.no_grad():
            function(**(good | change))


def test_transformations_are_refused() -> None:
    q, k, v = (GOOD[name] for name in "qkv")
    told = "attention_monarch under torch.func: not supported; call it outside"
    with pytest.raises(NotImplementedError, match=told):
        torch.func.vmap(lambda x: attention_monarch(x[None], k[:1], v[:1]))(q)
    meta = (zeros(2, 4, 8, 16, device="meta"),) * 3
    with pytest.raises(NotImplementedError, match="^q: expected a tensor with values, got one on device"):
        attention_monarch(*meta)


def test_no_kernel_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, "interpreted", lambda: False)
    needs = "needs CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported; q is on cpu"
    for impl, begins in ((None, "q: attention_monarch"), ("triton", "impl: 'triton'")):
        with pytest.raises(ValueError) as raised:
            attention_monarch(**(GOOD | {"impl": impl}))
        assert str(raised.value) == f"{begins} {needs}; impl='reference' runs on any device"
