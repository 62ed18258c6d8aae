"""attention(): wrong arguments are named, the implementation is the one asked for, gradients are refused."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from cases import INTERPRETER_REMARKS

from attnlib import attention, explain, launch, reference
from attnlib.kernels import forward
from attnlib.reference import Oracle, make_inputs
from attnlib.shapes import Shape

pytestmark = INTERPRETER_REMARKS
IMPLEMENTATIONS = ["triton", "reference", None]


def zeros(*shape, dtype=torch.float16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def all_of(*shape, **kwargs):
    return dict.fromkeys("qkv", zeros(*shape, **kwargs))


# What is changed in a good call with q (2, 4, 8, 16) and k, v (2, 2, 8, 16); the error; its message.
WRONG = [
    ({"q": None}, TypeError, "q: expected a torch.Tensor, got NoneType"),
    ({"k": [[1.0]]}, TypeError, "k: expected a torch.Tensor, got list"),
    ({"v": numpy.zeros((2, 2, 8, 16))}, TypeError, "v: expected a torch.Tensor, got ndarray"),
    ({"q": zeros(2, 8, 16)}, ValueError, "q: expected 4 dimensions (B, H, S, D), got shape (2, 8, 16)"),
    ({"k": zeros(16)}, ValueError, "k: expected 4 dimensions (B, H, S, D), got shape (16,)"),
    ({"v": zeros(1, 1, 1, 1, 1)}, ValueError,
     "v: expected 4 dimensions (B, H, S, D), got shape (1, 1, 1, 1, 1)"),
    ({"q": zeros(2, 4, 8, 16, dtype=torch.float64)}, TypeError,
     "q: expected dtype float16, bfloat16 or float32, got torch.float64"),
    (all_of(2, 2, 8, 16, dtype=torch.int32), TypeError,
     "q: expected dtype float16, bfloat16 or float32, got torch.int32"),
    ({"k": zeros(2, 2, 8, 16, dtype=torch.bfloat16)}, TypeError,
     "k: expected dtype torch.float16 as q has, got torch.bfloat16"),
    ({"v": zeros(2, 2, 8, 16, dtype=torch.float32)}, TypeError,
     "v: expected dtype torch.float16 as q has, got torch.float32"),
    ({"k": zeros(2, 2, 8, 16, device="meta")}, ValueError, "k: expected device cpu as q has, got meta"),
    ({"v": zeros(2, 2, 8, 16, device="meta")}, ValueError, "v: expected device cpu as q has, got meta"),
    ({"k": zeros(3, 2, 8, 16)}, ValueError, "k: expected batch size 2 as q has, got 3"),
    ({"v": zeros(1, 2, 8, 16)}, ValueError, "v: expected batch size 2 as q has, got 1"),
    ({"k": zeros(2, 2, 8, 24)}, ValueError, "k: expected head dimension 16 as q has, got 24"),
    ({"v": zeros(2, 2, 8, 8)}, ValueError, "v: expected head dimension 16 as q has, got 8"),
    ({"v": zeros(2, 2, 9, 16)}, ValueError, "v: expected shape (2, 2, 8, 16) as k has, got (2, 2, 9, 16)"),
    ({"v": zeros(2, 4, 8, 16)}, ValueError, "v: expected shape (2, 2, 8, 16) as k has, got (2, 4, 8, 16)"),
    *(
        (all_of(2, 2, 8, head_dim), ValueError,
         f"q: expected a head dimension that is a multiple of 8 from 8 to 256, got {head_dim}")
        for head_dim in (0, 4, 12, 264)
    ),
    *(
        (dict.fromkeys("kv", zeros(2, heads, 8, 16)), ValueError,
         f"k: expected a number of heads that divides q's 4, got {heads}")
        for heads in (0, 3, 8)
    ),
    ({"causal": 1}, TypeError, "causal: expected a bool, got int"),
    ({"causal": None}, TypeError, "causal: expected a bool, got NoneType"),
    ({"return_lse": "yes"}, TypeError, "return_lse: expected a bool, got str"),
    ({"sm_scale": "0.1"}, TypeError, "sm_scale: expected a number or None, got str"),
    ({"sm_scale": True}, TypeError, "sm_scale: expected a number or None, got bool"),
    ({"sm_scale": 1j}, TypeError, "sm_scale: expected a number or None, got complex"),
    ({"sm_scale": zeros(1)}, TypeError, "sm_scale: expected a number or None, got Tensor"),
    ({"sm_scale": math.nan}, ValueError, "sm_scale: expected a number finite in float32, got nan"),
    ({"sm_scale": -math.inf}, ValueError, "sm_scale: expected a number finite in float32, got -inf"),
    ({"sm_scale": 1e39}, ValueError, "sm_scale: expected a number finite in float32, got 1e+39"),
    ({"sm_scale": 10**400}, ValueError, f"sm_scale: expected a number finite in float32, got 1{'0' * 400}"),
    ({"impl": "flash"}, ValueError, "impl: expected 'hopper', 'triton', 'reference' or None, got 'flash'"),
    ({"impl": "Triton"}, ValueError, "impl: expected 'hopper', 'triton', 'reference' or None, got 'Triton'"),
    ({"impl": True}, ValueError, "impl: expected 'hopper', 'triton', 'reference' or None, got True"),
]


@pytest.mark.parametrize("impl", ["hopper", *IMPLEMENTATIONS])
@pytest.mark.parametrize(("wrong", "error", "message"), WRONG, ids=[message[:60] for *_, message in WRONG])
def test_wrong_arguments_are_named(wrong, error, message, impl):
    good = {"q": zeros(2, 4, 8, 16), "k": zeros(2, 2, 8, 16), "v": zeros(2, 2, 8, 16), "impl": impl}
    with pytest.raises(error) as raised:
        attention(**good | wrong)
    assert str(raised.value) == message


def test_options_are_keywords_only():
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given"):
        attention(zeros(1, 1, 8, 16), zeros(1, 1, 8, 16), zeros(1, 1, 8, 16), True)


def test_more_programs_than_a_grid_holds(monkeypatch):
    monkeypatch.setattr(launch, "interpreted", lambda: True)
    q = zeros(2**16, 2**15, 1, 8, device="meta")  # takes no memory
    with pytest.raises(ValueError) as raised:
        attention(q, q, q, impl="triton")
    assert str(raised.value) == (
        "q, k: expected fewer than 2^31 rows, keys and blocks of 64 rows over all heads, "
        f"got 1, 1 and {2**31}"
    )


# ---------------------------------------------------------------- the implementation asked for


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
def test_implementations_agree(causal, dtype, device):
    q, k, v = make_inputs(Shape(2, 4, 40, 64, dtype=dtype, heads_kv=2, seqlen_k=30), device=device)
    oracle = Oracle(q, k, v, causal)
    results = {}
    for impl in IMPLEMENTATIONS:
        results[impl] = out, lse = attention(q, k, v, causal=causal, return_lse=True, impl=impl)
        oracle.judge(out, lse).raise_if_bad(str(impl))
        assert out.dtype == q.dtype and out.device == q.device and lse.dtype == torch.float32
    assert torch.equal(results["reference"][0], oracle.out.to(q.dtype))
    # None is what explain says, not something near it.
    chosen = explain(q, k, v, causal=causal).kernel
    if chosen == "hopper":
        results[chosen] = attention(q, k, v, causal=causal, return_lse=True, impl=chosen)
    assert all(torch.equal(a, b) for a, b in zip(results[None], results[chosen], strict=True))


class Broken:
    """Stands for the kernel or the reference, and fails when it is used."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("owner", "name", "user"),
    [(forward, "attention_forward", "triton"), (reference, "attention_fp64", "reference")],
)
def test_a_failure_is_not_covered_up_by_another_implementation(owner, name, user, monkeypatch, device):
    q, k, v = make_inputs(Shape(1, 1, 8, 16), device=device)
    users = {user, None} if explain(q, k, v).kernel == user else {user}
    monkeypatch.setattr(owner, name, Broken())
    monkeypatch.setattr(launch, "_compiled", {})  # nor is a kernel used that was compiled before
    for impl in IMPLEMENTATIONS:
        if impl in users:
            with pytest.raises(RuntimeError, match="broken"):
                attention(q, k, v, impl=impl)
        else:
            assert attention(q, k, v, impl=impl).isfinite().all()


@pytest.mark.parametrize("seqlen", [8, 0])
def test_triton_on_a_cpu_without_the_interpreter(seqlen, monkeypatch):
    """Asked for by name: an error, even where there is nothing to compute. Not asked for: the reference."""
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(forward, "attention_forward", Broken())
    q, k, v = torch.randn(3, 1, 1, seqlen, 16)
    with pytest.raises(ValueError) as raised:
        attention(q, k, v, impl="triton")
    assert str(raised.value) == (
        "impl: 'triton' needs CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported; q is on cpu"
    )
    assert torch.equal(attention(q, k, v), attention(q, k, v, impl="reference"))


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_are_refused_not_dropped(name, impl, device):
    inputs = dict(zip("qkv", make_inputs(Shape(1, 1, 20, 16), device=device), strict=True))
    want = attention(**inputs, impl=impl)
    needs_grad = inputs | {name: inputs[name].clone().requires_grad_()}
    with pytest.raises(NotImplementedError) as raised:
        attention(**needs_grad, impl=impl)
    assert str(raised.value) == (
        f"{name}: requires grad, but attnlib.attention is forward only; "
        f"call it under torch.no_grad() or pass {name}.detach()"
    )
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = attention(**needs_grad, impl=impl)
        assert torch.equal(out, want) and not out.requires_grad
    assert torch.equal(attention(**needs_grad | {name: needs_grad[name].detach()}, impl=impl), want)


def test_a_result_of_other_operations_is_refused_too(device):
    """q = x W requires grad though nobody marked q itself."""
    q, k, v = make_inputs(Shape(1, 1, 20, 16), device=device)
    weight = torch.eye(16, dtype=q.dtype, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="^q: requires grad"):
        attention(q @ weight, k, v)
