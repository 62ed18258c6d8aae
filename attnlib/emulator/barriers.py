"""The barriers of Hopper: mbarriers in shared memory, and the 16 named ones."""

from __future__ import annotations

from attnlib.emulator.clocks import NEVER, Clock, event
from attnlib.emulator.errors import Race
from attnlib.emulator.machine import Partition, Program


class Barrier:
    """An mbarrier: a phase completes when all have arrived and all bytes that they expect are there."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.component = program.new_component()
        self.name = "barrier"
        self.count = 0  # arrivals of a phase; 0 before `init`
        self.arrived = 0
        self.missing = 0  # bytes, negative if they came before they were expected
        self.phase = 0  # number of the phase that is not complete
        self.waited: set[int] = set()  # phases that somebody waited for
        self.waiting = 0  # partitions that do
        self.fenced = NEVER  # from when on copies know of it
        self._arriving, self._complete = Clock(), Clock()  # what those who arrived had seen

    def init(self, count: int) -> None:
        if count < 1 or self.count:
            raise Race(f"{self.name}: initialized twice, or with a count of {count}")
        self.count = count
        if self.phase & 1:  # initialized again: it begins with parity 0
            self.waited.add(self.phase)
            self.phase += 1
        if self not in self.program.barriers:
            self.program.barriers.append(self)
        self.program.to_fence(self, self.program.current.now)

    def invalidate(self) -> None:
        """Nobody may use it until it is initialized again."""
        if not self.count:
            raise Race(f"{self.name}: invalidated before it is initialized")
        if self.arrived or self.missing:
            raise Race(f"{self.name}: invalidated in the middle of a phase")
        if self.waiting:
            raise Race(f"{self.name}: invalidated while somebody waits for it")
        self.count = 0
        self.fenced, self._complete = NEVER, Clock()  # its next life tells nothing of this one

    def fence(self, when: int) -> None:
        self.fenced = when

    @property
    def next(self) -> int:
        """That the phase completes which is not complete yet."""
        return event(self.component, self.phase + 1)

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        if not self.count:
            raise Race(f"{self.program.current} arrives at {self.name}, which is not initialized")
        self.arrived += count
        self.missing += expected
        if self.arrived > self.count:
            raise Race(f"{self.name}: {self.arrived} arrivals in a phase of {self.count}")
        self._arriving.join(self.program.current.tell())
        self._check()
        self.program.machine.pause()

    def received(self, size: int) -> None:
        self.missing -= size
        self._check()

    def _check(self) -> None:
        if self.arrived == self.count and self.missing == 0:
            self.phase += 1
            self.arrived = 0
            self._complete.join(self._arriving)
            self._complete[self.component] = self.phase
            self._arriving = Clock()

    def wait(self, parity: int) -> None:
        """Until the phase of this parity is complete, as the hardware tells it: by the last bit alone."""
        if parity not in (0, 1):
            raise ValueError(f"{self.name}: expected a parity of 0 or 1, got {parity}")
        if not self.count:
            raise Race(f"{self.program.current} waits for {self.name}, which is not initialized")
        self.waiting += 1
        self.program.machine.wait(
            lambda: self.phase & 1 != parity,
            lambda: f"{self.name}, parity {parity} (phase {self.phase}: {self.arrived} of {self.count} "
            f"arrived, {self.missing} bytes missing)",
        )
        self.waiting -= 1
        self.waited.add(self.phase - 1)
        self.program.current.clock.join(self._complete)


class NamedBarrier:
    """One of the 16 hardware barriers of a program, `bar.sync` and `bar.arrive`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.threads = 0  # that the round under way expects
        self.here: list[Partition] = []
        self.rounds: list[Clock] = []  # what those of a complete round had seen
        self._arriving = Clock()

    def arrive(self, partition: Partition, threads: int) -> None:
        if partition in self.here:
            raise Race(f"{partition} comes to barrier {self.number} twice before the others have come")
        if self.here and threads != self.threads:
            raise Race(f"barrier {self.number}: {partition} expects {threads} threads, others {self.threads}")
        self.threads = threads
        self.here.append(partition)
        self._arriving.join(partition.tell())
        came = sum(p.threads for p in self.here)
        if came > threads:
            raise Race(f"barrier {self.number}: {came} threads came, {threads} were expected")
        if came == threads:
            self.rounds.append(self._arriving)
            self._arriving = Clock()
            self.here.clear()

    def sync(self, partition: Partition, threads: int) -> None:
        number = len(self.rounds)
        self.arrive(partition, threads)
        partition.program.machine.wait(
            lambda: len(self.rounds) > number,
            lambda: f"barrier {self.number} ({', '.join(map(str, self.here))} of {self.threads} threads)",
        )
        partition.clock.join(self.rounds[number])
