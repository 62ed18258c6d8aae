"""Burst and sustained speeds side by side, with the clock that each ran at.

An H200 is limited by power: calls that last for milliseconds after a pause run at a higher clock than calls
that go on. Neither figure alone says how fast a kernel is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnlib.bench import ladder, names
from attnlib.bench.records import Table
from attnlib.bench.shapes import Shape
from attnlib.bench.verdict import judge

MODES = ("burst", "sustained")


def mode_rows(
    burst: Table,
    sustained: Table,
    shapes: Sequence[Shape],
    against: tuple[str, str] = ("attnlib", "fa3"),
    label: Callable[[str], str] = names.label,
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """(rows, columns) as texts: TFLOP/s and MHz of every implementation that has a sustained row, in both
    modes, on each shape; last the verdict on the two implementations of `against`, each in its own run.

    `burst` is a table of `harness.measure`, `sustained` one of `sustained.measure`. `label` gives the
    reader's name of an implementation.
    """
    tables = dict(zip(MODES, (burst, sustained), strict=True))
    columns = {"step": "TFLOP/s (SM clock, MHz)"}
    columns |= {f"{mode}_{s.head_dim}": f"D = {s.head_dim}, {mode}" for s in shapes for mode in MODES}
    rows = []
    for impl in ladder.order({row["impl"] for row in sustained.rows}):
        row = {"impl": impl, "step": label(impl)}
        for shape in shapes:
            for mode, table in tables.items():
                found = table.select(shape, impl=impl)
                row[f"{mode}_{shape.head_dim}"] = _cell(found[0] if found else None)
        rows.append(row)
    one, other = against
    row = {"impl": "", "step": f"{label(one)} against {label(other)}"}
    for shape in shapes:
        for mode, table in tables.items():
            row[f"{mode}_{shape.head_dim}"] = judge(table, shape, one, other).cell()
    return [*rows, row], columns


def _cell(row: dict | None) -> str:
    """ "527 (1875)", "527" where the clock is not known; an en dash, or why there is no time."""
    if not ladder.measured(row):
        return (row or {}).get("status", "–")
    clock = "" if row.get("sm_mhz") is None else f" ({row['sm_mhz']:.0f})"
    return f"{row['tflops']:.0f}{clock}"
