"""`attnlib.emulator.frames`: the frames of a call lie in one piece of memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from attnlib.emulator.frames import in_one_piece


def test_a_call_is_the_call() -> None:
    assert in_one_piece(dict, [("a", 1)], b=2) == {"a": 1, "b": 2}
    with pytest.raises(ZeroDivisionError):
        in_one_piece(lambda: 1 / 0)


def pieces(depth: int) -> int:
    """How many pages a loop of calls takes at this depth: few, unless each call takes a piece of its own."""
    if depth:
        return pieces(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(1000):
        _many_words()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _many_words() -> None:
    """A frame of more than a quarter of a piece."""


_many_words.__code__ = _many_words.__code__.replace(co_stacksize=600)


def most_pages(call: Callable) -> int:
    """Of all depths, in a thread: its frames begin in a piece of their own, which ends at one of them."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: max(call(pieces, depth) for depth in range(200))).result()


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="how CPython keeps its frames")
def test_no_call_takes_a_piece_of_its_own() -> None:
    assert most_pages(in_one_piece) < 1000
    if sys.version_info[:2] == (3, 11):  # of which it is known
        assert most_pages(lambda function, depth: function(depth)) >= 1000
