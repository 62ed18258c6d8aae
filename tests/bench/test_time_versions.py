"""tests/gpu/time_versions.py without a GPU: what the table of two versions says."""

from __future__ import annotations

from pathlib import Path

import time_versions

OTHER = Path("3.9.0")


def table(first: list[float], other: list[float], control: float = 1.0) -> str:
    def rows(times: list[float], triton: str) -> list[dict]:
        return [{"ms": ms, "control": control, "triton": triton} for ms in times]

    found = {time_versions.INSTALLED: rows(first, "3.6.0"), OTHER: rows(other, "3.9.0")}
    found |= {Path("3.8.0"): rows([7.0, 9.0], "3.8.0")}
    return time_versions.table({("forward", "d64"): found}, OTHER)


def test_a_difference_is_one_beyond_the_noise():
    assert table([1.0, 1.01], [0.9, 0.9]).endswith("3.9.0 is 1.117x, noise 1.010: faster")
    assert table([1.0, 1.0], [1.1, 1.1]).endswith("3.9.0 is 0.909x, noise 1.000: slower")
    assert table([1.0, 1.2], [1.1, 1.0]).endswith("3.9.0 is 1.048x, noise 1.200: tie")
    assert table([1.0, 1.0], [1.1, 1.1], control=0.8).endswith("noise 1.250: tie")


def test_what_was_not_timed_is_said():
    assert table([1.0], [0.9, 0.9]) == "forward  d64   not timed in every process"
