"""What ran when: the kernels of the last of several calls, by stream."""

from __future__ import annotations

import pytest

from attnlib.bench.ranks import last_call

CALLS = [(7, 10 * i + begin, 4, name) for i in range(3) for begin, name in ((1, "a"), (5, "b"))]
SENT = [(20, 10 * i, 3, "nccl") for i in range(3)]


def test_the_last_call_begins_where_the_one_before_ends():
    last, start = last_call(SENT + CALLS, 3)
    assert [(name, at - start) for _, at, _, name in last] == [("nccl", 1), ("a", 2), ("b", 6)]


def test_one_call_begins_with_its_first_kernel():
    last, start = last_call([(7, 5, 2, "b"), (20, 3, 1, "a")], 1)
    assert [name for *_, name in last] == ["a", "b"] and start == 3


def test_calls_that_are_not_equal_are_an_error():
    with pytest.raises(ValueError, match="expected a multiple of 3 on stream 7, got 5"):
        last_call(SENT + CALLS[:-1], 3)
