"""Chapter 41's trainer on two processes of a CPU: every way to spread a model computes what one process does;
and the script that measures it, from begin to end."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import training_jobs as jobs

from attnlib.book.training import Training

WAYS = [{"zero": 0}, {"zero": 1, "offload": True}, {"zero": 2}, {"zero": 3, "lora": 4}]


def test_every_spread_computes_the_same(two):
    cases = [replace(jobs.HOW, gpus=2, **way) for way in WAYS]
    one = {lora: jobs.alone(replace(jobs.HOW, lora=lora)) for lora in (None, 4)}
    found = two.run(jobs.farthest, cases, [one[how.lora] for how in cases])
    for errors in found:
        for way, error in zip(WAYS, errors, strict=True):
            assert error <= 0.02, (way, error)  # Adam's first steps magnify rounding


def test_the_number_of_ranks_is_checked():
    with pytest.raises(ValueError, match="how.gpus: expected the number of ranks, 1, got 2"):
        jobs.Trainer(jobs.SHAPE, Training(8, gpus=2))


def test_the_script_measures_and_goes_on(two, tmp_path):
    out = tmp_path / "record.json"
    assert two.run(jobs.measure, out) == [0, 0]
    assert jobs.measure(out) == 0  # one process: a table of its own
    record = json.loads(out.read_text())
    assert set(record["tables"]) == {"steps_2", "steps_1"}
    rows = record["tables"]["steps_2"]["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 4 and {row["gpus"] for row in rows} == {2}
    rows = record["tables"]["steps_1"]["rows"]
    rows[0]["status"] = "begun, and the process ended"
    gone = rows.pop(1)
    out.write_text(json.dumps(record))
    assert jobs.measure(out) == 1  # what ended the process is told, and not tried again
    after = json.loads(out.read_text())["tables"]["steps_1"]["rows"]
    assert [row["status"] for row in after] == ["begun, and the process ended", "ok", "ok"]
    assert after[1] == rows[1] and after[2]["lora"] == gone["lora"]


def test_rates_are_those_that_were_measured(monkeypatch):
    """Adam's on the host: 1000 elements of 100 bytes in 2 s, of which their 4 bytes are 1 s on the bus. Only
    several GPUs have a link."""
    script = jobs.measuring_script()
    clock = iter([0.0, 9.0, 9.0, 11.0])
    monkeypatch.setattr(script, "wait", lambda device: next(clock))
    assert script.adam_rate(1000, 4e-6, "cpu") == pytest.approx(1e-4)
    machine = replace(script.H200, cpu=7.0)
    found = [{row["rate"]: row["measured"] for row in script.rate_rows(machine, script.H200, count)}
             for count in (1, 2)]  # fmt: skip
    assert found[0]["cpu"] == 7.0 and "link" not in found[0] and "link" in found[1]
