"""The barrier protocol of the wide Hopper backward kernel, modeled as in test_barriers_backward.

`producer`, `values`, `keys` and `queries` follow `_produce`, `_values`, `_keys` and `_queries` of
attnlib/kernels/hopper_backward_wide.py step by step; `bug` plants one mistake, which some interleaving must
reveal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from test_barriers import NamedBarrier, Wait, interleave
from test_barriers_backward import Shared, go_on, sync


class Program(Shared):
    """With P and dS of two blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.p, self.ds = [None, None], [None, None]
        self.p_full, self.ds_full, self.ds_free = ([NamedBarrier(2) for _ in range(2)] for _ in range(3))
        self.end = NamedBarrier(2)


def producer(m: Program) -> Iterator[Wait]:
    m.copy(m.k, 0, "K", m.k_full)
    for j in range(m.n):
        if j >= 2 and m.bug != "Q is filled without asking":
            yield sync(m.q_free[j & 1], "producer")
        m.copy(m.q, j & 1, j, m.q_full[j & 1])
        if j == 0:
            m.copy(m.v, 0, "V", m.v_full)
        yield go_on
        if j >= 2 and m.bug != "dO is filled without asking":
            yield sync(m.do_free[j & 1], "producer")
        m.copy(m.do, j & 1, j, m.do_full[j & 1])
        yield go_on


def values(m: Program) -> Iterator[Wait]:
    yield m.k_full.passed(0)
    yield m.full(m.q_full, 0)
    scores = m.start((m.k, 0, "K"), (m.q, 0, 0))
    yield go_on
    scores()
    for j in range(m.n):
        m.start((m.q, j & 1, j))()  # LSE comes with Q
        if m.bug != "P is told before it is there":
            m.p[j & 1] = j
        m.p_full[j & 1].arrive(0)
        yield go_on
        m.p[j & 1] = j
        m.q_free[j & 1].arrive(0)
        yield m.full(m.do_full, j)
        dv = m.start((m.do, j & 1, j))
        if m.bug == "dO is released before dV is done":
            m.do_free[j & 1].arrive(0)
        yield go_on
        dv()
        if j + 1 < m.n:
            if m.bug != "Q of the next block is not waited for":
                yield m.full(m.q_full, j + 1)
            scores = m.start((m.k, 0, "K"), (m.q, (j + 1) & 1, j + 1))
        if m.bug != "dO is released before dV is done":
            m.do_free[j & 1].arrive(0)
        yield go_on
        if j + 1 < m.n:
            scores()
    if m.bug != "dV does not wait for the end":
        yield sync(m.end, 0)
    m.do[0] = "dV"


def keys(m: Program) -> Iterator[Wait]:
    yield m.v_full.passed(0)
    yield m.full(m.do_full, 0)
    scores = m.start((m.v, 0, "V"), (m.do, 0, 0))
    yield go_on
    scores()
    for j in range(m.n):
        m.start((m.do, j & 1, j))()  # delta comes with dO
        if m.bug != "P is not waited for":
            yield sync(m.p_full[j & 1], 1)
        m.start((m.p, 0 if m.bug == "one buffer of P" else j & 1, j))()
        yield m.full(m.q_full, j)
        dk = m.start((m.q, j & 1, j))
        if m.bug == "Q is released before dK is done":
            m.q_free[j & 1].arrive(1)
        if j >= 2 and m.bug != "dS is written without asking":
            yield sync(m.ds_free[j & 1], 1)
        m.ds[j & 1] = j
        if not (m.bug == "dS is not told" and j == 3):
            m.ds_full[j & 1].arrive(1)
        m.do_free[j & 1].arrive(1)
        yield go_on
        dk()
        if j + 1 < m.n:
            yield m.full(m.do_full, j + 1)
            scores = m.start((m.v, 0, "V"), (m.do, (j + 1) & 1, j + 1))
        if m.bug != "Q is released before dK is done":
            m.q_free[j & 1].arrive(1)
        yield go_on
        if j + 1 < m.n:
            scores()
    m.end.arrive(1)
    m.v[0] = "dK"


def queries(m: Program) -> Iterator[Wait]:
    yield m.k_full.passed(0)
    for j in range(m.n):
        yield sync(m.ds_full[j & 1], 2)
        for half in range(2):
            dq = m.start((m.ds, j & 1, j), (m.k, 0, "K"))
            if half == 1 and m.bug == "dS is released before dQ is done":
                m.ds_free[j & 1].arrive(2)
            yield go_on
            dq()
            if half == 1 and m.bug != "dS is released before dQ is done":
                m.ds_free[j & 1].arrive(2)
            yield go_on


def explore(m: Program, seed: int) -> None:
    interleave([producer(m), values(m), keys(m), queries(m)], m.flying, seed)
    assert m.products == 9 * m.n  # the five of a step, dQ in two, and the looks at LSE, delta and P


def program(seed: int, bug: str = "") -> Program:
    return Program(random.Random(1000 + seed).randint(1, 9), bug)


def test_no_interleaving_reads_a_wrong_block_or_deadlocks() -> None:
    for seed in range(2000):
        explore(program(seed), seed)


BUGS = [
    "Q is filled without asking",
    "dO is filled without asking",
    "Q of the next block is not waited for",
    "Q is released before dK is done",
    "dO is released before dV is done",
    "P is not waited for",
    "P is told before it is there",
    "one buffer of P",
    "dS is written without asking",
    "dS is released before dQ is done",
    "dS is not told",
    "dV does not wait for the end",
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
