"""What a chapter says of a card: the busiest unit, the longest wait, one thing for each head dimension."""

import pytest

from attnlib.book import card
from attnlib.book.words import by_head_dim

ROW = {"impl": "x", "tensor_pct": 58.0, "xu_pct": 62.0, "issue_pct": None, "occupancy_pct": 99.0}
ROW["stalls"] = {"selected": 0.3, "not_selected": 0.2, "barrier": 0.13, "short_scoreboard": 0.15}
ROW["stalls"] |= {"mio_throttle": 0.12, "wait": 0.1}


def test_the_busiest_unit_is_one_that_was_counted():
    assert card.busiest(ROW) == ("exponential unit", 62.0)
    with pytest.raises(ValueError, match="row: expected one with counters, got 'x' without"):
        card.busiest({"impl": "x", "tensor_pct": None})


def test_waits_are_no_issues_and_reasons_of_one_thing_add_up():
    name, share = card.longest_wait(ROW)
    assert name == "shared memory or exp" and share == pytest.approx(0.27)
    assert card.first_stall(ROW) == "short scoreboard"
    for function in (card.longest_wait, card.first_stall):
        with pytest.raises(ValueError, match="row: expected one with stalls, got 'x' without"):
            function({"impl": "x", "stalls": {}})


def test_equal_texts_are_said_once():
    assert by_head_dim({64: "L2", 128: "L2", 256: "L2"}) == "L2 at every D"
    assert by_head_dim({64: "L2", 128: "ALU", 256: "L2"}) == "L2 at D = 64 and 256, ALU at D = 128"
    assert by_head_dim({64: "L2"}) == "L2 at D = 64"
