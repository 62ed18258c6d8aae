"""Compare implementations of attention on a GPU, fairly and only when they are right.

All implementations of a comparison run on the same tensors in one process, in several rounds, each round in a
new random order, so that clock and power drift hit all of them alike. Every call starts with a cold L2, and
every window of calls after a pause (`bench.setting`). One implementation runs twice: the second, its control
row, shows the noise of this run (`bench.verdict`). An output is judged by the fp64 oracle before the timing
and after it: a kernel that is wrong gets no speed.

    python -m attnlib.bench --shapes d64,d128 --impl attnlib,flash,cudnn
    python -m attnlib.bench --batch 1 --heads 16 --seqlen 16384 --head-dim 128 --dense --json out.json
    python -m attnlib.bench --peers    # attnlib and every peer at the shapes of the task: the ladder
    python -m attnlib.bench --list     # which peers can be used here

The cells of a notebook call `measure`, which stores what it measured and replays it on a machine without a
GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from attnlib.bench import names, peers, power, records, roofline, timing
from attnlib.bench.oracle import Oracle, make_inputs, poisoned_empty
from attnlib.bench.setting import BOOK, Setting, in_use, warming
from attnlib.bench.shapes import Shape
from attnlib.bench.timing import Sustained, Timing, host_us, launched_kernels, resources, sustained, time_ms

__all__ = [
    "Attention",
    "Sustained",
    "Timing",
    "collect",
    "host_us",
    "launched_kernels",
    "measure",
    "method",
    "resources",
    "sustained",
    "time_ms",
]

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], torch.Tensor]
"""f(q, k, v, causal, sm_scale) -> out; q and out are (B, H, S, D), k and v (B, H_kv, Sk, D)."""

DEVICE = "cuda"


class Run:
    """One implementation on one shape: its row, and its call while nothing has gone wrong. A control is the
    same under a second name."""

    def __init__(self, impl: str, shape: Shape, control: bool = False) -> None:
        self.impl = impl
        self.shape = shape
        name = impl + names.CONTROL if control else impl
        self.row: dict[str, Any] = {"impl": name, **shape.to_dict(), "status": "ok"}
        if control:
            self.row["control_of"] = impl
        self.call: Callable[[], torch.Tensor] | None = None
        self.is_peer = False
        self.estimate = 0.0
        self.rounds: list[list[float]] = []
        self.clocks: list[float | None] = []

    @property
    def ok(self) -> bool:
        return self.row["status"] == "ok"

    @property
    def flops(self) -> float:
        """FLOPs that a call is credited with."""
        return roofline.flops(self.shape)

    def peer(self) -> peers.Peer:
        """Who computes it, where it has no function."""
        return peers.PEERS[self.impl]

    def stop(self, status: str, reason: str | None = None) -> None:
        """Give up on this implementation: it keeps its errors and gets no speed."""
        self.row["status"] = status
        if reason:
            self.row["reason"] = reason
        self.call = None

    def attempt(self, step: Callable[[], None]) -> None:
        """Do one step; an exception becomes the status of the row, so one kernel can't end a whole run."""
        if not self.ok:
            return
        try:
            step()
        except torch.OutOfMemoryError:
            self.stop("out of memory")
        except Exception as error:
            self.stop("failed", f"{type(error).__name__}: {peers.brief(error)}")
        if not self.ok:
            # After an illegal access nothing that follows on this GPU can be trusted: this raises then.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def prepare(self, function: Attention | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        causal, scale = self.shape.causal, self.shape.head_dim**-0.5
        self.is_peer = function is None
        if function is not None:
            self.call = lambda: function(q, k, v, causal, scale)
            return
        peer = self.peer()
        reason = peer.available()
        if reason:
            self.stop("not installed", reason)
        else:
            self.call = peer.make(q, k, v, causal, scale)

    def gate(self, oracle: Oracle | None) -> None:
        """Call once and judge the output. A function of ours starts from NaN in what it allocates: output
        that it did not write must not pass because the memory still held the right one of the call before."""
        with contextlib.nullcontext() if self.is_peer else poisoned_empty():
            out = self.call()
        torch.cuda.synchronize()
        if oracle is None:
            return
        verdict = oracle.judge(out)
        self.row.update(
            max_error=verdict.max_error,
            rms_error=verdict.rms_error,
            budget_max=verdict.budget.max,
            budget_rms=verdict.budget.rms,
        )
        if not verdict.ok:
            self.stop("wrong", verdict.reason)

    def time(self, setting: Setting) -> None:
        """One window."""
        if not self.estimate:
            self.estimate = timing.estimate_ms(self.call, cold=True)
        timing.rest(setting)
        with power.Sampler(power.BURST_INTERVAL_S) as sampler:
            self.rounds.append(timing.samples_ms(self.call, self.estimate, setting, cold=True))
        self.clocks.append(sampler.medians(settled=True)[0])

    def finish(self, oracle: Oracle | None) -> None:
        """Memory and kernel resources of one more call, its output judged again, then the times."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with timing.launched_kernels() as kernels:
            self.call()
        torch.cuda.synchronize()
        self.row.update(timing.resources(kernels), peak_bytes=torch.cuda.max_memory_allocated() - before)
        self.gate(oracle)
        if not self.ok:
            return
        median, p20, p80 = timing.summarize([ms for samples in self.rounds for ms in samples])
        mhz = [clock for clock in self.clocks if clock is not None]
        self.row.update(
            ms=median,
            ms_p20=p20,
            ms_p80=p80,
            round_ms=[statistics.median(samples) for samples in self.rounds],
            tflops=self.flops / median * 1e-9,
            sm_mhz=statistics.median(mhz) if mhz else None,
        )


def check_names(implementations: Mapping[str, Attention | None], control: str | None = None) -> None:
    if control is not None and control not in implementations:
        raise ValueError(f"control: expected one of {', '.join(implementations)}, got {control!r}")
    for name, function in implementations.items():
        if function is None and name not in peers.PEERS:
            raise ValueError(
                f"implementations: {name!r} has no function and is no peer ({', '.join(peers.PEERS)})"
            )
        if function is not None and not callable(function):
            raise TypeError(
                f"implementations[{name!r}]: expected a callable or None, got {type(function).__name__}"
            )


def collect(
    implementations: Mapping[str, Attention | None],
    shapes: Iterable[Shape],
    *,
    setting: Setting = BOOK,
    control: str | None = None,
    gate: bool = True,
    kind: str = "normal",
) -> list[dict[str, Any]]:
    """Measure on this GPU; one row for each shape and implementation, see `measure`, and one for the control.
    Stores nothing."""

    def start(shape: Shape) -> tuple[tuple[torch.Tensor, ...], Oracle | None]:
        tensors = make_inputs(shape, kind, device=DEVICE)
        return tensors, Oracle(*tensors, shape.causal) if gate and not warming() else None

    return collect_runs(Run, start, implementations, shapes, setting, control)


def collect_runs(
    run_type: type[Run],
    start: Callable[[Shape], tuple[tuple[torch.Tensor, ...], Any]],
    implementations: Mapping[str, Attention | None],
    shapes: Iterable[Shape],
    setting: Setting,
    control: str | None,
) -> list[dict[str, Any]]:
    """Rows of a run of each implementation on each shape, and of its control; `start` gives a shape's tensors
    and its oracle, or None where outputs are not judged."""
    timing.need_gpu()
    check_names(implementations, control)
    shapes, setting = list(shapes), in_use(setting)
    rows: list[dict[str, Any]] = []
    with progress(len(shapes) * (len(implementations) + 1) * (setting.rounds + 1)) as advance:
        for shape in shapes:
            tensors, oracle = start(shape)
            runs = prepared_runs(run_type, implementations, shape, tensors, oracle, control)
            time_rounds(runs, oracle, setting, advance)
            rows += [run.row for run in runs]
    return rows


def prepared_runs(
    run_type: type[Run],
    implementations: Mapping[str, Attention | None],
    shape: Shape,
    tensors: Sequence[torch.Tensor],
    oracle: Any,
    control: str | None,
) -> list[Run]:
    """A run of each implementation, its first output judged, and last the control: a second run of `control`,
    or else of the last implementation that works here, one of ours before a peer."""

    def start(impl: str, second: bool = False) -> Run:
        run = run_type(impl, shape, second)
        run.attempt(functools.partial(run.prepare, implementations[impl], *tensors))
        run.attempt(functools.partial(run.gate, oracle))
        return run

    runs = [start(impl) for impl in implementations]
    good = sorted((run for run in runs if run.ok), key=lambda run: not run.is_peer)
    chosen = control or (good[-1].impl if good else None)
    return runs if chosen is None else [*runs, start(chosen, second=True)]


def time_rounds(runs: Sequence[Run], oracle: Any, setting: Setting, advance: Callable) -> None:
    """Time prepared runs, interleaved and in a new order in each round, then judge them again."""
    for number in range(setting.rounds):
        for run in random.Random(number).sample(runs, len(runs)):
            run.attempt(functools.partial(run.time, setting))
            advance(run.row["impl"])
    for run in runs:
        run.attempt(functools.partial(run.finish, oracle))


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal that has tqdm; nothing elsewhere, so that notebooks stay clean."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or not sys.stderr.isatty():
        yield lambda text: None
        return
    with tqdm(total=total, leave=False, file=sys.stderr) as bar:

        def advance(text: str) -> None:
            bar.set_description(text)
            bar.update()

        yield advance


def method(
    setting: Setting = BOOK, control: str | None = None, gate: bool = True, kind: str = "normal"
) -> dict[str, Any]:
    """How `collect` measures with these options, in words, for a record."""
    return {
        "timer": "CUDA events around each call, 256 MiB written before it to flush L2",
        "statistic": "median, 20th and 80th percentile of all calls of all rounds; round_ms: median of each",
        "order": "implementations interleaved, shuffled in each round",
        "mode": "burst: a pause before the warm-up and the timed calls of each window",
        "control": f"{control or 'the last implementation that works, ours before peers'}, timed twice",
        "setting": setting.name,
        "rounds": setting.rounds,
        "pause_ms": setting.pause_ms,
        "warmup_ms": setting.warmup_ms,
        "rep_ms": setting.rep_ms,
        "inputs": kind,
        "gate": "fp64 oracle before and after the timing" if gate else "none",
        "flops": "4*B*H*Sq*Sk*D, halved when causal",
    }


def measure(
    name: str,
    implementations: Mapping[str, Attention | None],
    shapes: Iterable[Shape],
    *,
    notebook: str,
    anywhere: bool = False,
    **options: Any,
) -> records.Table:
    """Compare implementations on shapes; measured and stored on a GPU, replayed without one.

    `implementations`: name -> f(q, k, v, causal, sm_scale) -> out, or None for the peer of that name.
    `anywhere`: replay another GPU's rows where the reference GPU has none, see `records.load_anywhere`.
    `options`: setting, the book's one or that of sweeps; control, the implementation that is timed twice
    (default: the last that works, ours before peers); gate, whether outputs are judged; kind, of
    `oracle.make_inputs`.

    One row for each shape and implementation: impl, the fields of the shape, and `status`.

    - "ok": ms, ms_p20, ms_p80 and tflops; round_ms, the median of each round; sm_mhz while it was timed;
      registers, spills, shared_bytes and num_warps (None unless Triton compiled it); peak_bytes allocated
      during a call.
    - "wrong": no times, but the `reason`. With `gate` both have max_error, rms_error, budget_max, budget_rms.
    - "not installed", "out of memory", "failed": no times, and the `reason` where there is more to say.

    The rows of the control are the table's `controls`. A replay has exactly the rows that were asked for; a
    RecordError names one that was not recorded. Prints nothing.
    """
    check_names(implementations, options.get("control"))
    shapes = list(shapes)
    rows = functools.partial(collect, implementations, shapes, **options)
    table = records.table(notebook, name, rows, method(**options), anywhere)
    rows = [table.one(shape, impl=impl) for shape in shapes for impl in implementations]
    return dataclasses.replace(table, rows=rows)
