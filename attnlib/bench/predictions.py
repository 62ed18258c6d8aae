"""Whether a measured number lies in the interval that was predicted for it, as far as its noise tells."""

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


def tally(places: list[str]) -> str:
    """How many of each in words: "5 of 8 inside, 2 outside, 1 open"."""
    outside = sum(word in (BELOW, ABOVE) for word in places)
    parts = [f"{places.count(INSIDE)} of {len(places)} inside", f"{outside} outside"]
    parts += [f"{places.count(word)} {word}" for word in (OPEN, ABSENT) if word in places]
    return ", ".join(parts)
