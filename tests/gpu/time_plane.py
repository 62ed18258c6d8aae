"""Time the plane of calls, head dimension x length x kind x dtype, beside FlashAttention-3: both passes.

    python tests/gpu/time_plane.py                some 800 s; figures/data/<gpu>/plane.json
    python tests/gpu/time_plane.py --seconds 200  begin no cell after so many, and say what is left out
    python tests/gpu/time_plane.py --resume       leave out the cells that the record has
    python tests/gpu/time_plane.py --dims 64 96 --dtypes float16 --passes backward    these cells alone
    python tests/gpu/time_plane.py --named        the calls of `plane.NAMED` instead, in table `named`
    python tests/gpu/time_plane.py --settled      those behind in the record once more, in table `settled`
    python tests/gpu/time_plane.py --side-by-side --dims 64 128     as models have tensors, in `side_by_side`

Table `cells`: a row for each cell of `bench.plane` and pass, with both times, the ratio of each of eight
shuffled rounds with cold L2, and what attnlib differs by from itself. Table `named`: the same of calls beside
the plane. Table `settled`: calls of both whose ratio is below 1.0, in sixty rounds of one timed call each,
without pauses. At the power limit the clock differs from one window to the next by more than such calls do;
here each has the clock that the others leave it. Table `side_by_side`: cells of the plane whose heads lie
side by side in memory, (B, S, H, D), as a model's projections leave them; elsewhere they follow each other,
(B, H, S, D). FlashAttention-3 gets the same memory. ATTNLIB_FA3 names FlashAttention-3's library. First,
processes side by side compile. The record is written after each length of a kind; cells that were not
measured stay in it, and a row says its commit.

Before and after it is timed, either result is judged: the last query head (forward) or the query heads of
the last key head (gradients) of the last batch entry against fp64, with the budget of the oracle. And each
head of the whole result of ours may be as far from FlashAttention-3's, in RMS, as two that just keep that
budget may be. Nothing wrong is timed. Status 0 when all of attnlib's were right, 1 otherwise, 2 without a
Hopper GPU or FlashAttention-3.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention, node  # noqa: E402
from attnlib.bench import harness, peers, plane, records, timing, verdict  # noqa: E402
from attnlib.bench.backward import GRADIENTS, BackwardRun, make_gradient  # noqa: E402
from attnlib.bench.gradient_oracle import GradientOracle  # noqa: E402
from attnlib.bench.oracle import Budget, Judgement, Oracle, make_inputs  # noqa: E402
from attnlib.bench.plane import ALL, OURS, PEER, Cell, Kind  # noqa: E402
from attnlib.bench.setting import Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402

ROUNDS = Setting("plane, eight short rounds", rounds=8, pause_ms=5, warmup_ms=1, rep_ms=2)
IN_TURN = Setting("plane, sixty rounds without a pause", rounds=60, pause_ms=0, warmup_ms=0, rep_ms=0)
"""A round is one call that warms up and a timed one, of each implementation."""
SHORT_MS = 0.5
"""Of calls shorter than this the host's time is told, too."""
PROCESSES = 14

Tensor = torch.Tensor
Call = tuple[Cell, str]
"""A cell and a pass."""


def ours(window: tuple[int, int] | None, q, k, v, causal: bool, sm_scale: float):
    return attention(q, k, v, causal=causal, window=window, sm_scale=sm_scale)


# ---------------------------------------------------------------- judging


def apart(found: Tensor, other: Tensor, rms: float, whose: str = "FlashAttention-3's") -> str:
    """Why two results can't both keep a budget, in a head; empty when they may. `whose` is the other."""
    largest = (found.float() - other.float()).square_().mean((2, 3)).sqrt_().max().item()
    return "" if largest <= 2 * rms else f"a head is {largest:.2e} from {whose}, budget {rms:.2e}"


class Sample:
    """The truth of one head of an output; `other`: FlashAttention-3's output, or None."""

    def __init__(self, kind: Kind, other: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> None:
        last = (x[-1:, -1:] for x in (q, k, v))
        self.oracle, self.other = Oracle(*last, kind.causal, window=kind.window), other

    def judge(self, out: Tensor) -> Judgement:
        found = self.oracle.judge(out[-1:, -1:])
        if not found.ok or self.other is None:
            return found
        reason = apart(out, self.other, self.oracle.budget.rms)
        return Judgement(found.max_error, found.rms_error, found.budget, not reason, reason)


class GradientSample:
    """The truth of the gradients of one key head and its query heads; `other`: FlashAttention-3's, or None.

    The oracle computes one query head after the other, whose scores fit in memory. dK and dV are the sums of
    theirs, and what errors of `group` heads add up to is sqrt(group) times that of one.
    """

    def __init__(self, kind: Kind, other: tuple[Tensor, ...] | None, *tensors: Tensor) -> None:
        self.group, self.other = kind.group, other
        d_out, q = (x[-1, -kind.group :, None] for x in tensors[:2])
        k, v = (x[-1:, -1:].expand(kind.group, -1, -1, -1) for x in tensors[2:])
        self.oracle = GradientOracle(d_out, q, k, v, kind.causal, kind.window)
        for name in ("dk", "dv"):
            self.oracle.truth[name] = self.oracle.truth[name].sum(0, keepdim=True)
            budget = self.oracle.budget[name]
            self.oracle.budget[name] = Budget(*(math.sqrt(kind.group) * x for x in (budget.max, budget.rms)))

    def judge(self, *gradients: Tensor) -> dict[str, Judgement]:
        dq, dk, dv = gradients
        found = self.oracle.judge(dq[-1, -self.group :, None], dk[-1:, -1:], dv[-1:, -1:])
        if self.other is None or not all(one.ok for one in found.values()):
            return found
        for name, mine, other in zip(GRADIENTS, gradients, self.other, strict=True):
            one = found[name]
            if reason := apart(mine, other, one.budget.rms):
                found[name] = Judgement(one.max_error, one.rms_error, one.budget, False, f"{name}: {reason}")
        return found


# ---------------------------------------------------------------- timing


class InPlane:
    """A run of `harness` whose peer knows windows, and that tells the host's time of short calls."""

    def __init__(self, kind: Kind, *args: Any) -> None:
        super().__init__(*args)
        self.kind = kind

    def peer(self) -> peers.Peer:
        return peers.fa3(self.kind.window)

    def finish(self, oracle: Any) -> None:
        super().finish(oracle)
        if self.ok and self.estimate < SHORT_MS:
            self.row["host_us"] = timing.host_us(self.call, 20)


class ForwardPlane(InPlane, harness.Run):
    pass


class BackwardPlane(InPlane, BackwardRun):
    pass


def heads_side_by_side(x: Tensor) -> Tensor:
    """x (B, H, S, D), but in memory (B, S, H, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def start(
    cell: Cell, way: str, side_by_side: bool, shape: Shape
) -> tuple[tuple[Tensor, ...], Sample | GradientSample]:
    """Tensors of a call and what judges its result."""
    kind = ALL[cell.kind]
    tensors = make_inputs(shape, device=harness.DEVICE)
    d_out = (make_gradient(shape, device=harness.DEVICE),) if way == "backward" else ()
    if side_by_side:
        tensors, d_out = (tuple(map(heads_side_by_side, several)) for several in (tensors, d_out))
    options = shape.causal, shape.head_dim**-0.5
    peer, other = peers.fa3(kind.window), None
    with contextlib.suppress(RuntimeError):  # what it can't do is said where it is timed
        if way == "forward":
            other = peer.make(*tensors, *options)()
        else:
            other = peer.make_backward(*d_out, *tensors, *options)()
    tensors = *d_out, *tensors
    return tensors, (Sample if way == "forward" else GradientSample)(kind, other, *tensors)


def measured(
    cell: Cell, way: str, header: dict[str, Any], setting: Setting, side_by_side: bool = False
) -> dict[str, Any]:
    """The row of the record."""
    kind = ALL[cell.kind]
    rows = harness.collect_runs(
        partial(ForwardPlane if way == "forward" else BackwardPlane, kind),
        partial(start, cell, way, side_by_side),
        {OURS: partial(ours, kind.window), PEER: None}, [cell.shape], setting, OURS,
    )  # fmt: skip
    table = records.Table.of(plane.TABLE, rows, header, False)
    found = verdict.judge(table, cell.shape, OURS, PEER)
    mine, theirs = (table.one(cell.shape, impl=impl) for impl in (OURS, PEER))
    row = {"kind": cell.kind, "pass": way, **cell.shape.to_dict()}
    row |= {name: header[name] for name in ("commit", "date")}
    for name, one in ((f"{OURS}_", mine), (f"{PEER}_", theirs)):
        row[f"{name}status"] = one["status"]
        if one["status"] == "ok":
            row |= {name + field: one[field] for field in ("ms", "sm_mhz", "host_us") if field in one}
            row |= {f"{name}tflops": cell.flops(way) / one["ms"] * 1e-9, f"{name}of_budget": share(one)}
    if found.ratio is None:
        bad = [one for one in (mine, theirs) if one["status"] != "ok"]
        row["reason"] = "; ".join(
            f"{one['impl']}: {one['status']} {one.get('reason', '')}".strip() for one in bad
        )
    else:
        rounds = zip(theirs["round_ms"], mine["round_ms"], strict=True)
        row |= {"ratio": found.ratio, "control": found.control, "spread": found.spread}
        row["round_ratios"] = [other / own for other, own in rounds]
    row = records.rounded(row)
    return row | {"verdict": plane.verdict_of(row).word}


def share(row: dict[str, Any]) -> float:
    """The largest error of a result, as a share of its budget."""
    if "budget_max" in row:
        return max(row["max_error"] / row["budget_max"], row["rms_error"] / row["budget_rms"])
    return max(row[f"{name}_{size}"] / row[f"{name}_budget_{size}"]
               for name in GRADIENTS for size in ("max", "rms"))  # fmt: skip


# ---------------------------------------------------------------- compiling


def without_node() -> None:
    """In a child, which calls each kind once: none compiles `node.cpp`, which this process does meanwhile."""
    os.environ["CXX"] = "false"
    warnings.filterwarnings("ignore", message="attnlib: calls take longer")


def compile_cells(cells: Sequence[Cell]) -> None:
    """In a child: what it compiles stays in Triton's cache."""
    for cell in cells:
        shape, window = cell.shape, ALL[cell.kind].window
        tensors = make_inputs(shape, device=harness.DEVICE)
        try:
            ours(window, *tensors, shape.causal, shape.head_dim**-0.5)
            out = ours(window, *(x.requires_grad_() for x in tensors), shape.causal, shape.head_dim**-0.5)
            out.backward(out.detach())
            torch.cuda.synchronize()
        except Exception as error:  # it comes again where it is timed, and is in the record then
            print(f"{cell.label}: {peers.brief(error)}", flush=True)


def compile_all(cells: Iterable[Cell]) -> None:
    """Those of one kernel in one process; those that take longest first."""

    def kernel(cell: Cell) -> tuple[Any, ...]:
        return -cell.shape.head_dim, cell.shape.dtype, cell.shape.causal, ALL[cell.kind].window or ()

    jobs = [list(same) for _, same in groupby(sorted(cells, key=kernel), kernel)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, spawn, initializer=without_node) as pool:
        done = pool.map(compile_cells, jobs)
        node.wait()
        list(done)


# ---------------------------------------------------------------- command


def method(setting: Setting) -> dict[str, Any]:
    how = harness.method(setting, OURS) | {
        "gate": "before and after the timing: one head (backward: one key head and its query heads) against "
        "fp64; all heads of attnlib's within twice that budget, in RMS, of FlashAttention-3's",
        "timed": "the forward, and the backward alone",
        "flops": "4*B*H*pairs*D, 2.5 times as many backward; pairs: S^2, S^2/2 when causal, with a window "
        "those that see each other",
        "host": "calls are queued while the GPU writes and computes, so that its time alone is timed; "
        "host_us of short calls is what the host takes to queue one",
        "ratio": "time of FlashAttention-3 over time of attnlib",
        "memory": "heads after each other, (B, H, S, D); in table side_by_side (B, S, H, D)",
    }
    if setting is IN_TURN:
        how["mode"] = "in turn: a call that warms up and a timed one of each, without pauses, so that each "
        how["mode"] += "has the clock that the others leave it"
    return how


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the plane of calls beside FlashAttention-3.")
    parser.add_argument("--seconds", type=float, default=800,
                        help="begin no cell after so many (default: %(default)s)")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="leave out the cells that the record has")
    parser.add_argument("--dims", type=int, nargs="+", choices=plane.DIMS, default=plane.DIMS, metavar="D",
                        help="head dimensions of the plane (default: all)")  # fmt: skip
    parser.add_argument("--dtypes", nargs="+", choices=plane.DTYPES, default=plane.DTYPES, metavar="DTYPE",
                        help="bfloat16, float16 (default: both)")  # fmt: skip
    parser.add_argument("--passes", nargs="+", choices=plane.PASSES, default=plane.PASSES, metavar="PASS",
                        help="forward, backward (default: both)")  # fmt: skip
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--named", action="store_true", help="the calls of plane.NAMED instead of the plane")
    other.add_argument("--settled", action="store_true",
                       help="instead the calls of the record with a ratio below 1.0, in turn")  # fmt: skip
    other.add_argument("--side-by-side", action="store_true",
                       help="the plane in the memory of a model's tensors, (B, S, H, D)")  # fmt: skip
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/plane.json)")
    return parser.parse_args(argv)


def kept(path: Path, table: str) -> list[dict[str, Any]]:
    """The rows of a record's table that have a ratio."""
    if not path.exists():
        return []
    return [row for row in records.read(path)["tables"].get(table, {"rows": []})["rows"] if "ratio" in row]


def asked(args: argparse.Namespace, path: Path) -> tuple[str, Setting, list[list[Call]]]:
    """The table that is measured, how, and its calls; after each list of them the record is written."""
    if args.settled:
        table, setting = plane.SETTLED_TABLE, IN_TURN
        rows = [row for name in (plane.TABLE, plane.NAMED_TABLE) for row in kept(path, name)]
        behind = [plane.key(row) for row in rows if row["ratio"] < 1]
        groups = [[call] for call in dict.fromkeys(behind)]  # a named call may be one of the plane's
    else:
        table, setting = plane.NAMED_TABLE if args.named else plane.TABLE, ROUNDS
        if args.side_by_side:
            table = plane.SIDE_BY_SIDE_TABLE
        groups = [
            [(cell, way) for cell in group for way in plane.PASSES]
            for group in ([plane.NAMED] if args.named else plane.groups())
        ]
    done = {plane.key(row) for row in kept(path, table)} if args.resume else set()

    def chosen(call: Call) -> bool:
        shape, way = call[0].shape, call[1]
        selected = shape.head_dim in args.dims and shape.dtype in args.dtypes and way in args.passes
        return selected and call not in done

    return table, setting, [list(filter(chosen, group)) for group in groups]


def main(argv: Sequence[str] | None = None) -> int:
    args, begin = arguments(argv), time.monotonic()
    if no_hopper():
        return 2
    if reason := peers.fa3().available():
        print(f"needs FlashAttention-3: {reason}", file=sys.stderr)
        return 2
    header = records.provenance()
    path = records.report_path(plane.RECORD, header, args.out)
    name, setting, calls = asked(args, path)
    header["method"] = method(setting)
    found = {plane.key(row): row for row in kept(path, name)}
    compile_all({cell for group in calls for cell, _ in group})
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    left_out, wrong = [], []
    for group in filter(None, calls):
        for cell, way in group:
            if time.monotonic() - begin > args.seconds:
                left_out.append(f"{cell.label}, {way}")
                continue
            try:
                row = found[cell, way] = measured(cell, way, header, setting, args.side_by_side)
            except RuntimeError as error:  # no memory for the oracle, say
                left_out.append(f"{cell.label}, {way}: {peers.brief(error)}")
            else:
                wrong += [row] if row[f"{OURS}_status"] != "ok" else []
                print(f"{cell.label:44} {way:8} {plane.verdict_of(row).cell()}", flush=True)
            torch.cuda.empty_cache()
        records.add_table(path, header, name, list(found.values()))
        print(f"{time.monotonic() - begin:.0f} s, {len(found)} rows", flush=True)
    if left_out:
        print(f"left out ({args.seconds:g} s were over, where no reason is told):", *left_out, sep="\n  ")
    for row in wrong:
        print(f"{plane.key(row)[0].label} {row['pass']}: {row['reason']}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
