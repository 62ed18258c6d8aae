"""How long and how often a comparison times each call: one setting through the book, one more for sweeps.

An H200 is limited by power. A window of calls that follows other work starts at the clock that work left, and
after some ten milliseconds of its own the clock falls. Windows of different lengths, or with different
neighbors, so give one kernel different speeds. Every window of this book is the same: a pause, in which the
card rests at idle power, a short warm-up, and a burst of calls that ends before the power limit acts.
What the card keeps up is measured apart, by `attnlib.bench.sustained`.

A process that warms the compilers' caches calls everything as often as it must and times nothing: `ONCE`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """`rounds` windows for each implementation; a window is `pause_ms` of rest, calls for about `warmup_ms`
    and timed calls for about `rep_ms`, at least one call each."""

    name: str
    rounds: int
    pause_ms: float = 25.0
    warmup_ms: float = 4.0
    rep_ms: float = 8.0

    def __post_init__(self) -> None:
        if isinstance(self.rounds, bool) or not isinstance(self.rounds, int) or self.rounds < 1:
            raise ValueError(f"rounds: expected an int of at least 1, got {self.rounds!r}")
        for field in ("pause_ms", "warmup_ms", "rep_ms"):
            value = getattr(self, field)
            if not value >= 0:
                raise ValueError(f"{field}: expected milliseconds, at least 0, got {value!r}")

    @property
    def window_ms(self) -> float:
        """What one window takes of short calls, in ms, without the writes that flush L2."""
        return self.pause_ms + self.warmup_ms + self.rep_ms


BOOK = Setting("book", rounds=5)
"""Of every comparison that a chapter draws a conclusion from."""

SWEEP = Setting("sweep", rounds=3)
"""Of sweeps over many shapes: the same windows, fewer of them."""

WINDOW = Setting("window", rounds=1)
"""One window, for a caller that makes rounds of its own."""

ONCE = Setting("once", rounds=1, pause_ms=0, warmup_ms=0, rep_ms=0)
"""As few calls as there can be, for a process that warms the caches."""

WARM = "ATTNLIB_WARM"
"""The variable that makes a process warm the caches: the number of such processes that share the GPU."""


def warming() -> int:
    """How many processes, this one included, warm the compilers' caches side by side; 0 in all others.

    Such a process calls once what it would time and stores nothing, see `attnlib.book.warm`.
    """
    text = os.environ.get(WARM) or "0"
    if not text.isdecimal():
        raise ValueError(f"{WARM}: expected a number of processes, got {text!r}")
    return int(text)


def in_use(asked: Setting) -> Setting:
    """The setting that was asked for, or `ONCE` in a process that warms the caches."""
    return ONCE if warming() else asked
