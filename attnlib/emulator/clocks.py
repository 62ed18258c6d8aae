"""Who has seen what, whatever the order of a run: vector clocks.

Every partition and every mbarrier counts its own ticks: a partition whenever it tells others something, an
mbarrier its phases. A clock holds how far its owner has seen each of them; at a barrier clocks are joined. A
partition has seen an event if its clock is past the event's tick. So a missing wait is found even in a run in
which what was not waited for happened to be there.
"""

from __future__ import annotations

from collections.abc import Iterable

COMPONENTS = 256  # partitions and mbarriers of a program, at most
NEVER = 2**31 - 1  # an event that has not taken place


def event(component: int, tick: int) -> int:
    """An event as an int32; 0 is what was before everything."""
    return tick * COMPONENTS + component


class Clock(dict):
    """Component -> tick up to which it was seen."""

    def join(self, other: Clock) -> None:
        for component, tick in other.items():
            if tick > self.get(component, 0):
                self[component] = tick

    def saw(self, what: int) -> bool:
        return what // COMPONENTS <= self.get(what % COMPONENTS, 0)

    def first_unseen(self, events: Iterable[int]) -> int | None:
        return next((what for what in events if not self.saw(what)), None)
