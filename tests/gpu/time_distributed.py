"""Time attention of one sequence over the GPUs of this machine, beside one GPU and the peers.

    python tests/gpu/time_distributed.py             --seconds 300; figures/data/<gpu>/distributed.json
    torchrun --nproc-per-node 2 tests/gpu/time_distributed.py        the same
    python tests/gpu/time_distributed.py --tune      settings of NCCL, streams, heads, 60 s: `settings_...`
    python tests/gpu/time_distributed.py --tune --passes forward --settings later --rounds 12
                                                     one setting in one pass, and `calls`
    python tests/gpu/time_distributed.py --rounds 12 --seconds 480   longer, and surer
    python tests/gpu/time_distributed.py --lengths 65536 --seconds 90          less; --out FILE elsewhere
    python tests/gpu/time_distributed.py --lengths 65536 --window-ms 1500 --rounds 4 --out FILE
                                                     with each GPU's power, too
    python tests/gpu/time_distributed.py --long --rounds 3            only calls of seconds, with the peers:
                                                     `distributed_long`

`forward`, `backward`: bfloat16 B1 H16 D128, causal and dense, the most important call first. `calls`: by
PyTorch's profiler, of each of some calls in a row and on each rank: its ms, when its first transfer began,
and for how long no attention ran. `timeline`: what ran when in the last of them. `checks`: the errors that
were found before anything was timed. `memory`: what a forward and a backward pass need for each row. The
record is written after each call, so a run that is cut off keeps what it has. With more than two GPUs it is
distributed_<number>.json and has each method and the hybrid, at the first and at the third length.

A sample is a window of calls back to back that begins at the same time on all ranks. All windows of a call
are as long as one call on one GPU at least, and begin with calls that do not count, so that every GPU is at
the clock that it can keep at its power limit; the record has the clocks. A call's time is that of the slowest
rank, the median of the rounds, in which all that is compared takes turns. Before a call is timed, attnlib's
result is compared with that of one GPU: `rms_from_one_gpu` in its row.

Two rows say where time goes. "attnlib, one GPU, on each": the whole call on every GPU at the same time; it
takes longer than on the first GPU alone where another GPU is slower, or all of them are when they are busy.
"attnlib, without transfers": the same calls of kernels, on keys that are there already. A third, of causal
calls at the first length, says what order costs: "attnlib, rows in order" has a piece of the sequence on each
rank, and moves rows to where all have the same to do, and back.

Peers: PyTorch's context_parallel, with cuDNN and with attnlib as its kernels; ring-flash-attn on
FlashAttention-3 where ATTNLIB_PEERS_EXTRA names a file with `make_ring_flash_attn`. A peer that is missing or
fails is a row with the reason. Tensors lie as (B, S, H, D), each larger than the L2. Status 0 when all of
attnlib's results were right, 1 otherwise, 2 with fewer than two Hopper GPUs. `--device cpu`, under torchrun,
is for small runs and the tests: `--lengths 64`, say.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib.bench import ranks, records  # noqa: E402
from attnlib.bench.names import CONTROL  # noqa: E402
from attnlib.bench.parallel_calls import (  # noqa: E402
    EACH,
    GATHER,
    HYBRID,
    IN_ORDER,
    MAKERS,
    OF_TORCH,
    ONE,
    OURS,
    RING,
    RING_FA3,
    ULYSSES,
    Case,
    Timed,
    one_gpu,
    ours,
    own,
    several_ways,
    whole,
)
from attnlib.bench.peers import brief  # noqa: E402
from attnlib.distributed import links, rotation, streams  # noqa: E402

RECORD = "distributed"
SETTLE_MS, TIMED_MS = 100, 300
"""A window: for so long calls that do not count, and then those that do; without the first where one call of
one GPU is longer than the second."""
ROUNDS = range(4, 7)
CALL_SECONDS = 8
"""As many rounds as fit into that, of those numbers; fewer where time runs out."""
TFLOPS = 600
"""Assumed, to say what still fits into the time."""
SEVERAL = ONE, OURS, OURS + CONTROL
LONG = 1e15
"""FLOPs of a call from which it takes longer than a second on one GPU."""
TOLERANCE = 4e-3
"""Relative RMS difference from one GPU: some three roundings to bfloat16."""


# ---------------------------------------------------------------- right first


def results(timed: Timed, d_out: torch.Tensor, gradients: bool) -> dict[str, torch.Tensor]:
    """The output, and if asked the gradients, by name."""
    out = timed.forward()
    found = {"out": out.detach()}
    if gradients:
        found |= zip(("dq", "dk", "dv"), torch.autograd.grad(out, timed.inputs, d_out), strict=True)
    return found


def apart(
    timed: Timed, expected: dict[str, torch.Tensor], d_out: torch.Tensor, case: Case
) -> dict[str, float]:
    """How far the results of ranks are from those of one GPU, by name."""

    def there(x: torch.Tensor) -> torch.Tensor:
        return own(x, case, timed.group, timed.in_order)

    found = results(timed, there(d_out), len(expected) > 1)
    return {name: ranks.worst_error(x, there(expected[name])) for name, x in found.items()}


def checked(case: Case) -> list[dict[str, Any]]:
    """Output and gradients of each method beside those of one GPU."""
    *tensors, d_out = whole(case)
    expected, found = results(one_gpu(case, tensors), d_out, True), []
    for way in (GATHER, RING, ULYSSES, *[IN_ORDER] * case.causal, *[HYBRID] * several_ways()):
        for name, off in apart(MAKERS[way](case, tensors), expected, d_out, case).items():
            method = way.removeprefix("attnlib, ")
            row = {"call": case.label, "method": method, "result": name, "rms_from_one_gpu": off}
            found.append({**row, "status": "ok" if off <= TOLERANCE else "wrong"})  # NaN is wrong
    return found


# ---------------------------------------------------------------- timing


def passes(timed: Timed, d_out: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Forward without a graph, and backward through one that is kept."""

    def forward() -> None:
        with torch.no_grad():
            timed.forward()

    kept: list[torch.Tensor] = []

    def backward() -> None:
        if not kept:
            kept.append(timed.forward())
        grad = d_out if d_out.shape == kept[0].shape else d_out.transpose(1, 2)
        torch.autograd.grad(kept[0], timed.inputs, grad, retain_graph=True)

    return {"forward": forward, "backward": backward}


class Sampled(NamedTuple):
    """A call in its windows: how many calls settle and count in each, and what came."""

    call: Callable[[], Any]
    alone: bool
    settle: int
    count: int
    windows: list[ranks.Window]

    def take(self) -> None:
        self.windows.append(ranks.window(self.call, self.count, self.alone, self.settle))

    def row(self) -> dict[str, Any]:
        taken = [window.ms for window in self.windows]
        return {"status": "ok", "ms": statistics.median(taken), "ms_low": min(taken), "ms_high": max(taken),
                "round_ms": taken, "rounds": len(taken),
                "rank_ms": medians([window.rank_ms for window in self.windows]),
                "sm_mhz": medians([window.sm_mhz for window in self.windows]),
                "watts": medians([window.watts for window in self.windows])}  # fmt: skip


def medians(windows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Of each rank, None where no window has a value."""
    known = [[x for x in each if x is not None] for each in zip(*windows, strict=True)]
    return [statistics.median(each) if each else None for each in known]


def sampled(call: Callable[[], Any], alone: bool, longest: float) -> tuple[Sampled, float]:
    """A call with its numbers, and what one of them took; `longest`: ms of a call of one GPU, 0 if that is
    what is asked."""
    ms = max(ranks.window_ms(call, 1, alone), 1e-3)
    if longest < 1000:  # the first call may compile, or make plans; not that of a length that comes late
        ms = max(ranks.window_ms(call, 1, alone), 1e-3)
    span = max(TIMED_MS, longest or ms)
    settle = math.ceil(SETTLE_MS / ms) if span <= TIMED_MS else 0
    return Sampled(call, alone, settle, max(1, round(span / ms)), []), ms


def in_rounds(calls: dict[Any, Sampled], until: float, seed: str, rounds: range | None = None) -> None:
    """All of them in each round, in a new order, for as long as a whole round fits. Each call has orders of
    its own: what a window follows changes its clock, so no two should follow each other everywhere."""
    rounds, begin, taken, order = rounds or ROUNDS, time.monotonic(), 0.0, list(calls)
    for i in range(rounds.stop - 1):
        spent = time.monotonic() - begin
        enough = i >= rounds.start and spent + taken > CALL_SECONDS
        if i and ranks.late(until - taken if not enough else 0.0):
            return
        random.Random(f"{seed} {i}").shuffle(order)  # the same on all ranks
        for key in order:
            calls[key].take()
        taken = (time.monotonic() - begin) / (i + 1)


def is_long(case: Case, which: str) -> bool:
    return case.flops(which) > LONG * dist.get_world_size() / 2


def names_for(case: Case, which: str, lengths: Sequence[int], long: bool = False) -> list[str]:
    """Who is timed: all at the first length, later those that are compared, with more than two ranks at the
    third length every method, too, and of calls of seconds attnlib alone; where they are what is timed, with
    the whole call on each GPU and the peers."""
    ways = (ULYSSES, RING, GATHER, HYBRID) if several_ways() else ()
    if long:
        return [ONE, EACH, *SEVERAL[1:], OF_TORCH, RING_FA3[case.causal]]
    if case.length == lengths[0]:
        left_out = {RING_FA3[not case.causal], *(() if ways else (RING, GATHER, HYBRID))}
        left_out |= set() if case.causal else {IN_ORDER}  # the same call as the one without
        return [name for name in MAKERS if name not in left_out]
    if is_long(case, which):
        return list(SEVERAL)
    return [*SEVERAL, *(ways if case.length in lengths[2:3] else ()), OF_TORCH, RING_FA3[case.causal]]


def fits(case: Case, which: str, names: Sequence[str], until: float, rounds: range | None) -> bool:
    """Whether a call is likely to get its rounds in time, or its fewest: two where one takes seconds."""
    one = case.flops(which) / TFLOPS / 1e9
    fewest = 2 if case.flops(which) > LONG else ROUNDS.start
    window, least = max(TIMED_MS + SETTLE_MS, one), rounds.start if rounds else fewest
    return not ranks.late(until - (len(names) * (least * window + 2 * one) + 2 * one) / 1e3)  # + the check


def timed_rows(
    case: Case, which: str, names: Sequence[str], until: float, rounds: range | None = None
) -> list[dict[str, Any]]:
    rows, made, calls, longest = {}, {}, {}, 0.0
    count = dist.get_world_size()
    for name in names:
        rows[name] = {"call": case.label, **case.shape.to_dict(), "impl": name, "pass": which}
        rows[name] |= {"gpus": 1 if name in (ONE, EACH) else count, "status": "not timed: no time was left"}
        if name.endswith(CONTROL):
            rows[name]["control_of"] = name.removesuffix(CONTROL)
    if fits(case, which, names, until, rounds):
        *tensors, d_out = whole(case)
        for name in names:
            try:
                made[name] = MAKERS[name](case, tensors)
            except Exception as failure:
                missing = isinstance(failure, ImportError | OSError)
                rows[name] |= {"status": "not installed" if missing else "refused", "reason": brief(failure)}
                continue
            try:
                timed = made[name]
                grad = d_out if timed.whole else own(d_out, case, timed.group, timed.in_order)
                call = passes(timed, grad)[which]
                calls[name], ms = sampled(call, made[name].alone, longest)
                longest = longest or ms
            except Exception as failure:
                rows[name] |= {"status": "failed", "reason": brief(failure)}
        if {ONE, OURS} <= calls.keys():
            off = apart(made[OURS], results(made[ONE], d_out, which == "backward"), d_out, case)
            rows[OURS]["rms_from_one_gpu"] = max(off.values())
        in_rounds(calls, until, f"{case.label} {which}", rounds)
        for timed in reversed(made.values()):  # contexts end in the reverse of their order
            timed.leave()
    for name, each in calls.items():
        rows[name] |= each.row()
        rows[name]["tflops_per_gpu"] = case.flops(which) / rows[name]["ms"] / 1e9 / rows[name]["gpus"]
    for row in rows.values():
        if "ms" in row and "ms" in rows[ONE]:
            row["speedup"] = rows[ONE]["ms"] / row["ms"]
    off = rows[OURS].get("rms_from_one_gpu", 0.0)
    if not off <= TOLERANCE:
        rows[OURS] |= {"status": "wrong", "reason": f"relative RMS difference from one GPU {off:.2e}"}
    return list(rows.values())


def memory_rows(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Peak memory of a forward and backward pass beyond its inputs, of this rank."""
    for case in cases:
        *tensors, d_out = whole(case)
        timed, grad = ours(case, tensors), own(d_out, case)
        del tensors, d_out
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(timed.forward(), timed.inputs, grad)
        torch.cuda.synchronize()
        peak, rows = torch.cuda.max_memory_allocated() - before, case.length // dist.get_world_size()
        yield {"call": case.label, "rows": rows, "bytes": peak, "bytes_per_row": peak / rows}


# ---------------------------------------------------------------- what ran when

KINDS = {"nccl": "transfer", "attention_forward": "attention", "attention_backward": "attention",
         "add_rows": "merge"}  # fmt: skip


IN_A_ROW = 13
"""Calls that are profiled: beyond what a GPU can do at its highest clock, as in a window."""


def timeline(case: Case) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of forward passes in a row and of backward passes, on each rank: the kernels of the last one, ms from
    the end of the call before; and of each but the first what `of_call` says."""
    *tensors, d_out = whole(case)
    timed = ours(case, tensors)
    found, calls = [], []
    for which, call in passes(timed, own(d_out, case)).items():
        for _ in range(2):
            ranks.window_ms(call, 1)
        try:
            profiled = ranks.kernels_of_calls(call, KINDS, IN_A_ROW)
        except Exception as failure:  # a profile is no reason to lose what is timed
            print(f"timeline, {which}: {brief(failure)}", flush=True)
            profiled = []
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, profiled)
        for rank, in_a_row in enumerate(every):
            head = {"pass": which, "call": case.label, "rank": rank}
            calls += [head | {"number": i + 1} | of_call(kernels) for i, kernels in enumerate(in_a_row)]
            found += [head | kernel for kernel in (in_a_row[-1] if in_a_row else ())]
    return found, calls


def of_call(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """ms of a call; when its first transfer and its first attention kernel begin; how long transfers run; and
    how long no attention runs before the last of it ends."""
    sent, attended = ([row for row in kernels if row["kind"] == kind] for kind in ("transfer", "attention"))
    last = max(row["begin_ms"] + row["ms"] for row in attended)
    return {"ms": max(row["begin_ms"] + row["ms"] for row in kernels),
            "transfer_begins": min((row["begin_ms"] for row in sent), default=math.nan),
            "attention_begins": min(row["begin_ms"] for row in attended),
            "transfer_ms": ranks.covered_ms(kernels, "transfer"),
            "idle_ms": last - ranks.covered_ms(attended, "attention")}  # fmt: skip


# ---------------------------------------------------------------- settings beside each other


@contextlib.contextmanager
def changed(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def later(heads: rotation._Heads, *given: Any, begin=rotation._Heads.own) -> None:
    """Own keys 10 µs later, for NCCL's kernel to take its multiprocessors first."""
    if given[0].is_cuda:
        torch.cuda._sleep(20_000)
    begin(heads, *given)


SETTINGS: dict[str, tuple[Any, str, Any]] = {
    f"{links.CTAS} programs of NCCL, as it is": (links, "CTAS", links.CTAS),
    "as it is" + CONTROL: (links, "CTAS", links.CTAS),
    "8 programs of NCCL": (links, "CTAS", 8),
    "4 programs of NCCL": (links, "CTAS", 4),
    "side stream without priority": (streams, "SIDE_PRIORITY", 0),
    "own keys on all multiprocessors, forward": (rotation, "SPARE", 0),
    "own keys on all but 8, forward": (rotation, "SPARE", 8),
    "own keys later, forward": (rotation._Heads, "own", later),
    "one group of heads": (rotation, "head_groups", lambda *_, **__: [(slice(None), slice(None))]),
}
"""What is set instead of what is there."""


def settings_rows(
    case: Case, which: str, until: float, chosen: Sequence[str], rounds: range | None
) -> list[dict[str, Any]]:
    *tensors, d_out = whole(case)
    grad, calls = own(d_out, case), {}
    calls[ONE], longest = sampled(passes(one_gpu(case, tensors), d_out)[which], True, 0.0)
    for name, setting in ((name, SETTINGS[name]) for name in chosen):
        call = passes(ours(case, tensors), grad)[which]

        def with_it(call=call, setting=setting) -> None:
            with changed(*setting):
                call()

        calls[name], _ = sampled(with_it, False, longest)
    in_rounds(calls, until, f"settings {which}", rounds)
    first, rows = next(iter(SETTINGS)), []
    for name, each in calls.items():
        row = {"call": case.label, **case.shape.to_dict(), "impl": name, "pass": which}
        row |= {"gpus": 1 if name == ONE else dist.get_world_size(), **each.row()}
        row["speedup"] = statistics.median(window.ms for window in calls[ONE].windows) / row["ms"]
        rows.append(row | ({"control_of": first} if name.endswith(CONTROL) else {}))
    return rows


# ---------------------------------------------------------------- the ranks


def show(row: dict[str, Any]) -> str:
    head = f"{row['call']:14} {row['pass']:8} {row['impl']:42}"
    if "ms" not in row:
        return f"{head} {row['status']} {row.get('reason', '')}"
    clocks, watts = (
        "/".join("-" if x is None else f"{x:.0f}" for x in row[name]) for name in ("sm_mhz", "watts")
    )
    power = f" {watts} W" if watts.strip("-/") else ""
    times = f"{row['ms']:9.3f} ms ({row['ms_low']:.3f} to {row['ms_high']:.3f}, {row['rounds']} rounds)"
    return f"{head} {times} {clocks:>9} MHz{power} {row.get('speedup', 0):.3f}x"


class Report:
    """The record, of which rank 0 writes what has come so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if args.device == "cuda" else None
        self.header = records.provenance({
            "gpus": dist.get_world_size(), "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE"),
            "link": f"NCCL {nccl}" if nccl else "gloo",
            "nccl_programs": links.CTAS, "settle_ms": SETTLE_MS, "timed_ms": TIMED_MS,
            "timed": "windows of calls back to back, after some that do not count; slowest rank, median of "
            "rounds", "sm_mhz": "of each rank, NVML, the second half of a window, median of rounds",
            "watts": "of each rank, by the board's counter of energy, from windows of a second on",
        })  # fmt: skip
        self.header["gpu"]["name"] = self.header["gpu"]["name"] or "cpu"
        name = ranks.record_name(RECORD + "_long" * args.long, dist.get_world_size())
        self.path = records.report_path(name, self.header, args.out)
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.begin, self.first = time.monotonic(), dist.get_rank() == 0

    def add(self, name: str, rows: Sequence[dict[str, Any]], shown: bool = True) -> None:
        self.tables.setdefault(name, []).extend(rows)
        if not self.first:
            return
        records.add_table(self.path, self.header, name, self.tables[name])
        for row in rows if shown else ():
            print(show(row) if "pass" in row else " ".join(map(str, row.values())), flush=True)
        print(f"{name}: {len(rows)} rows, {time.monotonic() - self.begin:.0f} s", flush=True)


def ordered(lengths: Sequence[int], long: bool = False) -> list[tuple[int, bool, str]]:
    """The calls by importance: causal ones of the shortest length and of the third, dense ones of the
    shortest, then all others, the quickest first; without the longest dense backward pass, and last the
    longest dense forward pass. Or the long ones alone, the quickest first."""
    chosen = [(lengths[0], True), *((length, True) for length in lengths[2:3]), (lengths[0], False)]
    rest = [(length, causal) for length in lengths for causal in (True, False)]
    calls = [(*each, which) for each in rest for which in ("forward", "backward")]
    calls.sort(key=lambda call: Case(*call[:2]).flops(call[2]))
    if long:
        return [call for call in calls if is_long(Case(*call[:2]), call[2])]
    last = (lengths[-1], False, "forward"), (lengths[-1], False, "backward")
    if len(lengths) > 1:
        calls = [call for call in calls if call not in last] + [last[0]]
    found = [(*each, which) for each in chosen for which in ("forward", "backward")]
    return list(dict.fromkeys(found + calls))


def work(rank: int, count: int, args: argparse.Namespace, where: str) -> int:
    global TIMED_MS
    TIMED_MS = args.window_ms
    ranks.join(rank, count, where)
    report, until = Report(args), time.monotonic() + args.seconds
    case_of = (lambda n, causal: Case(n, causal, count, 16, "reference")) if args.device == "cpu" else Case
    first = args.lengths[0]
    rounds = range(args.rounds, args.rounds + 1) if args.rounds else None
    if args.tune:
        some = [name for name in SETTINGS if "as it is" in name or args.settings in name]
        for which in args.passes.split(","):
            report.add(f"settings_{which}", settings_rows(case_of(first, True), which, until, some, rounds))
        if args.device == "cuda" and not ranks.late(until):
            report.add("calls", timeline(case_of(first, True))[1], shown=False)
        return 0
    for causal in (True, False):
        for length in dict.fromkeys((min(8192, first), *[first] * (not args.long))):
            report.add("checks", checked(case_of(length, causal)))
    wrong = sum(row["status"] != "ok" for row in report.tables["checks"])
    for i, (length, causal, which) in enumerate([] if wrong else ordered(args.lengths, args.long)):
        if args.device == "cuda":
            torch.cuda.empty_cache()
            if i == 2 and not args.long:  # after the two calls that matter most
                for name, rows in zip(("timeline", "calls"), timeline(case_of(first, True)), strict=True):
                    report.add(name, rows, shown=False)
                some = [case_of(length, True) for length in dict.fromkeys((first, args.lengths[-1] // 2))]
                report.add("memory", list(memory_rows([*some, case_of(first, False)])))
        case = case_of(length, causal)
        names = names_for(case, which, args.lengths, args.long)
        report.add(which, timed_rows(case, which, names, until, rounds))
    if report.first:
        print(report.path, flush=True)
    dist.barrier()
    return int(any(row.get("status") == "wrong" for rows in report.tables.values() for row in rows))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time attention over the GPUs of this machine.")
    parser.add_argument("--lengths", default="65536,131072,262144,524288", help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=300,
                        help="begin nothing that would end later (default: %(default)s)")  # fmt: skip
    parser.add_argument("--tune", action="store_true", help="settings beside each other, two tables")
    parser.add_argument("--long", action="store_true", help="only the calls of seconds, with the peers")
    parser.add_argument("--passes", default="forward,backward", help="of --tune (default: %(default)s)")
    parser.add_argument("--settings", default="", help="of --tune: those with this in their names")
    parser.add_argument("--rounds", type=int, help="of each call (default: by the time that is there)")
    parser.add_argument("--window-ms", type=float, default=TIMED_MS,
                        help="a window's least length (default: %(default)s)")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/distributed.json)")
    args = parser.parse_args(argv)
    args.lengths = sorted(int(length) for length in args.lengths.split(","))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.device == "cpu":
        dist.init_process_group("gloo")
    elif torch.cuda.device_count() < 2 or torch.cuda.get_device_capability()[0] != 9:
        print("needs two GPUs of compute capability 9.x", file=sys.stderr)
        return 2
    return ranks.on_all_gpus(work, args)


if __name__ == "__main__":
    sys.exit(main())
