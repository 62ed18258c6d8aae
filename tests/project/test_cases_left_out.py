"""`tests/helpers/chosen.py`: which cases are tested, and that what is left out is said."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import chosen
import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(params=[False, True], ids=["those that stand for all", "every one"])
def every(request, monkeypatch) -> bool:
    monkeypatch.setattr(chosen, "EVERY", request.param)
    monkeypatch.setattr(chosen, "_left_out", [])
    return request.param


def test_the_others_are_tested_or_counted(every):
    assert chosen.more("ab") == (["a", "b"] if every else [])
    assert chosen.with_more("a", "abacc") == (["a", "b", "c"] if every else ["a"])
    assert chosen.left_out() == (0 if every else 4)


def test_the_first_stands_for_its_kind(every):
    found = chosen.first_of_each(["ox", "owl", "ant", "asp"], lambda word: word[0])
    assert found == (["ox", "ant", "owl", "asp"] if every else ["ox", "ant"])
    assert chosen.left_out() == (0 if every else 2)


@pytest.mark.parametrize(("cases", "ways"), [(7, 2), (7, 3), (2, 4)])
def test_each_case_takes_its_turn(every, cases, ways):
    found = chosen.in_turn(range(cases), range(ways))
    if every:
        assert sorted(found) == sorted(product(range(cases), range(ways)))
        return
    assert [case for case, _ in found] == list(range(cases))
    assert {way for _, way in found} == set(range(min(ways, cases)))
    assert chosen.left_out() == cases * (ways - 1)


@pytest.mark.parametrize("ways", [2, 3])
def test_both_parts_of_a_pair_meet_several_ways(every, ways):
    """Where as many pairs follow each other as there are ways, or twice as many, too."""
    for inner in (ways, 2 * ways):
        found = chosen.in_turn(product(range(4), range(inner)), range(ways))
        met = Counter((pair[1], way) for pair, way in found)
        assert all(len([way for second, way in met if second == i]) > 1 for i in range(inner))


@pytest.mark.parametrize("counted", [[], [3, 3]], ids=["here", "by processes"])
def test_what_is_left_out_is_said(every, counted, monkeypatch, request):
    """In one line, and by whoever collected it: each process has collected everything."""
    conftest = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    monkeypatch.setattr(conftest, "_left_out", counted)
    chosen.more("abc")

    class Reporter:
        verbosity, lines = 0, []

        def write_line(self, line):
            self.lines.append(line)

    Reporter.lines = []
    conftest.pytest_terminal_summary(Reporter())
    said = "attnlib: 3 cases that others stand for were NOT collected; every one: make every"
    assert Reporter.lines == ([] if every and not counted else [said])
