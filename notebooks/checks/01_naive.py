"""Checks of the exercises of chapter 01: AssertionError says what is wrong with an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from triton.runtime.interpreter import InterpreterBuilder

from attnlib.bench import timing
from attnlib.book import lesson


def check_longest_sequence(answer: Callable[..., int]) -> None:
    """answer(memory, B, H, matrices=2, itemsize=2) -> the largest S that fits."""
    exact = 2 * 2 * 16 * 40960**2
    cases = [
        (141 * 10**9, 1, 16, {}),
        (exact, 1, 16, {}),
        (exact - 1, 1, 16, {}),
        (80 * 10**9, 4, 32, {"matrices": 5, "itemsize": 4}),
    ]
    for memory, batch, heads, options in cases:
        got = answer(memory, batch, heads, **options)
        case = f"memory={memory}, B={batch}, H={heads}, {options}"
        assert isinstance(got, int), f"{case}: expected an int, got {got!r}"
        per_square = options.get("matrices", 2) * options.get("itemsize", 2) * batch * heads
        assert per_square * got**2 <= memory, f"{case}: S={got} needs {per_square * got**2} bytes"
        assert per_square * (got + 1) ** 2 > memory, f"{case}: S={got + 1} fits too"


@contextmanager
def _loaded_elements() -> Iterator[list[int]]:
    """Elements that each load in Triton's interpreter fetches: those that its mask lets through."""
    loaded, load = [], InterpreterBuilder.create_masked_load

    def counting(self, pointers, mask, *rest):
        loaded.append(int(mask.data.sum()))
        return load(self, pointers, mask, *rest)

    with mock.patch.object(InterpreterBuilder, "create_masked_load", counting):
        yield loaded


def check_softmax_once(answer: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """answer(s) -> softmax of each row of s [rows, columns], -inf for masked scores."""
    device = lesson.device()
    generator = torch.Generator().manual_seed(0)
    for rows, columns, scale, dtype in (
        (3, 1, 1, torch.float32),
        (5, 17, 1, torch.float32),
        (4, 100, 200, torch.float32),
        (3, 128, 4, torch.float16),
    ):
        s = torch.randn(rows, columns, generator=generator) * scale
        s[:, 1:] = s[:, 1:].masked_fill(
            torch.rand(rows, columns - 1, generator=generator) < 0.3, float("-inf")
        )
        s = s.to(device, dtype)
        before = s.clone()
        with _loaded_elements() as loaded, timing.launched_kernels() as launched:
            got = answer(s)
        case = f"{rows} rows of {columns} {dtype} scores up to {s.max().item():.0f}"
        assert isinstance(got, torch.Tensor), f"{case}: expected a tensor, got {type(got).__name__}"
        assert got.shape == s.shape and got.dtype == dtype, (
            f"{case}: got shape {tuple(got.shape)}, {got.dtype}"
        )
        assert torch.equal(s, before), f"{case}: the scores were overwritten"
        error = (got.double() - s.double().softmax(-1)).abs().max().item()
        tolerance = 1e-3 if dtype == torch.float16 else 1e-6
        assert error <= tolerance, f"{case}: largest error {error:.1e}, expected at most {tolerance:.0e}"
        assert loaded or launched, f"{case}: the numbers are right, but no Triton kernel computed them"
        assert device == "cuda" or sum(loaded) == rows * columns, (
            f"{case}: expected {rows * columns} scores to be read, each once, got {sum(loaded)}"
        )


def check_first_subnormal_length(answer: Callable[[torch.dtype], int]) -> None:
    """answer(dtype) -> the smallest S with 1/S below the smallest normal number of dtype."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        expected = round(1 / torch.finfo(dtype).tiny) + 1
        got = answer(dtype)
        assert got == expected, (
            f"{dtype}: expected another length than {got}: compare 1/S with {torch.finfo(dtype).tiny:.3e}"
        )
