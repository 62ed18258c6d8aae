"""Burst and sustained side by side: cells, verdicts, what is missing."""

from attnlib.bench.modes import mode_rows
from attnlib.bench.records import Table
from attnlib.bench.shapes import TASK

SHAPE = TASK["d64"]
ORIGIN = {"gpu": {"name": "NVIDIA H200"}, "date": "2026-11-22"}


def row(impl, tflops, **more):
    ms = 1000 / tflops
    found = {"impl": impl, **SHAPE.to_dict(), "status": "ok", "tflops": tflops, "ms": ms}
    return found | {"round_ms": [ms] * 3, "sm_mhz": 1900.0} | more


def table(*rows):
    return Table.of("t", list(rows), ORIGIN, replayed=True)


def test_both_modes_with_clock_and_verdict():
    control = row("attnlib (control)", 500.0 / 1.01, control_of="attnlib")
    burst = table(row("attnlib", 500.0), row("fa3", 450.0), row("01_naive", 40.0), control)
    lasting = table(
        row("fa3", 440.0, sm_mhz=None), row("attnlib", 442.0, sm_mhz=1500.0), control | {"ms": 2.28}
    )
    rows, columns = mode_rows(burst, lasting, [SHAPE])
    assert list(columns.values()) == ["TFLOP/s (SM clock, MHz)", "D = 64, burst", "D = 64, sustained"]
    assert [[one[key] for key in columns] for one in rows] == [
        ["attnlib", "500 (1900)", "442 (1500)"],  # no control, and nothing that runs in one mode alone
        ["FA3", "450 (1900)", "440"],
        ["attnlib against FA3", "1.111x, noise 1.010: faster", "1.005x, noise 1.008: tie"],
    ]


def test_a_peer_that_is_not_installed_is_shown():
    absent = {"impl": "fa3", **SHAPE.to_dict(), "status": "not installed"}
    both = table(row("attnlib", 500.0), absent)
    rows, _ = mode_rows(both, both, [SHAPE])
    assert rows[1]["burst_64"] == "not installed"
    assert rows[2]["sustained_64"] == "not measured (fa3: not installed)"
