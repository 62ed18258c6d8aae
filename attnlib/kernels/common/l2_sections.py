"""How many heads a Hopper kernel lets advance together: so few that what they read again stays in the L2, so
many that its SMs end together."""

from collections.abc import Iterator
from functools import lru_cache
from heapq import heapreplace
from random import Random
from typing import NamedTuple

SMS = 132
WAVES = 2
"""Where a launch has few programs, a section of key heads has at least about this many for each SM."""
FEW = 8
"""A launch with at most this many programs for each SM has few: the idle time after its last section
counts."""
MANY = 300
"""With more for each SM the order by sections was faster; why is not known."""


def query_heads(heads: int, group: int, keys: int, width: int, l2_bytes: int) -> int:
    """Of a forward pass: a power of two times `group`, at most about `heads`.

    heads: B * H; group: query heads of one key head; keys: S_k; width: columns of a tile. K and V have two
    bytes for each element.
    """
    return _power_of_two(heads // group, 4 * keys * width, l2_bytes) * group


class Heads(NamedTuple):
    """Key heads of a backward pass. number: of them; work: of the programs of each, in the order in which
    they start, in any unit; nbytes: what the programs of one read and add to; visited: query heads that a
    program visits one after the other, where `nbytes` has those of one."""

    number: int
    work: tuple[float, ...]
    nbytes: int
    visited: int = 1

    def together(self, l2_bytes: int) -> int:
        """How many fit in there, a power of two, 1 at least."""
        return _power_of_two(self.number, self.nbytes, l2_bytes)


class Sections(NamedTuple):
    """size: heads of a section; last: the head that the last one begins with, a multiple of `size`, which has
    all heads from there on. None: it has as many as the others, or fewer."""

    size: int
    last: int | None = None

    def spans(self, heads: int) -> Iterator[tuple[int, int]]:
        """(first head, end) of each."""
        first = 0
        while first < heads:
            end = heads if first == self.last else min(first + self.size, heads)
            yield first, end
            first = end


UNEVEN = 0.05
"""In the model of a launch programs take up to so much more or less than their work says."""
_random = Random(0)
_FACTORS = [1 + UNEVEN * _random.uniform(-1, 1) for _ in range(1009)]
MOST_WAVES = 16
"""The model follows the last programs, of so many for each SM: those before keep all SMs busy."""
CROWDED_BYTES = 96 << 20
"""No last section has more, unless a section like the others has."""
LEAST_GAIN = 0.001
"""Fewer heads in the last section are taken where more gain less than this."""
MOST_VISITORS = 2
"""Programs that visit several query heads drift apart. There a last section of three times as many heads as
the others took 10 to 15% longer, one of twice as many less time."""


def finished(heads: Heads, sections: Sections) -> float:
    """When the last program ends, in units of the work: an SM takes one after the other, in their order."""
    first = _followed(heads, sections.size)
    if sections.last is not None:
        first = min(first, sections.last)
    ends = [_before(heads, first)] * SMS
    for span in sections.spans(heads.number):
        if span[0] >= first:
            _run(ends, heads, *span)
    return max(ends)


@lru_cache(maxsize=256)
def balanced(heads: Heads, l2_bytes: int, crowding: float) -> Sections:
    """The sections of a backward pass whose programs differ in length. A program is a block of keys, the
    longest ones first in each section, so those of the last section begin when most others have ended. A
    large last section has short ones enough to fill the end, but more than the L2 holds.

    Answers are kept: grouped heads ask for the same sections several times, and each takes milliseconds.

    Args:
        heads: with their work.
        l2_bytes: what a section reads and adds to without a loss.
        crowding: by which share of its time each MiB beyond that makes a section longer.
    """
    fitting = heads.together(l2_bytes)
    # What is taken where a head has more programs than are followed.
    best, least = Sections(fitting, (heads.number - 1) // fitting * fitting), float("inf")
    sizes = [size for size in (fitting, fitting // 2) if size]
    if heads.visited > 1:
        sizes += [size for size in (2 * fitting, 4 * fitting) if size < 2 * heads.number]
    for size in sizes:
        for last, cost in _costs(heads, size, l2_bytes, crowding):
            if cost < least * (1 - LEAST_GAIN):
                best, least = Sections(size, last), cost
    return best


def _costs(heads: Heads, size: int, l2_bytes: int, crowding: float) -> list[tuple[int, float]]:
    """The first head of each last section that there may be, the smallest one first, and what a launch takes
    with it."""
    most = CROWDED_BYTES // heads.nbytes if heads.visited == 1 else MOST_VISITORS * size
    found, head = [], _followed(heads, size)
    ends = [_before(heads, head)] * SMS
    while head < heads.number:
        left = heads.number - head
        if left <= max(size, most):
            beyond = head * _beyond(heads, size, l2_bytes) + left * _beyond(heads, left, l2_bytes)
            slower = 1 + crowding * beyond / heads.number
            found.append((head, max(_run(ends[:], heads, head, heads.number)) * slower))
        end = min(head + size, heads.number)
        _run(ends, heads, head, end)
        head = end
    return found[::-1]


def _beyond(heads: Heads, together: int, l2_bytes: int) -> float:
    """MiB."""
    return max(together * heads.nbytes - l2_bytes, 0) / (1 << 20)


def _followed(heads: Heads, size: int) -> int:
    """The head from which on the model follows programs, a multiple of `size`."""
    return max(heads.number - MOST_WAVES * SMS // len(heads.work), 0) // size * size


def _before(heads: Heads, first: int) -> float:
    """When the programs of the heads before `first` have ended."""
    return first * sum(heads.work) / SMS


def _run(ends: list[float], heads: Heads, first: int, end: int) -> list[float]:
    """When each SM ends after a section more, in place."""
    number = first * len(heads.work)
    for work in heads.work:
        for _ in range(end - first):
            heapreplace(ends, ends[0] + work * _FACTORS[number % len(_FACTORS)])
            number += 1
    return ends


def key_heads(heads: int, blocks: int, rows: int, width: int, l2_bytes: int) -> int:
    """Of a backward pass whose programs the model does not know, at most `heads`.

    heads: B * H_kv; blocks: programs of each; rows: S_q, of all query heads that count; width: columns of a
    tile. Q and dO have two bytes for each element, the sums of dQ four.

    A program is a block of keys, the longest ones first in each section. The longest ones of the last section
    begin when most others have ended, so where there are few programs in all the sections are of equal size,
    and so large that the short ones at a section's end fill the time.
    """
    if heads * blocks <= FEW * SMS:
        return -(-heads // max(heads * blocks // (WAVES * SMS), 1))
    return by_cache(heads, rows, width, l2_bytes)


def last_section(heads: int, blocks: int, section: int, waves: float) -> int:
    """The head that the last section of a backward pass begins with, a multiple of `section`.

    In each section the longest programs come first, and those of the last one begin when most others have
    ended. So it has at least about `waves` programs for each SM, whatever the cache holds: the short ones of
    more heads fill the end.
    """
    least = max(section, round(waves * SMS / blocks))
    return max(heads - least, 0) // section * section


def leading_programs(heads: int, blocks: int, long: int) -> int:
    """How many programs of each head come before the others of all heads, of a backward pass whose heads have
    so many long ones. In sections alone those of the last one would begin when most others have ended. 0
    where a launch has few programs, whose sections are made for that, or very many: with 248 for each SM S2
    took 0.91 to 0.94 of the time by it, with 496 1.08 (docs/lab/s2.md)."""
    return long if FEW * SMS < heads * blocks <= MANY * SMS else 0


def by_cache(heads: int, rows: int, width: int, l2_bytes: int) -> int:
    """The same by the size of the cache alone: a power of two."""
    return _power_of_two(heads, 8 * rows * width, l2_bytes)


def _power_of_two(heads: int, bytes_per_head: int, l2_bytes: int) -> int:
    chosen = 1
    while 2 * chosen <= heads and 2 * chosen * bytes_per_head <= l2_bytes:
        chosen *= 2
    return chosen
