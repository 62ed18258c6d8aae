"""Predictions as intervals: shown before anything is measured, and held against what was.

A prediction is a name, a head dimension and the interval in which the value is to lie. Its table has a row
for each name and a column for each head dimension.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from attnlib.bench import verdict

Interval = tuple[float, float]
Predicted = Mapping[tuple[str, int], Interval]
"""(name, head dimension) -> least and most."""

INSIDE, BELOW, ABOVE = "inside", "below", "above"


def where(value: float | None, interval: Interval) -> str:
    """ "inside", "below" or "above" the interval; "not measured" for None and NaN."""
    low, high = interval
    if not low <= high:
        raise ValueError(f"interval: expected least and most, got {interval}")
    if value is None or math.isnan(value):
        return verdict.ABSENT
    return BELOW if value < low else ABOVE if value > high else INSIDE


def where_ratio(found: verdict.Verdict, interval: Interval) -> str:
    """The same for a measured ratio, with the noise of its run on both sides of the interval. A tie is a tie:
    it is inside of no interval, and a ratio whose noise is unknown is said to be that."""
    if found.word not in (verdict.FASTER, verdict.SLOWER):
        return found.word
    low, high = interval
    return where(found.ratio, (low / found.noise, high * found.noise))


def rows(
    predicted: Predicted, found: Mapping[tuple[str, int], float | None] | None = None, digits: int = 3
) -> list[dict]:
    """The table of predictions: "45 to 53"; with `found`, what came of each, "45 to 53: 49.1, inside".
    `found` says None where nothing was measured; a KeyError names what it does not have. `digits` are those
    of each number: four where ratios near 1 lie close together."""
    names, dims = (list(dict.fromkeys(key[i] for key in predicted)) for i in (0, 1))
    return [
        {"predicted": name} | {f"D = {d}": _cell(predicted, found, name, d, digits) for d in dims}
        for name in names
    ]


def _cell(predicted: Predicted, found: Mapping | None, name: str, d: int, digits: int) -> str:
    if (name, d) not in predicted:
        return "–"
    low, high = predicted[name, d]
    text = f"{low:.{digits}g} to {high:.{digits}g}"
    if found is None:
        return text
    value = found[name, d]
    said = where(value, (low, high))
    return f"{text}: {said}" if said == verdict.ABSENT else f"{text}: {value:.{digits}g}, {said}"


def tally(predicted: Predicted, found: Mapping[tuple[str, int], float | None]) -> str:
    """`summary` of what `rows` says."""
    return summary([where(found[key], interval) for key, interval in predicted.items()])


def summary(words: Sequence[str]) -> str:
    """How many predictions hold, from what `where` and `where_ratio` said of each: "Of 18 predictions 14 are
    inside their interval, 3 above it, 1 is a tie"."""
    counts = Counter(words)
    said = [f"{counts[word]} {are[counts[word] > 1]}" for word, are in _SAID.items() if counts[word]]
    return f"Of {len(words)} predictions {', '.join(said)}"


_SAID = {
    INSIDE: ("is inside its interval", "are inside their interval"),
    ABOVE: ("is above it", "are above it"),
    BELOW: ("is below it", "are below it"),
    verdict.TIE: ("is a tie", "are ties"),
    verdict.UNKNOWN: ("has a ratio whose noise was not measured", "have ratios whose noise was not measured"),
    verdict.ABSENT: ("was not measured", "were not measured"),
}
"""What can be said of a prediction -> of one, and of several."""
