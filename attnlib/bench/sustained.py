"""Compare implementations that run back to back: what the GPU keeps up at its power limit, and the energy.

A burst of calls after a pause, as `bench.collect` times them, runs at a higher clock than the same calls
after a fifth of a second of them. Order, control, inputs and judgment are those of `bench.collect`.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from attnlib.bench import harness, records, roofline, timing
from attnlib.bench.harness import Attention, Run
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.setting import warming
from attnlib.bench.shapes import Shape

MS, ROUNDS, ENERGY_MS = 200, 5, 1200
"""Of every sustained table of the book: `ROUNDS` times `MS` milliseconds, and `ENERGY_MS` for the energy."""


def sustained_rows(
    implementations: Mapping[str, Attention | None],
    shapes: Iterable[Shape],
    *,
    ms: float = MS,
    rounds: int = ROUNDS,
    energy_ms: float = ENERGY_MS,
    kind: str = "normal",
) -> list[dict[str, Any]]:
    """Run implementations back to back on this GPU; one row for each shape and implementation, and one for
    the control.

    `rounds` times `ms` milliseconds of each, interleaved and in a new order in each round; then once
    `energy_ms` of each for the energy, which the GPU counts too coarsely for less than a second (0: no
    energy). `implementations` and `kind` as in `bench.measure`.

    Columns: impl, the fields of the shape, and status, reason and errors as `bench.measure` has them. Where
    the status is "ok": ms and tflops, medians of the rounds, whose times are in round_ms; sm_mhz and watts
    meanwhile; joules of a call and tflops_per_watt, None where NVML or its counter is missing, and for the
    control. RuntimeError without a GPU.
    """
    timing.need_gpu()
    harness.check_names(implementations)
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    if warming():
        rounds, energy_ms = 1, 0
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        q, k, v = make_inputs(shape, kind, device=harness.DEVICE)
        oracle = None if warming() else Oracle(q, k, v, shape.causal)
        runs = harness.prepared_runs(Run, implementations, shape, (q, k, v), oracle, None)
        found = {run.row["impl"]: _Found([], []) for run in runs}
        for number in range(rounds):
            for run in random.Random(number).sample(runs, len(runs)):
                run.attempt(functools.partial(found[run.row["impl"]].time, run, ms))
        for run in runs:
            if energy_ms and "control_of" not in run.row:
                run.attempt(functools.partial(found[run.row["impl"]].weigh, run, energy_ms))
            run.attempt(functools.partial(run.gate, oracle))
            if run.ok:
                run.row.update(summary(shape, *found[run.row["impl"]]))
        rows += [run.row for run in runs]
    return rows


class _Found(NamedTuple):
    """What one implementation showed on one shape."""

    results: list[timing.Sustained]
    joules: list[float | None]

    def time(self, run: Run, ms: float) -> None:
        self.results.append(timing.sustained(run.call, ms))

    def weigh(self, run: Run, ms: float) -> None:
        self.joules.append(timing.joules(run.call, ms))


def summary(
    shape: Shape, results: list[timing.Sustained], joules_found: list[float | None]
) -> dict[str, float | None]:
    """The measured columns of a row: medians over rounds, of the values that are known."""
    flops = roofline.flops(shape)
    ms, sm_mhz, watts = (_median(column) for column in zip(*results, strict=True))
    joules = _median(joules_found)
    return {
        "ms": ms,
        "round_ms": [result.ms for result in results],
        "tflops": flops / ms * 1e-9,
        "sm_mhz": sm_mhz,
        "watts": watts,
        "joules": joules,
        "tflops_per_watt": flops / joules * 1e-12 if joules else None,
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def method(
    ms: float = MS, rounds: int = ROUNDS, energy_ms: float = ENERGY_MS, kind: str = "normal"
) -> dict[str, Any]:
    """How `sustained_rows` measures with these options, in words, for a record."""
    return {
        "timer": "CUDA events around all calls of a round, back to back, L2 warm",
        "mode": "sustained: no pause between calls",
        "control": "the last implementation that works, ours before peers, timed twice",
        "statistic": "median of the rounds' means; clock and power: medians of a round's second half",
        "energy": "NVML's energy counter between its first and last update in a run of its own",
        "order": "implementations interleaved, shuffled in each round",
        "rounds": rounds,
        "ms": ms,
        "energy_ms": energy_ms,
        "inputs": kind,
        "gate": "fp64 oracle before and after the timing",
        "flops": "4*B*H*Sq*Sk*D, halved when causal",
    }


def measure(
    name: str, implementations: Mapping[str, Attention | None], shapes: Iterable[Shape], *, notebook: str
) -> records.Table:
    """`sustained_rows` in the book's setting, measured and stored on a GPU, replayed without one."""
    shapes = list(shapes)
    return records.table(notebook, name, lambda: sustained_rows(implementations, shapes), method=method())
