"""Verdicts in texts are held against the control rows of the records: each planted mistake is found."""

import json

import pytest

from attnlib.bench import records, verdict
from attnlib.bench.shapes import TASK
from attnlib.book import claims, hygiene

SHAPE = TASK["d64"]
NOTEBOOK = "04_exp2"


def row(impl, ms, **more):
    rounds = [ms * factor for factor in (0.999, 1.0, 1.001, 1.0, 1.0)]
    return {"impl": impl, **SHAPE.to_dict(), "status": "ok", "ms": ms, "round_ms": rounds, **more}


def write(folder, rows):
    """A record of the reference GPU that has one table, "ladder"."""
    path = folder / records.REFERENCE_GPU / f"{NOTEBOOK}.json"
    path.parent.mkdir(exist_ok=True)
    header = {"gpu": {"name": "NVIDIA H200"}, "date": "2026-11-22", "schema": records.SCHEMA}
    records.write_json(path, records.rounded(header | {"tables": {"ladder": {"rows": rows}}}))


@pytest.fixture
def record(monkeypatch, tmp_path):
    """04 is 7% faster than 03 and level with the tutorial; the control is off by 1%."""
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    rows = [row(NOTEBOOK, 1.0), row("03_online_softmax", 1.07), row("tutorial", 1.005)]
    write(tmp_path, [*rows, row(f"{NOTEBOOK} (control)", 1.01, control_of=NOTEBOOK)])
    return tmp_path


def problems(said="", written="", source="", cell="c04-result"):
    """What the two rules find in a chapter with one code cell, which shows `said`, and one Markdown cell."""
    output = {"output_type": "display_data", "data": {"text/markdown": said}, "metadata": {}}
    content = {
        "cells": [
            {"cell_type": "code", "id": cell, "source": source, "outputs": [output]},
            {"cell_type": "markdown", "id": cell, "source": written},
        ]
    }
    notebook = hygiene.Notebook(NOTEBOOK, json.dumps(content), content)
    rules = (hygiene.true_verdicts, hygiene.judged)
    return [message for rule in rules for _, message in rule(notebook)]


def judged(other):
    return str(verdict.judge(records.load(NOTEBOOK, "ladder"), SHAPE, NOTEBOOK, other))


ASKS = "lesson.verdict(ladder, '04_exp2', '03_online_softmax')"


def test_what_the_record_gives_may_be_said(record):
    assert judged("03_online_softmax") == "1.070x, noise of this run 1.010: faster"
    text = f"Against 03: {judged('03_online_softmax')}. Against the tutorial: {judged('tutorial')}."
    assert "a tie" in text and problems(text, source=ASKS) == []
    cells = verdict.table_rows([records.load(NOTEBOOK, "ladder")], NOTEBOOK, ["tutorial"], [SHAPE])[0]
    assert problems(f"| x | D = 64 |\n| :--- | :--- |\n| x | {cells[0][SHAPE.label]} |", source=ASKS) == []


@pytest.mark.parametrize(
    "said",
    [
        "1.005x, noise of this run 1.010: faster",  # the control says a tie
        "1.005x, noise 1.001: faster",  # as if the control were smaller
        "1.070x, noise of this run 1.010: slower",
        "1.080x, noise of this run 1.010: faster",  # of an older run
        "1.070x, noise not measured",
        "1.005x: a tie, the same kernel differs by 1.020 from itself in this run",
    ],
)
def test_a_verdict_that_the_record_does_not_give_is_found(record, said):
    for where in ({"said": said}, {"written": f"So it is: {said}."}):
        found = problems(**where, source=ASKS)
        assert any("no record of this chapter gives the verdict" in one for one in found), found


def test_a_verdict_goes_stale_when_the_record_changes(record):
    text = judged("03_online_softmax")
    assert problems(text, source=ASKS) == []
    rows = [row(NOTEBOOK, 1.0), row("03_online_softmax", 1.07), row("c", 1.09, control_of=NOTEBOOK)]
    write(record, rows)
    assert "a tie" in judged("03_online_softmax") and len(problems(text, source=ASKS)) == 1


@pytest.mark.parametrize(
    "sentence",
    [
        "It is 7% faster than step 03.",
        "Step 04 **gains 1.07 times** at D = 64.",
        "At D = 64 it is 1.005x ahead of the tutorial.",
        "The tutorial is beaten: it loses 0.5%.",
        "First the table, of this run.\n\n- D = 64: a speedup of 1.07x",
        "It ends 2 percent behind.",
    ],
)
def test_a_comparison_without_a_verdict_is_found(record, sentence):
    for where in ({"said": sentence}, {"written": sentence}):
        assert any("without a verdict" in one for one in problems(**where, source=ASKS)), sentence


@pytest.mark.parametrize(
    "sentence",
    [
        "It is faster than step 03, as predicted.",  # no number: the table beside it has them
        "The model says 7% faster.",
        "Twice the clock would gain 7%.",
        "FlashAttention-3's paper says 1.5 to 2.0 times faster (arXiv:2407.08608).",
        "The lab log has a variant that loses 3%.",
        "78% of the tiles need no mask.",
        "| D | gain |\n| :--- | :--- |\n| 64 | 7% faster |",
    ],
)
def test_what_is_no_verdict_passes(record, sentence):
    assert problems(sentence, sentence, source=ASKS) == []


def test_a_prediction_is_no_verdict(record):
    assert problems(written="It gains 7%.", source=ASKS, cell="c04-prediction") == []
    assert problems(written="It gains 7%.", source=ASKS) != []


def test_a_measured_control_wants_a_verdict(record):
    assert "expected lesson.verdict" in problems(source="lesson.ladder(table)")[0]
    assert problems(source="v = verdict.judge(ladder, shape, a, b)") == []


def test_chapters_that_were_not_measured_again_wait(record):
    """An old record has no control, and its chapter no verdict: nothing can be held against it."""
    write(record, [row(NOTEBOOK, 1.0), row("03_online_softmax", 1.07)])
    assert problems("It is 7% faster.", source="lesson.ladder(table)") == []
    assert judged("03_online_softmax") == "1.070x, noise not measured"
    assert problems(judged("03_online_softmax"), source=ASKS) == []
    assert problems("1.070x, noise of this run 1.010: faster", source=ASKS) != []


def test_records_of_other_chapters_count_where_they_are_loaded(record):
    text = judged("03_online_softmax")
    tables = claims.tables_of("19_record", f'records.load("{NOTEBOOK}", "ladder")')
    assert text in claims.given(tables) and text not in claims.given(claims.tables_of("19_record"))


def test_records_of_other_gpus_count_where_all_are_asked_for(record):
    other = record / "another-gpu" / f"{NOTEBOOK}.json"
    other.parent.mkdir()
    header = {"gpu": {"name": "Another GPU"}, "date": "2026-11-23", "schema": records.SCHEMA}
    rows = [row(NOTEBOOK, 1.0), row("03_online_softmax", 1.5)]
    records.write_json(other, records.rounded(header | {"tables": {"ladder": {"rows": rows}}}))
    text = "1.500x, noise not measured"
    asked = claims.tables_of(NOTEBOOK, f'records.of_all_gpus("{NOTEBOOK}", "ladder")')
    assert text in claims.given(asked) and text not in claims.given(claims.tables_of(NOTEBOOK))


def test_inputs_of_one_shape_are_told_apart(record):
    """Rows that a column of the inputs tells apart have verdicts among themselves, and with nobody else."""
    write(record, [row(impl, ms, codes=codes) for codes, fa3 in ((1, 1.1), (2, 2.6)) for impl, ms in
                   ((NOTEBOOK, codes), ("fa3", fa3))])  # fmt: skip
    for ratio, found in ("1.100x", True), ("1.300x", True), ("2.6x", False), ("2x", False):
        said = problems(f"{ratio}, noise not measured", source=ASKS)
        assert (said == []) == found, ratio


def test_a_row_of_the_plane_gives_the_verdict_of_its_ratio(record):
    """Rows of `time_plane.py` have both times, and so their own ratio."""
    one = row("", 1.0) | {"ratio": 1.1, "control": 1.001, "spread": 1.004, "round_ratios": [1.1, 1.1]}
    write(record, [one])
    for text, found in ("1.100x, noise 1.004: faster", True), ("1.100x, noise 1.004: tie", False):
        assert (problems(text, source=ASKS) == []) == found, text
