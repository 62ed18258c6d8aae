"""Chapter 37's kernels on this Hopper GPU: errors, times, and clocks of a trip through the hot loop.

    python tests/gpu/time_exponentials.py                    some 120 s; figures/data/<gpu>/exponentials.json
    python tests/gpu/time_exponentials.py --tables held_out  one table alone, some 70 s

All at D = 64, causal. `powers`: what each way to compute 2^x makes of every number of bfloat16 and float16 up
to 0, beside its NumPy model, which it has to agree with bit for bit. `errors`: of the output, for some kinds
of inputs, against fp64. `calls`: time of whole calls. `clocks`: clocks of a trip through the loop, of copies
with stamps before and behind it, in the first program; also of kernels that are WRONG ON PURPOSE, each
without one part of its work (rows with "wrong"). Those say what binds the kernel, and are no attention.
`held_out`: the same of those kernels and of the ones that test the account made of them, together.
`beside`: whether other instructions keep their rate while the tensor cores multiply.
All that is compared runs in the same shuffled rounds, with a control row. Processes side by side compile
first. Status 0 when all that should be right was right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention  # noqa: E402
from attnlib.bench import (  # noqa: E402  # noqa: E402
    beside,
    changed_kernels,
    exponentials,
    harness,
    names,
    records,
    shapes,
    sources,
    timeline,
    timing,
)
from attnlib.bench.oracle import Oracle, make_inputs  # noqa: E402
from attnlib.bench.setting import BOOK  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402

DEVICE, STEP, BASE = "cuda", "37_exponentials", "15_teaching"
SHAPE = shapes.TASK["d64"]
SETTING = dataclasses.replace(BOOK, rounds=8)
LAUNCHES = 4
"""Of a copy with stamps in a round; the last one is read."""
LEAST_TRIPS = 8
"""Of a tile whose clocks count: shorter loops are mostly their begin."""
KINDS = "normal", "large", "outlier", "sink"
HELD_OUT = (
    "vexp_three", "vexp_two", "three", "poly6", "poly6_three", "no_copies_128", "no_maximum_exponentials",
    "staggered", "twice", "thrice", "poly3_twice",
)  # fmt: skip
"""Kernels that an account of the others' clocks was to predict: in the tables `held_out` and `errors`."""
EXACT = (BASE, "poly3", "poly4", "pairs", "keys_128", "two", "two_q", "three", "poly6", "poly6_three",
         "staggered", "twice", "thrice", "poly3_twice")  # fmt: skip
"""Kernels whose output has to be within the budget of an exact one."""
NOT_TIMED = "whole", "pairs_bf16"
"""A step on the way to others, and a kernel that has the machine code of "pairs" but for the format."""
BITS = "poly2", "poly3", "poly4", "schraudolph", "vexp"
"""Kernels that agree with their NumPy model bit for bit."""
LOOP, BLOCKS = "for i in range(start + 1, end", "end - start"
SPANS = [
    timeline.Span("loop", timeline.before(LOOP, tile=BLOCKS), timeline.after(LOOP, tile=BLOCKS)),
    timeline.Span("program", timeline.before("wait(mem.v_full, 0, plan)", tile="turn * 0"),
                  timeline.after("tma.store_wait(0)", tile="turn * 0")),
]  # fmt: skip
TILES = range(SHAPE.seqlen // 64 + 1)
"""A tile is known by how many blocks of keys it has; 0 is the whole program."""


def texts() -> dict[str, str]:
    found = sources.variant_sources(sources.notebook_of(STEP), BASE)
    return {name: text for name, text in found.items() if name not in NOT_TIMED}


def modules() -> dict[str, Any]:
    return {name: sources.load_source(changed_kernels.module_name(STEP, name), text)
            for name, text in texts().items()}  # fmt: skip


def is_wrong(name: str) -> bool:
    return name.startswith("no_")


def stamped(name: str, text: str, module: Any) -> timeline.Timeline:
    return timeline.of_text(f"{STEP}_{name}", text, module.attention, SPANS, TILES)


# ---------------------------------------------------------------- errors


def power_rows(*chosen: str) -> Iterator[dict[str, Any]]:
    for name in chosen or exponentials.MODELS:
        module = sources.load_source(f"{STEP}_{name}_powers", texts()[name] + exponentials.POWERS)
        for dtype in ("bfloat16", "float16"):
            x = exponentials.every(dtype)
            x = x[x >= -125]
            padded = torch.zeros(-(-len(x) // 4096) * 4096, device=DEVICE)
            padded[: len(x)] = torch.from_numpy(x)
            y = torch.empty_like(padded)
            module.powers[(len(padded) // 4096,)](padded, y, num_warps=4)
            found, model = y[: len(x)].cpu().numpy(), exponentials.MODELS[name](x)
            relative = np.abs(found / np.exp2(x.astype(np.float64)) - 1)
            seen = x >= (-14 if name == "pairs" else -125)  # float16 has no smaller normal numbers
            yield {
                "name": name, "dtype": dtype, "numbers": len(x), "max": relative[seen].max(),
                "mean": relative[seen & (x <= -(2.0**-9))].mean(),
                "not as the model": int((found.view(np.int32) != model.view(np.int32)).sum()),
                "off from the model": np.abs(found / np.maximum(model, 1e-38) - 1)[seen].max(),
            }  # fmt: skip


def error_rows() -> Iterator[dict[str, Any]]:
    kernels = {name: module.attention for name, module in modules().items() if not is_wrong(name)}
    for dtype in ("float16", "bfloat16"):
        for kind in KINDS:
            q, k, v = make_inputs(Shape(1, 2, 2048, 64, True, dtype), kind, device=DEVICE)
            oracle = Oracle(q, k, v, causal=True)
            for name, kernel in kernels.items():
                found = oracle.judge(kernel(q, k, v, True, 0.125))
                yield {
                    "name": name, "dtype": dtype, "inputs": kind, "max": found.max_error,
                    "rms": found.rms_error, "budget_max": found.budget.max, "budget_rms": found.budget.rms,
                    "ok": bool(found.ok),
                }  # fmt: skip


# ---------------------------------------------------------------- times


class Run(harness.Run):
    """A call that is timed though its output may be beyond the budget: `errors` says how far it is off."""

    def gate(self, oracle: None) -> None:
        out = self.call()
        if not torch.isfinite(out).all():
            self.stop("wrong", "not finite")


def call_rows() -> list[dict[str, Any]]:
    q, k, v = make_inputs(SHAPE, device=DEVICE)
    calls = {name: module.attention for name, module in modules().items()
             if not is_wrong(name) and name not in HELD_OUT}  # fmt: skip
    calls |= {"attnlib": lambda q, k, v, causal, scale: attention(q, k, v, causal=causal, sm_scale=scale)}
    runs = []
    for name, second in [*((name, False) for name in calls), (BASE, True)]:
        run = Run(name, SHAPE, second)
        run.attempt(lambda run=run, name=name: run.prepare(calls[name], q, k, v))
        run.attempt(lambda run=run: run.gate(None))
        runs.append(run)
    harness.time_rounds(runs, None, SETTING, lambda text: None)
    return [run.row for run in runs]


def clocks_of(found: timeline.Timeline, tensors: Sequence[torch.Tensor]) -> tuple[float, float]:
    """(of a trip through the loop, of the whole program): means over consumers and tiles of one launch."""
    for _ in range(LAUNCHES):
        found.attention(*tensors, True)
    torch.cuda.synchronize()
    loops, trips, programs = 0, 0, []
    for row in found.read():
        if row["event"] == "program":
            programs.append(row["end"] - row["begin"])
        elif row["tile"] > LEAST_TRIPS:
            loops, trips = loops + row["end"] - row["begin"], trips + row["tile"] - 1
    return loops / trips, statistics.mean(programs)


def held_out_rows() -> list[dict[str, Any]]:
    return clock_rows(HELD_OUT)


def clock_rows(more: Sequence[str] = ()) -> list[dict[str, Any]]:
    tensors = make_inputs(SHAPE, device=DEVICE)
    kernels = modules()
    written = {name: text for name, text in texts().items() if name not in HELD_OUT or name in more}
    lines = {name: stamped(name, text, kernels[name]) for name, text in written.items()}
    rows = {}
    for name in [*lines, BASE + names.CONTROL]:
        impl = name.removesuffix(names.CONTROL)
        plan = kernels[impl].plan_of.fn(64, True)
        rows[name] = {"name": name, "consumers": plan.warpgroups.value, "keys": plan.block_n.value,
                      "trip": [], "program": []}  # fmt: skip
        rows[name] |= {"wrong": True} if is_wrong(impl) else {}
        rows[name] |= {"control_of": impl} if impl != name else {}
    for number in range(SETTING.rounds):
        for name in random.Random(number).sample(list(rows), len(rows)):
            timing.rest(SETTING)
            trip, program = clocks_of(lines[name.removesuffix(names.CONTROL)], tensors)
            rows[name]["trip"].append(trip)
            rows[name]["program"].append(program)
    return [one_row(row) for row in rows.values()]


def one_row(row: dict[str, Any]) -> dict[str, Any]:
    """Medians of the rounds; `clocks`: for each consumer one trip, so of 64 x 64 scores of four consumers as
    it is, and of other plans as much as they take for as many scores."""
    scores = row["consumers"] * row["keys"] / (4 * 64)
    rounds = [trip / scores for trip in row.pop("trip")]
    programs = row.pop("program")
    return row | {"clocks": statistics.median(rounds), "round_clocks": rounds,
                  "program": statistics.median(programs), "round_program": programs}  # fmt: skip


# ---------------------------------------------------------------- command


def compile_all(tables: Sequence[str]) -> None:
    """A process for each kernel, which leaves it and its copies in Triton's cache."""
    command = [sys.executable, __file__, "--tables", *tables, "--compile"]
    waiting = [name for name in texts() if name not in HELD_OUT or {"held_out", "errors"} & {*tables}]
    waiting += beside.KINDS if "beside" in tables else ()
    running: list[subprocess.Popen] = []
    while waiting or running:
        running = [child for child in running if child.poll() is None]
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(subprocess.Popen([*command, waiting.pop()]))  # the last are the longest
        time.sleep(0.1)


def compile_one(name: str, tables: Sequence[str]) -> None:
    """What the tables need of a kernel."""
    if name in beside.KINDS:
        beside.clocks(True, name), beside.clocks(False, name)
        return
    tensors = make_inputs(dataclasses.replace(SHAPE, batch=1), device=DEVICE)
    text, module = texts()[name], modules()[name]
    if {"clocks", "held_out"} & {*tables}:
        stamped(name, text, module).attention(*tensors, True)
    if name in exponentials.MODELS and "powers" in tables:
        next(power_rows(name))
    if {"calls", "errors"} & {*tables} and not is_wrong(name):
        module.attention(*tensors, True, 0.125)
        module.attention(*(x.bfloat16() for x in tensors), True, 0.125)
    torch.cuda.synchronize()


def show(row: dict[str, Any]) -> str:
    name = row.get("name") or row.get("impl")
    if "clocks" in row:
        label = " (wrong on purpose)" if row.get("wrong") else ""
        return f"clocks {name:16} {row['clocks']:8.1f} a round, program {row['program']:9.0f}{label}"
    if "kind" in row:
        both = f"{row['alone']:.2f} alone, {row['beside products']:.2f} beside products"
        return f"beside {row['kind']:32} {both}, which lose {row['products slowed by']:.1%}"
    if "numbers" in row:
        differ = row["not as the model"]
        off = f"max {row['max']:.2%} mean {row['mean']:.3%}"
        return f"powers {name:16} {row['dtype']:9} {off}, {differ} differ"
    if "inputs" in row:
        off = f"max {row['max']:.1e} rms {row['rms']:.1e}"
        return f"error  {name:16} {row['dtype']:9} {row['inputs']:8} {off}"
    times = f"{row['ms']:.4f} ms" if "ms" in row else row.get("reason", row["status"])
    return f"call   {name:28} {times}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Chapter 37's kernels: errors, times, clocks.")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    tables = {"clocks": clock_rows, "held_out": held_out_rows, "calls": call_rows,
              "powers": power_rows, "errors": error_rows, "beside": beside.rows}  # fmt: skip
    parser.add_argument("--tables", choices=list(tables), nargs="+", default=list(tables),
                        help="(default: all)")  # fmt: skip
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/exponentials.json)")
    args, begin = parser.parse_args(argv), time.monotonic()
    if no_hopper():
        return 2
    if args.compile is not None:
        compile_one(args.compile, args.tables)
        return 0
    compile_all(args.tables)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    said = {
        "clocks": "%clock before and behind the hot loop, program 0, tiles of more than "
        f"{LEAST_TRIPS} blocks, launch {LAUNCHES}; of a round of four consumers, each a trip of 64 keys",
    }  # fmt: skip
    header = records.provenance(harness.method(SETTING, BASE, gate=False) | said)
    path = records.report_path("exponentials", header, args.out)
    good = True
    for table in args.tables:
        rows = list(tables[table]())
        print(*map(show, rows), f"{time.monotonic() - begin:.0f} s", sep="\n", flush=True)
        records.add_table(path, {"notebook": "exponentials", **header}, table, rows)
        good &= all(row.get("status", "ok") == "ok" for row in rows)
        good &= not any(row["not as the model"] for row in rows if table == "powers" and row["name"] in BITS)
        good &= all(row["ok"] for row in rows if table == "errors" and row["name"] in EXACT)
    print(path)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
