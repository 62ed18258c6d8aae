"""Checks of the exercises of chapter 34."""

from collections.abc import Callable

from attnlib.bench.shapes import Shape
from attnlib.book.exercises import judge_entmax


def check_sparsemax_attention(attention: Callable) -> None:
    """alpha = 2 against fp64: one tile and several, a part of a tile, rows with one key, scores far apart."""
    cases = (64, False, "normal"), (100, True, "normal"), (70, True, "large"), (1, True, "normal")
    for S, causal, kind in cases:
        judge_entmax(attention, Shape(1, 2, S, 32, causal), 2.0, kind)


def check_break_even(break_even: Callable) -> None:
    """By trying shares, one after the other."""
    for case in ((420, 128, 212, 399, 299), (420, 128, 212, 399, 299, 5), (300, 128, 212, 399, 299),
                 (5000, 128, 212, 399, 299), (700, 100, 100, 500, 0, 1)):  # fmt: skip
        dense, bound, flags, step, values, *rest = case
        steps = rest[0] if rest else 2

        def clocks(share, bound=bound, flags=flags, step=step, values=values, steps=steps):
            return bound + flags + share * (steps * step + values)

        want = max((i / 10000 for i in range(10001) if clocks(i / 10000) <= dense), default=0.0)
        got = break_even(*case)
        assert isinstance(got, int | float), f"expected a number, got {type(got).__name__}"
        assert abs(got - want) < 2e-4, f"break_even{case}: expected {want:.3f}, got {got:.3f}"


def judge_short(attention: Callable) -> None:
    """Small causal calls with alpha = 1.5: a row with one key, whole tiles, a part of one, rows without any
    difference and with large ones."""
    for S, kind in ((1, "normal"), (64, "normal"), (100, "large"), (200, "normal"), (130, "constant")):
        judge_entmax(attention, Shape(1, 2, S, 32, True), 1.5, kind)
