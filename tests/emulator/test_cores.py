"""Threads that take turns stay on one core, and only as long as they do."""

from __future__ import annotations

import os
import threading

import pytest

from attnlib.emulator.cores import on_one_core


def test_threads_stay_where_their_starter_is():
    before, found = os.sched_getaffinity(0), []
    with on_one_core():
        found.append(os.sched_getaffinity(0))
        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert found[0] == found[1] <= before and len(found[0]) == 1
    assert os.sched_getaffinity(0) == before


def test_a_failure_leaves_all_cores():
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), on_one_core():
        assert len(os.sched_getaffinity(0)) == 1
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before
