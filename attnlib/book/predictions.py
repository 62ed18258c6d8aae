"""Predictions as intervals: written down before a measurement, shown as a table, held against what came.

An interval is (least, most). Of a counter it is a factor: its value in this step over the step before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnlib.bench.verdict import Verdict

Interval = tuple[float, float]

Expected = Mapping[str, Mapping[int, Interval]]
"""Counter, a field of a profile's row such as "l2_bytes" -> head dimension -> factor to the step before."""

NAMES = {
    "instructions": "instructions",
    "fma_instructions": "instructions on the FMA pipe",
    "alu_instructions": "instructions on the ALU pipe",
    "xu_instructions": "instructions on the exponential unit",
    "issue_pct": "share of issue slots",
    "tensor_pct": "share of the tensor pipe",
    "xu_pct": "share of the exponential unit",
    "alu_pct": "share of the ALU pipe",
    "fma_pct": "share of the FMA pipe",
    "occupancy_pct": "warps on an SM",
    "l2_bytes": "bytes through L2",
    "dram_read_bytes": "bytes read from HBM",
}
"""Field -> what a table calls it."""

BELOW, INSIDE, ABOVE = "below", "inside", "above"
ABSENT = "not measured"


def place(value: float | None, interval: Interval, noise: float | None = None) -> str:
    """Where a measured ratio lies against a predicted interval: "below", "inside" or "above"; "not measured"
    for None. noise widens the interval on both sides: 1.02 is two percent, None is no noise known."""
    least, most = interval
    if not least <= most:
        raise ValueError(f"place: interval: expected (least, most), got {interval!r}")
    if value is None:
        return ABSENT
    noise = noise or 1.0
    return BELOW if value * noise < least else ABOVE if value / noise > most else INSIDE


def judged(found: Verdict, interval: Interval) -> str:
    """`place` of a speedup within the noise of its run; the verdict's own word where that noise, or a time,
    was not measured."""
    if found.ratio is None or found.noise is None:
        return found.word
    return place(found.ratio, interval, found.noise)


def text(interval: Interval) -> str:
    """ "1.21 to 1.33", or "1.00" where both ends are the same to two digits."""
    least, most = (f"{end:.2f}" for end in interval)
    return least if least == most else f"{least} to {most}"


def table(expected: Expected) -> list[dict[str, str]]:
    """Rows of the table that shows predicted factors: a line a counter, a column a head dimension."""
    return [
        {"counter": NAMES.get(field, field)} | {f"D = {d}": text(found) for d, found in by_dim.items()}
        for field, by_dim in expected.items()
    ]


def against(expected: Expected, before: Sequence[dict], after: Sequence[dict]) -> list[dict]:
    """Predicted and counted factors: a row for each counter and head dimension.

    before, after: rows of a profile with `head_dim`, of the step before and of this one. A counter that one
    of the two does not have is "not measured".
    """
    old, new = ({row["head_dim"]: row for row in rows} for rows in (before, after))
    rows = []
    for field, by_dim in expected.items():
        for d, interval in by_dim.items():
            a, b = old.get(d, {}).get(field), new.get(d, {}).get(field)
            factor = b / a if a and b is not None else None
            row = {"counter": NAMES.get(field, field), "D": d, "predicted": text(interval), "before": a}
            rows.append(row | {"after": b, "factor": factor, "counted is": place(factor, interval)})
    return rows
