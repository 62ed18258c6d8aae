"""The decoding kernels as `attention` runs them: few queries, and keys that fill their tensors."""

from __future__ import annotations

import math

import pytest
import torch
from cases import INTERPRETER_REMARKS
from draws import LAYOUTS, backwards

from attnlib import attention, explain
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels.decode.configs import Work, pays_to_split

pytestmark = INTERPRETER_REMARKS
CALLS = {
    "one query": {},
    "causal": {"rows": 5, "causal": True},
    "more queries than keys": {"rows": 16, "keys": 9, "causal": True},
    "window": {"rows": 3, "window": (100, 1)},
    "a bound that nobody reaches": {"window": (5000, 5000)},
    "no bound on the left": {"rows": 4, "window": (-1, 3)},
    "negative scale": {"sm_scale": -0.3},
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16", "rows": 2},
    "D 72": {"head_dim": 72},
    "D 8": {"head_dim": 8},
    "as many heads": {"heads": 2},
}


def make(device, rows=1, keys=300, heads=4, head_dim=64, dtype="float16", **options):
    shape = Shape(2, heads, rows, head_dim, False, dtype, 2, keys)
    return make_inputs(shape, "normal", device=device), options


@pytest.mark.parametrize("name", CALLS)
def test_call(name, device):
    (q, k, v), options = make(device, **CALLS[name])
    out, lse = attention(q, k, v, **options, return_lse=True, impl="decode")
    Oracle(q, k, v, **options).judge(out, lse).raise_if_bad(name)
    again = attention(q, k, v, **options, impl="decode")
    assert torch.equal(out, again) and out.stride() == q.stride()


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x is not backwards], ids=lambda x: x.__name__)
def test_layouts(layout, device):
    (q, k, v), _ = make(device)
    expected = attention(q, k, v, impl="decode")
    for tensors in ((layout(q), layout(k), layout(v)), (q, k, layout(v))):
        if layout.__name__ == "expanded":
            Oracle(*tensors).judge(attention(*tensors, impl="decode")).raise_if_bad("expanded")
        else:
            assert torch.equal(attention(*tensors, impl="decode"), expected)


def test_without_being_asked_for_and_with_gradients(device):
    """Long enough for the interpreter's three multiprocessors. The backward pass is another family's."""
    (q, k, v), _ = make(device, keys=700, heads=8, head_dim=128, rows=2)
    assert explain(q, k, v, causal=True).kernel == "decode"
    plain = attention(q, k, v, causal=True)
    Oracle(q, k, v, True).judge(plain).raise_if_bad("without being asked for")
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, causal=True)
    assert torch.equal(out, plain)
    d_out = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), d_out)
    oracle = GradientOracle(d_out, q.detach(), k.detach(), v.detach(), True)
    for verdict in oracle.judge(*found).values():
        verdict.raise_if_bad("gradients")
    with pytest.raises(ValueError, match="^impl: 'decode' has no backward pass"):
        attention(q, k, v, impl="decode")


def test_nothing_to_attend_to(device):
    (q, k, v), _ = make(device)
    for tensors in ((q, k[:, :, :0], v[:, :, :0]), (q[:0], k[:0], v[:0])):
        out, lse = attention(*tensors, return_lse=True, impl="decode")
        assert out.shape == tensors[0].shape and not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("heads", range(1, 600, 7))
def test_what_pays_to_split_goes_on_paying_for_more_keys(heads):
    """And less is left to gain by a split, the more whole waves there are."""

    def pays(keys: int, heads: int = heads) -> bool:
        return pays_to_split(Work(1, 128, "float16", heads, keys, 132), heads)

    told = [pays(1 << i) for i in range(20)]
    assert told == sorted(told) and not told[0]
    assert not pays(1 << 19, 132 * heads), "whole waves of heads that share nothing"
