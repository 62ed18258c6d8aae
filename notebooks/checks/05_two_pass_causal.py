"""Checks of the exercises of chapter 05."""

from functools import partial

import numpy as np
import torch

from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.book.exercises import judge_kernel

SIZES = ((64, 64), (128, 64), (64, 128), (128, 32))


def check_tile_counts(answer):
    for seqlen in (1, 64, 600, 1000, 1024):
        for block_m, block_n in SIZES:
            full = masked = 0
            for row in range(0, seqlen, block_m):
                for key in range(0, seqlen, block_n):
                    if key + block_n <= row // block_n * block_n:
                        full += 1
                    elif key < min(seqlen, row + block_m):
                        masked += 1
            got = tuple(answer(seqlen, block_m, block_n))
            assert got == (full, masked), (
                f"S = {seqlen}, tile {block_m} x {block_n}: expected {(full, masked)}, got {got}"
            )


def check_sectioned(answer):
    for rows, heads, section in ((4, 3, 1), (4, 3, 3), (5, 6, 2), (5, 7, 3), (1, 5, 2)):
        case = f"{rows} row blocks, {heads} heads, section {section}"
        got = [tuple(answer(n, rows, heads, section)) for n in range(rows * heads)]
        everything = {(i_m, i_h) for i_m in range(rows) for i_h in range(heads)}
        assert set(got) == everything, f"{case}: each (row block, head) must occur exactly once, got {got}"
        groups = [i_h // section for _, i_h in got]
        assert groups == sorted(groups), f"{case}: a section must be finished before the next, got {got}"
        for group in set(groups):
            order = [i_m for i_m, i_h in got if i_h // section == group]
            assert order == sorted(order, reverse=True), (
                f"{case}: the longest rows of a section (largest i_m) come first, got {order}"
            )


def check_window_bounds(answer):
    for seqlen in (1, 100, 256, 300):
        for block_m, block_n in SIZES:
            for window in (1, 17, 64, 100, 1000):
                for i_m in range(-(-seqlen // block_m)):
                    _check_window(answer, i_m, seqlen, block_m, block_n, window)


def _check_window(answer, i_m, seqlen, block_m, block_n, window):
    case = f"i_m = {i_m}, S = {seqlen}, tile {block_m} x {block_n}, window {window}"
    bounds = tuple(answer(i_m, seqlen, block_m, block_n, window))
    first, full_from, full_to, end = bounds
    assert list(bounds) == sorted(bounds), f"{case}: bounds must rise, got {bounds}"
    assert not any(x % block_n for x in bounds), f"{case}: expected multiples of {block_n}, got {bounds}"
    rows = np.arange(i_m * block_m, min(seqlen, (i_m + 1) * block_m))[:, None]
    for key in range(0, max(seqlen, end), block_n):
        keys = np.arange(key, key + block_n)[None, :]
        seen = (keys <= rows) & (keys > rows - window) & (keys < seqlen)
        visited, unmasked = first <= key < end, full_from <= key < full_to
        assert visited or not seen.any(), f"{case}: the tile at key {key} is needed and not visited"
        assert seen.any() or not visited, f"{case}: the tile at key {key} is visited in vain"
        assert seen.all() or not unmasked, f"{case}: the tile at key {key} needs a mask"
        assert unmasked or not seen.all(), f"{case}: the tile at key {key} is full and needs no mask"


def check_windowed(windowed):
    """Right for windows of many sizes; no tile is visited in which no row of the block sees a key."""
    for seqlen, window in ((150, 40), (150, 1), (64, 1000), (200, 64), (33, 32)):
        call = partial(windowed, window=window)
        judge_kernel(call, Shape(1, 2, seqlen, 16), causal=True, window=(window - 1, 0))
    _check_visits(windowed)


def _check_visits(windowed, seqlen=320, window=70, block_m=64, block_n=32):
    """A tile that is visited brings NaN from its V into the sum, even where its weights are 0."""
    q, k, v = make_inputs(Shape(1, 1, seqlen, 16))
    out = windowed(q, k, v, window)
    for row in range(0, seqlen, block_m):
        first = max(0, row - window + 1) // block_n * block_n
        poisoned = v.clone()
        poisoned[:, :, :first], poisoned[:, :, row + block_m :] = float("nan"), float("nan")
        with np.errstate(all="ignore"):
            again = windowed(q, k, poisoned, window)
        rows = slice(row, row + block_m)
        assert torch.equal(out[:, :, rows], again[:, :, rows]), (
            f"S={seqlen}, window {window}: rows {row} to {row + block_m - 1} see keys {first} to "
            f"{row + block_m - 1}, in whole tiles; the kernel reads others for them"
        )
