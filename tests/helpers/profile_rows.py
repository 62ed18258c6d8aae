"""Rows as `profiling.profile` makes them, with made-up values that differ by step and head dimension."""

from __future__ import annotations

import json
from pathlib import Path

from attnlib.bench import counters, profiling
from attnlib.bench.names import PEERS
from attnlib.bench.shapes import TASK, Shape
from attnlib.book.chapters import STEPS

IMPLS = [*(step for step, _ in STEPS), "attnlib-triton", "attnlib", *PEERS]
TOOL = "Nsight Compute 2025.4.0.0"


def profile_row(impl: str, shape: Shape, share: float, direction: str = "forward") -> dict:
    """A row of a kernel that uses this share of the tensor cores."""
    reasons = {
        "selected": 1.0,
        "barrier": 4 * share,
        "long_scoreboard": 6 - 5 * share,
        "wait": 2.0,
        "gmma": share,
    }
    kernel = {counters.stall_metric(reason): value for reason, value in reasons.items()}
    kernel |= {
        counters.WARP_CYCLES: sum(reasons.values()) + 0.1,
        counters.L2_HIT: 90.0,
        counters.REGISTERS: 168,
    }
    kernel |= {metric: 50.0 * share for metric in counters.PERCENT.values()}
    kernel |= {metric: 1e8 / (0.1 + share) for metric in counters.SUMS.values()}
    kernel |= {
        counters.PERCENT["tensor_pct"]: 100 * share,
        counters.PERCENT["issue_pct"]: 3000 / shape.head_dim,
    }
    kernel |= {counters.SUMS["time_us"]: 400 / (0.1 + share), "name": "kernel", "grid": None, "block": None}
    made = {"impl": impl, **shape.to_dict(), "pass": direction, "status": "ok", "tool": TOOL}
    return made | counters.fields_of([kernel], shape)


def profile_rows() -> list[dict]:
    """Every step, the package and the peers at the task's shapes."""
    return [profile_row(impl, s, (i + 1) / len(IMPLS)) for s in TASK.values() for i, impl in enumerate(IMPLS)]


def write_profile(folder: Path, rows: list[dict]) -> Path:
    """A record of these rows for the reference GPU, in a data folder of a test."""
    path = folder / "nvidia-h200" / f"{profiling.RECORD}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"schema": 1, "gpu": {"name": "NVIDIA H200"}, "date": "2026-11-21"}
    path.write_text(json.dumps({**record, "tables": {profiling.TABLE: {"rows": rows}}}), encoding="utf-8")
    return path
