"""The portable backward kernels against the fp64 oracle, and the oracle against autograd."""

from __future__ import annotations

import pytest
import torch
from backward_cases import CASES, BackwardCase, check_backward, exact_forward, portable_backward
from cases import INTERPRETER_REMARKS

from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels.common.launch_preprocess import ROWS
from attnlib.kernels.portable.configs_backward import backward_config
from attnlib.kernels.portable.launch_backward import padding_of
from attnlib.kernels.reference.gradients import gradient_fp64, visible
from attnlib.params import MaskWindow, Params

pytestmark = INTERPRETER_REMARKS


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients(case: BackwardCase, device: str) -> None:
    check_backward(case, device)


def test_kinds_of_layout(device: str) -> None:
    """What autograd hands over: transposed views, an expanded gradient, a slice at an odd address."""
    shape = Shape(2, 2, 40, 64)
    q, k, v = make_inputs(shape, device=device)
    d_out = torch.randn(2, 2, 40, 1, device=device).half().expand(2, 2, 40, 64)
    scale = 0.125
    out, lse = exact_forward(q, k, v, MaskWindow(None, 0), scale)
    oracle = GradientOracle(d_out, q, k, v, causal=True, sm_scale=scale)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    odd = torch.empty(k.numel() + 1, dtype=k.dtype, device=device)[1:].view_as(k).copy_(k)
    params = Params(MaskWindow(None, 0), scale)
    dq, dk, dv = portable_backward(d_out, transposed, odd, v, out, lse, params)
    for verdict in oracle.judge(dq, dk, dv).values():
        verdict.raise_if_bad("layouts")
    assert dq.stride() == transposed.stride()


def test_same_bits_every_time(device: str) -> None:
    q, k, v = make_inputs(Shape(1, 2, 100, 64), device=device)
    out, lse = exact_forward(q, k, v, MaskWindow(None, 0), 0.125)
    params = Params(MaskWindow(None, 0), 0.125)
    first, second = (portable_backward(q, q, k, v, out, lse, params) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("causal, window", [(True, None), (False, None), (False, (7, 3)), (True, (5, -1))])
def test_oracle_is_what_autograd_computes(causal: bool, window: tuple[int, int] | None) -> None:
    q, k, v = (torch.randn(2, h, s, 8).double().requires_grad_() for h, s in ((4, 30), (2, 25), (2, 25)))
    d_out = torch.randn(2, 4, 30, 8).double()
    right = 0 if causal else None if window is None or window[1] == -1 else window[1]
    left = None if window is None or window[0] == -1 else window[0]
    seen = visible(30, 25, MaskWindow(left, right))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True, scale=0.3)
    out = out.masked_fill(~seen.any(1)[:, None], 0.0)  # a query without a key
    expected = torch.autograd.grad(out, (q, k, v), d_out)
    found = gradient_fp64(d_out, q, k, v, causal=causal, window=window, sm_scale=0.3)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.nan_to_num(0.0))


def test_oracle_rejects() -> None:
    q, k, v = make_inputs(Shape(1, 1, 20, 16), device="cpu")
    oracle = GradientOracle(q, q, k, v, causal=True)
    dq, dk, dv = (x.half() for x in oracle.truth.values())
    assert all(verdict.ok for verdict in oracle.judge(dq, dk, dv).values())
    verdicts = oracle.judge(dq + 0.01, dk[:, :, :10], dv * float("nan"))
    assert [verdict.ok for verdict in verdicts.values()] == [False] * 3
    assert "dq: max error" in verdicts["dq"].reason
    assert verdicts["dk"].reason.startswith("dk: expected shape (1, 1, 20, 16)")


def test_visible() -> None:
    assert visible(2, 3, MaskWindow(None, 0)).tolist() == [[True, True, False], [True, True, True]]
    assert visible(3, 2, MaskWindow(0, 0)).tolist() == [[False, False], [True, False], [False, True]]
    assert visible(1, 4, MaskWindow(1, None)).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("bad, error", [(0, "1 to 256, got 0"), (257, "1 to 256, got 257")])
def test_configs_reject_head_dims(bad: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        backward_config(bad)


def test_configs_reject_dtypes() -> None:
    with pytest.raises(ValueError, match="dtype: expected 'float16', 'bfloat16' or 'float32', got 'float64'"):
        backward_config(64, "float64")


@pytest.mark.parametrize("arch", [None, (8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_blocks_divide_the_padding(dtype: str, arch: tuple[int, int] | None) -> None:
    """Rows of LSE and delta are read in whole tiles, without a mask."""
    for head_dim in (8, 64, 96, 128, 256):
        config = backward_config(head_dim, dtype, arch)
        padding = padding_of(config)
        assert padding % min(padding, ROWS) == 0
        for tile in filter(None, (config.keys, config.queries, config.values)):
            assert padding % tile.block_m == 0
