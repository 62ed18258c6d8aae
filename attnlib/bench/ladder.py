"""The ladder: one row for each step and peer, over the three shapes of the task. README, notebooks and
charts share it."""

from collections.abc import Callable, Iterable, Sequence
from statistics import harmonic_mean

from attnlib.bench import names
from attnlib.bench.names import PEERS, number
from attnlib.bench.roofline import H200
from attnlib.bench.shapes import TASK

__all__ = ["TENSOR_PEAK", "YARDSTICKS", "harmonic_mean", "ladder_rows", "measured", "order", "task_rows"]

TENSOR_PEAK = H200.tensor_tflops_fp16
"""Dense fp16 TFLOP/s of H100 SXM and H200 by their datasheets: the 100% of the peak column."""

YARDSTICKS = ("fa3", "cudnn")
"""The peer that the percentage compares with: the first of these that was measured."""


def order(impls: Iterable[str]) -> list[str]:
    """Implementations in the order of every table and chart: steps by number, then peers from slow to fast
    as in PEERS."""
    peers = list(PEERS)
    ranks = {impl: (0, number(impl), impl) for impl in impls if number(impl) is not None}
    ranks |= {
        impl: (1, peers.index(impl) if impl in peers else len(peers), impl)
        for impl in impls
        if impl not in ranks
    }
    return sorted(ranks, key=ranks.__getitem__)


def measured(row: dict | None) -> bool:
    """True if the row carries a time: the implementation ran, and its result was right."""
    return row is not None and row.get("status", "ok") == "ok" and row.get("ms") is not None


def task_rows(rows: Iterable[dict], head_dim: int, causal: bool = True) -> dict[str, dict]:
    """Implementation -> its row at the task's shape for `head_dim`, or at the longest sequence where that
    is not there; without control rows, which are no implementations."""
    wanted = {(s.batch, s.heads, s.seqlen) for s in TASK.values() if s.head_dim == head_dim}

    def rank(row: dict) -> tuple[bool, int]:
        return (row.get("batch"), row.get("heads"), row["seqlen"]) in wanted, row["seqlen"]

    found = [
        row
        for row in rows
        if row["head_dim"] == head_dim and bool(row.get("causal", True)) == causal and "control_of" not in row
    ]
    return {row["impl"]: row for row in sorted(reversed(found), key=rank)}  # the last of each has the most


def _join(parts: Iterable[str]) -> str:
    """ "12 / 14 / –"; a single dash where nothing was measured."""
    parts = list(parts)
    return "–" if all(p == "–" for p in parts) else " / ".join(parts)


def ladder_rows(
    rows: Iterable[dict],
    head_dims: Sequence[int] = (64, 128, 256),
    causal: bool = True,
    label: Callable[[str], str] = names.label,
) -> tuple[list[dict], dict[str, str]]:
    """The ladder as texts: (rows, columns), columns being key -> header in order.

    `rows` are rows of an attention timing (see `bench.measure`). Keys of a result row: impl, step,
    tflops_<D>, ms, of_rival, of_peak, error, where a cell "a / b / c" goes over `head_dims`. A peer that
    was not installed keeps its row and says so. `label` gives the reader's name of an implementation."""
    rows = list(rows)
    by_dim = {d: task_rows(rows, d, causal) for d in head_dims}
    by_dim = {d: found for d, found in by_dim.items() if found}
    if not by_dim:
        raise ValueError(
            f"ladder_rows: rows: expected some with head_dim in {tuple(head_dims)}, causal={causal}; got none"
        )
    rival = next((y for y in YARDSTICKS if any(measured(found.get(y)) for found in by_dim.values())), None)
    result = []
    for impl in order({impl for found in by_dim.values() for impl in found}):
        cells = {d: found.get(impl) for d, found in by_dim.items()}
        good = {d: row for d, row in cells.items() if measured(row)}
        row = {"impl": impl, "step": label(impl)}
        for d, cell in cells.items():
            row[f"tflops_{d}"] = f"{cell['tflops']:.0f}" if d in good else (cell or {}).get("status", "–")
        row["ms"] = _join(_ms(good[d]["ms"]) if d in good else "–" for d in cells)
        if rival:
            row["of_rival"] = _join(
                f"{100 * good[d]['tflops'] / by_dim[d][rival]['tflops']:.0f}"
                if d in good and measured(by_dim[d].get(rival)) else "–"
                for d in cells
            )  # fmt: skip
        row["of_peak"] = _join(_percent(good[d]["tflops"] / TENSOR_PEAK) if d in good else "–" for d in cells)
        errors = [r["max_error"] for r in good.values() if r.get("max_error") is not None]
        row["error"] = f"{max(errors):.1e}" if errors else "–"
        result.append(row)
    slash = " / ".join(str(d) for d in by_dim)
    columns = {"step": "Step"} | {f"tflops_{d}": f"TFLOP/s, D = {d}" for d in by_dim}
    columns["ms"] = f"ms ({slash})"
    if rival:
        columns["of_rival"] = f"% of {label(rival)}"
    columns |= {"of_peak": f"% of {TENSOR_PEAK:.0f} TFLOP/s", "error": "max error"}
    return result, columns


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.1f}"
