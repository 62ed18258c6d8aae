"""The table of transformers' architectures: a part of it found again, and all of it up to date."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from cases import INTERPRETER_REMARKS

transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

import walk  # noqa: E402
from tiny import architectures  # noqa: E402
from walk_cases import CASES, ELSE, NOT_FOR_IT, REFUSED, WRONG, refusal  # noqa: E402

import attnlib.hf  # noqa: E402
from attnlib import dispatch  # noqa: E402

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SAMPLE = ["mistral (decoder)", "opt (decoder)", "t5 (encoder-decoder)", "deepseek_v3 (decoder)"]
"""Windows; packed rows that "eager" does not see; cross-attention and a bias; values of another width."""

table = json.loads(walk.DATA.read_text())
if table["transformers"] != transformers.__version__:
    pytest.skip(f"the table is of transformers {table['transformers']}", allow_module_level=True)


def key(row: dict) -> tuple[str, str, str]:
    return row["type"], row["role"], row["class"]


def test_the_table_names_every_architecture():
    expected = [(a.model_type, a.role, a.class_name) for a in architectures()]
    assert [key(row) for row in table["rows"]] == expected
    assert {(*key(row), row["sdpa"]) for row in table["rows"]} == {
        (a.model_type, a.role, a.class_name, a.claims_sdpa) for a in architectures()
    }


def test_every_architecture_has_a_verdict_for_every_case():
    refused = {a.class_name for a in architectures() if not a.is_taken}
    for row in table["rows"]:
        expected = [walk.REFUSAL] if row["class"] in refused else [case.name for case in CASES]
        assert list(row["verdicts"]) == expected, row["type"]


def test_nothing_is_wrong():
    wrong = [
        (*key(row), *found)
        for row in table["rows"]
        for found in row["verdicts"].items()
        if found[1].startswith(WRONG)
    ]
    assert not wrong


def test_the_table_says_something():
    """Most cases are compared, and no case of an architecture is left out for want of a small model."""
    count = Counter(
        "else" if found.startswith(ELSE) else "refused" if found.startswith(REFUSED) else "compared"
        for row in table["rows"]
        if walk.REFUSAL not in row["verdicts"]
        for found in row["verdicts"].values()
        if found != NOT_FOR_IT
    )
    assert count["compared"] > 0.7 * sum(count.values()) and count["else"] < 0.1 * sum(count.values()), count


def test_the_page_is_of_this_table():
    assert walk.PAGE.read_text() == walk.page(table), "python tests/hf/walk.py --page"


def test_architectures_that_are_not_taken_are_refused_by_name():
    attnlib.hf.register()
    for architecture in architectures():
        if not architecture.is_taken:
            assert refusal(architecture) == REFUSED + architecture.class_name


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_walks_to_the_verdicts_of_the_table(name, monkeypatch):
    """All cases but the compiled ones, which other tests have. The reference computes, as for the table."""
    for registry in ("FAMILIES", "MASKED", "DECODERS"):
        reference = list(getattr(dispatch, registry).items())[-1:]
        monkeypatch.setattr(dispatch, registry, dict(reference))
    monkeypatch.setattr(dispatch, "_roads", {})
    (architecture,) = [a for a in architectures() if a.name == name]
    cases = [case for case in CASES if not case.name.startswith("compiled")]
    found = walk.walk(architecture, "cpu", cases)["verdicts"]
    (row,) = [row for row in table["rows"] if f"{row['type']} ({row['role']})" == name]
    assert found == {case.name: row["verdicts"][case.name] for case in cases}
