"""What `tune_forward.py` and `tune_backward.py` have in common: configurations that a command line asks for,
`--vary FIELD=VALUE,VALUE`, every combination, and the tables of their times."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from attnlib.bench import peers  # noqa: E402

Config = TypeVar("Config")
Value = int | float | None
DEFAULT = "default"


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vary", action="append", default=[], metavar="FIELD=VALUE,VALUE")


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


def tell_refused(refused: Mapping[str, Sequence[str]]) -> None:
    """What configurations refuse, by cell."""
    for name, reasons in refused.items():
        for reason in reasons:
            print(f"{name}, left out: {reason}")


def table_of(
    name: str, found: Mapping[str, Sequence[float]], base: Sequence[float], flops: float, peer: str
) -> str:
    """A cell's forms and the peer, milliseconds of each round, and `base` over them."""
    lines = []
    for form, taken in found.items():
        ratios = sorted(a / b for a, b in zip(base, taken, strict=True))
        ms = statistics.median(taken)
        lines.append(f"  {form:18} {ms:7.3f} ms {flops / ms * 1e-9:4.0f} TFLOP/s  "
                     f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})")  # fmt: skip
    best = min((form for form in found if form != peer), key=lambda form: statistics.median(found[form]))
    return "\n".join([f"{name}: best {best}", *lines])


def tell(reports: Mapping[str, Callable[[], tuple[str, list[str]]]], ends: float) -> int:
    """Print the table of each cell, and what is wrong, as they come, and all tables again. None is begun
    after `ends`. Returns the status."""
    begin, tables, bad, left_out = time.monotonic(), [], [], []
    for name, report in reports.items():
        if time.monotonic() > ends:
            left_out.append(name)
            continue
        try:
            table, wrongs = report()
        except RuntimeError as error:  # no memory for the oracle, say
            left_out.append(f"{name}: {peers.brief(error)}")
            continue
        tables.append(table)
        bad += wrongs
        print(table, *wrongs, sep="\n", flush=True)
        torch.cuda.empty_cache()
    seconds = f"{time.monotonic() - begin:.0f} s"
    print(f"\n{seconds}. Behind the times FlashAttention-3's over a form's:", *tables, sep="\n")
    if left_out:
        print("left out, for the time where no reason is told:", *left_out, sep="\n  ")
    print(*bad, sep="\n")
    return int(bool(bad))
