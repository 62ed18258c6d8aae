"""Threads of which one runs at a time, on one core.

Who hands its turn to a thread that sleeps on another core waits for that core to wake up. Where all cores are
busy, half of the emulator's time went there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_current_core = ctypes.CDLL(None).sched_getcpu


@contextmanager
def on_one_core() -> Iterator[None]:
    """This thread, and those that it starts, stay on the core on which it runs now."""
    before = os.sched_getaffinity(0)
    core = _current_core()
    if core not in before:  # it has just been told to leave, or the system can't say
        yield
        return
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
