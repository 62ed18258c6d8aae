"""Checks of the exercises of chapter 00: AssertionError says what is wrong with an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from attnlib.bench.roofline import H100, H200, Hardware
from attnlib.book import lesson


def check_binding_roof(answer: Callable[[int, int, Hardware], str]) -> None:
    """answer(S, D, hw) -> "hbm", "tensor" or "exp", the longest of the three least times."""
    slow_exp = replace(H200, exp_per_clk_per_sm=4)
    cases = [
        (128, 128, H200, "hbm"),
        (400, 256, H200, "hbm"),
        (424, 256, H200, "tensor"),
        (424, 128, H100, "hbm" if 424 / 2 < H100.ridge else "tensor"),
        (16384, 128, H200, "tensor"),
        (16384, 32, H200, "exp"),
        (16384, 128, slow_exp, "exp"),
        (100, 64, slow_exp, "exp" if 100 / (8 * 64) > slow_exp.exps_per_second / 4.8e12 else "hbm"),
    ]
    for seqlen, head_dim, hw, expected in cases:
        got = answer(seqlen, head_dim, hw)
        assert got in ("hbm", "tensor", "exp"), f'expected "hbm", "tensor" or "exp", got {got!r}'
        assert got == expected, (
            f"S={seqlen}, D={head_dim}, {hw.exp_per_clk_per_sm} exp per clock: expected {expected}, got {got}"
        )


def check_is_right(answer: Callable[[torch.Tensor, torch.Tensor, float], bool]) -> None:
    """answer(out, truth, tol) -> True only if every element is within tol."""
    truth = torch.linspace(-1, 1, 12).view(3, 4)
    nan, inf, one_nan, one_wrong = truth * float("nan"), truth + float("inf"), truth.clone(), truth.clone()
    one_nan[1, 2], one_wrong[2, 1] = float("nan"), truth[2, 1] + 2e-2
    equal_rows = truth[:1].expand(3, 4)
    cases = [
        ("the truth itself", truth.clone(), truth, True),
        ("an error of tol / 2", truth + 5e-3, truth, True),
        ("an error of 2 tol", truth - 2e-2, truth, False),
        ("an error of 2 tol in one element", one_wrong, truth, False),
        ("all NaN", nan, truth, False),
        ("one NaN", one_nan, truth, False),
        ("infinities", inf, truth, False),
        ("one row instead of three equal ones", truth[:1], equal_rows, False),
        ("the truth as one row of 12", truth.reshape(-1), truth, False),
        ("a matrix of another shape", truth.T, truth, False),
    ]
    for name, out, right, expected in cases:
        try:
            got = answer(out, right, 1e-2)
        except RuntimeError as error:
            raise AssertionError(f"{name}: expected False, got an exception ({error})") from None
        assert bool(got) is expected, f"{name}: expected {expected}, got {got}"


def check_visited_tiles(answer: Callable[[int, int, int], int]) -> None:
    """answer(S, BLOCK_M, BLOCK_N) -> the number of tiles with at least one score on or below the diagonal."""
    for seqlen, block_m, block_n in (
        (512, 128, 128),
        (512, 128, 64),
        (512, 64, 128),
        (1, 64, 64),
        (1000, 128, 64),
        (129, 64, 128),
        (129, 128, 64),
    ):
        expected = 0
        for row in range(0, seqlen, block_m):
            for column in range(0, seqlen, block_n):
                expected += column <= min(row + block_m, seqlen) - 1
        got = answer(seqlen, block_m, block_n)
        assert got == expected, f"S={seqlen}, tiles {block_m}x{block_n}: expected {expected}, got {got}"


def check_row_sums(answer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """answer(x, m) -> the sum of exp(x - m) over each row of x [rows, columns], m its maximum."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns, scale in ((1, 1, 1), (5, 17, 1), (16, 32, 1), (33, 100, 50)):
        x = (torch.randn(rows, columns, generator=generator) * scale).to(lesson.device(), torch.float16)
        m = x.float().amax(1)
        got, expected = answer(x, m), (x.double() - m.double()[:, None]).exp().sum(1)
        case = f"{rows} rows of {columns}"
        assert isinstance(got, torch.Tensor), f"{case}: expected a tensor, got {type(got).__name__}"
        assert got.shape == m.shape, f"{case}: expected {rows} sums, got shape {tuple(got.shape)}"
        wrong = ~((got - expected).abs() <= 1e-5 * expected)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise AssertionError(
                f"{case}: {int(wrong.sum())} sums are wrong, the first in row {row}: "
                f"expected {expected[row]:.4f}, got {got[row]:.4f}"
            )
