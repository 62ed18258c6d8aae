"""Calls that are timed beside each other."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from attnlib.bench import timing  # noqa: E402
from attnlib.bench.setting import ONCE, Setting  # noqa: E402

Key = TypeVar("Key")


SETTLED = 0.5
"""For so many seconds calls run before the first one counts in `in_turn`; then the GPU is at its power
limit."""


def in_rounds(
    calls: Mapping[Key, Callable[[], Any]], rounds: int, setting: Setting
) -> dict[Key, list[float]]:
    """Milliseconds of each in shuffled rounds."""
    samples: dict[Key, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in _shuffled(calls, i):
            samples[name].append(timing.time_ms(calls[name], setting=setting).median)
    return samples


def in_turn(
    calls: Mapping[Key, Callable[[], Any]], rounds: int, flush: bool = False
) -> dict[Key, list[float]]:
    """Milliseconds of single calls, in shuffled rounds of one call each without a pause. At the power limit
    the clock changes from one window to the next by more than calls differ; here each call has the clock that
    the others leave it. For calls of a millisecond or more: L2 is as the call before leaves it.

    flush: as `time_plane.py --settled` does it, with a call before each one that counts, and a cold L2; the
    GPU computes nothing for 0.3 ms meanwhile. Kernels at the power limit may stand in another order then.
    """
    samples: dict[Key, list[float]] = {name: [] for name in calls}
    begin = time.monotonic()
    while time.monotonic() - begin < SETTLED:
        for call in calls.values():
            call()
        torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(rounds):
        for name in _shuffled(calls, i):
            if flush:
                samples[name] += timing.samples_ms(calls[name], 1.0, ONCE, cold=True)
                continue
            start.record()
            calls[name]()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end))
    return samples


def _shuffled(calls: Mapping[Key, Any], number: int) -> list[Key]:
    """The names in the order of a round."""
    order = list(calls)
    random.Random(number).shuffle(order)
    return order
