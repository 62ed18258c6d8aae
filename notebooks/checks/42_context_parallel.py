"""Checks of the exercises of chapter 42."""

import math
from collections.abc import Callable

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check_merge_two(kernel: Callable) -> None:
    """`kernel[(blocks,)](o_a, l_a, o_b, l_b, out, lse, R, D)`."""
    for R, D, kind in ((32, 16, "plain"), (37, 8, "plain"), (16, 32, "large"), (20, 16, "empty")):
        torch.manual_seed(R)
        o_a, o_b = torch.randn(2, R, D)
        l_a, l_b = torch.randn(2, R) * (300 if kind == "large" else 2)
        if kind == "empty":
            l_a[:8], l_b[4:12] = -torch.inf, -torch.inf
            o_a[:8], o_b[4:12] = 0, 0
        out = torch.full((R + 1, D), 77.0, device=DEVICE)
        lse = torch.full((R + 1,), 77.0, device=DEVICE)
        kernel[(-(-R // 16),)](*(x.to(DEVICE) for x in (o_a, l_a, o_b, l_b)), out, lse, R, D)
        case = f"{kind} LSEs, R = {R}, D = {D}"
        beyond = bool((out[R] == 77).all()) and bool(lse[R] == 77)
        assert beyond, f"{case}: something was written beyond row {R - 1}"
        want = torch.logaddexp(l_a.double(), l_b.double())
        shift = want.masked_fill(want.isneginf(), 0)
        weights = [torch.exp(x.double() - shift)[:, None] for x in (l_a, l_b)]
        exact = weights[0] * o_a + weights[1] * o_b
        off = (out[:R].cpu() - exact).abs().max().item()
        assert off <= 1e-4, f"{case}: the output is off by up to {off:.2g}"
        got = lse[:R].cpu().double()
        assert bool((got.isneginf() == want.isneginf()).all()), f"{case}: which LSEs are -inf is wrong"
        off = (got - want).nan_to_num(0, 0, 0).abs().max().item()
        assert off <= 1e-3, f"{case}: the LSE is off by up to {off:.2g}"


def check_rows_to_hide(answer: Callable) -> None:
    for heads, kv_heads, tflops, rate in ((16, 16, 650, 450), (32, 8, 650, 50), (8, 1, 400, 25)):
        want = math.ceil(0.75 * 4 * kv_heads * tflops * 1e12 / (2 * heads * rate * 1e9))
        got = answer(heads, kv_heads, tflops, rate)
        assert isinstance(got, int), f"expected an int, got {type(got).__name__}"
        assert got == want, f"H = {heads}, Hkv = {kv_heads}, {tflops} TFLOP/s, {rate} GB/s: {want}, not {got}"
