"""What runs under a profiler: calls of attention, each once warm and once inside of the profiled range.

    python -m attnlib.bench.profile_target JOBS.json RESULTS.jsonl --tool ncu|cupti|none --seconds 200

`profiling` starts it. JOBS is a list of {"impl", "shape", "pass"}, with "options" of a step's `attention`
where a variant of it is meant. A line is added to RESULTS when a job's profiled call begins (its marker), and
one with its status when it ends. An implementation that fails leaves its reason there, and the next one goes
on. Under ncu only what lies between the driver's profiler start and stop is profiled: a marker, whose kernel
ncu's table shows, and the call.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from attnlib.api import attention, attention_decode, attention_fp8, quantize_fp8
from attnlib.bench import counters, harness, peers, sources, timing
from attnlib.bench.backward import BackwardRun, make_gradient
from attnlib.bench.harness import Attention, Run
from attnlib.bench.oracle import make_inputs
from attnlib.bench.setting import WINDOW
from attnlib.bench.shapes import Shape

BACKWARD = {"20_one_pass": "ONE_PASS", "20_two_passes": "PASSES"}
"""The two ways of chapter 20 -> the name of their tiles in its kernel cell."""

Tensors = tuple[torch.Tensor, ...]
Call = Callable[[], Any]


@triton.jit
def profile_marker(x_ptr):
    tl.store(x_ptr, 1)


def _package(family: str | None) -> Attention:
    return lambda q, k, v, causal, scale: attention(q, k, v, causal=causal, sm_scale=scale, impl=family)


def function_of(impl: str, head_dim: int) -> Attention | None:
    """What computes `impl`; None for a peer."""
    if impl in peers.PEERS:
        return None
    if impl in ("attnlib", "attnlib-triton", "20_portable"):
        return _package(None if impl == "attnlib" else "triton")
    if impl in BACKWARD:
        step = sources.load_step("20_backward")
        tiles = getattr(step, BACKWARD[impl])[head_dim]
        return lambda q, k, v, causal, scale: step.attention(q, k, v, causal, scale, tiles)
    return sources.load_step(impl).attention


def variant_of(job: Mapping[str, Any]) -> Attention | None:
    """What computes a job: its implementation, with the job's options where it has some."""
    function, options = function_of(job["impl"], job["shape"]["head_dim"]), job.get("options")
    return functools.partial(function, **options) if options else function


def in_fp8(impl: str, tensors: Tensors, shape: Shape) -> Call:
    """Attention of operands that are quantized beforehand, by the package or chapter 22, whose kernel takes
    values as they are."""
    center, scale = impl == "attnlib", shape.head_dim**-0.5
    operands = [quantize_fp8(x, role, center=center) for x, role in zip(tensors, "qkv", strict=True)]
    if impl == "attnlib":
        return lambda: attention_fp8(*operands, causal=shape.causal, sm_scale=scale)
    return lambda: sources.load_step(impl).forward(*operands, shape.causal, scale)


BEYOND: dict[str, Callable[[str, Tensors, Shape], Call]] = {
    "fp8": in_fp8,
    "values": lambda impl, tensors, shape: lambda: quantize_fp8(tensors[2], "v"),
    "decode": lambda impl, tensors, shape: lambda: attention_decode(*tensors),
}
"""Passes beside forward and backward: attention in FP8, quantizing its values, and decoding."""


def prepared(job: Mapping[str, Any]) -> Run:
    """The run of a job, called once: compiled and warm, or with the status that says why not."""
    shape = Shape.from_dict(job["shape"])
    tensors = make_inputs(shape, device=harness.DEVICE)
    if job["pass"] == "backward":
        tensors = (make_gradient(shape, device=harness.DEVICE), *tensors)
    run = (BackwardRun if job["pass"] == "backward" else Run)(job["impl"], shape)
    if job["pass"] in BEYOND:
        run.attempt(lambda: setattr(run, "call", BEYOND[job["pass"]](job["impl"], tensors, shape)))
    else:
        run.attempt(lambda: run.prepare(variant_of(job), *tensors))
    run.attempt(lambda: (run.call(), torch.cuda.synchronize()))
    return run


# ---------------------------------------------------------------- one profiled call, by tool


def under_ncu(call: Callable, began: Callable[[], None]) -> None:
    torch.cuda.profiler.start()
    try:
        mark()
        began()
        call()
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def mark() -> None:
    profile_marker[(1,)](torch.empty(1, dtype=torch.int32, device=harness.DEVICE))
    torch.cuda.synchronize()


def under_cupti(call: Callable) -> list[counters.Kernel]:
    """The launches of a call by torch.profiler: times, registers, shared memory, grids. Empty where CUPTI
    can't be loaded or may not trace."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return traced_kernels(json.loads(path.read_text(encoding="utf-8")))


def traced_kernels(trace: Mapping[str, Any]) -> list[counters.Kernel]:
    """The launches in a trace of torch.profiler, in order of time."""
    events = [event for event in trace.get("traceEvents", []) if event.get("cat") == "kernel"]
    found = []
    for event in sorted(events, key=lambda event: event["ts"]):
        says = event.get("args", {})
        found.append({
            "name": event["name"],
            "grid": str(tuple(says["grid"])) if "grid" in says else None,
            "block": str(tuple(says["block"])) if "block" in says else None,
            "shared_bytes": says.get("shared memory"),
            counters.SUMS["time_us"]: float(event["dur"]),
            counters.REGISTERS: says.get("registers per thread"),
            "theoretical_occupancy_pct": says.get("est. achieved occupancy %"),
        })  # fmt: skip
    return found


def by_events(call: Callable) -> list[counters.Kernel]:
    """The whole call as one launch, timed by CUDA events; registers where Triton compiled its kernels."""
    ms = timing.time_ms(call, setting=WINDOW).median
    with timing.launched_kernels() as kernels:
        call()
    torch.cuda.synchronize()
    used = timing.resources(kernels)
    names = " + ".join(dict.fromkeys(getattr(kernel, "name", "") for kernel in kernels)) or "all kernels"
    return [{"name": names, counters.SUMS["time_us"]: 1e3 * ms, counters.REGISTERS: used["registers"],
             "shared_bytes": used["shared_bytes"]}]  # fmt: skip


def profiled(run: Run, tool: str, began: Callable[[], None]) -> list[counters.Kernel]:
    """One call of a run that has not failed; its launches, which under ncu only ncu sees."""
    found: list[counters.Kernel] = []
    if tool == "ncu":
        run.attempt(lambda: under_ncu(run.call, began))
    elif tool == "cupti":
        run.attempt(lambda: found.extend(under_cupti(run.call) or by_events(run.call)))
    return found


# ---------------------------------------------------------------- all jobs


def work(jobs: Sequence[Mapping[str, Any]], results: Path, tool: str, seconds: float) -> None:
    """Do the jobs in order. A line of results has the job's index, and "began" or a status."""

    def note(**line: Any) -> None:
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    end = time.monotonic() + seconds
    mark()  # compiles the marker
    if tool == "ncu" and not jobs:  # whether counters can be read at all
        under_ncu(lambda: None, lambda: None)
    for index, job in enumerate(jobs):
        if time.monotonic() > end:
            note(index=index, status="failed", reason=f"not reached within {seconds:.0f} s")
            continue
        run = prepared(job)
        kernels = profiled(run, tool, functools.partial(note, index=index, began=True))
        says = {key: run.row[key] for key in ("status", "reason") if key in run.row}
        note(index=index, **says, kernels=kernels)
        del run
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m attnlib.bench.profile_target")
    parser.add_argument("jobs", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--tool", choices=("ncu", "cupti", "none"), required=True)
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args(argv)
    sys.stdout.flush()
    os.dup2(2, 1)  # ncu writes its table to the standard output: what is printed here goes elsewhere
    work(json.loads(args.jobs.read_text(encoding="utf-8")), args.results, args.tool, args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
