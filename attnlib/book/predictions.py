"""Predictions against results: a range that was written down first, a value, and a word for each."""

from collections.abc import Sequence

from attnlib.book import lesson

HELD = "as predicted"


def judged(
    what: str, low: float, value: float | None, high: float, noise: float = 1.0, digits: str = ".2f"
) -> dict[str, str]:
    """A row of `show`: whether `value` lies from `low` to `high`.

    noise: the factor by which a second run of the same thing may differ. A value that is within it of a
    border lies neither inside nor outside: the word is "on the border". digits: format of the numbers.
    """
    if low > high:
        raise ValueError(f"judged: low: expected at most high ({high}), got {low}")
    if not noise >= 1:
        raise ValueError(f"judged: noise: expected a factor of 1 or more, got {noise}")
    expected = [f"{border:{digits}}" for border in (low, high)]
    row = {"prediction": what, "expected": expected[0] if low == high else " to ".join(expected)}
    if value is None or value != value:
        return row | {"measured": "–", "verdict": "not measured"}
    return row | {"measured": f"{value:{digits}}", "verdict": _word(low, value, high, noise)}


def _word(low: float, value: float, high: float, noise: float) -> str:
    if noise > 1 and any(border / noise <= value <= border * noise for border in (low, high)):
        return "on the border"
    return "below" if value < low else "above" if value > high else HELD


def show(rows: Sequence[dict[str, str]], others: str = "") -> None:
    """Show rows of `judged` as a table, those that did not hold in bold, and how many did; `others`: a
    sentence about the bold ones."""
    lesson.show_table(rows, mark=lambda row: row["verdict"] != HELD)
    held = sum(row["verdict"] == HELD for row in rows)
    rest = "." if held == len(rows) else f"; the others are in bold. {others}"
    lesson.say(f"{held} of {len(rows)} held{rest}".strip())
