"""Calls whose Python frames lie in one piece of memory.

CPython (3.11 and later) keeps the frames of a thread in pieces of 16 KiB. A call that does not fit into the
last piece asks the operating system for another one, and its return gives it back. Where a loop runs just
below the end of a piece, nearly every call in it does both: half the time of some tests went there. Which
loop it is depends on how deep it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WORDS = 1 << 16
"""Of a frame for which CPython takes a piece of 1 MiB: half of it is left, for thousands of other frames."""


def in_one_piece(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs); its frames, and those of what it calls, lie in one piece."""
    return function(*args, **kwargs)


# The frame has room for an evaluation stack of so many values. It uses few, and so little of the memory.
in_one_piece.__code__ = in_one_piece.__code__.replace(co_stacksize=WORDS)
