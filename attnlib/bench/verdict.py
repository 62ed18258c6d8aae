"""Whether one implementation is faster than another, or whether the difference is noise of the same run.

Two things tell the noise. The control row: one implementation timed a second time, under a second name, in
the same shuffled rounds. And the rounds: each gives a ratio of its own, and from how these differ follows how
far their mean may be off; of a record that has only the fastest and the slowest round, how far any two of
them may be off. The noise is the larger of the two; a difference inside it is a tie.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attnlib.bench.ladder import measured
from attnlib.bench.records import RecordError, Table
from attnlib.bench.shapes import Shape

STUDENT_T = {2: 63.7, 3: 9.92, 4: 5.84, 5: 4.60, 6: 4.03, 7: 3.71, 8: 3.50, 9: 3.36, 10: 3.25}
"""Rounds -> factor of the standard error that holds 99 of 100 means: Student's t, two-sided, with a degree of
freedom less than there are rounds. With more rounds than these the last is taken, which is a little too
careful."""

FASTER, SLOWER, TIE = "faster", "slower", "tie"
UNKNOWN, ABSENT = "noise not measured", "not measured"


@dataclass(frozen=True)
class Verdict:
    """`impl` against `other` on one shape of one run.

    ratio: time of `other` over time of `impl`, 1.07 where `impl` needs 7% less; None where one has no time,
    and `reason` says why. control: how many times longer one of two runs of the same implementation took.
    spread: how far the ratio may be off by the differences between rounds. Both are at least 1, None where
    the record does not have them.
    """

    impl: str
    other: str
    shape: Shape
    ratio: float | None
    control: float | None = None
    spread: float | None = None
    reason: str = ""

    @property
    def noise(self) -> float | None:
        """The larger of `control` and `spread`, rounded up to what is shown; None unless both are known."""
        if self.control is None or self.spread is None:
            return None
        return math.ceil(max(self.control, self.spread) * 1000 - 1e-9) / 1000

    @property
    def word(self) -> str:
        """ "faster", "slower" or "tie"; "noise not measured" or "not measured" where it can't be said."""
        if self.ratio is None:
            return ABSENT
        if self.noise is None:
            return UNKNOWN
        if round(self.ratio, 3) > self.noise:
            return FASTER
        return SLOWER if round(1 / self.ratio, 3) > self.noise else TIE

    def sentence(self) -> str:
        """In plain English: "1.072x, noise of this run 1.020: faster"."""
        if self.word != TIE:
            return self.cell().replace(", noise 1", ", noise of this run 1")
        if self.control >= self.spread:
            why = f"the same kernel differs by {self.noise:.3f} from itself in this run"
        else:
            why = f"the rounds of this run leave {self.noise:.3f} open"
        return f"{self.times}: a tie, {why}"

    def cell(self) -> str:
        """The same, short, for a table: "1.072x, noise 1.020: faster"."""
        if self.ratio is None:
            return f"{ABSENT} ({self.reason})"
        if self.noise is None:
            return f"{self.times}, {UNKNOWN}"
        return f"{self.times}, noise {self.noise:.3f}: {self.word}"

    @property
    def times(self) -> str:
        """The ratio as it is shown: "1.072x"."""
        return f"{self.ratio:.3f}x" if self.ratio < 2 else f"{self.ratio:.3g}x"

    def __str__(self) -> str:
        return self.sentence()


def judge(table: Table, shape: Shape, impl: str, other: str) -> Verdict:
    """The verdict on `impl` against `other` from a table of `harness.measure`, `backward.measure` or
    `sustained.measure`. A RecordError names an implementation or a shape that the table does not have."""
    ours, theirs = (table.one(shape, impl=name) for name in (impl, other))
    missing = [row for row in (ours, theirs) if not measured(row)]
    if missing:
        reason = ", ".join(f"{row['impl']}: {row.get('status', 'no time')}" for row in missing)
        return Verdict(impl, other, shape, None, reason=reason)
    return Verdict(
        impl, other, shape, theirs["ms"] / ours["ms"], control_of(table, shape), spread(ours, theirs)
    )


def control_of(table: Table, shape: Shape) -> float | None:
    """How many times longer the slower of the two runs of the control took on this shape; None where the
    table has no control, or it did not run."""
    found = [row for row in table.controls if Shape.of_row(row) == shape and measured(row)]
    if not found:
        return None
    original = table.one(shape, impl=found[0]["control_of"])
    if not measured(original):
        return None
    ratio = found[0]["ms"] / original["ms"]
    return max(ratio, 1 / ratio)


def spread(ours: dict[str, Any], theirs: dict[str, Any]) -> float | None:
    """How far the ratio of two rows may be off, by the ratios of their single rounds: the factor that holds
    99 of 100 means; where only their extremes were kept (`ms_low`, `ms_high`), how far the ratio of any two
    rounds is from that of the medians. None without two rounds."""
    pairs = list(zip(ours.get("round_ms") or (), theirs.get("round_ms") or (), strict=False))
    if len(pairs) < 2:
        if not all(name in row for row in (ours, theirs) for name in ("ms_low", "ms_high")):
            return None
        ratio = theirs["ms"] / ours["ms"]
        low, high = theirs["ms_low"] / ours["ms_high"], theirs["ms_high"] / ours["ms_low"]
        return max(high / ratio, ratio / low)
    logs = [math.log(b / a) for a, b in pairs]
    t = STUDENT_T[min(len(logs), max(STUDENT_T))]
    return math.exp(t * statistics.stdev(logs) / math.sqrt(len(logs)))


def table_rows(
    tables: Sequence[Table], impl: str, others: Sequence[str], shapes: Sequence[Shape], label: Callable = str
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Verdicts as the texts of one table, (rows, columns): a row for each of `others`, a column for each
    shape, which may be in a table of its own. `label` gives the reader's name of an implementation."""
    heads = {shape: f"D = {shape.head_dim}" for shape in shapes}
    if len(set(heads.values())) < len(heads):
        heads = {shape: shape.label for shape in shapes}
    columns = {"other": f"{label(impl)} against"} | {shape.label: head for shape, head in heads.items()}
    rows = []
    for other in others:
        found = {shape.label: judge(table_with(tables, shape), shape, impl, other) for shape in shapes}
        rows.append({"other": label(other)} | {name: verdict.cell() for name, verdict in found.items()})
    return rows, columns


def tally(words: Sequence[str]) -> str:
    """How often each word of a verdict came: "faster: 12, slower: 0, tie: 5; noise not measured: 1"."""
    said = ", ".join(f"{word}: {words.count(word)}" for word in (FASTER, SLOWER, TIE))
    open_ = "; ".join(f"{word}: {words.count(word)}" for word in (UNKNOWN, ABSENT) if word in words)
    if len(words) == words.count(UNKNOWN) + words.count(ABSENT):
        return open_
    return f"{said}; {open_}" if open_ else said


def table_with(tables: Sequence[Table], shape: Shape) -> Table:
    """The one of `tables` that has rows of this shape; RecordError if none has."""
    for table in tables:
        if any(Shape.of_row(row) == shape for row in table.rows):
            return table
    raise RecordError(f"tables {', '.join(repr(t.name) for t in tables)}: no rows of {shape.label}")
