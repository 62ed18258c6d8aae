"""Which kernels are compiled: those that stand for all, or with ATTNLIB_EVERY_KERNEL=1 (`make kernels`) every
one. A file names the first in its lists, and puts the others into `more`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

EVERY = os.environ.get("ATTNLIB_EVERY_KERNEL") == "1"


def more(cases: Iterable[Any]) -> list[Any]:
    """Cases that are compiled where every kernel is."""
    return list(cases) if EVERY else []


def with_more(first: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """The first ones, and behind them the others of `every`."""
    first = list(first)
    return first + more(case for case in every if case not in first)
