"""Calls that are timed beside each other."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from attnlib.bench import timing  # noqa: E402
from attnlib.bench.setting import Setting  # noqa: E402

Key = TypeVar("Key")


def in_rounds(
    calls: Mapping[Key, Callable[[], Any]], rounds: int, setting: Setting
) -> dict[Key, list[float]]:
    """Milliseconds of each in shuffled rounds."""
    samples: dict[Key, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        order = list(calls)
        random.Random(i).shuffle(order)
        for name in order:
            samples[name].append(timing.time_ms(calls[name], setting=setting).median)
    return samples
