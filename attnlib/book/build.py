"""The book's workshop: execute notebooks, write figures and the tables of pages, check what is committed.

python -m attnlib.book run [03 ...]      execute in place on a CUDA GPU: measure, rewrite outputs, records;
                                         --minutes N stops in time and says which notebooks are left
python -m attnlib.book replay [03 ...]   execute copies in build/notebooks, measurements replayed
python -m attnlib.book figures           NAME.svg and NAME.pdf of each published figure, with nbconvert
python -m attnlib.book readme            the tables of README and of the page of results, from the records
python -m attnlib.book check             notebook hygiene, and these tables against the records
python -m attnlib.book card STEP         a step's profile card as SVG and PDF, from the record of counters
"""

import argparse
import base64
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from attnlib.bench.paths import FIGURES, NOTEBOOKS, ROOT
from attnlib.book import hygiene

BUILD = ROOT / "build"


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

    _check_limits(timeout=timeout, minutes=minutes)
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

    _check_limits(timeout=timeout, jobs=jobs)
    paths = chapters(folder, names)
    jobs = jobs or default_jobs()
    limits = Limits(timeout)
    return _summary(execute_all(paths, lambda path: out / path.name, mode=REPLAY, jobs=jobs, limits=limits))


def _check_limits(**limits: float | None) -> None:
    """With a time that is over before it begins nothing would run, and nothing would have failed."""
    for name, value in limits.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}: expected more than 0, got {value}")
        if value == math.inf:
            raise ValueError(f"{name}: expected a finite number, got {value}")


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


def check(names: Sequence[str] = (), folder: Path = NOTEBOOKS) -> list[str]:
    """What is wrong with the notebooks and, unless some are named, with the tables of README and of the page
    of results; a line each, empty if nothing is."""
    problems = [str(problem) for notebook in chapters(folder, names) for problem in hygiene.check(notebook)]
    if not names:
        from attnlib.book import readme

        try:
            problems += [
                f"{page.name}: a table differs from the records: python -m attnlib.book readme"
                for page in readme.stale()
            ]
        except (ValueError, LookupError) as error:
            problems.append(str(error))
    return problems


def card(args: argparse.Namespace) -> list[Path]:
    """Write a profile card as SVG and PDF; returns the files."""
    from attnlib.bench import profiling, records
    from attnlib.book import plotting
    from attnlib.book.card import alt_text, counted, profile_card

    if args.record:
        record = records.read(args.record)
        rows = record["tables"].get(profiling.TABLE, {}).get("rows", [])
        table = records.Table(profiling.TABLE, rows, record["gpu"]["name"], record["date"], replayed=False)
    else:
        table = records.load(profiling.RECORD, profiling.TABLE)
    direction = "backward" if args.backward else "forward"
    if args.before is not None and not counted(table, args.before, direction):
        raise ValueError(f"card: before: expected a step whose counters were read, got {args.before!r}")
    what = args.step, args.before, direction
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
        "readme": "rewrite the tables of README and of the page of results from the records",
        "check": "notebook hygiene, and these tables against the records",
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
            from attnlib.book import readme

            rewritten = [f"{_short(page)}: rewritten" for page in readme.rewrite()]
            print("\n".join(rewritten) or "tables are up to date")
        elif given.command == "card":
            print("\n".join(map(_short, card(given))))
        else:
            problems = check(given.names, given.source)
            print("\n".join(problems) or "notebooks and tables are clean")
            return 1 if problems else 0
    except (ValueError, LookupError, OSError) as error:
        print(f"attnlib.book: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
