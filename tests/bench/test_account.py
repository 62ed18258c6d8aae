"""Chapter 37's account of a trip's clocks: its terms, its weights, and the limit beside them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from attnlib.bench import account
from attnlib.bench.inspect_sm90 import Stats

PRODUCT = "HGMMA.64x64x16.F32 R24, gdesc[UR8], RZ, !UPT"  # 32 clocks
LOOP = (PRODUCT, "FADD R0, R0, R1", "VOTE.ANY R2, PT, P0", "@!P0 BRA 0x60", "FMUL R24, R24, R3",
        "BRA 0x20")  # fmt: skip
STALLS = (1, 4, 2, 5, 9, 6)


def stats(consumers: int) -> Stats:
    counts = {"HGMMA": 1, "FADD": 1, "VOTE": 1, "BRA": 2, "FMUL": 1}
    loops = [(x,) * consumers for x in (counts, LOOP, STALLS)]
    return Stats("kernel", 96, 0, 0, 4, counts, *loops, LOOP, ())


def test_terms() -> None:
    found = account.terms(stats(3))
    assert (found.tensor, found.slots) == (96, 15)  # without the multiplication that the vote jumps over
    assert (found.path, found.paths) == (18, 54)
    assert found.code == found.fetched == 3 * 6 * 16
    twice = account.terms(stats(3), blocks=2)
    assert (twice.tensor, twice.slots, twice.path, twice.paths) == (48, 7.5, 9, 27)
    assert (twice.code, twice.fetched) == (found.code, found.code / 2)


def test_weights_are_found_again() -> None:
    weights = np.array([0.3, 0.8, 0.6, 250.0])
    counted = {f"kernel {i}": list(np.random.default_rng(i).uniform(100, 3000, 3)) + [1.0] for i in range(8)}
    took = {name: float(weights @ x) for name, x in counted.items()}
    assert account.fit(list(counted.values()), list(took.values())) == pytest.approx(weights)
    took["kernel 3"] *= 2
    assert account.weights_without(counted, took, "kernel 3") == pytest.approx(weights)
    assert account.weights_without(counted, took, "kernel 2") != pytest.approx(weights)


def test_the_limit_counts_beyond_the_cache_only() -> None:
    weights, found = np.array([1.0, 1.0, 1.0, 10.0]), account.terms(stats(3))
    assert account.clocks(weights, found) == 96 + 15 + 18 + 10
    long = dataclasses.replace(found, code=account.CACHE, fetched=account.CACHE)
    assert account.clocks(weights, long) == 139
    longer = dataclasses.replace(long, code=account.CACHE + 16, fetched=account.CACHE + 16)
    assert account.clocks(weights, longer) == longer.limit == (account.CACHE + 16) / account.FETCHED
    assert account.clocks(weights, longer, account.CACHE_SINCE) == 139  # a capacity that was read off later
    far = dataclasses.replace(longer, code=account.CACHE_SINCE + 16)
    assert account.clocks(weights, far, account.CACHE_SINCE) == far.limit > 0
