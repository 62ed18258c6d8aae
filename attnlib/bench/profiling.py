"""Profile attention on this GPU: what each unit did during one call, by the hardware's counters.

    python -m attnlib.bench --profile          # the package and its peers at the shapes of the task
    python -m attnlib.bench --profile --impl 03_online_softmax,attnlib --shapes d128
    python -m attnlib.bench --profile --book   # every step of the book: figures/data/<gpu>/profile.json
    python -m attnlib.bench --profile --book --beyond   # only FP8 and decoding of it
    python -m attnlib.bench --profile --book --package  # no step: the package and its peers as they are today

Nsight Compute (ncu) reads the counters, where it is found and the driver allows it. One child process (see
`profile_target`) makes all calls; what it has to compile is compiled before, by several processes at a time.
Without counters torch.profiler (CUPTI), or else CUDA events, gives the times and resources of kernels; the
row's `tool` says which, and its `note` why.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlib.bench import counters, names, peers, records, roofline, sources, tables, timing
from attnlib.bench.counters import NoCounters
from attnlib.bench.paths import ROOT
from attnlib.bench.profile_target import BACKWARD, BEYOND
from attnlib.bench.setting import warming
from attnlib.bench.shapes import TASK, Shape

RECORD, TABLE, BEYOND_TABLE, PACKAGE_TABLE = "profile", "counters", "beyond", "package"
"""Where the book's rows are: tables of figures/data/<gpu>/profile.json. The second has FP8 and decoding, the
third the package and the peers alone. Chapters that predict from the counters of a day keep those, and the
third table has today's beside them."""

DECODED = [Shape(1, 32, 1, d, False, heads_kv=8, seqlen_k=(1 << 23) // d) for d in (64, 128, 256)]
"""One token of one sequence, whose keys and values have 268 MB."""

LAST_STEP = 18
"""The highest number of a chapter whose step is a forward pass of the ladder."""

MARKER = "profile_marker"
SECONDS, COMPILE_SECONDS = 200, 120
"""After so long a profiled run begins no new call, and rows that it did not reach say so; what is not
compiled ahead by then is compiled under the profiler."""

PLACES = (
    "/usr/local/cuda/bin/ncu",
    "/opt/nvidia/nsight-compute/*/ncu",
    "/usr/local/NVIDIA-Nsight-Compute*/ncu",
)

Job = dict[str, Any]


def steps() -> list[str]:
    """The book's steps that are forward passes: notebooks up to `LAST_STEP` with a kernel cell, or with cells
    that change the kernel of another one."""
    paths = sorted(sources.notebooks_dir().glob("[0-9][0-9]_*.ipynb"))
    paths = [path for path in paths if names.number(path.stem) <= LAST_STEP]
    tags = "kernel", "change"
    return [path.stem for path in paths if any(sources.cells_tagged(path, tag) for tag in tags)]


def implementations(direction: str) -> list[str]:
    """All that can be profiled: steps, package and peers."""
    if direction == "forward":
        return [*steps(), "attnlib-triton", "attnlib", *peers.PEERS]
    if direction in BEYOND:
        return ["22_fp8", "attnlib"] if direction == "fp8" else ["attnlib"]
    return [*BACKWARD, "20_portable", "21_hopper_backward", "attnlib", "flash", "cudnn", "fa3"]


def jobs_of(impls: Iterable[str], shapes: Iterable[Shape], direction: str = "forward") -> list[Job]:
    """One call of each implementation on each shape. ValueError for a name that is none of
    `implementations`."""
    impls, known = list(impls), implementations(direction)
    unknown = [impl for impl in impls if impl not in known]
    if unknown:
        raise ValueError(f"impl: unknown {', '.join(unknown)}; expected of {', '.join(known)}")
    return [{"impl": i, "shape": s.to_dict(), "pass": direction} for s in shapes for i in impls]


def method() -> dict[str, Any]:
    """How rows are made, in words, for a record."""
    return {
        "tool": "ncu --clock-control none, L2 flushed and the launch repeated for each group of counters",
        "call": "one call after one that warms up, inputs N(0, 1)",
        "percent": "of the unit's peak over the time of the launch; several launches weighted by time",
        "stalls": "shares of all cycles of resident warps; 'selected' is issuing",
        "flops": "4*B*H*Sq*Sk*D, halved when causal; a backward 2.5 times as many",
        "instructions_per_score": "32 * instructions of warps / scores that the mask keeps",
    }


# ---------------------------------------------------------------- the child processes


@functools.cache
def find_ncu() -> str | None:
    """The path of Nsight Compute's command line, or None."""
    places = [path for place in PLACES for path in sorted(Path("/").glob(place.lstrip("/")))]
    return shutil.which("ncu") or next((str(path) for path in places if os.access(path, os.X_OK)), None)


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def _run(command: Sequence[str], seconds: float) -> str:
    """What a command wrote, errors too; whatever its status. A command that takes longer is ended."""
    try:
        done = subprocess.run(command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", timeout=seconds)  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stdout or ""
        return said.decode(errors="replace") if isinstance(said, bytes) else said
    except OSError as error:
        return f"==ERROR== {error}\n"
    return done.stdout


class Child:
    """The files of a process that works through jobs, and its command."""

    def __init__(self, folder: Path, name: str, jobs: Sequence[Job], tool: str, seconds: float) -> None:
        self.jobs, self.results = folder / f"{name}.json", folder / f"{name}.jsonl"
        self.jobs.write_text(json.dumps(list(jobs)), encoding="utf-8")
        self.command = [sys.executable, "-m", "attnlib.bench.profile_target", str(self.jobs),
                        str(self.results), "--tool", tool, "--seconds", str(seconds)]  # fmt: skip


def lines_of(results: Path) -> list[dict[str, Any]]:
    """What a child noted so far, without a line that it was writing when it ended."""
    text = results.read_text(encoding="utf-8") if results.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def ncu_command(ncu: str, metrics: Sequence[str], target: Sequence[str]) -> list[str]:
    return [ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
            "--profile-from-start", "off", "--target-processes", "application-only",
            "--metrics", ",".join(metrics), *target]  # fmt: skip


def compile_ahead(jobs: Sequence[Job], folder: Path, seconds: float) -> None:
    """Fill the compilers' caches with what the jobs need, in several processes. Their failures are not
    looked at: the profiled process meets them again."""
    needed = [job for job in jobs if job["impl"] not in peers.PEERS or job["impl"] in ("flex", "tutorial")]
    count = min(len(needed), 8, max(1, (os.cpu_count() or 1) // 2))
    running = []
    for i in range(count if count > 1 else 0):
        child = Child(folder, f"compile{i}", needed[i::count], "none", seconds)
        running.append(subprocess.Popen(child.command, env=_environment(), stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL))  # fmt: skip
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---------------------------------------------------------------- rows


def _row(job: Job, tool: str, note: str = "") -> dict[str, Any]:
    row = {"impl": job["impl"], **job["shape"], "pass": job["pass"], "status": "ok", "tool": tool}
    return row | ({"note": note} if note else {})


def rows_of(
    jobs: Sequence[Job],
    lines: Sequence[dict[str, Any]],
    groups: Sequence[Sequence[dict]] | None,
    row: Mapping,
) -> list[dict[str, Any]]:
    """A row for each job, from what the child noted and, under ncu, the `groups` of launches in the order in
    which calls began; else launches are in the child's lines. `row` has the tool and its note.

    NoCounters when ncu's table and the child's notes do not fit together."""
    began = [line["index"] for line in lines if line.get("began")]
    ended = {line["index"]: line for line in lines if "status" in line}
    if groups is not None and len(groups) != len(began):
        raise NoCounters(f"No counters: {len(began)} calls were made, Nsight Compute profiled {len(groups)}.")
    launched = {index: line.get("kernels") or [] for index, line in ended.items()}
    launched |= dict(zip(began, groups, strict=True)) if groups is not None else {}
    rows = []
    for index, job in enumerate(jobs):
        made = _row(job, **row)
        line = ended.get(index, {"status": "failed", "reason": "the profiled process ended before it"})
        kernels = launched.get(index, [])
        if line["status"] == "ok" and not kernels:
            line = {"status": "failed", "reason": "no launch was seen"}
        made |= {key: line[key] for key in ("status", "reason") if key in line}
        if line["status"] == "ok":
            shape = Shape.from_dict(job["shape"])
            backward = job["pass"] == "backward"
            factor = roofline.backward_flops(shape) / roofline.flops(shape) if backward else 1
            made |= counters.fields_of(kernels, shape, factor)
        rows.append(made)
    return rows


def with_counters(jobs: Sequence[Job], folder: Path) -> list[dict[str, Any]]:
    """Rows by Nsight Compute. NoCounters, quickly, where it is missing or may not read any."""
    ncu = find_ncu()
    if ncu is None:
        raise NoCounters("No counters: Nsight Compute (ncu) was not found; it comes with the CUDA toolkit.")
    metrics = counters.known(counters.METRICS, _run([ncu, "--query-metrics"], 60))
    # Without a job the child has the marker alone profiled, which shows whether counters can be read.
    probe = Child(folder, "probe", [], "ncu", 60)
    counters.read_table(_run(ncu_command(ncu, metrics, probe.command), 120))
    compile_ahead(jobs, folder, COMPILE_SECONDS)
    child = Child(folder, "jobs", jobs, "ncu", SECONDS)
    said = _run(ncu_command(ncu, metrics, child.command), SECONDS + 120)
    (folder / "ncu.csv").write_text(said, encoding="utf-8")
    version = re.search(r"Version ([\d.]+)", _run([ncu, "--version"], 60))
    return rows_in(folder, f"Nsight Compute {version.group(1)}" if version else "Nsight Compute")


def rows_in(folder: Path, tool: str) -> list[dict[str, Any]]:
    """The rows of a run by Nsight Compute from its files, which `profile` can keep: so that what is derived
    from the counters can be changed without a GPU."""
    jobs = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
    kernels = counters.read_table((folder / "ncu.csv").read_text(encoding="utf-8"))
    return rows_of(jobs, lines_of(folder / "jobs.jsonl"), counters.groups(kernels, MARKER), {"tool": tool})


def without_counters(jobs: Sequence[Job], folder: Path, why: str) -> list[dict[str, Any]]:
    """Rows with times and resources alone; `why` is their note."""
    compile_ahead(jobs, folder, COMPILE_SECONDS)
    child = Child(folder, "jobs", jobs, "cupti", SECONDS)
    _run(child.command, SECONDS + 120)
    return rows_of(
        jobs, lines_of(child.results), None, {"tool": "torch.profiler or CUDA events", "note": why}
    )


def profile(
    jobs: Sequence[Job], need_counters: bool = False, keep: Path | None = None
) -> list[dict[str, Any]]:
    """A row for each job: impl, the fields of the shape, pass, tool, status and reason as `bench.measure`
    has them, and where the status is "ok" the fields of `counters.fields_of`. A field that was not counted is
    None, and `note` says why.
    In a process that warms the caches the jobs are compiled, and there are no rows.

    `need_counters`: NoCounters instead of rows without them. `keep`: a folder for ncu's own table and the
    notes of the processes. RuntimeError without a GPU."""
    timing.need_gpu()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if warming():
            compile_ahead(jobs, folder, COMPILE_SECONDS)
            return []
        try:
            return with_counters(jobs, folder)
        except NoCounters as error:
            if need_counters:
                raise
            return without_counters(jobs, folder, str(error))
        finally:
            if keep is not None:
                shutil.copytree(folder, keep, dirs_exist_ok=True)


def book_jobs() -> list[Job]:
    """Every step, the package and the peers at the shapes of the task, forward and backward."""
    return [job for direction in ("forward", "backward")
            for job in jobs_of(implementations(direction), TASK.values(), direction)]  # fmt: skip


def beyond_jobs() -> list[Job]:
    """FP8 at the shapes of the task, and decoding."""
    shapes = dict.fromkeys(BEYOND, TASK.values()) | {"decode": DECODED}
    return [job for direction in BEYOND
            for job in jobs_of(implementations(direction), shapes[direction], direction)]  # fmt: skip


def package_jobs() -> list[Job]:
    """Those of the book, and beyond it, without the kernels of chapters."""
    return [job for job in (*book_jobs(), *beyond_jobs()) if not job["impl"][0].isdigit()]


JOBS = {TABLE: book_jobs, BEYOND_TABLE: beyond_jobs, PACKAGE_TABLE: package_jobs}
"""What is profiled for each table of the record."""


def record(table: str = TABLE, keep: Path | None = None) -> records.Table:
    """Profile the jobs of a table into the book's record, or replay it, see `records.table`. NoCounters where
    this GPU's counters can't be read: the record then stays as it is."""
    return records.table(RECORD, table, lambda: profile(JOBS[table](), True, keep), method())


# ---------------------------------------------------------------- as text


COLUMNS = {
    "impl": "implementation", "head_dim": "D", "ms": "ms", "tensor_pct": "tensor %", "xu_pct": "XU %",
    "fma_pct": "FMA %", "alu_pct": "ALU %", "issue_pct": "issue %", "shared_pct": "shared %",
    "l2_pct": "L2 %", "dram_pct": "DRAM %", "l2_gb": "L2 GB", "dram_mb": "DRAM MB",
    "instructions_per_score": "instr/score", "waits": "warps, % of cycles", "remark": "remark",
}  # fmt: skip
FORMATS = {"ms": ".3f", "l2_gb": ".2f", "dram_mb": ".0f", "instructions_per_score": ".2f"}
FORMATS |= dict.fromkeys(counters.PERCENT, ".0f")


def format_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of `profile` as a Markdown table; columns that no row has a value for are left out."""
    shown = []
    for row in rows:
        line = dict(row)
        if row.get("time_us") is not None:
            line["ms"] = row["time_us"] / 1e3
        if row.get("l2_bytes") is not None:
            line["l2_gb"] = row["l2_bytes"] / 1e9
        if row.get("dram_read_bytes") is not None and row.get("dram_write_bytes") is not None:
            line["dram_mb"] = (row["dram_read_bytes"] + row["dram_write_bytes"]) / 1e6
        top = sorted((row.get("stalls") or {}).items(), key=lambda item: -item[1])[:3]
        line["waits"] = ", ".join(f"{reason} {100 * share:.0f}" for reason, share in top) or None
        line["impl"] += "" if row["pass"] == "forward" else f" ({row['pass']})"
        if row["status"] != "ok":
            line["remark"] = f"{row['status']}: {row.get('reason', '')}".rstrip(": ")
        shown.append(line)
    columns = {k: h for k, h in COLUMNS.items() if any(line.get(k) is not None for line in shown)}
    return tables.markdown(shown, columns, formats=FORMATS)
