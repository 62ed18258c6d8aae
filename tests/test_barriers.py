"""The barrier protocol of the Hopper kernel, modeled on the CPU and explored over random interleavings.

One program: a producer, its consumer warpgroups, and copies that land whenever they like. Every buffer holds
the name of what was copied into it; a product checks the names when it starts and when it ends. The functions
`producer` and `consumer` follow `_produce` and `_consume` of attnlib/kernels/hopper.py line by line; `bug`
plants one mistake, which some interleaving must reveal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

Wait = Callable[[], bool]
IN_FLIGHT = "a copy in flight"


class Barrier:
    """An mbarrier: `arrivals` of threads and the bytes of copies complete a phase."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.bytes = self.completed = 0

    def arrive(self) -> None:
        assert self.pending > 0, "more arrivals than a phase has"
        self.pending -= 1
        self._complete()

    def expect(self, copies: int) -> None:
        self.bytes += copies
        self.arrive()

    def landed(self) -> None:
        self.bytes -= 1
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.completed += 1
            self.pending = self.arrivals

    def passed(self, parity: int) -> Wait:
        """A wait returns once the phase of that parity is complete: the one before the current one."""
        return lambda: self.completed & 1 != parity


class NamedBarrier:
    """The hardware's: all threads of one round must have arrived before anyone arrives for the next."""

    def __init__(self, participants: int) -> None:
        self.participants, self.here, self.rounds = participants, set(), 0

    def arrive(self, who: object) -> None:
        assert who not in self.here, "one thread arrived twice at a named barrier"
        self.here.add(who)
        if len(self.here) == self.participants:
            self.here, self.rounds = set(), self.rounds + 1


@dataclass
class Program:
    """Shared memory of one program, and what it is to compute: `tiles` lists, for each tile that it will
    draw, how many blocks each consumer needs. Of packed sequences a program may find no tile at all."""

    tiles: list[list[int]]
    stages: int
    joint: bool
    named: bool
    bug: str = ""
    packed: bool = False
    flying: list[Callable[[], None]] = field(default_factory=list)
    products: int = 0

    def __post_init__(self) -> None:
        self.consumers = len(self.tiles[0]) if self.tiles else 2
        slots, w = range(self.stages), range(self.consumers)
        self.k, self.v, self.q = [None] * self.stages, [None] * self.stages, [None] * self.consumers
        self.k_full = [Barrier(1) for _ in slots]
        self.v_full = self.k_full if self.joint else [Barrier(1) for _ in slots]
        self.kv_free = [Barrier(self.consumers) for _ in slots]
        self.named_free = [NamedBarrier(1 + self.consumers) for _ in slots]
        self.q_full, self.q_free = ([Barrier(1) for _ in w] for _ in range(2))
        self.next_tile, self.drawn = [None, None], [Barrier(1), Barrier(1)]

    def copy(self, buffer: list, index: int, name: object, barrier: Barrier) -> None:
        buffer[index] = IN_FLIGHT

        def land() -> None:
            buffer[index] = name
            barrier.landed()

        self.flying.append(land)

    def place(self, c: int) -> tuple[int, int]:
        return c % self.stages, (c // self.stages) & 1

    def drawing(self, number: int) -> tuple[int, int]:
        if self.bug == "one place for the next tile":
            return 0, number & 1
        return number & 1, (number >> 1) & 1

    def number(self, turn: int) -> int:
        """Of what is told at the end of tile number `turn`. That of the first tile is 0 if it is told."""
        return turn + self.packed

    def tell(self, number: int, tile: int) -> None:
        if self.packed and self.bug == "two tiles are told under one number":
            number = max(number - 1, 0)
        b, _ = self.drawing(number)
        self.next_tile[b] = tile
        self.drawn[b].arrive()

    def told(self, number: int, tile: int) -> Iterator[Wait]:
        b, parity = self.drawing(number)
        yield self.drawn[b].passed(parity)
        assert self.next_tile[b] == tile, f"expected tile {tile}, read {self.next_tile[b]}"

    def wait_k(self, c: int) -> Wait:
        slot, parity = self.place(c)
        return self.k_full[slot].passed(parity)

    def wait_v(self, c: int) -> Wait:
        slot, parity = self.place(c)
        return self.v_full[slot].passed(parity)

    def release(self, c: int, who: int) -> None:
        slot, _ = self.place(c)
        if self.named:
            self.named_free[slot].arrive(who)
        else:
            self.kv_free[slot].arrive()

    def acquire(self, c: int) -> Iterator[Wait]:
        slot, parity = self.place(c)
        if self.bug == "a slot is filled without asking":
            return
        if not self.named:
            yield self.kv_free[slot].passed(parity ^ 1)
        elif c >= self.stages:
            rounds = self.named_free[slot].rounds
            self.named_free[slot].arrive("producer")
            yield lambda: self.named_free[slot].rounds > rounds


def producer(m: Program) -> Iterator[Wait]:
    extra = int(m.joint)
    turn, c, n = 0, 0, max(m.tiles[0]) if m.tiles else 1

    def copy_k(c: int, name: object, more: int) -> None:
        slot, _ = m.place(c)
        m.k_full[slot].expect(1 + more)
        m.copy(m.k, slot, name, m.k_full[slot])

    def copy_v(c: int, name: object, expect: bool) -> None:
        slot, _ = m.place(c)
        if expect:
            m.v_full[slot].expect(1)
        m.copy(m.v, slot, name, m.v_full[slot])

    if m.packed:
        m.tell(0, 0)
    if m.tiles or m.bug == "keys for a tile that is not there":
        copy_k(0, (0, n - 1), 0)
    if not m.joint and m.bug != "nobody speaks for the values of the first slot":
        m.v_full[0].arrive()
    tile = 0
    while tile < len(m.tiles):
        for w in range(m.consumers):
            yield m.q_free[w].passed((turn & 1) ^ 1)
            m.q_full[w].expect(1)
            m.copy(m.q, w, tile, m.q_full[w])
        for i in range(1, n):
            yield from m.acquire(c + i)
            copy_k(c + i, (tile, n - 1 - i), extra)
            copy_v(c + i, (tile, n - i), not m.joint)
        m.tell(m.number(turn), tile + 1)
        turn, c = turn + 1, c + n
        yield from m.acquire(c)
        if tile + 1 < len(m.tiles):
            n = max(m.tiles[tile + 1])
            copy_k(c, (tile + 1, n - 1), extra)
            copy_v(c, (tile, 0), not m.joint)
        else:
            copy_v(c, (tile, 0), True)
        tile += 1


def consumer(m: Program, w: int) -> Iterator[Wait]:
    turn = c = tile = 0

    def product(buffer: list, index: int, name: object) -> Iterator[Wait]:
        """Reads its operand from now until it is waited for."""
        assert buffer[index] == name, f"expected {name}, found {buffer[index]}"
        m.products += 1
        yield lambda: True
        assert buffer[index] == name, f"{name} was overwritten by {buffer[index]}"

    def scores(c: int, block: int) -> Iterator[Wait]:
        assert m.q[w] == tile, f"expected Q of tile {tile}, found {m.q[w]}"
        yield from product(m.k, m.place(c)[0], (tile, block))
        assert m.q[w] == tile, f"Q of tile {tile} was overwritten"

    def release(c: int) -> None:
        if not (m.bug == "a slot is not released" and c == 3 and w == 0):
            m.release(c, w)

    if m.packed:
        yield from m.told(0, 0)
    while tile < len(m.tiles):
        n, own = max(m.tiles[tile]), m.tiles[tile][w]
        end = c + n
        start = end - own
        yield m.q_full[w].passed((turn & 1) ^ (m.bug == "wrong parity for Q"))
        for i in range(c, start):
            if m.bug != "an unseen block is released unseen":
                yield m.wait_k(i)
                if not m.joint and i > c:
                    yield m.wait_v(i)
            release(i)
        yield m.wait_k(start)
        if not m.joint and start > c and m.bug != "values of a skipped block are not waited for":
            yield m.wait_v(start)
        yield from scores(start, own - 1)
        release(start)
        for i in range(start + 1, end):
            block = own - 1 - (i - start)
            yield m.wait_k(i)
            if m.bug == "released before P V is done":
                release(i)
            yield from scores(i, block)
            if not m.joint:
                yield m.wait_v(i)
            yield from product(m.v, m.place(i)[0], (tile, block + 1))
            if m.bug != "released before P V is done":
                release(i)
        if m.bug != "Q is never given back":
            m.q_free[w].arrive()
        c = end
        yield m.wait_v(c)
        yield from product(m.v, m.place(c)[0], (tile, 0))
        yield from m.told(m.number(turn), tile + 1)
        tile += 1
        turn += 1


def interleave(threads: list[Iterator[Wait]], flying: list[Callable[[], None]], seed: int) -> None:
    """Run threads and copies in a random order; AssertionError for a wrong operand or a deadlock.

    Some threads are slow in a run, so that the others get as far ahead as the protocol lets them.
    """
    rng = random.Random(seed)
    waits: dict[int, Wait] = {i: lambda: True for i in range(len(threads))}
    speed = [rng.choice((0.02, 0.3, 1.0)) for _ in threads]
    landing = rng.choice((0.02, 0.5))
    while waits:
        ready = [i for i, wait in waits.items() if wait()]
        if flying and (not ready or rng.random() < landing):
            flying.pop(rng.randrange(len(flying)))()
            continue
        assert ready, f"deadlock: {len(waits)} of {len(threads)} threads wait forever"
        i = rng.choices(ready, [speed[i] for i in ready])[0]
        try:
            waits[i] = next(threads[i])
        except StopIteration:
            del waits[i]
    assert not flying, "a copy outlives the program"


def explore(m: Program, seed: int) -> None:
    interleave([producer(m), *(consumer(m, w) for w in range(m.consumers))], m.flying, seed)
    assert m.products == 2 * sum(map(sum, m.tiles))


def program(seed: int, joint: bool, named: bool, bug: str = "", packed: bool = False) -> Program:
    """Consumers of a tile end in different blocks, as on the diagonal: later rows see no fewer."""
    rng = random.Random(1000 + seed)
    consumers, spread = rng.choice((2, 3, 4)), rng.choice((0, 1, 3))
    tiles = []
    for _ in range(rng.randint(0 if packed else 1, 6)):
        n = rng.randint(1, 7)
        tiles.append(sorted(max(1, n - rng.randint(0, spread)) for _ in range(consumers - 1)) + [n])
    return Program(tiles, rng.choice((2, 3, 5, 8)), joint, named, bug, packed)


KINDS = pytest.mark.parametrize(
    ("joint", "named"), [(j, n) for j in (False, True) for n in (False, True)],
    ids=lambda value: str(value),
)  # fmt: skip


@KINDS
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_no_interleaving_reads_a_wrong_block_or_deadlocks(packed, joint, named):
    for seed in range(600):
        explore(program(seed, joint, named, packed=packed), seed)


BUGS = {
    "a slot is filled without asking": (False, False),
    "nobody speaks for the values of the first slot": (False, False),
    "one place for the next tile": (True, False),
    "a slot is not released": (True, False),
    "wrong parity for Q": (True, False),
    "an unseen block is released unseen": (True, False),
    "values of a skipped block are not waited for": (False, False),
    "released before P V is done": (True, True),
    "Q is never given back": (True, False),
    "two tiles are told under one number": (True, False),
    "keys for a tile that is not there": (True, False),
}
PACKED_BUGS = ("two tiles are told under one number", "keys for a tile that is not there")


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug):
    for seed in range(600):
        try:
            explore(program(seed, *BUGS[bug], bug, bug in PACKED_BUGS), seed)
        except AssertionError as found:
            print(f"seed {seed}: {found}")
            return
    pytest.fail(f"600 interleavings did not reveal: {bug}")
