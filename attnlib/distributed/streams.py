"""The streams of a rank: two that compute, so that one fills the multiprocessors that the other leaves idle
at the end of a kernel, and one on which transfers wait for both."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

SIDE_PRIORITY = -1
"""Of the side stream: above that of a caller's stream, which is 0, and below NCCL's."""


class Streams:
    """Of one call. Without a GPU there is one stream, and nothing to do."""

    def __init__(self, device: torch.device) -> None:
        self._device = self._side = self._transfers = None
        if device.type == "cuda":
            self._device, main = device, torch.cuda.current_stream(device)
            self._side, self._transfers = _others_of(device.index, main.cuda_stream, SIDE_PRIORITY)
            self._side.wait_stream(main)
            self._transfers.wait_stream(main)

    def side(self) -> AbstractContextManager:
        """Work in it goes to the side stream."""
        return torch.cuda.stream(self._side) if self._side else nullcontext()

    def transfers(self) -> AbstractContextManager:
        """Transfers that are started in it wait for what is on the stream of transfers, which computes
        nothing, instead of for what is on another one."""
        return torch.cuda.stream(self._transfers) if self._transfers else nullcontext()

    def mark(self) -> torch.cuda.Event | None:
        """The end of what is on the current stream so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._device else None

    def wait(self, *marks: torch.cuda.Event | None) -> None:
        """The current stream goes on after these."""
        for mark in marks:
            if mark is not None:
                torch.cuda.current_stream(self._device).wait_event(mark)

    def join(self) -> None:
        """The current stream goes on after all of the side stream."""
        if self._side:
            torch.cuda.current_stream(self._device).wait_stream(self._side)


@cache
def _others_of(device: int, main: int, priority: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Two for each stream of a caller: what is allocated on the first is then used by it and the caller's
    alone, and each call begins with a wait of one for the other."""
    return torch.cuda.Stream(device, priority=priority), torch.cuda.Stream(device)
