"""A prediction holds or fails only where the noise of the measurement leaves no doubt."""

import math

import pytest

from attnlib.bench import predictions


@pytest.mark.parametrize(
    ("value", "noise", "expected"),
    [
        (0.95, 1.0, "inside"),
        (0.90, 1.0, "inside"),  # the ends belong to it
        (1.00, 1.0, "inside"),
        (0.89, 1.0, "below"),
        (1.01, 1.0, "above"),
        (0.95, 1.02, "inside"),
        (0.91, 1.02, "open"),  # it may be 0.892
        (0.89, 1.02, "open"),
        (0.87, 1.02, "below"),
        (1.01, 1.02, "open"),
        (1.03, 1.02, "above"),
        (0.95, 1.20, "open"),  # a noise that is wider than the interval holds nothing
        (0.95, None, "noise not measured"),
    ],
)
def test_where_a_value_lies(value, noise, expected):
    assert predictions.place(value, 0.90, 1.00, noise) == expected


def test_what_was_not_measured_is_never_inside():
    assert predictions.place(math.nan, 0.90, 1.00, 1.0) == "open"


@pytest.mark.parametrize(
    ("low", "high", "noise", "message"),
    [
        (1.0, 0.9, 1.0, "low, high: expected an interval with low <= high, got 1.0 and 0.9"),
        (0.9, 1.0, 0.98, "noise: expected a factor of at least 1, got 0.98"),
        (0.9, 1.0, math.nan, "noise: expected a factor of at least 1, got nan"),
    ],
)
def test_wrong_arguments(low, high, noise, message):
    with pytest.raises(ValueError, match=message):
        predictions.place(0.95, low, high, noise)


def test_a_tally_counts_each_prediction_once():
    places = ["inside", "inside", "below", "above", "open"]
    assert predictions.tally(places) == "2 of 5 inside, 2 outside, 1 open"
    places = ["inside", "noise not measured"]
    assert predictions.tally(places) == "1 of 2 inside, 0 outside, 1 noise not measured"


def test_a_table_has_a_cell_for_each_prediction():
    predicted = {"clocks": {64: (0.9, 1.0), 128: (0.9, 1.0)}, "bytes": {128: (2, 3)}}
    found = {64: {"clocks": 0.95}, 128: {"clocks": 1.2, "bytes": 1.99}}
    rows, words = predictions.rows_of(predicted, found, 1.02)
    assert rows == [
        {"what": "clocks", "D = 64": "0.95 (0.9 to 1): inside", "D = 128": "1.2 (0.9 to 1): above"},
        {"what": "bytes", "D = 128": "1.99 (2 to 3): open"},
    ]
    assert words == ["inside", "above", "open"]


def test_what_was_predicted_and_not_found_is_an_error():
    with pytest.raises(KeyError, match="clocks"):
        predictions.rows_of({"clocks": {64: (0.9, 1.0)}}, {64: {}}, 1.0)
