"""The command line of `python -m attnlib.bench`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attnlib.bench import counters, harness, ladder, peers, profiling, records, tables
from attnlib.bench.oracle import INPUTS
from attnlib.bench.setting import BOOK
from attnlib.bench.shapes import DTYPES, TASK, Shape

OURS = ("attnlib", "attnlib-triton")
"""What `attnlib.attention` chooses by itself, and the portable kernel."""
DEFAULT_IMPLS = "attnlib,flash,cudnn,flex,fa3,tutorial"
BACKWARD_IMPLS = "attnlib,flash,cudnn,fa3"


COLUMNS = {
    "ms": ("ms", "{:.4f}"),
    "spread": ("p20-p80", "{}"),
    "tflops": ("TFLOP/s", "{:.1f}"),
    "max_error": ("max err", "{:.1e}"),
    "budget_max": ("budget", "{:.1e}"),
    "registers": ("regs", "{:.0f}"),
    "spills": ("spills", "{:.0f}"),
    "sm_mhz": ("MHz", "{:.0f}"),
    "remark": ("", "{}"),
}
"""Key of a row -> its header and format in the table of `format_rows`."""


def format_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows of `collect` as a text table."""
    import pandas as pd

    shown = []
    for row in rows:
        timed = row.get("ms") is not None
        remark = "" if row["status"] == "ok" else f"{row['status']}: {row.get('reason', '')}".rstrip(": ")
        spread = f"{row['ms_p20']:.4f}-{row['ms_p80']:.4f}" if timed else None
        shown.append({**row, "shape": Shape.of_row(row).label, "spread": spread, "remark": remark})
    frame = pd.DataFrame(shown).set_index(["shape", "impl"]).reindex(columns=list(COLUMNS))
    for key, (_, form) in COLUMNS.items():
        frame[key] = frame[key].map(form.format, na_action="ignore")
    frame.columns = [head for head, _ in COLUMNS.values()]
    return frame.to_string(na_rep="-", sparsify=False)


def format_ladders(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of `collect` as Markdown, causal and dense: TFLOP/s for each D, % of the yardstick, the error."""
    parts = []
    for causal in (True, False):
        if any(row["causal"] == causal for row in rows):
            lines, columns = ladder.ladder_rows(rows, causal=causal)
            shown = {key: head for key, head in columns.items() if key not in ("ms", "of_peak")}
            parts += ["Causal" if causal else "Dense", tables.markdown(lines, shown)]
    return "\n\n".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attnlib.bench", description="Time attention on this GPU."
    )
    parser.add_argument("--shapes", help=f"shapes of the task, of {','.join(TASK)} (default: all)")
    for name in ("batch", "heads", "seqlen", "head-dim"):
        parser.add_argument(f"--{name}", type=int, help="one shape of your own: give all four")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", dest="causal", action="store_true", default=True, help="(default)")
    mask.add_argument("--dense", dest="causal", action="store_false")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float16")
    parser.add_argument(
        "--impl",
        help=f"of {','.join([*OURS, *peers.PEERS])} (default: {DEFAULT_IMPLS}); with --profile also steps",
    )
    parser.add_argument("--rounds", type=int, default=BOOK.rounds, help="(default: %(default)s)")
    parser.add_argument("--inputs", choices=INPUTS, default="normal")
    parser.add_argument("--json", type=Path, help="write the rows and their provenance to this file")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="the ladder: attnlib and every peer at the shapes of the task, causal and dense",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="read the hardware's counters during one call instead of timing many; steps of the book too",
    )
    parser.add_argument("--backward", action="store_true", help="with --profile: the backward passes")
    parser.add_argument(
        "--book",
        action="store_true",
        help="with --profile: all steps, the package and the peers at the task's shapes, into figures/data",
    )
    parts = parser.add_mutually_exclusive_group()
    about = {
        profiling.BEYOND_TABLE: "FP8, its pass over values, and decoding",
        profiling.PACKAGE_TABLE: "the package and the peers",
    }
    for table, what in about.items():
        how = {"dest": "part", "action": "store_const", "const": table}
        parts.add_argument(f"--{table}", **how, help=f"with --profile: {what} alone")
    parser.add_argument("--keep", type=Path, help="with --profile: a folder for the profiler's own table")
    parser.add_argument(
        "--list", action="store_true", help="list the peers and whether they can be used, and exit"
    )
    return parser


def _shapes_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Shape]:
    own = [args.batch, args.heads, args.seqlen, args.head_dim]
    if any(value is not None for value in own):
        if args.shapes or None in own:
            parser.error("give --batch, --heads, --seqlen and --head-dim together and without --shapes")
        try:
            return [Shape(*own, args.causal, args.dtype)]
        except ValueError as error:
            parser.error(str(error))
    names = args.shapes.split(",") if args.shapes else list(TASK)
    unknown = [name for name in names if name not in TASK]
    if unknown:
        parser.error(f"--shapes: unknown {', '.join(unknown)}; expected of {', '.join(TASK)}")
    return [dataclasses.replace(TASK[name], causal=args.causal, dtype=args.dtype) for name in names]


def _names_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    if args.peers:
        if args.impl or args.batch is not None or not args.causal:
            parser.error("--peers takes every implementation, causal and dense, at the shapes of the task")
        return ["attnlib", *peers.PEERS]
    names = (args.impl or DEFAULT_IMPLS).split(",")
    unknown = [name for name in names if name not in (*OURS, *peers.PEERS)]
    if unknown:
        parser.error(f"--impl: unknown {', '.join(unknown)}; expected of {', '.join([*OURS, *peers.PEERS])}")
    return names


def _attnlib(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sm_scale: float
) -> torch.Tensor:
    from attnlib.api import attention

    return attention(q, k, v, causal=causal, sm_scale=sm_scale)


def _portable(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sm_scale: float
) -> torch.Tensor:
    from attnlib.api import attention

    return attention(q, k, v, causal=causal, sm_scale=sm_scale, impl="triton")


def _profile(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """`--profile`: counters as a table; with `--json` also in a file, with `--book` in the book's record."""
    if args.peers or args.inputs != "normal" or args.rounds != BOOK.rounds:
        parser.error("--peers, --inputs and --rounds do not go with --profile")
    chosen = args.impl or args.backward or args.shapes or args.batch is not None or not args.causal
    chosen = chosen or args.dtype != "float16"
    if (args.book or args.part) and chosen:
        parser.error("--book, --beyond and --package profile everything at shapes of their own")
    impls = (args.impl or (BACKWARD_IMPLS if args.backward else DEFAULT_IMPLS)).split(",")
    direction = "backward" if args.backward else "forward"
    try:
        jobs = profiling.jobs_of(impls, _shapes_of(args, parser), direction)
        jobs = profiling.JOBS[args.part]() if args.part else jobs
    except ValueError as error:
        parser.error(f"--{error}")
    if not torch.cuda.is_available():
        print(
            "attnlib.bench: profiling needs a CUDA GPU; recorded counters are in figures/data",
            file=sys.stderr,
        )
        return 2
    try:
        rows = _recorded(args) if args.book else profiling.profile(jobs, keep=args.keep)
    except counters.NoCounters as error:
        print(f"{error} The book's record stays as it is.")
        return 0
    if args.json:
        _write(args.json, records.provenance(profiling.method()), profiling.TABLE, rows)
    print(profiling.format_rows(rows))
    for note in dict.fromkeys(row["note"] for row in rows if row.get("note")):
        print(f"\n{note}")
    return 1 if any(row["impl"] in OURS and row["status"] != "ok" for row in rows) else 0


def _recorded(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The book's rows, measured: all, or with `--beyond` or `--package` those alone."""
    if args.part:
        return profiling.record(args.part, args.keep).rows
    rows = profiling.record(keep=args.keep).rows
    return [*rows, *profiling.record(profiling.BEYOND_TABLE, None if rows else args.keep).rows]


def _write(path: Path, header: Mapping[str, Any], table: str, rows: Sequence[Mapping[str, Any]]) -> None:
    records.write_report(path, header, {table: {"rows": rows}})


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Status 0; 1 when attnlib is wrong or failed; 2 for bad arguments, or without a GPU or
    pandas."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.list:
        for peer in peers.PEERS.values():
            print(f"{peer.name:9s} {peer.about}: {peer.available() or 'available'}")
        return 0
    if args.profile:
        return _profile(args, parser)
    if args.backward or args.book or args.part or args.keep:
        parser.error("--backward, --book, --beyond, --package and --keep go with --profile")
    names = _names_of(args, parser)
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {args.rounds}")
    shapes = _shapes_of(args, parser)
    if args.peers:
        shapes += [dataclasses.replace(shape, causal=False) for shape in shapes]
    if find_spec("pandas") is None:
        print("attnlib.bench: its tables need pandas: pip install pandas", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(
            "attnlib.bench: timing needs a CUDA GPU; recorded measurements are in figures/data",
            file=sys.stderr,
        )
        return 2
    ours = {"attnlib": _attnlib, "attnlib-triton": _portable}
    implementations = {name: ours.get(name) for name in names}
    options = {"setting": dataclasses.replace(BOOK, rounds=args.rounds), "kind": args.inputs}
    header = records.provenance(harness.method(**options))
    gpu = header["gpu"]
    print(f"{gpu['name']}, driver {gpu['driver']}, torch {header['torch']}, triton {header['triton']}")
    rows = harness.collect(implementations, shapes, **options)
    print(format_rows(rows))
    if args.peers:
        print(f"\n{format_ladders(rows)}")
    if args.json:
        _write(args.json, header, "bench", rows)
    return 1 if any(row["impl"] in OURS and row["status"] != "ok" for row in rows) else 0
