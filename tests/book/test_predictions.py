"""Predictions as intervals."""

import pytest

from attnlib.bench.shapes import TASK
from attnlib.bench.verdict import Verdict
from attnlib.book import predictions


@pytest.mark.parametrize(
    ("value", "noise", "word"),
    [
        (1.00, None, "below"),
        (1.10, None, "inside"),
        (1.20, None, "inside"),
        (1.21, None, "above"),
        (1.08, 1.02, "inside"),  # 1.08 x 1.02 reaches 1.10
        (1.07, 1.02, "below"),
        (1.22, 1.02, "inside"),
        (1.23, 1.02, "above"),
        (None, 1.02, "not measured"),
    ],
)
def test_place(value, noise, word):
    assert predictions.place(value, (1.10, 1.20), noise) == word


def test_place_names_a_reversed_interval():
    with pytest.raises(ValueError, match=r"interval: expected \(least, most\), got \(2, 1\)"):
        predictions.place(1.5, (2, 1))


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ({"ratio": 1.08, "control": 1.02, "spread": 1.001}, "inside"),
        ({"ratio": 1.07, "control": 1.02, "spread": 1.001}, "below"),
        ({"ratio": 1.15}, "noise not measured"),  # an old record has no control row
        ({"ratio": None, "reason": "not installed"}, "not measured"),
    ],
)
def test_judged_takes_the_noise_of_the_run(found, word):
    verdict = Verdict("new", "old", TASK["d64"], **found)
    assert predictions.judged(verdict, (1.10, 1.20)) == word


def test_table_has_a_line_for_each_counter():
    rows = predictions.table({"l2_bytes": {64: (0.48, 0.54), 128: (1.0, 1.0)}, "new_field": {64: (1, 2)}})
    assert rows == [
        {"counter": "bytes through L2", "D = 64": "0.48 to 0.54", "D = 128": "1.00"},
        {"counter": "new_field", "D = 64": "1.00 to 2.00"},
    ]


def test_against_divides_the_same_head_dimension():
    expected = {"l2_bytes": {64: (0.48, 0.54), 128: (0.98, 1.02), 256: (1, 2)}}
    before = [{"head_dim": 128, "l2_bytes": 100}, {"head_dim": 64, "l2_bytes": 400}]
    after = [{"head_dim": 64, "l2_bytes": 200}, {"head_dim": 128, "l2_bytes": 110}]
    rows = predictions.against(expected, before, after)
    assert [(row["D"], row["factor"], row["counted is"]) for row in rows] == [
        (64, 0.5, "inside"),
        (128, 1.1, "above"),
        (256, None, "not measured"),
    ]
