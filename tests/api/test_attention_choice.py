"""attention(): the implementation is the one asked for, or the first that can run the call."""

from __future__ import annotations

import pytest
import torch
from cases import INTERPRETER_REMARKS
from families import forget_launches, fresh_launches  # noqa: F401  (a fixture)

from attnlib import attention, explain
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels import reference
from attnlib.kernels.common import device as devices
from attnlib.kernels.portable import forward_kernel

pytestmark = INTERPRETER_REMARKS
IMPLEMENTATIONS = ["triton", "reference", None]


def test_more_programs_than_a_grid_holds(monkeypatch, fresh_launches):
    monkeypatch.setattr(devices, "interpreted", lambda: True)
    q = torch.zeros(1, 1, 1, 8, dtype=torch.float16).expand(2**16, 2**15, 1, 8)  # takes no memory
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
    [(forward_kernel, "attention_forward", "triton"), (reference, "attention_fp64", "reference")],
)
def test_a_failure_is_not_covered_up_by_another_implementation(
    owner, name, user, monkeypatch, fresh_launches, device
):
    q, k, v = make_inputs(Shape(1, 1, 8, 16), device=device)
    users = {user, None} if explain(q, k, v).kernel == user else {user}
    monkeypatch.setattr(owner, name, Broken())
    forget_launches()  # nor is a kernel used that was compiled before
    for impl in IMPLEMENTATIONS:
        if impl in users:
            with pytest.raises(RuntimeError, match="broken"):
                attention(q, k, v, impl=impl)
        else:
            assert attention(q, k, v, impl=impl).isfinite().all()


@pytest.mark.parametrize("seqlen", [8, 0])
def test_triton_on_a_cpu_without_the_interpreter(seqlen, monkeypatch, fresh_launches):
    """Asked for by name: an error, even where there is nothing to compute. Not asked for: the reference."""
    monkeypatch.setattr(devices, "interpreted", lambda: False)
    monkeypatch.setattr(forward_kernel, "attention_forward", Broken())
    q, k, v = torch.randn(3, 1, 1, seqlen, 16)
    with pytest.raises(ValueError) as raised:
        attention(q, k, v, impl="triton")
    assert str(raised.value) == (
        "impl: 'triton' needs CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported; q is on cpu"
    )
    assert torch.equal(attention(q, k, v), attention(q, k, v, impl="reference"))
