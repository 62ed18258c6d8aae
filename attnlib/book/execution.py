"""Executing notebooks: one or several at a time, with progress, and failures that say where and why."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from attnlib.bench import compiler
from attnlib.bench.files import write_atomically
from attnlib.bench.paths import ROOT
from attnlib.bench.setting import WARM
from attnlib.book import forked_kernel

SHOWN_LINES = 4
"""Lines of a failing cell's source in a report."""


@dataclass(frozen=True)
class Mode:
    """What notebooks are executed for: variables that their kernels get, whether a notebook goes on after a
    cell that failed, and whether kernels are forks of one process, see `forked_kernel`."""

    variables: Mapping[str, str] = field(default_factory=dict)
    goes_on: bool = False
    forked: bool = False


MEASURE = Mode()
REPLAY = Mode({"ATTNLIB_REPLAY": "1"}, forked=True)


@dataclass(frozen=True)
class Limits:
    """Seconds that a cell may take, and the moment, by `time.monotonic`, at which all has to be over."""

    cell: float = 900
    end: float = math.inf

    def left(self) -> float:
        """Seconds that a cell that starts now may take."""
        return min(self.cell, self.end - time.monotonic())


@dataclass(frozen=True)
class Result:
    """One executed notebook: its name, seconds, where the executed copy is, the failure ("" if none), and the
    seconds for which its kernel, and what that started, kept a core busy."""

    notebook: str
    seconds: float
    target: Path
    failure: str = ""
    cpu_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.failure


def execute(
    path: Path, target: Path, mode: Mode, limits: Limits, jobs: int = 1, failed: Path | None = None
) -> Result:
    """Execute the notebook at `path` from its first cell in a kernel of its own, and write it to `target`.

    The kernel runs in the notebook's folder. When a cell fails, what was executed so far goes to `failed`
    (default: `target`), so that a committed notebook is never replaced by a broken one. jobs: notebooks that
    are executed side by side.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    running: list[nbformat.NotebookNode] = []
    used: list[float] = []
    variables, manager = environment(mode, jobs), {}
    if mode.forked:
        variables[compiler.SERVER] = compiler.serve()
        forked_kernel.start_server(variables)
        manager = {"kernel_manager_class": forked_kernel.ForkedKernelManager}
    client = NotebookClient(
        notebook,
        timeout_func=lambda cell: max(1, math.ceil(limits.left())),
        allow_errors=mode.goes_on,
        startup_timeout=600,  # on a busy machine importing takes its time
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
        # no history file, and no warning on stderr about unencrypted TCP on the loopback device
        extra_arguments=["--HistoryManager.enabled=False", "--IPKernelApp.log_level=ERROR"],
        on_cell_start=lambda cell, cell_index: running.append(cell),
        on_cell_executed=lambda **_: used.append(_cpu_seconds(client.km.provisioner.pid)),
        **manager,
    )
    start, failure = time.monotonic(), ""
    try:
        client.execute(env=variables)
        failure = _first_error(path.stem, notebook)
    except CellExecutionError as error:
        failure = describe(path.stem, running[-1], f"{error.ename}: {error.evalue}")
    except CellTimeoutError:
        failure = describe(path.stem, running[-1], f"TimeoutError: {_overtime(limits)}")
    except DeadKernelError:
        failure = describe(path.stem, running[-1], "DeadKernelError: the kernel died (out of memory?)")
    except Exception as error:  # a kernel that does not start must not stop the other notebooks
        cell = running[-1] if running else None
        failure = describe(path.stem, cell, f"{type(error).__name__}: {error}")
    clean(notebook)
    where = (failed or target) if failure else target
    write_atomically(where, nbformat.writes(notebook) + "\n")
    return Result(path.stem, time.monotonic() - start, where, failure, max(used, default=0.0))


def _cpu_seconds(process: int) -> float:
    """Of a process and of its children that have ended, user and system."""
    times = psutil.Process(process).cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def _overtime(limits: Limits) -> str:
    if time.monotonic() >= limits.end:
        return "the time for all notebooks was over"
    return f"more than {limits.cell:.0f} s in one cell"


def _first_error(name: str, notebook: nbformat.NotebookNode) -> str:
    """The first failure of a notebook that went on after it; "" if there is none."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return describe(name, cell, f"{output.ename}: {output.evalue}")
    return ""


def describe(name: str, cell: nbformat.NotebookNode | None, error: str) -> str:
    """A failure as text: notebook, cell id, the first lines of the cell, the error."""
    if cell is None:
        return f"{name}: before its first cell\n    {error}"
    lines = cell.source.splitlines()
    shown = lines[:SHOWN_LINES] + (["..."] if len(lines) > SHOWN_LINES else [])
    indented = "\n".join(f"    | {line}" for line in shown)
    message = "\n".join(f"    {line}" for line in error.strip().splitlines())
    return f"{name}, cell {cell.id}:\n{indented}\n{message}"


def clean(notebook: nbformat.NotebookNode) -> None:
    """Remove what changes from run to run or from machine to machine, so that diffs show what changed."""
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook.metadata["kernelspec"] = kernel
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)


def execute_all(
    paths: Sequence[Path],
    target: Callable[[Path], Path],
    *,
    mode: Mode,
    jobs: int = 1,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    failed: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[Result]:
    """Execute notebooks, `jobs` at a time; a failure does not stop the others. Results are in order of
    `paths`; a notebook that could not begin in time has none.

    failed: folder for the copies of notebooks that failed.
    """
    done = 0

    def one(path: Path) -> Result | None:
        nonlocal done
        if limits.left() <= 0:
            say(f"{path.stem}: not begun, the time is over")
            return None
        if jobs == 1:
            say(f"[{done + 1}/{len(paths)}] {path.stem} ...")
        copy = failed / path.name if failed else None
        result = execute(path, target(path), mode, limits, jobs, copy)
        done += 1
        verdict = "ok" if result.ok else "FAILED"
        say(f"[{done}/{len(paths)}] {path.stem}: {verdict}, {result.seconds:.1f} s")
        if not result.ok:
            say(result.failure)
        return result

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        return [result for result in pool.map(one, paths) if result is not None]


def environment(mode: Mode, jobs: int = 1) -> dict[str, str]:
    """Variables of a kernel: this package on its path, the same output each time, cores shared among
    `jobs`."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
    env["PYTHONHASHSEED"] = "0"
    env["SOURCE_DATE_EPOCH"] = "0"
    env["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # a debugger's warning on stderr that is of no use here
    env.pop("TRITON_INTERPRET", None)  # attnlib.book.lesson decides
    env.pop(WARM, None)  # a notebook that is measured or replayed must not take it from the caller
    env |= mode.variables
    if jobs > 1:
        env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    return env
