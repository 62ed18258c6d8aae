"""The words for predictions: inside, outside, on the border, and what is no prediction at all."""

import math

import pytest

from attnlib.book import predictions
from attnlib.book.predictions import judged


@pytest.mark.parametrize(
    ("value", "noise", "word"),
    [
        (1.5, 1.0, "as predicted"),
        (1.0, 1.0, "as predicted"),
        (2.0, 1.0, "as predicted"),
        (0.99, 1.0, "below"),
        (2.01, 1.0, "above"),
        (0.99, 1.02, "on the border"),
        (1.01, 1.02, "on the border"),
        (2.03, 1.02, "on the border"),
        (1.96, 1.03, "on the border"),
        (0.97, 1.02, "below"),
        (2.05, 1.02, "above"),
        (1.5, 1.02, "as predicted"),
        (None, 1.0, "not measured"),
        (math.nan, 1.0, "not measured"),
    ],
)
def test_a_value_near_a_border_is_neither_inside_nor_outside(value, noise, word):
    assert judged("x", 1.0, value, 2.0, noise)["verdict"] == word


def test_a_row_shows_its_numbers():
    row = judged("time", 1, 1.26, 1.5, digits=".1f")
    assert row == {
        "prediction": "time",
        "expected": "1.0 to 1.5",
        "measured": "1.3",
        "verdict": "as predicted",
    }
    assert judged("length", 49152, 49152, 49152, digits="g")["expected"] == "49152"
    assert judged("length", 1, None, 2)["measured"] == "–"


def test_bad_ranges_are_errors():
    with pytest.raises(ValueError, match="judged: low: expected at most high"):
        judged("x", 2, 1, 1)
    with pytest.raises(ValueError, match="judged: noise: expected a factor of 1 or more, got 0.5"):
        judged("x", 1, 1, 1, noise=0.5)
    with pytest.raises(ValueError, match="noise"):
        judged("x", 1, 1, 1, noise=math.nan)


def test_show_counts_what_held(capsys):
    predictions.show([judged("a", 1, 1, 1), judged("b", 1, 3, 2)], "One was bold.")
    out = capsys.readouterr().out
    assert "1 of 2 held; the others are in bold. One was bold." in out and "**above**" in out
    predictions.show([judged("a", 1, 1, 1)], "One was bold.")
    out = capsys.readouterr().out
    assert "1 of 1 held." in out and "bold" not in out
