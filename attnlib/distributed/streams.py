"""The two streams of a rank: attention to its own keys runs on the caller's, attention to what came from
others on a side stream, so that one fills the multiprocessors that the other leaves idle at its end."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


class Streams:
    """Of one call. Without a GPU there is one stream, and nothing to do."""

    def __init__(self, device: torch.device) -> None:
        self._main = self._side = None
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._side = _side_of(device.index, self._main.cuda_stream)
            self._side.wait_stream(self._main)

    def side(self) -> AbstractContextManager:
        """Work in it goes to the side stream."""
        return torch.cuda.stream(self._side) if self._side else nullcontext()

    def mark(self) -> torch.cuda.Event | None:
        """The end of what is on the side stream so far."""
        return self._side.record_event() if self._side else None

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """The caller's stream goes on after `mark`."""
        if mark is not None:
            self._main.wait_event(mark)

    def join(self) -> None:
        """The caller's stream goes on after all of the side stream."""
        if self._main:
            self._main.wait_stream(self._side)


@cache
def _side_of(device: int, main: int) -> torch.cuda.Stream:
    """One for each stream of a caller: what is allocated on it is then used by these two alone, and each call
    begins with a wait of one for the other."""
    return torch.cuda.Stream(device, priority=-1)
