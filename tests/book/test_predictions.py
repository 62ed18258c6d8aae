"""Predictions: intervals, what lies inside, and what no interval may call a success."""

import math

import pytest

from attnlib.bench.shapes import TASK
from attnlib.bench.verdict import ABSENT, TIE, UNKNOWN, Verdict
from attnlib.book import predictions


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.9, "below"), (1.0, "inside"), (1.1, "inside"), (1.2, "above"), (None, "not measured"),
     (math.nan, "not measured")],
)  # fmt: skip
def test_where(value, said):
    assert predictions.where(value, (1.0, 1.1)) == said


@pytest.mark.parametrize("interval", [(1.1, 1.0), (math.nan, 1.0)])
def test_an_interval_has_a_least_and_a_most(interval):
    with pytest.raises(ValueError, match="interval: expected least and most"):
        predictions.where(1.0, interval)


@pytest.mark.parametrize(
    ("ratio", "noise", "said"),
    [
        (1.005, 1.01, "tie"),  # though the interval holds it
        (1.05, 1.01, "inside"),
        (1.105, 1.01, "inside"),  # within the noise of the interval's end
        (1.12, 1.01, "above"),
        (0.9, 1.01, "below"),
        (1.05, None, "noise not measured"),
        (None, 1.01, "not measured"),
    ],
)
def test_a_ratio_is_judged_with_the_noise_of_its_run(ratio, noise, said):
    found = Verdict("new", "old", TASK["d64"], ratio, noise, noise, reason="failed")
    assert predictions.where_ratio(found, (1.0, 1.1)) == said


def test_rows_before_and_after():
    predicted = {
        ("tensor pipe (%)", 64): (40.0, 50.0),
        ("tensor pipe (%)", 128): (60, 70),
        ("L2", 64): (0.5, 0.6),
    }
    assert predictions.rows(predicted) == [
        {"predicted": "tensor pipe (%)", "D = 64": "40 to 50", "D = 128": "60 to 70"},
        {"predicted": "L2", "D = 64": "0.5 to 0.6", "D = 128": "–"},
    ]
    found = {("tensor pipe (%)", 64): 45.0, ("tensor pipe (%)", 128): 71.26, ("L2", 64): None}
    first, second = predictions.rows(predicted, found)
    assert first["D = 64"] == "40 to 50: 45, inside" and first["D = 128"] == "60 to 70: 71.3, above"
    assert second["D = 64"] == "0.5 to 0.6: not measured"
    assert predictions.rows({("pipe", 64): (1.085, 1.18)}, {("pipe", 64): 1.0823}, digits=4) == [
        {"predicted": "pipe", "D = 64": "1.085 to 1.18: 1.082, below"}
    ]
    assert predictions.tally(predicted, found) == (
        "Of 3 predictions 1 is inside its interval, 1 is above it, 1 was not measured"
    )


def test_the_summary_counts_each_word():
    words = ["tie", "inside", "inside", "below", "tie", "noise not measured"]
    assert predictions.summary(words) == (
        "Of 6 predictions 2 are inside their interval, 1 is below it, 2 are ties, "
        "1 has a ratio whose noise was not measured"
    )
    assert set(predictions._SAID) >= {TIE, UNKNOWN, ABSENT}


def test_nothing_found_must_be_said():
    with pytest.raises(KeyError):
        predictions.rows({("L2", 64): (0.5, 0.6)}, {})
