"""Warm the compilers' caches before the book is measured.

Notebooks are measured one after the other, alone on the GPU, and a kernel that is not compiled yet keeps the
GPU and all cores but one waiting. So every notebook is executed before, all side by side, in processes in
which nothing is timed (`bench.setting.warming`): what would be timed is called once and is then in the caches
that Triton, inductor and `bench.inspect_sm90` keep on disk. Nothing else is kept, neither outputs nor
records. A cell that fails here costs what it would have compiled, and no more.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from attnlib.bench.setting import WARM
from attnlib.book.execution import Limits, Mode, Result, execute_all

SECONDS = 300
"""What warming may take at most; notebooks that are then not through are cut off."""


def warm(paths: Sequence[Path], limits: Limits, say: Callable[[str], None] = print) -> list[Result]:
    """Execute notebooks side by side, so that what they time is compiled; says how long it took, and warns
    of the first failure in each notebook."""
    jobs, start = processes(len(paths)), time.monotonic()
    say(f"warming the compilers' caches: {len(paths)} notebooks, {jobs} at a time, nothing is timed ...")
    with tempfile.TemporaryDirectory() as folder:
        results = execute_all(
            paths[::-1],  # the later chapters take longest
            lambda path: Path(folder) / path.name,
            mode=mode(jobs, Path(folder)),
            jobs=jobs,
            limits=replace(limits, end=min(limits.end, start + SECONDS)),
            say=lambda text: None,
        )
    failed = [result for result in results if not result.ok]
    say(f"{len(results) - len(failed)} of {len(paths)} notebooks warmed, {time.monotonic() - start:.0f} s")
    for result in failed:
        say(f"warning, while warming: {result.failure}")
    return results


def processes(notebooks: int) -> int:
    """Notebooks to execute side by side: half as many as there are cores, since each compiles on one core and
    has a process of ptxas beside it."""
    return max(1, min(notebooks, (os.cpu_count() or 1) // 2))


def mode(jobs: int, folder: Path) -> Mode:
    """How notebooks are executed here. A choice that a chapter makes by timing is not kept: `folder` is a
    temporary one. One graph is compiled at a time, so inductor needs no workers of its own."""
    variables = {WARM: str(jobs), "ATTNLIB_CACHE": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return Mode(variables, goes_on=True)
