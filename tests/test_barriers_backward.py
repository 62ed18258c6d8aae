"""The barrier protocol of the Hopper backward kernel, modeled on the CPU over random interleavings.

As in test_barriers: a producer, two consumers, copies that land whenever they like. A buffer holds the number
of the block that lies in it; a product checks it when it starts and when it is waited for. `producer` and
`consumer` follow `_produce` and `_consume` of attnlib/kernels/hopper_backward.py step by step; `bug` plants
one mistake, which some interleaving must reveal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from test_barriers import IN_FLIGHT, Barrier, NamedBarrier, Wait, interleave


def go_on() -> bool:
    return True


@dataclass
class Shared:
    """What the shared memory of a program of n steps holds in both backward kernels."""

    n: int
    bug: str = ""
    flying: list[Callable[[], None]] = field(default_factory=list)
    products: int = 0

    def __post_init__(self) -> None:
        self.k, self.v, self.q, self.do = [None], [None], [None, None], [None, None]
        self.k_full, self.v_full = Barrier(1), Barrier(1)
        self.q_full, self.do_full = ([Barrier(1) for _ in range(2)] for _ in range(2))
        self.q_free, self.do_free = ([NamedBarrier(3) for _ in range(2)] for _ in range(2))

    def copy(self, buffer: list, index: int, name: object, barrier: Barrier) -> None:
        barrier.expect(1)
        buffer[index] = IN_FLIGHT

        def land() -> None:
            buffer[index] = name
            barrier.landed()

        self.flying.append(land)

    def full(self, barriers: list[Barrier], j: int) -> Wait:
        return barriers[j & 1].passed(0 if self.bug == "the parity stays 0" else (j >> 1) & 1)

    def start(self, *operands: tuple[list, int, object]) -> Callable[[], None]:
        """Start a product, or a load; the result is to be called where it is waited for."""

        def look() -> None:
            for buffer, index, name in operands:
                assert buffer[index] == name, f"expected {name}, found {buffer[index]}"

        look()
        self.products += 1
        return look


class Program(Shared):
    """With dS of two blocks for two consumers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ds = [None] * 4
        self.ds_full = [NamedBarrier(2) for _ in range(4)]

    def buffer(self, j: int) -> int:
        return 0 if self.bug == "a buffer of dS too few" else 2 * (j & 1)


def sync(barrier: NamedBarrier, who: object) -> Wait:
    rounds = barrier.rounds
    barrier.arrive(who)
    return lambda: barrier.rounds > rounds


def producer(m: Program) -> Iterator[Wait]:
    m.copy(m.k, 0, "K", m.k_full)
    for j in range(m.n):
        if j >= 2 and m.bug != "Q is filled without asking":
            yield sync(m.q_free[j & 1], "producer")
        m.copy(m.q, j & 1, j, m.q_full[j & 1])
        if j == 0:
            m.copy(m.v, 0, "V", m.v_full)
        yield go_on
        if j >= 2:
            yield sync(m.do_free[j & 1], "producer")
        m.copy(m.do, j & 1, j, m.do_full[j & 1])
        yield go_on


def consumer(m: Program, w: int) -> Iterator[Wait]:
    def await_ds(j: int) -> Iterator[Wait]:
        if j >= 0 and m.bug != "dS is not waited for":
            yield sync(m.ds_full[2 * (1 - w) + (j & 1)], w)

    def write_ds(j: int) -> None:
        m.ds[m.buffer(j) + w] = j
        if not (m.bug == "a consumer does not tell" and w == 1 and j == 3):
            m.ds_full[2 * w + (j & 1)].arrive(w)

    def start_dq(j: int) -> Callable[[], None]:
        if j < 0:  # whatever lies there
            return lambda: None
        return m.start((m.ds, m.buffer(j), j), (m.ds, m.buffer(j) + 1, j), (m.k, 0, "K"))

    yield m.k_full.passed(0)
    yield m.full(m.q_full, 0)
    scores = m.start((m.q, 0, 0), (m.k, 0, "K"))
    yield go_on
    scores()
    yield m.v_full.passed(0)
    for j in range(m.n):
        yield m.full(m.do_full, j)
        dp = m.start((m.v, 0, "V"), (m.do, j & 1, j))
        m.start((m.q, j & 1, j))()  # LSE comes with Q
        yield go_on
        dp()
        dv = m.start((m.do, j & 1, j))
        if m.bug == "dS is written before the other's is there":
            write_ds(j)
        yield from await_ds(j - 1)
        dq = start_dq(j - 1)
        yield go_on
        dv()
        # Released any earlier, it would not be filled before Q of the same block is.
        if not (m.bug == "dO is not released" and w == 1 and j == 2):
            m.do_free[j & 1].arrive(w)
        dk = m.start((m.q, j & 1, j))
        if m.bug == "Q is released before dK is done":
            m.q_free[j & 1].arrive(w)
        if j + 1 < m.n:
            if m.bug != "Q of the next block is not waited for":
                yield m.full(m.q_full, j + 1)
            scores = m.start((m.q, (j + 1) & 1, j + 1))
        yield go_on
        dq()
        if m.bug != "dS is written before the other's is there":
            write_ds(j)
        yield go_on
        dk()
        if m.bug != "Q is released before dK is done":
            m.q_free[j & 1].arrive(w)
        yield go_on
        scores()
    yield from await_ds(m.n - 1)
    dq = start_dq(m.n - 1)
    yield go_on
    dq()


def explore(m: Program, seed: int) -> None:
    interleave([producer(m), consumer(m, 0), consumer(m, 1)], m.flying, seed)
    assert m.products == 2 * 6 * m.n  # the five of a step, and the look at its LSE


def program(seed: int, bug: str = "") -> Program:
    return Program(random.Random(1000 + seed).randint(1, 9), bug)


def test_no_interleaving_reads_a_wrong_block_or_deadlocks() -> None:
    for seed in range(1000):
        explore(program(seed), seed)


BUGS = [
    "Q is filled without asking",
    "Q of the next block is not waited for",
    "Q is released before dK is done",
    "dO is not released",
    "dS is not waited for",
    "dS is written before the other's is there",
    "a buffer of dS too few",
    "a consumer does not tell",
    "the parity stays 0",
]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    for seed in range(1000):
        try:
            explore(program(seed, bug), seed)
        except AssertionError as found:
            print(f"seed {seed}: {found}")
            return
    pytest.fail(f"1000 interleavings did not reveal: {bug}")
