"""What the GPU's counters say of a call: the metrics that Nsight Compute is asked for, its table, and a row.

A call may launch several kernels. Its row has sums of times, bytes and instructions, percentages weighted by
time, stall reasons weighted by warp-cycles, and the list of its kernels. Names of metrics are those of Nsight
Compute for compute capability 9.0 (`ncu --query-metrics --chip gh100` lists them).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attnlib.bench import roofline
from attnlib.bench.shapes import Shape

_OF_PEAK = ".avg.pct_of_peak_sustained_elapsed"

PERCENT = {
    "tensor_pct": "sm__pipe_tensor_cycles_active" + _OF_PEAK,
    "xu_pct": "sm__inst_executed_pipe_xu" + _OF_PEAK,
    "fma_pct": "sm__inst_executed_pipe_fma" + _OF_PEAK,
    "alu_pct": "sm__inst_executed_pipe_alu" + _OF_PEAK,
    "issue_pct": "sm__inst_issued" + _OF_PEAK,
    "shared_pct": "l1tex__data_pipe_lsu_wavefronts" + _OF_PEAK,
    "l2_pct": "lts__throughput" + _OF_PEAK,
    "dram_pct": "dram__throughput" + _OF_PEAK,
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
"""Field -> metric. Shares of what a unit could do in the time of the launch: tensor cores, exponential unit
(XU), FMA and ALU pipes, issue slots, the pipe to shared memory and L1, L2 (the busiest of its parts), DRAM.
Occupancy is in warps, of the 64 of an SM, while the SM has any."""

SUMS = {
    "time_us": "gpu__time_duration.sum",
    "sm_clocks": "sm__cycles_elapsed.max",
    "instructions": "smsp__inst_executed.sum",
    "xu_instructions": "sm__inst_executed_pipe_xu.sum",
    "fma_instructions": "sm__inst_executed_pipe_fma.sum",
    "alu_instructions": "sm__inst_executed_pipe_alu.sum",
    "shared_loads": "smsp__inst_executed_op_shared_ld.sum",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
}
"""Field -> metric. Instructions are those of warps."""

L2_HIT = "lts__t_sector_hit_rate.pct"
REGISTERS, SHARED = "launch__registers_per_thread", "launch__shared_mem_per_block"
WARP_CYCLES = "smsp__average_warp_latency_per_inst_issued.ratio"
"""Cycles that warps are resident for, for each instruction issued: the sum of all reasons."""

STALLS = (
    "selected",
    "not_selected",
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
"""What a resident warp does in a cycle: it issues ("selected"), or this keeps it from issuing."""

OTHER = "other"
"""Cycles of warps that no reason accounts for."""


def stall_metric(reason: str) -> str:
    """Cycles of warps with this reason, for each cycle in which an instruction is issued."""
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


METRICS = (
    *PERCENT.values(),
    *SUMS.values(),
    L2_HIT,
    REGISTERS,
    SHARED,
    WARP_CYCLES,
    *map(stall_metric, STALLS),
)

UNITS = {
    "byte": 1,
    "byte/block": 1,
    "kbyte/block": 1e3,
    "kbyte": 1e3,
    "mbyte": 1e6,
    "gbyte": 1e9,
    "tbyte": 1e12,
}
UNITS |= {"ns": 1e-3, "us": 1, "ms": 1e3, "s": 1e6}
UNITS |= {"nsecond": 1e-3, "usecond": 1, "msecond": 1e3, "second": 1e6}
"""Unit in Nsight Compute's table -> factor to bytes and microseconds. Other units stay as they are."""

RESOURCES = ("grid", "block", "shared_bytes", "theoretical_occupancy_pct")
"""What else is known of a launch, where the tool says it."""

Kernel = dict[str, Any]
"""One launch: name, grid, block, and the metrics by their names."""


class NoCounters(RuntimeError):
    """Nsight Compute read no counters; the message says why, in a sentence."""


def known(metrics: Sequence[str], listing: str) -> list[str]:
    """Those of `metrics` that `ncu --query-metrics` lists; all of them where the list can't be read. Metrics
    of the launch itself are always there and never listed."""
    names = {line.split()[0] for line in listing.splitlines() if line.strip()}
    found = [m for m in metrics if m.partition(".")[0] in names or m.startswith("launch__")]
    return found if len(found) > len(metrics) / 2 else list(metrics)


def read_table(text: str) -> list[Kernel]:
    """The launches in the output of `ncu --csv --page raw`, in order, bytes and microseconds as units.

    NoCounters when there is no table; its sentence has what ncu said instead."""
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    start = next((i for i, row in enumerate(rows) if "Kernel Name" in row), None)
    if start is None or len(rows) < start + 3:
        raise NoCounters(why_none(text))
    head, units = rows[start], rows[start + 1]
    kernels = []
    for row in rows[start + 2 :]:
        if len(row) != len(head):  # not of the table
            continue
        kernel: Kernel = {"name": row[head.index("Kernel Name")]}
        for key in ("Grid Size", "Block Size"):
            kernel[key.split()[0].lower()] = row[head.index(key)] if key in head else None
        for name, unit, value in zip(head, units, row, strict=True):
            if "__" in name:
                kernel[name] = _number(value, unit)
        kernel["shared_bytes"] = kernel.get(SHARED)
        kernels.append(kernel)
    return kernels


def _number(text: str, unit: str) -> float | None:
    """A cell of the table; None where ncu has no value ("n/a")."""
    try:
        return float(text.replace(",", "")) * UNITS.get(unit.strip().lower(), 1)
    except ValueError:
        return None


def why_none(text: str) -> str:
    """One sentence that says why ncu's output holds no counters."""
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "No counters: the driver lets only administrators read them here (ERR_NVGPUCTRPERM; "
            "NVreg_RestrictProfilingToAdminUsers=0 allows them to all)."
        )
    errors = re.findall(r"==ERROR==\s*(.+)", text)
    if not errors:
        errors = [line.strip() for line in text.splitlines() if line.strip()][-1:] or ["it wrote nothing"]
    return f"No counters: Nsight Compute (ncu) could not read them: {errors[0].strip().rstrip('.')}."


# ---------------------------------------------------------------- a row


def merged(kernels: Sequence[Kernel], metrics: Mapping[str, str], weight: Sequence[float] | None = None):
    """Fields of all launches together: their sum, or their mean with these weights. None where one launch
    lacks the metric: a part of a sum is no sum."""
    fields: dict[str, float | None] = {}
    for field, metric in metrics.items():
        values = [kernel.get(metric) for kernel in kernels]
        if None in values or (weight is not None and not sum(weight)):
            fields[field] = None
        elif weight is None:
            fields[field] = sum(values)
        else:
            fields[field] = sum(v * w for v, w in zip(values, weight, strict=True)) / sum(weight)
    return fields


def stall_shares(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Reason -> share of all warp-cycles, largest first; they sum to 1. "selected" is issuing. A launch
    counts with its warp-cycles: ncu's values are cycles for each instruction."""
    cycles: dict[str, float] = {}
    for kernel in kernels:
        issued = kernel.get(SUMS["instructions"])
        found = {reason: kernel.get(stall_metric(reason)) for reason in STALLS}
        found = {reason: value for reason, value in found.items() if value is not None}
        if not found or issued is None:
            return {}
        rest = (kernel.get(WARP_CYCLES) or 0) - sum(found.values())
        for reason, value in (found | {OTHER: rest if rest > 1e-6 else 0}).items():
            cycles[reason] = cycles.get(reason, 0) + value * issued
    total = sum(cycles.values())
    shares = {reason: value / total for reason, value in cycles.items() if value} if total else {}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def counted(kernels: Sequence[Kernel]) -> dict[str, float | None]:
    """Sums of these launches, percentages weighted by time, and the hit rate of L2 weighted by bytes."""
    times = [kernel.get(SUMS["time_us"]) or 0 for kernel in kernels]
    l2_bytes = [kernel.get(SUMS["l2_bytes"]) or 0 for kernel in kernels]
    fields = merged(kernels, SUMS) | merged(kernels, PERCENT, times)
    return fields | merged(kernels, {"l2_hit_pct": L2_HIT}, l2_bytes)


def launches(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """The kernels of a call by name, in order of their first launch: launches, share of the time, registers
    of a thread, grid and block of the last; where there are several names, also the counters of each."""
    total = sum(kernel.get(SUMS["time_us"]) or 0 for kernel in kernels)
    named: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        named.setdefault(short_name(kernel["name"]), []).append(kernel)
    entries = []
    for name, group in named.items():
        spent = sum(kernel.get(SUMS["time_us"]) or 0 for kernel in group)
        entry = {"name": name, "launches": len(group), "share": spent / total if total else 0.0}
        entry["registers"] = group[-1].get(REGISTERS)
        entry |= {key: kernel[key] for kernel in group for key in RESOURCES if kernel.get(key)}
        if len(named) > 1:
            entry |= counted(group) | {"stalls": stall_shares(group)}
        entries.append(entry)
    return entries


_WRAPPER = re.compile(r"^(?:void )?(?:cutlass::device_kernel|flash::enable_sm\w+)<(?=[a-z])")
"""CUTLASS's one kernel, whose template argument is the kernel."""


def short_name(name: str) -> str:
    """A kernel's name without return type, template arguments and parameters, at most 60 characters."""
    name = name.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    while (inside := _WRAPPER.sub("", name)) != name:
        name = inside.partition("<")[0] if not _WRAPPER.match(inside) else inside
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    return name.partition("(")[0].strip().removeprefix("void ")[:60]


def kept_scores(shape: Shape) -> int:
    """Scores that the mask keeps, counted exactly: B*H*S*(S+1)/2 for a square causal call."""
    sq, sk = shape.seqlen, shape.keys
    if not shape.causal:
        return shape.batch * shape.heads * sq * sk
    rows = min(sq, sk)  # rows above these see no key: the mask is aligned to the last query and key
    return shape.batch * shape.heads * (rows * (sk - rows) + rows * (rows + 1) // 2)


def fields_of(kernels: Sequence[Kernel], shape: Shape, flops_factor: float = 1) -> dict[str, Any]:
    """The fields of a row: what was counted, and what follows from it. `flops_factor`: FLOPs credited, for
    each of the forward (2.5 for a backward)."""
    row = counted(kernels)
    reads, writes = row["dram_read_bytes"], row["dram_write_bytes"]
    dram = None if reads is None or writes is None else reads + writes
    flops, scores = flops_factor * roofline.flops(shape), kept_scores(shape)
    row["clock_mhz"] = _ratio(row["sm_clocks"], row["time_us"])
    row["flops_per_dram_byte"] = _ratio(flops, dram)
    row["flops_per_l2_byte"] = _ratio(flops, row["l2_bytes"])
    for unit in ("", "xu_", "fma_", "alu_"):
        count = row[f"{unit}instructions"]
        row[f"{unit}instructions_per_score"] = None if count is None else 32 * count / scores
    registers = [kernel[REGISTERS] for kernel in kernels if kernel.get(REGISTERS) is not None]
    row["registers"] = max(registers, default=None)
    return row | {"stalls": stall_shares(kernels), "kernels": launches(kernels)}


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def groups(kernels: Iterable[Kernel], marker: str) -> list[list[Kernel]]:
    """The launches after each launch of the kernel named `marker`, which starts a group."""
    found: list[list[Kernel]] = []
    for kernel in kernels:
        if short_name(kernel["name"]) == marker:
            found.append([])
        elif found:
            found[-1].append(kernel)
    return found
