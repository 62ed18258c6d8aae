"""Factors of counters and sentences on waits, from a made-up record."""

import pytest
from profile_rows import profile_row, write_profile

from attnlib.bench.records import RecordError
from attnlib.bench.shapes import TASK
from attnlib.book import counted

BEFORE, AFTER = "03_online_softmax", "04_exp2"


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    return lambda rows: write_profile(tmp_path, rows)


def test_factors_are_of_the_same_head_dimension(record):
    rows = [profile_row(BEFORE, TASK["d64"], 0.2), profile_row(BEFORE, TASK["d128"], 0.25)]
    rows += [profile_row(AFTER, shape, 0.5) | {"l2_pct": None} for shape in (TASK["d64"], TASK["d128"])]
    record(rows)
    found = counted.factors({"tensor pipe": "tensor_pct", "L2": "l2_pct"}, BEFORE, AFTER, (64, 128))
    assert found[("tensor pipe", 64)] == pytest.approx(2.5) and found[("tensor pipe", 128)] == pytest.approx(
        2
    )
    assert found[("L2", 64)] is None and len(found) == 4
    with pytest.raises(RecordError):
        counted.factors({"L2": "l2_pct"}, BEFORE, "05_two_pass_causal", (64,))


def test_waits_name_the_longest_of_each_head_dimension(record):
    stalls = {
        64: {"selected": 0.5, "barrier": 0.31, "wait": 0.19},
        128: {"long_scoreboard": 0.2, "gmma": 0.1},
    }
    record([profile_row(AFTER, TASK[f"d{d}"], 0.5) | {"stalls": found} for d, found in stalls.items()])
    assert counted.waits(AFTER, (64, 128)) == (
        "a barrier at D = 64 (31% of their cycles), global memory at D = 128 (20%)"
    )
