"""Time one function on a GPU: cold or back to back, its host side, and what its Triton kernels use."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from attnlib.bench import power
from attnlib.bench.setting import BOOK, Setting, in_use, warming

_FLUSH_BYTES = 256 << 20  # several times the L2 of an H100 or H200, 50 and 60 MiB
_MAX_CALLS = 1000  # about as many launches as fit in the driver's queue
_MAX_TIMED = 100  # calls of a window: with head start and flush each of them takes 0.3 ms or more
_HEAD_START = 400_000
"""Clocks, some 0.2 ms: more than the slowest host needs to queue an event, a call and another event. With
30 µs the times of calls shorter than that were the host's."""


_clean = ContextVar("clean", default=False)
"""Whether the flush is followed by reading as much: see `clean_l2`."""


class Timing(NamedTuple):
    """Milliseconds per call: the median, the 20th and the 80th percentile."""

    median: float
    p20: float
    p80: float


class Sustained(NamedTuple):
    """A kernel run back to back: ms per call, SM clock in MHz and board power in W (None without NVML)."""

    ms: float
    sm_mhz: float | None
    watts: float | None


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("timing needs a CUDA GPU; without one, use records.load for what was measured")


def _record_ms(fn: Callable[[], Any], calls: int, cold: bool) -> list[float]:
    """GPU milliseconds of each of `calls` calls, between two events; L2 is flushed before each if `cold`.

    While the host queues a call the GPU is busy, with counting clocks and then with the flush: else a short
    call would be over before its second event is queued, and the time between the events would be the host's.
    The flush alone, 0.08 ms, is too short for a host that takes as long.
    """
    read = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda") if cold and _clean.get() else None
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda") if cold else None
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for start, end in events:
        torch.cuda._sleep(_HEAD_START)
        if flush is not None:
            flush.zero_()
            if read is not None:
                read.amax()
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


@contextlib.contextmanager
def clean_l2() -> Iterator[None]:
    """Cold calls find L2 full of what was read. Else it is full of what was written, which goes to memory
    when a call needs the place: up to 60 MiB more than the call itself moves."""
    token = _clean.set(True)
    try:
        yield
    finally:
        _clean.reset(token)


def estimate_ms(fn: Callable[[], Any], cold: bool) -> float:
    """A rough time per call, after one call that may compile. A slow function is timed once only."""
    fn()
    torch.cuda.synchronize()
    first = _record_ms(fn, 1, cold)[0]
    return max(1e-3, first if first > 10 or warming() else statistics.median(_record_ms(fn, 5, cold)))


def rest(setting: Setting) -> None:
    """The pause before a window: the GPU has nothing to do, and what ran before no longer shows."""
    torch.cuda.synchronize()
    time.sleep(setting.pause_ms / 1000)


def samples_ms(fn: Callable[[], Any], estimate: float, setting: Setting, cold: bool) -> list[float]:
    """Milliseconds of each timed call of a window, after its warm-up; `rest` comes before it."""
    for _ in range(max(1, min(_MAX_CALLS, int(setting.warmup_ms / estimate)))):
        fn()
    return _record_ms(fn, max(1, min(_MAX_TIMED, int(setting.rep_ms / estimate))), cold)


def summarize(samples: Sequence[float]) -> Timing:
    """Median and percentiles (linear interpolation) of samples in ms."""
    places = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    return Timing(*torch.tensor(samples, dtype=torch.float64).quantile(places).tolist())


def time_ms(fn: Callable[[], Any], cold: bool = True, setting: Setting = BOOK) -> Timing:
    """GPU time of one call of `fn`, in ms, in the windows in which comparisons are timed too.

    `cold` flushes L2 before each call (256 MB are written, outside of the timed span). RuntimeError without a
    GPU.
    """
    need_gpu()
    setting, estimate = in_use(setting), estimate_ms(fn, cold)
    samples: list[float] = []
    for _ in range(setting.rounds):
        rest(setting)
        samples += samples_ms(fn, estimate, setting, cold)
    return summarize(samples)


def sustained(fn: Callable[[], Any], ms: float = 200) -> Sustained:
    """Run `fn` back to back for about `ms` milliseconds: the mean time per call, with L2 warm and the card at
    its power limit; clock and power are medians of the second half. RuntimeError without a GPU."""
    took, sampler = _back_to_back(fn, ms)
    return Sustained(took, *sampler.medians(settled=True))


def joules(fn: Callable[[], Any], ms: float = 2000) -> float | None:
    """Energy of one call of `fn` in J, run back to back for about `ms` milliseconds, by the board's counter.

    The counter changes about ten times a second, so that a second or more is needed. None where it is missing
    or `ms` is too short. RuntimeError without a GPU.
    """
    took, sampler = _back_to_back(fn, ms)
    watts = sampler.mean_watts()
    return None if watts is None else watts * took / 1000


def _back_to_back(fn: Callable[[], Any], ms: float) -> tuple[float, power.Sampler]:
    """(ms per call, what was sampled meanwhile)."""
    need_gpu()
    calls = 1 if warming() else max(3, int(ms / estimate_ms(fn, cold=False)))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with power.Sampler() as sampler:
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / calls, sampler


def host_us(fn: Callable[[], Any], n: int = 200) -> float:
    """Host time of one call in microseconds: what Python and the launch cost, without waiting for the GPU.

    The queue is emptied every 20 calls, outside of the timed span, so that the host never waits for a place
    in it. The median over these groups. RuntimeError without a GPU.
    """
    need_gpu()
    group = 20
    for _ in range(3):
        fn()
    means = []
    for _ in range(max(1, n // group)):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(group):
            fn()
        means.append((time.perf_counter() - begin) / group * 1e6)
    torch.cuda.synchronize()
    return statistics.median(means)


@contextlib.contextmanager
def launched_kernels() -> Iterator[list[Any]]:
    """Collect the compiled Triton kernels that are launched inside of the block, in order; see `resources`.

    Kernels that do not go through `triton.jit` (cuDNN's, FA3's, those of torch.compile) are not seen.
    """
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    from attnlib.kernels.common.launcher import through_triton

    kernels: list[Any] = []
    run, launch = JITFunction.run, CompiledKernel.__getitem__

    @functools.wraps(run)
    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **kwargs)
        if kernel is not None and not kwargs.get("warmup"):
            kernels.append(kernel)
        return kernel

    def recording_launch(self: Any, grid: Any) -> Any:
        kernels.append(self)
        return launch(self, grid)

    JITFunction.run, CompiledKernel.__getitem__ = recording, recording_launch
    try:
        with through_triton():
            yield kernels
    finally:
        JITFunction.run, CompiledKernel.__getitem__ = run, launch


def resources(kernels: Sequence[Any]) -> dict[str, int | None]:
    """What the kernel with the most registers among `kernels` uses; all None when there is none.

    registers: 32-bit registers of a thread. spills: 32-bit words of local memory of a thread, as Triton's
    n_spills. shared_bytes: shared memory of a block. num_warps: warps of a block.
    """
    heaviest = max(kernels, key=lambda kernel: getattr(kernel, "n_regs", None) or 0, default=None)
    metadata = getattr(heaviest, "metadata", None)
    return {
        "registers": getattr(heaviest, "n_regs", None),
        "spills": getattr(heaviest, "n_spills", None),
        "shared_bytes": getattr(metadata, "shared", None),
        "num_warps": getattr(metadata, "num_warps", None),
    }
