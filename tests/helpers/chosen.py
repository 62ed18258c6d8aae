"""Which cases are tested: those that stand for all, or with ATTNLIB_EVERY_CASE=1 (`make every`) every one. A
file names the first in its lists, and puts the others into `more`.

A case can be left out where another one takes the same way: a further order of the emulator, dtype or tile of
the same kernel, or planted bug of the same kind. What is left out is counted, and said behind the results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

EVERY = os.environ.get("ATTNLIB_EVERY_CASE") == "1"
_left_out: list[Any] = []


def more(cases: Iterable[Any]) -> list[Any]:
    """Cases that are tested where every one is."""
    cases = list(cases)
    if EVERY:
        return cases
    _left_out.extend(cases)
    return []


def with_more(first: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """The first ones, and behind them the others of `every`, each once."""
    first, others = list(first), []
    for case in every:
        if case not in first and case not in others:
            others.append(case)
    return first + more(others)


def first_of_each(cases: Iterable[Any], kind: Callable[[Any], Any]) -> list[Any]:
    """The first case of each kind. The others of it are in `more`."""
    cases = list(cases)
    first = list({kind(case): case for case in reversed(cases)}.values())
    return with_more([case for case in cases if case in first], cases)


def in_turn(cases: Iterable[Any], ways: Sequence[Any]) -> list[tuple[Any, Any]]:
    """(case, way): each case in one way, the next case in the next one. The other pairs are in `more`."""
    cases = list(cases)
    first = [(case, ways[_turn(number, len(ways))]) for number, case in enumerate(cases)]
    return with_more(first, product(cases, ways))


def _turn(number: int, ways: int) -> int:
    """The sum of its digits to this base: in a list of pairs, too, each second part meets several ways."""
    turn = 0
    while number:
        number, digit = divmod(number, ways)
        turn += digit
    return turn % ways


def left_out() -> int:
    """How many cases the files that were imported have left out."""
    return len(_left_out)
