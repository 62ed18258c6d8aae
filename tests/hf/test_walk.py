"""The table of transformers' architectures: a part of it found again, and all of it up to date."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

import walk  # noqa: E402
from tiny import architectures  # noqa: E402
from walk_cases import CASES, ELSE, NOT_FOR_IT, REFUSED, WRONG, refusal  # noqa: E402

import attnlib.hf  # noqa: E402

SAMPLE = ["bert", "mistral", "opt", "t5"]
"""Cross-attention, windows, packed rows that "eager" does not see, a bias."""

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


def test_a_sample_walks_to_the_verdicts_of_the_table(tmp_path):
    """By the command itself, without the interpreter: on a CPU the reference computes, as for the table."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join((str(walk.ROOT), env.get("PYTHONPATH", "")))
    found = tmp_path / "found.json"
    command = [sys.executable, str(Path(walk.__file__)), "--only", *SAMPLE, "--table", str(found)]
    subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    committed = [row for row in table["rows"] if row["type"] in SAMPLE]
    assert json.loads(found.read_text())["rows"] == committed
