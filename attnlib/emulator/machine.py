"""One program on one SM: its warps take turns, its copies and products happen when they like.

A scheduler picks, again and again, one thing that can happen: a partition goes on to its next wait or issue,
a copy lands, a product is formed. Which one is drawn from a seed; `order` says how:

    "random"   any of them
    "late"     copies and products only when no partition can go on: nothing is there before it must be
    "eager"    copies and products at once: everything that is freed too early is lost
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

Order = Literal["random", "late", "eager"]
WARP = 32


class Race(RuntimeError):
    """Memory was used while something else could still write it, or written while it could be read."""


class Deadlock(RuntimeError):
    """No partition can go on, and nothing is under way."""


class _Stopped(BaseException):
    """Ends the threads of a program in which another one has failed."""


@dataclass
class Partition:
    """Some warps that execute the same code: a thread that runs when it is its turn."""

    name: str
    first_thread: int
    warps: int
    ready: Callable[[], bool] | None = None  # None: it waits for nothing
    waits_for: str = ""
    done: bool = False
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    products: deque = field(default_factory=deque)  # wgmma, in order
    stores: list = field(default_factory=list)  # copies out of shared memory
    unfenced: list[torch.Tensor] = field(default_factory=list)  # states of what it has stored; see `memory`

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def __str__(self) -> str:
        return self.name


class Machine:
    """Runs the partitions of one program."""

    def __init__(self, order: Order, rng: random.Random) -> None:
        self.order = order
        self.rng = rng
        self.partitions: list[Partition] = []
        self.copies: list[Callable[[], None]] = []  # into shared memory, under way
        self.named = {number: NamedBarrier(number) for number in range(16)}
        self.barriers: list[Barrier] = []
        self.current: Partition | None = None
        self._scheduler = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    # ------------------------------------------------------------ called by the scheduler

    def run(self, function: Callable[[], None], warps: int) -> None:
        """Call `function` as the first partition; return when all are done and nothing is under way."""
        self.start("warps 0-", 0, warps, function)
        try:
            while any(not partition.done for partition in self.partitions):
                self._step()
                if self._failure is not None:
                    raise self._failure
        finally:
            self._stop()
        for partition in self.partitions:
            if partition.stores:
                raise Race(f"{partition} ends while its copies out of shared memory are under way")
            if partition.products:
                raise Race(f"{partition} ends while its products are under way")
        if self.copies:
            raise Race("the program ends while copies into shared memory are under way")

    def start(self, name: str, first_thread: int, warps: int, function: Callable[[], None]) -> Partition:
        partition = Partition(name, first_thread, warps)

        def body() -> None:
            partition.turn.acquire()
            try:
                if self._failure is None:
                    with torch.no_grad():  # which each thread decides for itself
                        function()
            except _Stopped:
                pass
            except BaseException as failure:
                failure.add_note(f"in {partition}")
                self._failure = failure
            partition.done = True
            self._scheduler.release()

        thread = threading.Thread(target=body, daemon=True)
        self.partitions.append(partition)
        self._threads.append(thread)
        thread.start()
        return partition

    def _step(self) -> None:
        able = [p for p in self.partitions if not p.done and (p.ready is None or p.ready())]
        events = list(self._events())
        if self.order == "late" and able:
            events = []
        if not able and not events:
            waiting = (f"{p} waits for {p.waits_for}" for p in self.partitions if not p.done)
            self._failure = Deadlock("; ".join(waiting))
            return
        chosen = self.rng.choice(able + events)
        if isinstance(chosen, Partition):
            self.current, chosen.ready = chosen, None
            chosen.turn.release()
            self._scheduler.acquire()
        else:
            try:
                chosen()
            except Exception as failure:
                self._failure = failure

    def _events(self) -> Iterator[Callable[[], None]]:
        """What can take place now: any copy, and of each partition's products the oldest."""
        for copy in self.copies:
            yield lambda copy=copy: (self.copies.remove(copy), copy())
        for partition in self.partitions:
            if partition.products:
                yield lambda p=partition: p.products.popleft()()
            for store in partition.stores:
                yield lambda p=partition, store=store: (p.stores.remove(store), store())

    def _stop(self) -> None:
        """Let every thread that still lives run into the end."""
        self._failure = self._failure or _Stopped()
        for partition, thread in zip(self.partitions, self._threads, strict=True):
            partition.turn.release()
            thread.join()

    # ------------------------------------------------------------ called by the partitions

    def pause(self) -> None:
        """Let others go first."""
        self.wait(None, "")

    def wait(self, ready: Callable[[], bool] | None, what: str) -> None:
        partition = self.current
        partition.ready, partition.waits_for = ready, what
        self._scheduler.release()
        partition.turn.acquire()
        if self._failure is not None:
            raise _Stopped
        self.current = partition

    def fence(self) -> None:
        """What this partition has stored can be read by copies and products from here on."""
        for state in self.current.unfenced:
            state.zero_()
        self.current.unfenced.clear()

    def copy_in(self, copy: Callable[[], None]) -> None:
        self._issue(self.copies, copy)

    def copy_out(self, copy: Callable[[], None]) -> None:
        self._issue(self.current.stores, copy)

    def multiply(self, product: Callable[[], None]) -> None:
        self._issue(self.current.products, product)

    def _issue(self, queue: list | deque, event: Callable[[], None]) -> None:
        if self.order == "eager":
            event()
        else:
            queue.append(event)
        self.pause()

    def wait_products(self, outstanding: int) -> None:
        products = self.current.products
        self.wait(lambda: len(products) <= outstanding, f"products, all but {outstanding}")

    def wait_stores(self, outstanding: int) -> None:
        stores = self.current.stores
        self.wait(lambda: len(stores) <= outstanding, f"copies out, all but {outstanding}")


# ---------------------------------------------------------------- barriers


@dataclass
class Barrier:
    """An mbarrier: a phase completes when all have arrived and all bytes that they expect are there."""

    machine: Machine
    name: str = "barrier"
    count: int = 0
    arrived: int = 0
    missing: int = 0  # bytes, negative if they came before they were expected
    phase: int = 0  # number of the phase that is not complete
    waited: set[int] = field(default_factory=set)  # phases that somebody waited for

    def init(self, count: int) -> None:
        self.count = count
        self.machine.barriers.append(self)

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        self.arrived += count
        self.missing += expected
        if self.arrived > self.count:
            raise Race(f"{self.name}: {self.arrived} arrivals in a phase of {self.count}")
        self._complete()
        self.machine.pause()

    def received(self, size: int) -> None:
        self.missing -= size
        self._complete()

    def _complete(self) -> None:
        if self.arrived == self.count and self.missing == 0:
            self.phase += 1
            self.arrived = 0

    def wait(self, parity: int) -> None:
        """Until the phase of this parity is complete, as the hardware tells it: by the last bit alone."""
        if parity not in (0, 1):
            raise ValueError(f"{self.name}: expected a parity of 0 or 1, got {parity}")
        what = f"{self.name}, parity {parity} (phase {self.phase}: {self.arrived} of {self.count} arrived, "
        self.machine.wait(lambda: self.phase & 1 != parity, what + f"{self.missing} bytes missing)")
        self.waited.add(self.phase - 1)


@dataclass
class NamedBarrier:
    """One of the 16 hardware barriers of a program, `bar.sync` and `bar.arrive`."""

    number: int
    threads: int = 0
    rounds: int = 0
    here: list[Partition] = field(default_factory=list)

    def arrive(self, partition: Partition, threads: int) -> None:
        if partition in self.here:
            raise Race(f"{partition} comes to barrier {self.number} twice before the others have come")
        if self.here and threads != self.threads:
            raise Race(f"barrier {self.number}: {partition} expects {threads} threads, others {self.threads}")
        self.threads = threads
        self.here.append(partition)
        came = sum(p.threads for p in self.here)
        if came > threads:
            raise Race(f"barrier {self.number}: {came} threads came, {threads} were expected")
        if came == threads:
            self.rounds += 1
            self.here.clear()

    def sync(self, machine: Machine, threads: int) -> None:
        before = self.rounds
        self.arrive(machine.current, threads)
        machine.wait(lambda: self.rounds > before, f"barrier {self.number}")
