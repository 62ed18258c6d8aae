"""Executing notebooks: one or several at a time, with progress, and failures that say where and why."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from attnlib.bench.files import write_atomically
from attnlib.bench.paths import ROOT

SHOWN_LINES = 4
"""Lines of a failing cell's source in a report."""


@dataclass(frozen=True)
class Result:
    """One executed notebook: its name, seconds, where the executed copy is, and the failure ("" if none)."""

    notebook: str
    seconds: float
    target: Path
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure


def execute(
    path: Path, target: Path, env: dict[str, str], timeout: float, failed: Path | None = None
) -> Result:
    """Execute the notebook at `path` from its first cell in a kernel of its own, and write it to `target`.

    The kernel runs in the notebook's folder. When a cell fails, what was executed so far goes to `failed`
    (default: `target`), so that a committed notebook is never replaced by a broken one. timeout: seconds
    a cell may take.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    running: list[nbformat.NotebookNode] = []
    client = NotebookClient(
        notebook,
        timeout=timeout,
        startup_timeout=600,  # on a busy machine importing takes its time
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
        # no history file, and no warning on stderr about unencrypted TCP on the loopback device
        extra_arguments=["--HistoryManager.enabled=False", "--IPKernelApp.log_level=ERROR"],
        on_cell_start=lambda cell, cell_index: running.append(cell),
    )
    start, failure = time.monotonic(), ""
    try:
        client.execute(env=env)
    except CellExecutionError as error:
        failure = describe(path.stem, running[-1], f"{error.ename}: {error.evalue}")
    except CellTimeoutError:
        failure = describe(path.stem, running[-1], f"TimeoutError: more than {timeout:.0f} s in one cell")
    except DeadKernelError:
        failure = describe(path.stem, running[-1], "DeadKernelError: the kernel died (out of memory?)")
    except Exception as error:  # a kernel that does not start must not stop the other notebooks
        cell = running[-1] if running else None
        failure = describe(path.stem, cell, f"{type(error).__name__}: {error}")
    clean(notebook)
    where = (failed or target) if failure else target
    write_atomically(where, nbformat.writes(notebook) + "\n")
    return Result(path.stem, time.monotonic() - start, where, failure)


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
    replay: bool,
    jobs: int = 1,
    timeout: float = 900,
    failed: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[Result]:
    """Execute notebooks, `jobs` at a time; a failure does not stop the others. Results are in order of
    `paths`.

    replay: no measuring, even on a GPU. failed: folder for the copies of notebooks that failed.
    """
    env = environment(replay, jobs)
    done = 0

    def one(path: Path) -> Result:
        nonlocal done
        if jobs == 1:
            say(f"[{done + 1}/{len(paths)}] {path.stem} ...")
        result = execute(path, target(path), env, timeout, failed / path.name if failed else None)
        done += 1
        verdict = "ok" if result.ok else "FAILED"
        say(f"[{done}/{len(paths)}] {path.stem}: {verdict}, {result.seconds:.1f} s")
        if not result.ok:
            say(result.failure)
        return result

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        return list(pool.map(one, paths))


def environment(replay: bool, jobs: int = 1) -> dict[str, str]:
    """Variables of a kernel: this package on its path, the same output each time, cores shared among
    `jobs`."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
    env["PYTHONHASHSEED"] = "0"
    env["SOURCE_DATE_EPOCH"] = "0"
    env["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # a debugger's warning on stderr that is of no use here
    env.pop("TRITON_INTERPRET", None)  # attnlib.book.lesson decides
    if replay:
        env["ATTNLIB_REPLAY"] = "1"
    if jobs > 1:
        env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    return env
