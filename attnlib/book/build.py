"""The book's workshop: execute the notebooks, write the figures and README's tables, check what is committed.

python -m attnlib.book run [03 ...]      execute in place on a CUDA GPU: measure, rewrite outputs, records;
                                         --minutes N stops in time and says which notebooks are left
python -m attnlib.book replay [03 ...]   execute copies in build/notebooks, measurements replayed
python -m attnlib.book figures           NAME.svg and NAME.pdf of each published figure, with nbconvert
python -m attnlib.book readme            the tables between README's markers, from the records
python -m attnlib.book check             notebook hygiene, and README against the records
python -m attnlib.book card STEP         a step's profile card as SVG and PDF, from the record of counters
"""

import argparse
import base64
import os
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from attnlib.bench.paths import FIGURES, NOTEBOOKS, ROOT
from attnlib.book import chapters as book_chapters
from attnlib.book import hygiene

BUILD = ROOT / "build"
README = ROOT / "README.md"
LADDER, SUSTAINED = ("19_record", "ladder"), ("19_record", "sustained")
TEACHING = ("15_teaching", "ladder")
HOST, STEP = ("host_time", "backward"), ("host_time", "step")
DECODE = ("decode", "calls")
FP8 = ("fp8", "attention")
MONARCH, MONARCH_TOKENS = ("monarch", "sweep"), (1024, 4096, 16384, 65536)
DISTR, DISTR_TOKENS = ("distr", "attention"), (4096, 16384)
DISTRIBUTED = "distributed"
"""Records and tables that README shows."""


def chapters(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """The chapter notebooks of a folder in order, or those named ("03", "03_online_softmax"); ValueError if
    one is not there."""
    found = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not found:
        raise ValueError(f"notebooks: expected NN_slug.ipynb files in {folder}, found none")
    if not names:
        return found
    chosen = []
    for name in names:
        stem = Path(name).stem
        matching = [path for path in found if stem in (path.stem, path.stem[:2])]
        if not matching:
            raise ValueError(f"notebook: expected one of {', '.join(p.stem for p in found)}, got {name}")
        chosen += matching
    return sorted(set(chosen))


def run(
    names: Sequence[str] = (),
    folder: Path = NOTEBOOKS,
    out: Path | None = None,
    timeout: float = 900,
    minutes: float | None = None,
    warmed: bool = True,
) -> bool:
    """Execute notebooks one after the other on the GPU, in place or into `out`; True if all went through.

    A notebook that fails stays as it was; what it got to is in build/failed. minutes: after them none begins
    and the one that runs has failed; the notebooks that are left are named, for another run. warmed: compile
    what they time before, side by side, see `attnlib.book.warm`.
    """
    from attnlib.bench.records import can_measure
    from attnlib.book.execution import MEASURE, Limits, execute_all
    from attnlib.book.warm import warm

    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes: expected more than 0, got {minutes}")
    if out is None and not can_measure():
        raise ValueError(
            "run: expected a CUDA GPU and no ATTNLIB_REPLAY; use `replay`, or --out DIR to execute copies"
        )
    paths = chapters(folder, names)
    limits = Limits(timeout) if minutes is None else Limits(timeout, time.monotonic() + 60 * minutes)
    if warmed and can_measure():
        warm(paths, limits)
    results = execute_all(
        paths,
        lambda path: (out or folder) / path.name,
        mode=MEASURE,
        limits=limits,
        failed=None if out else BUILD / "failed",
    )
    good = _summary(results)
    done = {result.notebook for result in results if result.ok}
    if left := [path.stem for path in paths if path.stem not in done]:
        print(f"left: {' '.join(left)}")
    return good and not left


def replay(
    names: Sequence[str] = (),
    folder: Path = NOTEBOOKS,
    out: Path = BUILD / "notebooks",
    jobs: int | None = None,
    timeout: float = 900,
) -> bool:
    """Execute notebooks into `out` with replayed measurements, two at a time without a GPU; True if all
    went through."""
    from attnlib.book.execution import REPLAY, Limits, execute_all

    paths = chapters(folder, names)
    jobs = jobs or default_jobs()
    limits = Limits(timeout)
    return _summary(execute_all(paths, lambda path: out / path.name, mode=REPLAY, jobs=jobs, limits=limits))


def default_jobs() -> int:
    """Notebooks to execute at a time: one on a GPU, which they would share, else two if there are the
    cores."""
    import torch

    return 1 if torch.cuda.is_available() else min(2, os.cpu_count() or 1)


def _summary(results: Sequence) -> bool:
    failed = [result for result in results if not result.ok]
    seconds = sum(result.seconds for result in results)
    print(f"{len(results) - len(failed)} of {len(results)} notebooks executed, {seconds:.0f} s of kernels")
    if failed:
        print(
            "\nFAILED\n"
            + "\n\n".join(f"{r.failure}\n    executed so far: {_short(r.target)}" for r in failed)
        )
    return not failed


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def figures(source: Path = NOTEBOOKS, out: Path = FIGURES, names: Sequence[str] = ()) -> list[Path]:
    """Write each published figure of executed notebooks as NAME.svg and NAME.pdf; returns the files.

    Without `names`, figures in `out` that no notebook publishes any more are removed. A name that two
    figures share is a ValueError."""
    content: dict[str, tuple[str, bytes]] = {}
    for path in chapters(source, names):
        for file, data in published(path).items():
            if file in content:
                raise ValueError(f"figures: {file} is published by {content[file][0]} and by {path.stem}")
            content[file] = (path.stem, data)
    out.mkdir(parents=True, exist_ok=True)
    for file, (_, data) in content.items():
        (out / file).write_bytes(data)
    if not names:
        for old in [*out.glob("*.svg"), *out.glob("*.pdf")]:
            if old.name not in content:
                old.unlink()
    return [out / file for file in sorted(content)]


def published(notebook: Path) -> dict[str, bytes]:
    """File name -> content of the figures of one executed notebook, as nbconvert extracts them."""
    import nbformat
    from nbconvert.preprocessors import ExtractOutputPreprocessor

    content = nbformat.read(notebook, as_version=4)
    for cell in content.cells:  # only what was published under a name
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("metadata", {}).get("filename")]
    extract = ExtractOutputPreprocessor(extract_output_types={"image/svg+xml", "application/pdf"})
    try:
        _, resources = extract.preprocess(content, {"outputs": {}, "unique_key": notebook.stem})
    except ValueError as error:
        raise ValueError(f"{notebook.stem}: {error}") from None
    return resources["outputs"]


def ladder_table(record: tuple[str, str] = LADDER) -> str:
    """A ladder of README: a record's, causal fp16 at the task's shapes, with its provenance."""
    from attnlib.bench import ladder, records, tables

    table = records.load(*record, gpu=records.REFERENCE_GPU)
    rows, columns = ladder.ladder_rows(table.rows, label=book_chapters.label)
    return f"{tables.markdown(rows, columns)}\n\n*{table.gpu}, {table.date}*"


def modes_table() -> str:
    """README's burst and sustained speeds at the task's shapes, with the clock, and both verdicts on FA3."""
    from attnlib.bench import modes, records, shapes, tables

    burst, sustained = (records.load(*where, gpu=records.REFERENCE_GPU) for where in (LADDER, SUSTAINED))
    label = book_chapters.label
    task = [shape for shape in shapes.TASK.values() if burst.select(shape) and sustained.select(shape)]
    rows, columns = modes.mode_rows(burst, sustained, task, label=label)
    dates = " and ".join(dict.fromkeys((burst.date, sustained.date)))
    return f"{tables.markdown(rows, columns)}\n\n*{burst.gpu}, {dates}*"


def host_table() -> str:
    """README's tables of host time, of the record of `tests/gpu/time_host.py`: backward passes, and the step
    of a model that keeps the GPU waiting."""
    from attnlib.bench import records, tables

    table = records.load(*HOST, gpu=records.REFERENCE_GPU)
    columns = {
        "call": "Backward pass through autograd, bf16", "kernels_us": "kernels alone, µs",
        "attnlib_us": "attnlib, µs", "cudnn_us": "cuDNN, µs", "of_cudnn": "attnlib / cuDNN",
    }  # fmt: skip
    forms = {key: ".2f" if key == "of_cudnn" else ".0f" for key in columns if key != "call"}
    steps = [
        {
            "step": "{layers} layers, {tokens} tokens, batch {batch}".format(**row),
            **{impl: f"{row[f'{impl}_us'] / 1000:.1f}" for impl in ("attnlib", "sdpa")},
            "of_sdpa": _interval(row, "attnlib_of_sdpa"),
            "control": _interval(row, "control_of_sdpa"),
        }
        for row in records.load(*STEP, gpu=records.REFERENCE_GPU).rows
    ]
    names = {
        "step": "Step of a model, bf16", "attnlib": "attnlib, ms", "sdpa": "SDPA, ms",
        "of_sdpa": "attnlib / SDPA (99 of 100)", "control": "SDPA / SDPA",
    }  # fmt: skip
    parts = tables.markdown(table.rows, columns, formats=forms), tables.markdown(steps, names)
    return "\n\n".join([*parts, f"*{table.gpu}, {table.date}*"])


def _interval(row: dict, field: str) -> str:
    """A median and where 99 of 100 repetitions would have it."""
    return "{:.3f} ({:.3f} to {:.3f})".format(*(row[field + end] for end in ("", "_low", "_high")))


def decode_table() -> str:
    """README's table of decoding: GB/s of keys and values in the record of `tests/gpu/time_decode.py`."""
    from attnlib.bench import records, tables

    table = records.load(*DECODE, gpu=records.REFERENCE_GPU)
    impls = {
        "attnlib": "attnlib", "fa3": "FA3", "cudnn": "cuDNN", "flashinfer": "FlashInfer",
        "flashinfer, xqa": "its XQA", "copy": "device copy",
    }  # fmt: skip
    rows: dict[str, dict[str, str | None]] = {}
    for row in table.rows:
        if row["impl"] in impls and row["status"] == "ok":
            cells = rows.setdefault(row["call"], {"call": row["call"], **dict.fromkeys(impls)})
            cells[row["impl"]] = f"{row['gb_per_s']:.0f}"
    columns = {"call": "Decoding, fp16, GB/s of keys and values", **impls}
    return f"{tables.markdown(list(rows.values()), columns)}\n\n*{table.gpu}, {table.date}*"


def fp8_table() -> str:
    """README's table of FP8: speeds, and errors against fp64, in the record of `tests/gpu/time_fp8.py`."""
    from attnlib.bench import records, tables
    from attnlib.bench.shapes import Shape

    table = records.load(*FP8, gpu=records.REFERENCE_GPU)
    impls = {
        "attnlib fp8": "attnlib FP8", "attnlib fp8, with the pass": "and quantizing", "fa3 fp8": "FA3 FP8",
        "attnlib bf16": "attnlib bf16", "fa3 bf16": "FA3 bf16",
    }  # fmt: skip
    columns = {"call": "FP8 (e4m3), TFLOP/s", **impls}
    columns |= {"error of attnlib fp8": "RMS error, FP8", "error of attnlib bf16": "bf16"}
    rows: dict[str, dict[str, str | None]] = {}
    for row in table.rows:
        if row["status"] != "ok" or row["impl"] not in impls:
            continue
        shape = Shape(*(row[name] for name in ("batch", "heads", "seqlen", "head_dim", "causal", "dtype")))
        cells = rows.setdefault(shape.label, dict.fromkeys(columns) | {"call": shape.label})
        cells[row["impl"]] = f"{row['tflops']:.0f}"
        if "error of " + row["impl"] in columns:
            cells["error of " + row["impl"]] = f"{row['rms_error']:.1e}"
    return f"{tables.markdown(list(rows.values()), columns)}\n\n*{table.gpu}, {table.date}*"


def approximate_tables() -> str:
    """README's tables of approximations beside dense attention, of the records of `tests/gpu/time_monarch.py`
    and `tests/gpu/time_distr.py`: times, and of DistrAttention the relative error of the output."""
    from attnlib.bench import records, tables
    from attnlib.bench.shapes import Shape

    parts = []
    monarch = {
        "monarch, 1 rounds": "1 round", "monarch, 2 rounds": "2 rounds", "monarch, 3 rounds": "3 rounds",
        "attnlib": "attnlib, dense", "cudnn": "cuDNN, dense",
    }  # fmt: skip
    distr = {
        "distr G2": "groups of 2", "distr G4": "groups of 4", "attnlib": "attnlib",
        "attnlib fp8, with the pass": "FP8 and quantizing",
    }  # fmt: skip
    for title, where, lengths, impls in (
        ("MonarchAttention, ms", MONARCH, MONARCH_TOKENS, monarch),
        ("DistrAttention, ms", DISTR, DISTR_TOKENS, distr),
    ):
        table = records.load(*where, gpu=records.REFERENCE_GPU)
        columns = {"call": title, **impls}
        if where == DISTR:
            columns |= {f"error of {impl}": f"error, {impls[impl]}" for impl in impls if impl != "distr G4"}
        rows: dict[str, dict[str, str | None]] = {}
        for row in table.rows:
            shape = Shape.of_row(row)
            wanted = row["impl"] in impls and shape.seqlen in lengths and shape.causal == (where == DISTR)
            if not wanted or row["status"] != "ok":
                continue
            cells = rows.setdefault(shape.label, dict.fromkeys(columns) | {"call": shape.label})
            cells[row["impl"]] = f"{row['ms']:.3f}"
            if "error of " + row["impl"] in columns:
                cells["error of " + row["impl"]] = f"{row['relative_error']:.3f}"
        parts.append(f"{tables.markdown(list(rows.values()), columns)}\n\n*{table.gpu}, {table.date}*")
    return "\n\n".join(parts)


def distributed_table() -> str:
    """README's table of two GPUs: speed-ups over one, in the record of `tests/gpu/time_distributed.py`."""
    from attnlib.bench import records, tables

    impls = {
        "attnlib": "attnlib", "attnlib (control)": "the same again", "attnlib, ulysses": "its Ulysses",
        "ring-flash-attn, FA3, zigzag": "ring-flash-attn, FA3",
        "torch context_parallel, cuDNN, alltoall": "PyTorch, cuDNN",
    }  # fmt: skip
    columns = {"call": "Two GPUs, bf16 B1 H16 D128", "one": "one GPU, ms", **impls}
    lines: dict[tuple[str, str], dict[str, str | None]] = {}
    for which in ("forward", "backward"):
        table = records.load(DISTRIBUTED, which, gpu=records.REFERENCE_GPU)
        for row in (row for row in table.rows + table.controls if row["status"] == "ok"):
            cells = lines.setdefault((row["call"], which), dict.fromkeys(columns))
            cells["call"] = f"{row['call']}, {which}"
            if row["gpus"] == 1:
                cells["one"] = f"{row['ms']:.4g}"
            elif row["impl"] in impls:
                cells[row["impl"]] = f"{row['speedup']:.2f}x"
    return f"{tables.markdown(list(lines.values()), columns)}\n\n*{table.gpu}, {table.date}*"


SECTIONS = {
    "ladder": ladder_table, "modes": modes_table, "teaching": partial(ladder_table, TEACHING),
    "host": host_table, "decode": decode_table, "fp8": fp8_table, "approximate": approximate_tables,
    "distributed": distributed_table,
}  # fmt: skip
"""What README shows between `<!-- name -->` and `<!-- /name -->`."""


def with_sections(text: str) -> str:
    """README's text with the present tables between their markers; ValueError unless there is one of each."""
    for name, make in SECTIONS.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
            raise ValueError(f"README: expected {start} and then {end}, once each")
        table = make()
        pattern = re.escape(start) + r".*?" + re.escape(end)
        text = re.sub(pattern, lambda _: f"{start}\n{table}\n{end}", text, flags=re.DOTALL)  # noqa: B023
    return text


def readme(path: Path = README) -> bool:
    """Rewrite the tables of README from the records; True if one was different."""
    old = path.read_text(encoding="utf-8")
    new = with_sections(old)
    if new != old:
        path.write_text(new, encoding="utf-8")
    return new != old


def check(names: Sequence[str] = (), folder: Path = NOTEBOOKS, path: Path = README) -> list[str]:
    """What is wrong with the notebooks and README's tables, one line each; empty if nothing is."""
    problems = [str(problem) for notebook in chapters(folder, names) for problem in hygiene.check(notebook)]
    if not names and path.exists():
        try:
            old = path.read_text(encoding="utf-8")
            if with_sections(old) != old:
                problems.append("README: a table differs from the records: python -m attnlib.book readme")
        except (ValueError, LookupError) as error:
            problems.append(f"README: {error}")
    return problems


def card(args: argparse.Namespace) -> list[Path]:
    """Write a profile card as SVG and PDF; returns the files."""
    from attnlib.bench import profiling, records
    from attnlib.book import plotting
    from attnlib.book.card import alt_text, profile_card

    if args.record:
        record = records.read(args.record)
        rows = record["tables"].get(profiling.TABLE, {}).get("rows", [])
        table = records.Table(profiling.TABLE, rows, record["gpu"]["name"], record["date"], replayed=False)
    else:
        table = records.load(profiling.RECORD, profiling.TABLE)
    what = args.step, args.before, "backward" if args.backward else "forward"
    name = f"card_{args.step.replace('-', '_')}"
    content, _ = plotting.bundle(profile_card(table, *what), name, alt_text(table, *what))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.svg").write_text(content["image/svg+xml"], encoding="utf-8")
    (args.out / f"{name}.pdf").write_bytes(base64.b64decode(content["application/pdf"]))
    return [args.out / f"{name}.svg", args.out / f"{name}.pdf"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m attnlib.book", description="Execute, draw and check the book."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    texts = {
        "run": "execute in place on a CUDA GPU: measure, rewrite outputs and records",
        "replay": "execute copies with replayed measurements; needs no GPU",
        "figures": "write the published figures of executed notebooks as SVG and PDF",
        "readme": "rewrite README's table from the records",
        "check": "notebook hygiene, and README against the records",
        "card": "draw a profile card: what each unit of the GPU did, and what warps waited for",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        if name not in ("readme", "card"):
            command.add_argument("names", nargs="*", metavar="NOTEBOOK", help="such as 03 (default: all)")
            command.add_argument(
                *("--source", "--notebooks"), dest="source", type=Path, default=NOTEBOOKS, metavar="DIR",
                help="folder of the notebooks (default: notebooks)",
            )  # fmt: skip
        if name in ("run", "replay"):
            command.add_argument("--timeout", type=float, default=900, help="seconds a cell may take (900)")
    commands.choices["run"].add_argument(
        "--out", type=Path, metavar="DIR", help="write copies here, not in place"
    )
    commands.choices["run"].add_argument(
        "--minutes", type=float, metavar="N", help="stop after N minutes and say which notebooks are left"
    )
    commands.choices["run"].add_argument(
        "--cold", action="store_true", help="do not compile ahead, side by side, what the notebooks time"
    )
    commands.choices["replay"].add_argument(
        "--out", type=Path, default=BUILD / "notebooks", metavar="DIR", help="build/notebooks"
    )
    commands.choices["replay"].add_argument("--jobs", type=int, help="notebooks at a time (2; 1 on a GPU)")
    commands.choices["figures"].add_argument(
        "--out", type=Path, default=FIGURES, metavar="DIR", help="folder to write to (figures)"
    )
    command = commands.choices["card"]
    command.add_argument("step", help="such as 03_online_softmax, attnlib or fa3")
    command.add_argument("--before", metavar="STEP", help="whose values the thin marks show")
    command.add_argument("--backward", action="store_true", help="its backward pass")
    command.add_argument(
        "--record", type=Path, metavar="FILE",
        help="what python -m attnlib.bench --profile --json wrote (default: the book's record)",
    )  # fmt: skip
    command.add_argument("--out", type=Path, default=BUILD, metavar="DIR", help="folder to write to (build)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 if all is well, 1 if a notebook or a check failed, 2 for a wrong call."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "run":
            how = given.timeout, given.minutes, not given.cold
            return 0 if run(given.names, given.source, given.out, *how) else 1
        if given.command == "replay":
            return 0 if replay(given.names, given.source, given.out, given.jobs, given.timeout) else 1
        if given.command == "figures":
            files = figures(given.source, given.out, given.names)
            print(f"{len(files)} files in {_short(given.out)}: {', '.join(sorted({f.stem for f in files}))}")
        elif given.command == "readme":
            print("README: table rewritten" if readme() else "README: table is up to date")
        elif given.command == "card":
            print("\n".join(map(_short, card(given))))
        else:
            problems = check(given.names, given.source)
            print("\n".join(problems) or "notebooks and README are clean")
            return 1 if problems else 0
    except (ValueError, LookupError, FileNotFoundError) as error:
        print(f"attnlib.book: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
