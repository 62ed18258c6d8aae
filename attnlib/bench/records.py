"""Measurements with their provenance: written on a GPU, replayed without one.

One JSON file for each GPU and notebook, `<data>/<gpu>/<notebook>.json`: a header that says where the numbers
come from and named tables of rows. What is shown is always what is stored, floats rounded to 5 significant
digits included, so a replay shows the numbers of the run. Nothing is invented: a table or row that was not
recorded is a `RecordError`.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from attnlib.bench import power
from attnlib.bench.files import write_atomically
from attnlib.bench.paths import FIGURES, PACKAGE
from attnlib.bench.setting import warming
from attnlib.bench.shapes import Shape

SCHEMA = 1
REFERENCE_GPU = "nvidia-h200"
"""The folder that is replayed where the machine's own GPU has no record."""

_HEADER = ("gpu", "cuda", "torch", "triton", "cudnn", "commit", "date", "method")


class RecordError(LookupError):
    """A record, a table or a row that was asked for has not been measured, or a file is not a record."""


@dataclass(frozen=True)
class Table:
    """Rows of one measurement and where they come from. `gpu` is its name, `gpus` how many of them ran,
    `date` is ISO (2026-11-21), `commit` the code's where the record says it.

    `controls` are the rows that time an implementation a second time, for the noise (see `bench.verdict`):
    they have its name as `control_of`, and are no part of `rows`, so that no ladder or chart shows them."""

    name: str
    rows: list[dict[str, Any]]
    gpu: str
    date: str
    replayed: bool
    controls: list[dict[str, Any]] = field(default_factory=list)
    commit: str | None = None
    gpus: int = 1

    @classmethod
    def of(cls, name: str, rows: list[dict[str, Any]], origin: Mapping[str, Any], replayed: bool) -> Table:
        """The rows of a record, its control rows set apart; `origin` is the record's header."""
        shown = [row for row in rows if "control_of" not in row]
        controls = [row for row in rows if "control_of" in row]
        gpus = (origin.get("method") or {}).get("gpus", 1)
        where = origin["gpu"]["name"], origin["date"], replayed, controls, origin.get("commit"), gpus
        return cls(name, shown, *where)

    @property
    def source(self) -> str:
        """Where and when: "NVIDIA H200, 2026-11-21", or "2 NVIDIA H200, 2026-11-21"."""
        return f"{self.gpus} {self.gpu}, {self.date}" if self.gpus > 1 else f"{self.gpu}, {self.date}"

    @property
    def label(self) -> str:
        """Provenance for tables and charts: `source`, after "replayed from" in a replay.

        With ATTNLIB_PAPER=1 a replay is labeled as when it was measured; the paper's figures are drawn so.
        """
        return (
            f"replayed from {self.source}" if self.replayed and not _flag("ATTNLIB_PAPER") else self.source
        )

    def measured(self) -> Table:
        """Without the implementations of which no row is ok, such as a package that was not installed."""
        there = {row["impl"] for row in self.rows if row["status"] == "ok"}
        return replace(self, rows=[row for row in self.rows if row["impl"] in there])

    def select(self, shape: Shape | None = None, **equal: Any) -> list[dict[str, Any]]:
        """Rows of this shape, when given, whose values equal `equal`. An unknown column is a RecordError."""
        columns = {key for row in self.rows for key in row}
        unknown = sorted(set(equal) - columns)
        if unknown and self.rows:
            raise RecordError(f"table {self.name!r}: no column {unknown}; columns are {sorted(columns)}")
        rows = [row for row in self.rows if all(key in row and row[key] == equal[key] for key in equal)]
        return rows if shape is None else [row for row in rows if Shape.of_row(row) == shape]

    def one(self, shape: Shape | None = None, **equal: Any) -> dict[str, Any]:
        """The only row that `select` finds; a RecordError when there is none or more than one."""
        rows = self.select(shape, **equal)
        if len(rows) != 1:
            asked = [f"{key}={value!r}" for key, value in equal.items()]
            asked += [] if shape is None else [shape.label]
            found = f"expected 1 row with {', '.join(asked)}, found {len(rows)}"
            raise RecordError(f"table {self.name!r} ({self.label}): {found}")
        return rows[0]


def _flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def can_measure() -> bool:
    """True with a CUDA GPU, unless ATTNLIB_REPLAY=1 or this process warms the caches."""
    if _flag("ATTNLIB_REPLAY") or warming():
        return False
    import torch  # here, so that records can be read without torch

    return torch.cuda.is_available()


def data_dir() -> Path:
    """$ATTNLIB_DATA, or figures/data beside the package."""
    folder = os.environ.get("ATTNLIB_DATA")
    return Path(folder) if folder else FIGURES / "data"


def gpu_slug(name: str) -> str:
    """Folder of a GPU: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _own_gpu() -> str | None:
    """Folder of this machine's GPU; None without one."""
    import torch

    return gpu_slug(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def _path(gpu: str, notebook: str) -> Path:
    if not re.fullmatch(r"\w[\w.-]*", notebook):
        raise ValueError(f"notebook: expected a name such as '03_online_softmax', got {notebook!r}")
    return data_dir() / gpu / f"{notebook}.json"


def _commit() -> str | None:
    """$ATTNLIB_COMMIT where it is set, by who sent a copy to another machine; else the commit of the working
    tree that holds the package, with "-dirty" when the package differs from it, or None outside of git.

    Only the package counts: the notebooks and records change while they are measured.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(PACKAGE), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    if named := os.environ.get("ATTNLIB_COMMIT"):
        return named
    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            "-dirty" if git("status", "--porcelain", ".") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def provenance(method: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The header of a record made here and now: GPU, driver, power limit, versions, commit, date, method."""
    import torch

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    cuda = torch.cuda.is_available()
    return {
        "gpu": {"name": torch.cuda.get_device_name() if cuda else None, **power.device_info()},
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton_version,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "method": dict(method or {}),
    }


def rounded(value: Any) -> Any:
    """A value as a record holds it: floats of 5 significant digits (NaN and infinity become None), containers
    too.

    Scalars of torch and NumPy become Python's. TypeError for what JSON has no form for.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"record: expected str keys, got {key!r}")
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"record: expected numbers, strings, lists and dicts, got {type(value).__name__}")


def encode(value: Any, depth: int = 1) -> str:
    """JSON with sorted keys, indent 1 and each row of a table on its own line, which keeps diffs small."""
    pad, end = " " * depth, " " * (depth - 1)
    if isinstance(value, dict) and value:
        items = [f"{pad}{json.dumps(key)}: {encode(value[key], depth + 1)}" for key in sorted(value)]
        return "{\n" + ",\n".join(items) + f"\n{end}}}"
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        rows = [pad + json.dumps(row, sort_keys=True, allow_nan=False) for row in value]
        return "[\n" + ",\n".join(rows) + f"\n{end}]"
    return json.dumps(value, sort_keys=True, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write a record to `path` in one step, see `files.write_atomically`."""
    write_atomically(path, encode(value) + "\n")


def report_path(name: str, header: Mapping[str, Any], out: Path | None = None) -> Path:
    """Where a script's report of this name goes: to `out`, or beside the records of the header's GPU."""
    return out or data_dir() / gpu_slug(header["gpu"]["name"]) / f"{name}.json"


def write_report(path: Path, header: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    """Write a script's report as a record: `provenance` as its header, and its tables."""
    write_json(path, rounded({"schema": SCHEMA, **header, "tables": tables}))


def add_table(path: Path, header: Mapping[str, Any], name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one table of a script's report, beside those that are there, which keep what is said of them. So
    a run that is cut off leaves what it has measured."""
    record = _merged(read(path) if path.exists() else None, rounded(header), path.stem)
    record["tables"][name] = {"rows": rounded(rows)}
    write_json(path, record)


def read(path: Path) -> dict[str, Any]:
    """A record; RecordError when the file is missing, can't be read, is no JSON, has another schema, or lacks
    what every record has."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"no record {path}: run the notebook on a CUDA GPU, or set ATTNLIB_DATA") from None
    except OSError as error:
        raise RecordError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not JSON, not even text, or too deep
        raise RecordError(f"{path} is not JSON: {error}") from None
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema != SCHEMA:
        raise RecordError(f"{path}: expected schema {SCHEMA}, got {schema!r}")
    _check_origin(str(path), record)
    tables = record.get("tables")
    if not isinstance(tables, dict):
        raise RecordError(f"{path}: expected an object as 'tables', got {tables!r:.60}")
    for name, entry in tables.items():
        rows = entry.get("rows") if isinstance(entry, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise RecordError(f"{path}: expected objects as rows of table {name!r}, got {rows!r:.60}")
        _check_origin(f"{path}: table {name!r}", {**record, **entry})
    return record


def _check_origin(where: str, entry: dict[str, Any]) -> None:
    gpu, date = entry.get("gpu"), entry.get("date")
    if not isinstance(gpu, dict) or not isinstance(gpu.get("name"), str):
        raise RecordError(f"{where}: expected an object with a 'name' as 'gpu', got {gpu!r:.60}")
    if not isinstance(date, str):
        raise RecordError(f"{where}: expected a string as 'date', got {date!r:.60}")


def _merged(old: dict[str, Any] | None, new_header: dict[str, Any], notebook: str) -> dict[str, Any]:
    """A record with the new header and the old tables.

    An old table keeps its own date, commit, versions, ... where these differ from the new header, so that
    measuring one table again never changes what is said of the others.
    """
    record: dict[str, Any] = {"schema": SCHEMA, "notebook": notebook, **new_header, "tables": {}}
    for name, entry in (old or {"tables": {}})["tables"].items():
        differing = {key: old[key] for key in _HEADER if key in old and old[key] != new_header[key]}
        record["tables"][name] = {**differing, **entry}
    return record


def table(
    notebook: str,
    name: str,
    produce: Callable[[], list[dict[str, Any]]],
    method: Mapping[str, Any] | None = None,
    anywhere: bool = False,
) -> Table:
    """Measure a table on a GPU and store it, or replay it.

    On a GPU the rows of `produce()` become tables[name] of the notebook's record; its other tables stay.
    Without one (or with ATTNLIB_REPLAY=1) `produce` is not called and the stored rows come back, see `load`.
    A process that warms the caches calls `produce`, stores nothing, and has the stored rows.
    ATTNLIB_TABLES=NAME,NAME measures the tables of these names alone, and replays all others.
    `method` says how the rows were measured. anywhere: replay another GPU's where the reference GPU has
    none, see `load_anywhere`.
    """
    stored = partial(load_anywhere if anywhere else load, notebook, name)
    asked = os.environ.get("ATTNLIB_TABLES")
    if asked and name not in asked.split(","):
        return stored()
    if not can_measure():
        return _called_once(stored, name, produce) if warming() and _own_gpu() else stored()
    import torch

    path = _path(gpu_slug(torch.cuda.get_device_name()), notebook)
    path.parent.mkdir(parents=True, exist_ok=True)  # now: fail before measuring, not after it
    old = read(path) if path.exists() else None
    rows = produce()
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise TypeError(f"produce: expected a list of dicts, got {type(rows).__name__}")
    header = rounded(provenance(method))
    record = _merged(old, header, notebook)
    record["tables"][name] = {"rows": rounded(rows)}
    write_json(path, record)
    return Table.of(name, rounded(rows), header, replayed=False)


def _called_once(
    stored: Callable[[], Table], name: str, produce: Callable[[], list[dict[str, Any]]]
) -> Table:
    """Make the rows of a table, so that all their kernels are compiled, and show the recorded ones. Those
    just made, which were not timed by any rule, are shown only where none are recorded; nothing is stored.

    What fails here fails again where it is measured, and matters there.
    """
    try:
        rows, failure = produce(), None
    except Exception as error:
        rows, failure = [], error
    try:
        return stored()
    except RecordError:
        if failure is not None:
            raise failure from None
        return Table.of(name, rounded(rows), rounded(provenance()), replayed=True)


def load(notebook: str, name: str, gpu: str | None = None) -> Table:
    """A stored table: of `gpu` (a folder name) when given, else of this machine's GPU if it has one, else the
    reference GPU's. RecordError when it was not recorded."""
    if gpu is None:
        own, gpu = _own_gpu(), REFERENCE_GPU
        if own is not None and own != gpu and _path(own, notebook).exists():
            if name in read(_path(own, notebook))["tables"]:
                return load(notebook, name, own)
    path = _path(gpu, notebook)
    record = read(path)
    tables = record["tables"]
    if name not in tables:
        raise RecordError(f"{path} has no table {name!r}; tables: {', '.join(sorted(tables)) or 'none'}")
    entry = {**record, **tables[name]}
    return Table.of(name, entry["rows"], entry, replayed=True)


def load_anywhere(notebook: str, name: str, gpu: str | None = None) -> Table:
    """A stored table: as `load` finds it, else that of another GPU, the latest of several. Its label says
    which. For tables that are shown as they are: nothing divides one GPU's numbers by another's."""
    try:
        return load(notebook, name, gpu)
    except RecordError:
        if not (found := of_all_gpus(notebook, name)):
            raise
        return found[0]


def of_all_gpus(notebook: str, name: str) -> list[Table]:
    """The stored tables of this name, of one GPU each, the latest first."""
    folders = [path.parent.name for path in sorted(data_dir().glob(f"*/{notebook}.json"))
               if name in read(path)["tables"]]  # fmt: skip
    return sorted((load(notebook, name, gpu) for gpu in folders), key=lambda table: table.date, reverse=True)
