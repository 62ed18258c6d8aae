"""Programs on SMs: their warps take turns, their copies and products happen when they like.

A scheduler picks, again and again, one thing that can happen: a partition goes on to its next wait or issue,
a copy lands, a product is formed. Which one is drawn from a seed; `order` says how:

    "random"   any of them; some partitions and copies are slow, so that others get as far ahead as they can
    "late"     copies and products only when no partition can go on: nothing is there before it must be
    "eager"    copies and products at once: everything that is freed too early is lost

Where programs wait for each other (`in_order`), additions to global memory take place some time after they
were issued, too, as late as a fence of the GPU's scope lets them. Such a fence waits for those that its
partition has issued or, by way of barriers, has been told of by another one of its program. What a copy out
adds is added some time after the copy has read shared memory, and no fence waits for that
(`wait_for_landing`).
"""

from __future__ import annotations

import random
import threading
from bisect import bisect
from collections import deque
from collections.abc import Callable
from typing import Literal

import torch

from attnlib.emulator.clocks import COMPONENTS, Clock, event
from attnlib.emulator.errors import Deadlock, Race

Order = Literal["random", "late", "eager"]
WARP = 32


class _Stopped(BaseException):
    """Ends the threads of programs in which another one has failed."""


SPEEDS = 0.02, 0.3, 1.0  # of what competes, in a random order


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Work:
    """A product or a copy, done at some time. A product and a copy out read until they are waited for."""

    def __init__(self, reads: tuple = ()) -> None:
        self.reads = reads  # shared memory
        self.speed = 1.0
        self.done = False
        self.waited = False

    def do(self) -> None:
        raise NotImplementedError


class Partition:
    """Some warps that execute the same code: a thread that runs when it is its turn."""

    def __init__(self, program: Program, name: str, first_thread: int, warps: int, clock: Clock) -> None:
        self.program, self.name, self.first_thread, self.warps = program, name, first_thread, warps
        self.threads = WARP * warps
        self.component = program.new_component()
        self.clock = Clock(clock)
        self.clock[self.component] = 1
        self.ready: Callable[[], bool] | None = None  # None: it waits for nothing
        self.waits_for: Callable[[], str] = str
        self.done = False
        self.turn = _locked()  # released when it is
        self.speed = 1.0
        self.products: deque[Work] = deque()  # not waited for, in the order in which they are formed
        self.stores: deque[Work] = deque()  # copies out, not waited for
        self.additions: list[Work] = []  # to global memory, which may still be under way
        self.landing: list[Work] = []  # copies out that have read shared memory and still have to add that
        self.loads: list = []  # buffers that it loaded since its last fence
        self.registers: dict = {}  # that assembly has declared for more than one line

    @property
    def now(self) -> int:
        return event(self.component, self.clock[self.component])

    def tell(self) -> Clock:
        """What it has seen and done so far; what it does from here on is not in it."""
        told = Clock(self.clock)
        self.clock[self.component] += 1
        return told

    def __str__(self) -> str:
        return f"{self.name} of program {self.program.number}"


class Program:
    """What the partitions of one program share."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        self.named: dict[int, object] = {}  # the hardware's barriers, by number
        self.barriers: list = []  # mbarriers
        self.copies: list = []  # into shared memory, over or not
        self.owners: dict[int, Partition] = {}  # by component
        self._components = 0
        self._unfenced: list[tuple[object, int]] = []  # what was written, and when

    @property
    def current(self) -> Partition:
        return self.machine.current

    def new_component(self) -> int:
        self._components += 1
        assert self._components < COMPONENTS, "a program with too many barriers for the emulator"
        return self._components

    def start(self, name: str, first_thread: int, warps: int, function: Callable[[], None]) -> Partition:
        clock = self.current.tell() if self.current is not None else Clock()
        partition = Partition(self, name, first_thread, warps, clock)
        self.owners[partition.component] = partition
        self.machine.add(partition, function)
        return partition

    def to_fence(self, what: object, when: int) -> None:
        """Memory was written that copies and products will not find so before a fence."""
        self._unfenced.append((what, when))

    def fence(self) -> None:
        """Of this partition: for its own loads, and for all stores that it has seen, its own and those that
        others did before a barrier."""
        partition, waiting = self.current, []
        for buffer in partition.loads:
            buffer.fence_load()
        partition.loads.clear()
        for what, when in self._unfenced:
            if partition.clock.saw(when):
                what.fence(partition.now)
            else:
                waiting.append((what, when))
        self._unfenced = waiting

    def check_end(self, partition: Partition) -> None:
        """What may be under way when the last partition ends."""
        for copy in self.copies:
            if not partition.clock.saw(copy.landed):
                raise Race(f"the program ends, and nobody has waited for a copy into {copy.buffer.name}")


class Machine:
    """Runs the partitions of some programs, one at a time."""

    def __init__(self, order: Order, rng: random.Random, in_order: bool = False) -> None:
        self.order, self.rng, self.in_order = order, rng, in_order
        self.current: Partition | None = None
        self.copies: list[Work] = []  # into shared memory, under way
        self.partitions: list[Partition] = []
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self._over = _locked()
        self._rate = rng.choice(SPEEDS)  # of copies and products

    # ------------------------------------------------------------ from outside

    def run(self) -> None:
        """Until all partitions are done; raises what went wrong in one of them."""
        self._pass_on(self._choose())
        self._over.acquire()
        failure = self._failure
        self._failure = failure or _Stopped()
        for partition, thread in zip(self.partitions, self._threads, strict=True):
            partition.turn.release()
            thread.join()
        if failure is not None:
            raise failure

    def add(self, partition: Partition, function: Callable[[], None]) -> None:
        if self.order == "random":
            partition.speed = self.rng.choice(SPEEDS)

        @torch.no_grad()  # which each thread decides for itself
        def body() -> None:
            partition.turn.acquire()
            if self._failure is not None:
                return
            try:
                self.current = partition
                function()
                self._check_end(partition)
            except _Stopped:
                return
            except BaseException as failure:
                failure.add_note(f"in {partition}")
                self._failure = self._failure or failure
            partition.done = True
            self._pass_on(self._choose())

        self.partitions.append(partition)
        self._threads.append(threading.Thread(target=body, daemon=True))
        self._threads[-1].start()

    # ------------------------------------------------------------ the choice of what is next

    def _choose(self) -> Partition | None:
        """Let copies and products take place until it is a partition's turn. None: it is over."""
        while self._failure is None:
            waiting = [p for p in self.partitions if not p.done]
            able = [p for p in waiting if p.ready is None or p.ready()]
            events = [] if self.order == "eager" or (self.order == "late" and able) else self._events()
            if not waiting:
                self._finish_additions()
                return None
            if not able and not events:
                self._failure = Deadlock("; ".join(f"{p} waits for {p.waits_for()}" for p in waiting))
                return None
            chosen = self._draw(able, events)
            if isinstance(chosen, Partition):
                return chosen
            try:
                chosen.do()
                chosen.done = True
            except Exception as failure:
                self._failure = failure
        return None

    def _draw(self, able: list[Partition], events: list[Work]) -> Partition | Work:
        """One of them, the faster the likelier. (`random.choices` does the same, and more for each call.)"""
        ends, end = [], 0.0
        for partition in able:
            end += partition.speed
            ends.append(end)
        for work in events:
            end += self._rate * work.speed
            ends.append(end)
        number = bisect(ends, self.rng.random() * end, 0, len(ends) - 1)
        return able[number] if number < len(able) else events[number - len(able)]

    def _events(self) -> list[Work]:
        """What can take place now: any copy, and of each partition's products the oldest."""
        if self.copies:
            self.copies = [copy for copy in self.copies if not copy.done]
        events = list(self.copies)
        for partition in self.partitions:
            for product in partition.products:
                if not product.done:
                    events.append(product)
                    break
            if partition.stores:
                events += [store for store in partition.stores if not store.done]
            if partition.additions:
                partition.additions = [work for work in partition.additions if not work.done]
                events += partition.additions
            if partition.landing:
                partition.landing = [work for work in partition.landing if not work.done]
                events += partition.landing
        return events

    def _finish_additions(self) -> None:
        """The end of a launch waits for them."""
        for partition in self.partitions:
            for work in partition.additions + partition.landing:
                if not work.done:
                    work.do()

    def _pass_on(self, chosen: Partition | None) -> None:
        (self._over if chosen is None else chosen.turn).release()

    # ------------------------------------------------------------ called by the partitions

    def pause(self) -> None:
        """Let others go first."""
        self.wait(None, str)

    def wait(self, ready: Callable[[], bool] | None, what: Callable[[], str]) -> None:
        partition = self.current
        partition.ready, partition.waits_for = ready, what
        chosen = self._choose()
        if chosen is not partition:
            self._pass_on(chosen)
            partition.turn.acquire()
        if self._failure is not None:
            raise _Stopped
        self.current, partition.ready = partition, None

    def issue(self, queue: deque[Work] | list[Work], work: Work) -> None:
        queue.append(work)
        work.speed = self.rng.choice(SPEEDS)
        if self.order == "eager":
            work.do()
            work.done = True
        self.pause()

    def add_to_memory(self, work: Work) -> None:
        if self.in_order:
            work.event = self.current.now
            self.issue(self.current.additions, work)
        else:
            work.do()

    def fence_additions(self) -> None:
        """Until all additions that this partition knows of are done."""
        program, saw = self.current.program, self.current.clock.saw
        known = [
            work for partition in self.partitions if partition.program is program
            for work in partition.additions if partition is self.current or saw(work.event)
        ]  # fmt: skip
        self.wait(lambda: all(work.done for work in known), lambda: "additions to memory")

    def land(self, partition: Partition, work: Work) -> None:
        """What a partition's copy out adds to memory, some time after it has read it: before the partition
        goes on from `wait_for_landing`."""
        if self.in_order and self.order != "eager":
            work.speed = self.rng.choice(SPEEDS)
            partition.landing.append(work)
        else:
            work.do()

    def wait_for_landing(self) -> None:
        """Until all that copies out of this partition add has been added."""
        self.wait_for(self.current.stores, 0, "copies out")
        known = list(self.current.landing)
        self.wait(lambda: all(work.done for work in known), lambda: "what copies out add")

    def wait_for(self, queue: deque[Work], outstanding: int, what: str) -> None:
        """All of a queue but the newest `outstanding`."""
        oldest = list(queue)[: max(len(queue) - outstanding, 0)]
        self.wait(lambda: all(work.done for work in oldest), lambda: f"{what}, all but {outstanding}")
        for work in oldest:
            queue.remove(work)
            work.waited = True
            for buffer in work.reads:
                buffer.end_reading()

    @staticmethod
    def _check_end(partition: Partition) -> None:
        if partition.first_thread == 0:  # it has waited for the others
            partition.program.check_end(partition)
        if partition.stores:
            raise Race(f"{partition} ends and has not waited for its copies out of shared memory")
        if partition.products:
            raise Race(f"{partition} ends and has not waited for its products")
