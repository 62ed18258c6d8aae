"""attention_bsfa() and bsfa_threshold(): every wrong argument is named, with what was expected and what came;
gradients are refused, and compilers see an operator."""

from __future__ import annotations

import numpy
import pytest
import torch
from argument_rows import check_every_argument_has_a_row, check_mistake, mistakes
from cases import INTERPRETER_REMARKS

from attnlib import attention_bsfa, bsfa_threshold
from attnlib.kernels.common import device as where

pytestmark = INTERPRETER_REMARKS


def zeros(*shape, dtype=torch.float16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def limits(*shape, dtype=torch.float32, device="cpu"):
    return zeros(*shape, dtype=dtype, device=device)


GOOD = {"q": zeros(2, 4, 8, 64), "k": zeros(2, 2, 8, 64), "v": zeros(2, 2, 8, 64), "threshold": 0.0,
        "impl": "reference"}  # fmt: skip
GOOD_THRESHOLD = {"q": GOOD["q"], "k": GOOD["k"], "kept": 2}
THRESHOLD = "expected a number, or a float32 tensor (H), (H, N) or (B, H, N)"
SHAPED = f"{THRESHOLD} with B = 2, H = 4 and N from 1 on, got shape"
KEPT = "expected a number of blocks, an int from 0 on, or a share of them, a float from 0 to 1, got"
IMPL = "expected 'hopper', 'triton', 'reference' or None, got"

# What is changed in a good call; the error; its message.
TENSORS = [
    ({"q": None}, TypeError, "q: expected a torch.Tensor, got NoneType"),
    ({"q": zeros(2, 4, 8, 64, dtype=torch.float32)}, TypeError,
     "q: expected dtype float16 or bfloat16, got torch.float32"),
    ({"q": zeros(2, 4, 8, 96)}, ValueError, "q: expected a head dimension of 64 or 128, got 96"),
    ({"q": zeros(8, 4, 64)}, ValueError, "q: expected 4 dimensions (B, H, S, D), got shape (8, 4, 64)"),
    ({"k": [[1.0]]}, TypeError, "k: expected a torch.Tensor, got list"),
    ({"k": zeros(2, 2, 8, 64, dtype=torch.bfloat16)}, TypeError,
     "k: expected dtype torch.float16 as q has, got torch.bfloat16"),
    ({"k": zeros(3, 2, 8, 64)}, ValueError, "k: expected batch size 2 as q has, got 3"),
    ({"causal": 1}, TypeError, "causal: expected a bool, got int"),
    ({"sm_scale": "1"}, TypeError, "sm_scale: expected a number or None, got str"),
    ({"sm_scale": float("nan")}, ValueError, "sm_scale: expected a number from -1e26 to 1e26, got nan"),
]  # fmt: skip
OPTIONS = [
    ({"v": numpy.zeros((2, 2, 8, 64))}, TypeError, "v: expected a torch.Tensor, got numpy.ndarray"),
    ({"v": zeros(2, 2, 9, 64)}, ValueError, "v: expected shape (2, 2, 8, 64) as k has, got (2, 2, 9, 64)"),
    ({"v": zeros(2, 2, 8, 128)}, ValueError, "v: expected head dimension 64 as q has, got 128"),
    ({"threshold": None}, TypeError, f"threshold: {THRESHOLD}, got NoneType"),
    ({"threshold": True}, TypeError, f"threshold: {THRESHOLD}, got bool"),
    ({"threshold": [1.0]}, TypeError, f"threshold: {THRESHOLD}, got list"),
    ({"threshold": float("nan")}, ValueError, f"threshold: {THRESHOLD}, got nan"),
    ({"threshold": 1e300}, ValueError,
     "threshold: expected a magnitude of at most 3.4e+38, or infinity, got 1e+300"),
    ({"threshold": -1e39}, ValueError,
     "threshold: expected a magnitude of at most 3.4e+38, or infinity, got -1e+39"),
    ({"threshold": torch.nested.nested_tensor([torch.ones(4)])}, TypeError,
     "threshold: expected a dense tensor (layout torch.strided), got a nested tensor"),
    ({"threshold": limits(4, dtype=torch.float16)}, TypeError,
     "threshold: expected dtype float32, got torch.float16"),
    ({"threshold": limits(4).to_sparse()}, TypeError,
     "threshold: expected a dense tensor (layout torch.strided), got torch.sparse_coo"),
    ({"threshold": limits()}, ValueError, f"threshold: {SHAPED} ()"),
    ({"threshold": limits(3)}, ValueError, f"threshold: {SHAPED} (3,)"),
    ({"threshold": limits(4, 0)}, ValueError, f"threshold: {SHAPED} (4, 0)"),
    ({"threshold": limits(1, 4, 2)}, ValueError, f"threshold: {SHAPED} (1, 4, 2)"),
    ({"threshold": limits(1, 1, 4, 2)}, ValueError, f"threshold: {SHAPED} (1, 1, 4, 2)"),
    ({"threshold": limits(4, device="meta")}, ValueError,
     "threshold: expected device cpu as q has, got meta"),
    ({"return_lse": None}, TypeError, "return_lse: expected a bool, got NoneType"),
    ({"return_kept": 1}, TypeError, "return_kept: expected a bool, got int"),
    ({"impl": 1}, TypeError, f"impl: {IMPL} int"),
    ({"impl": "decode"}, ValueError, f"impl: {IMPL} 'decode'"),
]  # fmt: skip
COUNTS = [
    ({"kept": None}, TypeError, f"kept: {KEPT} NoneType"),
    ({"kept": True}, TypeError, f"kept: {KEPT} bool"),
    ({"kept": -1}, ValueError, f"kept: {KEPT} -1"),
    ({"kept": 1.5}, ValueError, f"kept: {KEPT} 1.5"),
    ({"kept": float("nan")}, ValueError, f"kept: {KEPT} nan"),
]
TABLES = [(attention_bsfa, GOOD, TENSORS + OPTIONS), (bsfa_threshold, GOOD_THRESHOLD, TENSORS + COUNTS)]


@mistakes(TABLES)
def test_wrong_arguments(mistake) -> None:
    check_mistake(mistake)


def test_every_argument_has_a_row() -> None:
    check_every_argument_has_a_row(TABLES)


@pytest.mark.parametrize("function, good", [(attention_bsfa, GOOD), (bsfa_threshold, GOOD_THRESHOLD)])
def test_gradients_are_refused(function, good: dict) -> None:
    told = f"does: {function.__name__} has no gradient; attention has one"
    good = good | ({"threshold": limits(4)} if "threshold" in good else {})
    for name in good.keys() & {"q", "k", "v", "threshold"}:
        change = {name: good[name].clone().requires_grad_()}
        with pytest.raises(RuntimeError, match=f"^{name}: expected a tensor that does not .* {told}$"):
            function(**(good | change))
        with torch.no_grad():
            function(**(good | change))


def test_a_compiler_sees_an_operator() -> None:
    q, k, v = (GOOD[name] for name in "qkv")

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def compiled(q, k, v, threshold):
        return attention_bsfa(q, k, v, threshold=threshold, return_lse=True, return_kept=True)

    for threshold in (limits(4), limits(2, 4, 1)):
        expected = attention_bsfa(q, k, v, threshold=threshold, return_lse=True, return_kept=True)
        for found, wanted in zip(compiled(q, k, v, threshold), expected, strict=True):
            assert torch.equal(found, wanted) and found.dtype == wanted.dtype
    assert torch.equal(torch.compile(attention_bsfa, fullgraph=True, backend="eager")(q, k, v, threshold=0.5),
                       attention_bsfa(q, k, v, threshold=0.5))  # fmt: skip
    torch.library.opcheck(
        torch.ops.attnlib.attention_bsfa, (q, k, v, limits(1, 4, 1), True, None, True, True),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_a_threshold_with_a_tangent_is_refused() -> None:
    threshold = limits(4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(threshold, torch.ones_like(threshold))
        with pytest.raises(RuntimeError, match="attention_bsfa has no forward-mode derivative"):
            attention_bsfa(**(GOOD | {"threshold": dual}))


def test_transformations_are_refused() -> None:
    q, k, v = (GOOD[name] for name in "qkv")
    with pytest.raises(NotImplementedError, match="attention_bsfa under torch.func: not supported"):
        torch.func.vmap(lambda x: attention_bsfa(x[None], k[:1], v[:1], threshold=0.0))(q)
    with pytest.raises(NotImplementedError, match="bsfa_threshold under torch.func"):
        torch.func.vmap(lambda x: bsfa_threshold(x[None], k[:1], kept=1))(q)


def test_an_implementation_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="^impl: 'hopper' needs CUDA tensors; q is on cpu$"):
        attention_bsfa(**(GOOD | {"impl": "hopper"}))
    monkeypatch.setattr(where, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="^impl: 'triton' needs CUDA tensors, or TRITON_INTERPRET=1"):
        attention_bsfa(**(GOOD | {"impl": "triton"}))
    out = attention_bsfa(**(GOOD | {"impl": None}))  # the reference runs every call
    assert torch.equal(out, attention_bsfa(**GOOD))
