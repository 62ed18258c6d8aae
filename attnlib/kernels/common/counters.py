"""Counters in global memory: the programs of a persistent kernel draw their tiles from one, and programs that
share a result count in others how many of them are done."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from attnlib.kernels.common import device

_counters: dict[tuple[int, int], torch.Tensor] = {}
"""(device, stream) -> the counters of its launches; all 0 between launches."""


class _Thread(threading.local):
    own_counters = False


_thread = _Thread()


@contextmanager
def own_counters() -> Iterator[None]:
    """Within it each launch allocates counters of its own and keeps none. For code that a compiler may run to
    prepare a CUDA graph: it takes memory that stays allocated for a leak."""
    before, _thread.own_counters = _thread.own_counters, True
    try:
        yield
    finally:
        _thread.own_counters = before


def counter(index: int, size: int = 1) -> torch.Tensor:
    """At least `size` int32 that are 0, for one launch after another on a device.

    Launches on one stream share them, because each leaves them at 0. A captured launch has counters of its
    own, which the graph sets to 0, because a graph may be replayed on any stream, beside any launches. A
    launch within `own_counters` has its own, too.
    """
    if _thread.own_counters or device.capturing(index):
        return torch.zeros(size, dtype=torch.int32, device=f"cuda:{index}")
    key = index, device.current_stream(index)
    found = _counters.get(key)
    if found is None or len(found) < size:
        found = _counters[key] = torch.zeros(size, dtype=torch.int32, device=f"cuda:{index}")
    return found
