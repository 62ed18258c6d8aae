"""What ran when: the kernels of the last of several calls, by stream."""

from __future__ import annotations

import pytest

from attnlib.bench.ranks import Window, by_call, covered_ms, record_name

CALLS = [(7, 10 * i + begin, 4, name) for i in range(3) for begin, name in ((1, "a"), (5, "b"))]
SENT = [(20, 10 * i, 3, "nccl") for i in range(3)]


def test_a_call_begins_where_the_one_before_ends():
    calls = by_call(SENT + CALLS, 3)
    found = [[(name, at - start) for _, at, _, name in kernels] for kernels, start in calls]
    assert found == [[("nccl", 1), ("a", 2), ("b", 6)]] * 2


def test_calls_that_are_not_equal_are_an_error():
    with pytest.raises(ValueError, match="expected a multiple of 3 on stream 7, got 5"):
        by_call(SENT + CALLS[:-1], 3)


def test_covered():
    """Kernels that overlap count once, a gap does not, and only those of the kinds do."""
    kernels = ("b", 6, 1), ("a", 0, 3), ("a", 1, 1), ("a", 2, 2), ("c", 0, 9)
    rows = [{"kind": kind, "begin_ms": begin, "ms": ms} for kind, begin, ms in kernels]
    assert covered_ms(rows, "a") == 4 and covered_ms(rows, "a", "b") == 5 and covered_ms(rows) == 0


def test_a_windows_time_is_that_of_the_slowest_rank():
    assert Window([2.0, 3.0], [None, 1400.0], [None] * 2).ms == 3.0
    assert Window([2.0, None], [None, None], [None] * 2).ms == 2.0


def test_records_of_other_numbers_of_gpus_have_other_names():
    assert [record_name("distributed", n) for n in (2, 4, 8)] == [
        "distributed", "distributed_4", "distributed_8"]  # fmt: skip
