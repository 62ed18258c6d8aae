"""Kernels that the tests of a file need, compiled by several processes before the first test."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def compile_ahead(compile_one: Callable[[Any], None], kinds: Sequence[Any]) -> None:
    """Call a function that can be pickled with each kind. What it compiles stays in Triton's cache.

    Every process of pytest-xdist compiles its share: a pool in each would be more contexts than memory.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker:
        for kind in kinds[int(worker) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
            compile_one(kind)
        return
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, kinds))
