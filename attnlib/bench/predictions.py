"""Whether a measured number lies in the interval that was predicted for it, as far as its noise tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

INSIDE, BELOW, ABOVE, OPEN, ABSENT = "inside", "below", "above", "open", "noise not measured"


def place(value: float, low: float, high: float, noise: float | None) -> str:
    """Where `value` lies beside the interval from `low` to `high`.

    `noise`: the factor by which the same measurement may come out larger or smaller, as `Verdict.noise` has
    it; 1 for what repeats exactly, None where it is not known. "inside", "below" or "above" hold for all that
    the noise allows; "open" is all else: an end of the interval lies within the noise. Without a noise,
    "noise not measured". ValueError for an interval or a noise that is none.
    """
    if not low <= high:
        raise ValueError(f"low, high: expected an interval with low <= high, got {low} and {high}")
    if noise is None:
        return ABSENT
    if not noise >= 1:
        raise ValueError(f"noise: expected a factor of at least 1, got {noise}")
    least, most = value / noise, value * noise
    if most < low:
        return BELOW
    if least > high:
        return ABOVE
    return INSIDE if low <= least and most <= high else OPEN


def rows_of(
    predicted: Mapping[str, Mapping[int, tuple[float, float]]],
    found: Mapping[int, Mapping[str, float]],
    noise: float | None,
) -> tuple[list[dict[str, str]], list[str]]:
    """A table of predictions by head dimension, and the word for each: (rows, words).

    predicted: what -> {head dimension: (low, high)}; found: head dimension -> {what: value}. A cell is like
    "7.3 (6.66 to 7.51): inside"."""
    rows, words = [], []
    for what, intervals in predicted.items():
        row = {"what": what}
        for d, (low, high) in intervals.items():
            value = found[d][what]
            words.append(place(value, low, high, noise))
            row[f"D = {d}"] = f"{value:.3g} ({low:.3g} to {high:.3g}): {words[-1]}"
        rows.append(row)
    return rows, words


def tally(places: Sequence[str]) -> str:
    """How many of each in words: "5 of 8 inside, 2 outside, 1 open"."""
    outside = sum(word in (BELOW, ABOVE) for word in places)
    parts = [f"{places.count(INSIDE)} of {len(places)} inside", f"{outside} outside"]
    parts += [f"{places.count(word)} {word}" for word in (OPEN, ABSENT) if word in places]
    return ", ".join(parts)
