"""The Hopper kernels, line by line as they are, in the emulator: results, and no race or deadlock."""

from __future__ import annotations

import pytest
from emulated import ORDERS, Call, check_backward, check_forward


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_forward(D: int, causal: bool, order: str) -> None:
    check_forward(Call(D, causal=causal), order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_backward(D: int, causal: bool, order: str) -> None:
    check_backward(Call(D, causal=causal), order)
