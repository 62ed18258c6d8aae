"""What the four `tune_*.py` for forward and backward passes, FP8 and block masks have in common: the command
line, whose configurations are every combination of `--vary FIELD=VALUE,VALUE`, what is wrong with a form, and
the tables of their times."""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from hopper_only import no_hopper
from rounds import in_rounds, in_turn

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from attnlib.bench import peers  # noqa: E402
from attnlib.bench.setting import Setting  # noqa: E402

DEVICE = "cuda"
SHORT = Setting("one short window", rounds=1, pause_ms=8, warmup_ms=2, rep_ms=4)
PROCESSES = 14

Config = TypeVar("Config")
Forms = Mapping[str, Mapping[str, Config]]
"""Of each cell by name, the forms by name."""
Value = int | float | None
DEFAULT = "default"


# ---------------------------------------------------------------- command line


def parser_of(description: str, cells: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("cells", nargs="+", metavar=cells)
    parser.add_argument("--vary", action="append", default=[], metavar="FIELD=VALUE,VALUE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-turn", action="store_true", help="single calls without pauses, for long ones")
    parser.add_argument("--flush", action="store_true", help="of --in-turn: as time_plane.py --settled does")
    parser.add_argument("--seconds", type=float, default=400, help="begin no cell after so many")
    return parser


def value_of(text: str) -> Value:
    """"8M" is 8 MiB, "none" None."""
    if text == "none":
        return None
    if text.endswith("M"):
        return int(text[:-1]) << 20
    return float(text) if "." in text else int(text)


def varied(texts: Sequence[str]) -> dict[str, list[Value]]:
    """Field -> values, of texts like "pause_every=0,1".

    Raises:
        ValueError: not of this form.
    """
    found = {}
    for text in texts:
        field, equals, values = text.partition("=")
        if not equals or not field or not values:
            raise ValueError(f"--vary: expected FIELD=VALUE,VALUE, got {text}")
        found[field] = [value_of(value) for value in values.split(",")]
    return found


def forms_of(config: Config, fields: Mapping[str, Sequence[Value]]) -> tuple[dict[str, Config], list[str]]:
    """The configuration and what the fields make of it, and what was refused.

    Raises:
        ValueError: it has no such field.
    """
    refused = []
    known = {field.name: field.type for field in dataclasses.fields(config)}
    if unknown := sorted(set(fields) - set(known)):
        of = f"{type(config).__name__}, {', '.join(known)}"
        raise ValueError(f"--vary: expected fields of {of}; got {unknown[0]}")
    found = {DEFAULT: config}
    for values in product(*fields.values()) if fields else ():
        changes = dict(zip(fields, values, strict=True))
        changes |= {field: bool(x) for field, x in changes.items() if known[field] in (bool, "bool")}
        name = ", ".join(f"{field}={value}" for field, value in changes.items())
        try:
            found[name] = dataclasses.replace(config, **changes)
        except ValueError as error:
            refused.append(f"{name}: {error}")
    return found, refused


def forms_asked_for(
    args: argparse.Namespace, default_of: Callable[[str], Config], check: Callable[[Config], None] | None
) -> dict[str, dict[str, Config]]:
    """The forms of each cell. Prints what configurations refuse.

    Raises:
        ValueError: from `varied`, `forms_of` or `check`.
    """
    fields, found = varied(args.vary), {}
    for name in args.cells:
        found[name], refused = forms_of(default_of(name), fields)
        for reason in refused:
            print(f"{name}, left out: {reason}")
        for form in found[name].values() if check else ():
            check(form)
    return found


# ---------------------------------------------------------------- compiling


def side_by_side(function: Callable[..., str], jobs: Sequence[tuple[Any, ...]]) -> list[str]:
    """What is not empty of what the function returns, in processes."""
    children = min(PROCESSES, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(children, multiprocessing.get_context("spawn")) as pool:
        return [reason for reason in pool.map(function, *zip(*jobs, strict=True)) if reason]


def each_form(compile_one: Callable[[str, Config], str], forms: Forms) -> list[str]:
    """Each form of each cell compiled; what failed."""
    return side_by_side(compile_one, [(name, form) for name in forms for form in forms[name].values()])


# ---------------------------------------------------------------- judging and timing


def failure(name: str, form: Config, call: Callable[[], Any]) -> str:
    """Why a form can't be compiled or launched; empty when it can."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:  # it comes again where it is timed
        return f"{name} {form}: {peers.brief(error)}"
    return ""


def judge(name: str, calls: dict[str, Callable[[], Any]], wrong: Callable[[Any], str]) -> list[str]:
    """What is wrong, of what `wrong` says about results; the calls that are go."""
    bad = []
    for form in list(calls):
        try:
            reason = wrong(calls[form]())
        except RuntimeError as error:
            reason = peers.brief(error)
        if reason:
            bad.append(f"WRONG {name} {form}: {reason}")
            del calls[form]
    return bad


class Rounds(NamedTuple):
    """How often forms are timed, and whether as `rounds.in_turn` (and its `flush`) or as `rounds.in_rounds`
    does it."""

    number: int
    in_turn: bool = False
    flush: bool = False


def times(calls: Mapping[str, Callable[[], Any]], rounds: Rounds) -> dict[str, list[float]]:
    """Milliseconds of each in shuffled rounds."""
    if rounds.in_turn:
        return in_turn(calls, rounds.number, rounds.flush)
    return in_rounds(calls, rounds.number, SHORT)


# ---------------------------------------------------------------- tables


def table_of(name: str, found: Mapping[str, Sequence[float]], flops: float, peer: str) -> str:
    """A cell's forms and the peer, milliseconds of each round, and what the peer takes over them; where it
    takes no part, what the first form takes."""
    if not set(found) - {peer}:
        return f"{name}: no form is right"
    base, lines = found.get(peer) or next(iter(found.values())), []
    for form, taken in found.items():
        ratios = sorted(a / b for a, b in zip(base, taken, strict=True))
        ms = statistics.median(taken)
        lines.append(f"  {form:18} {ms:7.3f} ms {flops / ms * 1e-9:4.0f} TFLOP/s  "
                     f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})")  # fmt: skip
    best = min((form for form in found if form != peer), key=lambda form: statistics.median(found[form]))
    return "\n".join([f"{name}: best {best}", *lines])


def tell(
    report: Callable[[str, Mapping[str, Config], Rounds], tuple[str, list[str]]],
    forms: Forms,
    rounds: Rounds,
    ends: float,
    over: str,
) -> int:
    """Print the table of each cell, and what is wrong, as they come, and all tables again.

    Args:
        report: of a cell's name, its forms and the rounds, the table and what is wrong.
        ends: no cell is begun after it, a time of `time.monotonic`.
        over: whose time stands over a form's in the tables.

    Returns:
        The status of the script.
    """
    begin, tables, bad, left_out = time.monotonic(), [], [], []
    for name in forms:
        if time.monotonic() > ends:
            left_out.append(name)
            continue
        try:
            table, wrongs = report(name, forms[name], rounds)
        except RuntimeError as error:  # no memory for the oracle, say
            left_out.append(f"{name}: {peers.brief(error)}")
            continue
        tables.append(table)
        bad += wrongs
        print(table, *wrongs, sep="\n", flush=True)
        torch.cuda.empty_cache()
    seconds = f"{time.monotonic() - begin:.0f} s"
    print(f"\n{seconds}. Behind the times {over} over a form's:", *tables, sep="\n")
    if left_out:
        print("left out, for the time where no reason is told:", *left_out, sep="\n  ")
    print(*bad, sep="\n")
    return int(bool(bad))


# ---------------------------------------------------------------- scripts


def run(
    argv: Sequence[str] | None, description: str, default_of: Callable[[str], Config],
    compile_all: Callable[[Forms], list[str]],
    report: Callable[[str, Mapping[str, Config], Rounds], tuple[str, list[str]]],
    *, cells: str = "D-KIND-LENGTH", over: str = "FlashAttention-3's", default_needs_gpu: bool = False,
    check: Callable[[Config], None] | None = None,
) -> int:  # fmt: skip
    """A script from its command line to its status.

    Args:
        argv, description: of the script.
        default_of: the form that a call gets, by the name of a cell; ValueError for a wrong name.
        compile_all: compiles the forms, and returns what failed.
        report: see `tell`.
        cells: what a name looks like, for --help.
        over: see `tell`.
        default_needs_gpu: so without one no cell and no form can be checked.
        check: ValueError for a form that can't be timed.

    Returns:
        0 when all were right, 1 otherwise, 2 for a wrong command line or without a Hopper GPU.
    """
    parser = parser_of(description, cells)
    args, begin = parser.parse_args(argv), time.monotonic()
    if args.flush and not args.in_turn:
        parser.error("--flush: expected --in-turn, too")
    if default_needs_gpu and no_hopper():
        return 2
    try:
        forms = forms_asked_for(args, default_of, check)
    except (ValueError, KeyError) as error:
        parser.error(str(error))
    if no_hopper():
        return 2
    failed = compile_all(forms)
    print(f"compiled after {time.monotonic() - begin:.0f} s", *failed, sep="\n", flush=True)
    rounds = Rounds(args.rounds, args.in_turn, args.flush)
    return tell(report, forms, rounds, begin + args.seconds, over)
