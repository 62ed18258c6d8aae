"""Cases that are compiled side by side in child processes, where there are the cores for it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def cores() -> int:
    """Cores for each of the processes that pytest-xdist has started."""
    return len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def for_hopper() -> None:
    """In a child: launches overlap, as on the GPUs that it compiles for."""
    from attnlib.kernels.common import device

    device.overlaps = lambda index: True


def run(compile_case: Callable, cases: Iterable[Any]) -> list[Any]:
    """compile_case(case) of each, in order. What it sets in `triton.knobs` is as before afterwards."""
    children = min(8, cores())
    if children > 1:
        with ProcessPoolExecutor(children, multiprocessing.get_context("spawn"), for_hopper) as pool:
            return list(pool.map(compile_case, cases))
    from triton import knobs

    with knobs.compilation.scope(), knobs.nvidia.scope():
        return [compile_case(case) for case in cases]
