"""The Hopper kernels, line by line as they are, in the emulator: results, and no race or deadlock."""

from __future__ import annotations

import pytest
import torch
from emulated import on_the_cpu

from attnlib import launch_hopper, launch_hopper_backward
from attnlib.band import band
from attnlib.reference import attention_fp64
from attnlib.reference_gradients import gradient_fp64

ORDERS = "eager", "late", "random"


def tensors(B: int, H: int, H_kv: int, S_q: int, S_k: int, D: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = (B, H, S_q, D), (B, H_kv, S_k, D), (B, H_kv, S_k, D), (B, H, S_q, D)
    return [torch.randn(shape, generator=rng).half() for shape in shapes]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_forward(D: int, causal: bool, order: str) -> None:
    q, k, v, _ = tensors(1, 2, 1, 150, 200, D)
    with on_the_cpu(order):
        out, lse = launch_hopper.forward(q, k, v, band(causal, None), D**-0.5, True)
    truth, truth_lse = attention_fp64(q, k, v, causal=causal)
    torch.testing.assert_close(out.double(), truth, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_backward(D: int, causal: bool, order: str) -> None:
    q, k, v, d_out = tensors(1, 2, 1, 150, 200, D)
    out, lse = attention_fp64(q, k, v, causal=causal)
    with on_the_cpu(order):
        found = launch_hopper_backward.backward(
            d_out, q, k, v, out.half(), lse.float(), band(causal, None), D**-0.5
        )
    truth = gradient_fp64(d_out, q, k, v, causal=causal)
    for gradient, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=2e-3, atol=2e-3)
