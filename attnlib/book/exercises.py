"""Checks of exercises in which the reader writes a kernel: the answer is a launcher, judged against fp64.

A kernel in plain Triton runs in Triton's interpreter, or on the GPU where there is one; a kernel in Gluon
runs in the emulator, in several orders, wherever the notebook runs. Where the exercise is to be fast, `race`
times the answer on a GPU beside the kernel of the book that it has to beat."""

from __future__ import annotations

import random
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

import attnlib
from attnlib.bench import records, sources, timing
from attnlib.bench.backward import Judge, make_gradient
from attnlib.bench.entmax_oracle import EntmaxOracle
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Oracle, make_inputs, poisoned_empty
from attnlib.bench.setting import BOOK, WINDOW
from attnlib.bench.shapes import TASK, Shape
from attnlib.bench.verdict import FASTER, Verdict, spread
from attnlib.book.bounds import within_tensors
from attnlib.emulator import Deadlock, Race, emulated
from attnlib.emulator.barriers import Barrier, NamedBarrier
from attnlib.emulator.machine import Machine
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.params import EntmaxParams

ORDERS = ("eager", 0), ("late", 0), ("random", 0), ("random", 1)
"""Order of a run and its seed."""


def judge_kernel(attention: Callable, shape: Shape, **how) -> None:
    """`attention(q, k, v)` on the notebook's device against fp64; `how` is what `Oracle` takes."""
    q, k, v = make_inputs(shape)
    with np.errstate(all="ignore"), within_tensors():  # a wrong answer makes the interpreter warn of NaN
        out = attention(q, k, v)
    verdict = Oracle(q, k, v, **how).judge(out)
    assert verdict.ok, f"{_named(shape, how)}: {verdict.reason}"


def judge_entmax(attention: Callable, shape: Shape, alpha: float, kind: str = "normal") -> None:
    """`attention(q, k, v, causal, sm_scale)` on the notebook's device against alpha-entmax in fp64."""
    q, k, v = make_inputs(shape, kind)
    params = EntmaxParams(alpha, shape.causal, shape.head_dim**-0.5)
    with np.errstate(all="ignore"), within_tensors():
        out = attention(q, k, v, shape.causal, params.sm_scale)
    verdict = EntmaxOracle(q, k, v, params).judge("out", out)
    assert verdict.ok, f"{_named(shape)}, {kind} inputs, alpha = {alpha:g}: {verdict.reason}"


def judge_gluon(attention: Callable, shape: Shape) -> None:
    """`attention(q, k, v, causal)` in the emulator: right, without a race or a deadlock, in each of `ORDERS`.

    The kernels are those of the module, or notebook, in which `attention` was defined."""
    q, k, v = make_inputs(shape, device="cpu")
    oracle = Oracle(q, k, v, causal=shape.causal)
    runs = in_each_order(attention.__globals__, _named(shape), lambda: attention(q, k, v, shape.causal))
    for case, out in runs:
        verdict = oracle.judge(out)
        assert verdict.ok, f"{case}: {verdict.reason}"


def judge_gradients(gradients: Callable, shape: Shape) -> None:
    """`gradients(d_out, q, k, v, out, lse, causal, sm_scale)`, a backward pass whose kernel is in Gluon, in
    the emulator, as `judge_gluon` judges a forward pass. What it has in plain Triton, `preprocess` and
    `finish`, runs in Triton's interpreter, or on the GPU where there is one."""
    q, k, v = make_inputs(shape, device="cpu")
    d_out, scale = make_gradient(shape, device="cpu"), shape.head_dim**-0.5
    out, lse = attention_fp64(q, k, v, causal=shape.causal)
    oracle = GradientOracle(d_out, q, k, v, causal=shape.causal)
    namespace = gradients.__globals__
    elsewhere = {name: _on_the_gpu(namespace[name]) for name in ("preprocess", "finish")}

    def call() -> tuple:
        with mock.patch.dict(namespace, elsewhere):
            return gradients(d_out, q, k, v, out.to(q.dtype), lse.float(), shape.causal, scale)

    for case, found in in_each_order(namespace, _named(shape), call):
        for verdict in oracle.judge(*found).values():
            assert verdict.ok, f"{case}: {verdict.reason}"


def in_each_order(namespace: dict, case: str, call: Callable[[], Any]) -> Iterator[tuple[str, Any]]:
    """(case and order, result) of `call` in the emulator, in each of `ORDERS`; its kernels are those of
    `namespace`. AssertionError if there is a race or a deadlock."""
    for order, seed in ORDERS:
        named = f"{case}, order {order} {seed}"
        try:
            with emulated(namespace, order, seed):
                found = call()
        except (Race, Deadlock) as problem:
            raise AssertionError(f"{named}: {type(problem).__name__}: {problem}") from None
        yield named, found


def _on_the_gpu(function: Callable) -> Callable:
    """`function` of CPU tensors, computed on the GPU if there is one; it may change what it is given."""
    if not torch.cuda.is_available():
        return function
    properties = torch.cuda.get_device_properties  # `emulated` makes PyTorch tell others

    def call(*given):
        with mock.patch.object(torch.cuda, "get_device_properties", properties):
            there = [x.cuda() if isinstance(x, torch.Tensor) else x for x in given]
            found = function(*there)
        for here, changed in zip(given, there, strict=True):
            if isinstance(here, torch.Tensor):
                here.copy_(changed)
        return None if found is None else tuple(x.cpu() for x in found)

    return call


def _named(shape: Shape, how: dict | None = None) -> str:
    heads = f"H={shape.heads}" if shape.kv_heads == shape.heads else f"H={shape.heads} of {shape.kv_heads}"
    keys = f"S={shape.seqlen}" if shape.keys == shape.seqlen else f"Sq={shape.seqlen}, Sk={shape.keys}"
    given = {"causal": shape.causal} | (how or {})
    return ", ".join([heads, keys, f"D={shape.head_dim}", *(f"{name}={x}" for name, x in given.items())])


@contextmanager
def watched() -> Iterator[list[list[str]]]:
    """What each partition of each run in the emulator did, a list for each that did anything, in its order:
    "Product", "CopyIn" and "CopyOut" when it started one, "wait n" when it waited for all but n of them,
    "arrive NAME" at an mbarrier, "exp2" of a tile or a row."""
    did: dict[threading.Thread, list[str]] = {}

    def noted(original: Callable, word: Callable[..., str]) -> Callable:
        def call(*args, **options):
            did.setdefault(threading.current_thread(), []).append(word(*args))
            return original(*args, **options)

        return call

    words = (
        (Machine, "issue", lambda machine, queue, work: type(work).__name__),
        (Machine, "wait_for", lambda machine, queue, outstanding, what: f"wait {outstanding}"),
        (Barrier, "arrive", lambda barrier, *counts: f"arrive {barrier.name}"),
        (torch, "exp2", lambda tile: "exp2"),
    )
    found: list[list[str]] = []
    with ExitStack() as stack:
        for owner, name, word in words:
            stack.enter_context(mock.patch.object(owner, name, noted(getattr(owner, name), word)))
        yield found
    found += did.values()


@dataclass
class Pace:
    """What `paced` saw of partitions that run the same code.

    Attributes:
        ahead: of each partition, by its name: by how many products it was ahead of the other at most.
        named: numbers of the hardware's barriers that were used.
    """

    ahead: dict[str, int] = field(default_factory=dict)
    named: set[int] = field(default_factory=set)


@contextmanager
def paced() -> Iterator[Pace]:
    """Watches the runs in the emulator of a kernel with two consumers, all of them together."""
    pace, issue, arrive = Pace(), Machine.issue, NamedBarrier.arrive
    started: dict[Any, Counter[str]] = defaultdict(Counter)  # of each program: products of each partition

    def count(machine: Machine, queue: Any, work: Any) -> None:
        if type(work).__name__ == "Product":
            name, counts = machine.current.name, started[machine.current.program]
            counts[name] += 1
            others = [n for other, n in counts.items() if other != name]
            pace.ahead[name] = max(pace.ahead.get(name, 0), counts[name] - max(others, default=0))
        issue(machine, queue, work)

    def note(barrier: NamedBarrier, *who: Any) -> None:
        pace.named.add(barrier.number)
        arrive(barrier, *who)

    with mock.patch.object(Machine, "issue", count), mock.patch.object(NamedBarrier, "arrive", note):
        yield pace


# To beat a number: only a GPU can tell


def window_ms(call: Callable[[], Any]) -> float:
    """The time of a call in one window, as the book times everything."""
    return timing.time_ms(call, setting=WINDOW).median


def replayed_ms(call: Callable[[], Any]) -> float:
    """The same of a CUDA graph of the call, which the host may take longer to launch than the GPU to run."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return window_ms(graph.replay)


@dataclass(frozen=True)
class Contest:
    """A call, and the kernel of the book that an answer has to beat on it.

    Attributes:
        rival: the book's function; it and the answer take the same arguments.
        shape: of the call.
        start: makes the arguments on the GPU, and what judges a result: it raises AssertionError if that is
            wrong.
        ms: the rival's time by the record, which is the number to beat.
        label: where the record is from.
        small: judges an answer on small calls, which any machine can run; it raises AssertionError if one is
            wrong. None where an answer is judged on the GPU alone.
        clock: takes a call and gives milliseconds, as the record was measured.
    """

    rival: Callable
    shape: Shape
    start: Callable[[], tuple[tuple, Callable[[Any], None]]]
    ms: float
    label: str
    small: Callable[[Callable], None] | None = None
    clock: Callable[[Callable], float] = window_ms

    def __str__(self) -> str:
        return f"{self.ms:.3g} ms, {self.shape.label} ({self.label})"


def contest(step: str, head_dim: int, table: str = "ladder", impl: str | None = None) -> Contest:
    """To beat the last kernel of a step at the task's shape of `head_dim`, causal. `table` and `impl` say
    where the step's record has its time. RecordError if it has none."""
    rival, shape = sources.load_step(step).attention, TASK[f"d{head_dim}"]
    return contest_of(rival, shape, records.load(step, table), impl or step)


def contest_of(rival: Callable, shape: Shape, measured: records.Table, impl: str) -> Contest:
    """To beat `rival`, exact attention as f(q, k, v, causal, sm_scale), which `measured` calls `impl`."""

    def start() -> tuple[tuple, Callable[[Any], None]]:
        q, k, v = make_inputs(shape, device="cuda")
        oracle = Oracle(q, k, v, causal=shape.causal)

        def judge(out: Any) -> None:
            verdict = oracle.judge(out)
            assert verdict.ok, f"{_named(shape)}: {verdict.reason}"

        return (q, k, v, shape.causal, shape.head_dim**-0.5), judge

    return Contest(rival, shape, start, _ms_of(measured, shape, impl), measured.label)


def contest_of_gradients(rival: Callable, shape: Shape, measured: records.Table, impl: str) -> Contest:
    """To beat `rival`, a backward pass as `judge_gradients` takes one, which `measured` calls `impl`."""

    def start() -> tuple[tuple, Callable[[Any], None]]:
        q, k, v = make_inputs(shape, device="cuda")
        d_out = make_gradient(shape, device="cuda")
        out, lse = attnlib.attention(q, k, v, causal=shape.causal, return_lse=True)
        oracle = Judge(d_out, q, k, v, shape.causal)

        def judge(found: Any) -> None:
            for verdict in oracle.judge(*found).values():
                assert verdict.ok, f"{_named(shape)}: {verdict.reason}"

        return (d_out, q, k, v, out, lse, shape.causal, shape.head_dim**-0.5), judge

    return Contest(rival, shape, start, _ms_of(measured, shape, impl), measured.label)


def _ms_of(measured: records.Table, shape: Shape, impl: str) -> float:
    """The recorded time of an implementation; RecordError if it has none."""
    row = measured.one(shape, impl=impl)
    if row["status"] != "ok":
        raise records.RecordError(
            f"table {measured.name!r}: {impl!r} has no time at {shape.label}: {row['status']}"
        )
    return row["ms"]


def race(answer: Callable, against: Contest, clock: Callable[[Callable], float] | None = None) -> Verdict:
    """Time `answer` beside its rival in shuffled rounds, the rival twice, which tells the noise of this run.
    AssertionError unless the answer is right, before and after, and faster by more than the noise. `clock`
    stands for that of the contest."""
    clock = clock or against.clock
    arguments, judge = against.start()
    calls = {"yours": answer, "the book's": against.rival, "the book's again": against.rival}

    def right() -> None:
        with poisoned_empty():  # what an answer does not write must not pass as what another call left there
            out = answer(*arguments)
        judge(out)

    right()
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(BOOK.rounds):
        for name in order.sample(list(calls), len(calls)):
            times[name].append(clock(lambda name=name: calls[name](*arguments)))
    right()
    yours, rival, again = (statistics.median(times[name]) for name in calls)
    open_ = spread({"round_ms": times["yours"]}, {"round_ms": times["the book's"]})
    verdict = Verdict(
        "yours", "the book's", against.shape, rival / yours, max(rival / again, again / rival), open_
    )
    assert verdict.word == FASTER, (
        f"right, and {verdict.sentence()}. Yours {yours:.3g} ms, the book's {rival:.3g} ms in the same run; "
        f"on record {against}"
    )
    return verdict
