"""Timing on several GPUs of one machine: a process for each, windows of calls that begin together, kernels of
one rank over time. Scripts of tests/gpu use it."""

from __future__ import annotations

import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from attnlib.bench import power

HEAD_START = 4_000_000
"""Clocks, some 2 ms, in which the host of a rank gets ahead of its GPU."""


class Window(NamedTuple):
    """ms of a call on each rank, and meanwhile its SM clock in MHz and its mean power in W; None where a rank
    had nothing to do, or it is unknown, as power is in windows of less than a second or so."""

    rank_ms: list[float | None]
    sm_mhz: list[float | None]
    watts: list[float | None]

    @property
    def ms(self) -> float:
        """On the slowest rank."""
        return max(ms for ms in self.rank_ms if ms is not None)


def record_name(record: str, ranks: int) -> str:
    """A record of two GPUs has the script's name; others say their number, and take nothing's place."""
    return record if ranks == 2 else f"{record}_{ranks}"


def device() -> torch.device:
    """Where this rank computes: its GPU, or in the tests the CPU."""
    return torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")


def wait() -> None:
    """Until this rank's GPU has nothing left to do."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def window(
    call: Callable[[], Any], count: int, alone: bool = False, settle: int = 0, clocks: int = HEAD_START
) -> Window:
    """`count` calls back to back, after `settle` of them that do not count; `alone`: rank 0 runs them and the
    others wait."""
    wait()
    dist.barrier()
    wait()
    found = torch.full((len(Window._fields),), math.nan, device=device())
    if not alone or dist.get_rank() == 0:
        with power.Sampler() as sampler:
            taken = _timed(call, count, settle, clocks)
        on_gpu = device().type == "cuda"
        seen = (sampler.medians(settled=True)[0], sampler.mean_watts()) if on_gpu else (None, None)
        found = torch.tensor([math.nan if x is None else x for x in (taken, *seen)], device=device())
    every = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(every, found)
    rows = zip(*(rank.tolist() for rank in every), strict=True)
    return Window(*([None if math.isnan(x) else x for x in values] for values in rows))


def _timed(call: Callable[[], Any], count: int, settle: int, clocks: int) -> float:
    """ms of a call of this rank."""
    if device().type == "cpu":
        for _ in range(settle):
            call()
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(clocks)
    for _ in range(settle):
        call()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def window_ms(call: Callable[[], Any], count: int, alone: bool = False, clocks: int = HEAD_START) -> float:
    """ms of a call, as `window` has it."""
    return window(call, count, alone, clocks=clocks).ms


def late(until: float) -> bool:
    """Whether rank 0's clock is beyond it; all ranks answer alike."""
    flag = torch.tensor([float(time.monotonic() > until)], device=device())
    dist.broadcast(flag, 0)
    return bool(flag.item())


def worst_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative RMS difference of the worst rank."""
    difference = (found.float() - expected.float()).square().mean() / expected.float().square().mean()
    worst = difference.sqrt().nan_to_num(nan=float("inf")).reshape(1)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


Event = tuple[int, int, int, str]
"""Of a kernel: stream, begin and length in ns, name."""


def kernels_of_calls(
    call: Callable[[], Any], kinds: dict[str, str], calls: int = 3
) -> list[list[dict[str, Any]]]:
    """This rank's kernels in each of some calls that are queued together, by PyTorch's profiler, but for the
    first: ms from the end of the call before. So the host is ahead, as it is in a program that has more to
    do. kinds: part of a kernel's name -> its kind; "other" where none fits. Nothing on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    if device().type == "cpu":
        call()
        return []
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        torch.cuda._sleep(HEAD_START)
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = [e for e in seen.profiler.kineto_results.events() if e.device_type().name == "CUDA"]
    # Without PyTorch's notes about what NCCL does, and the head start.
    events = [e for e in events if not e.name().startswith("nccl:") and "spin_kernel" not in e.name()]
    events = [(e.device_resource_id(), e.start_ns(), e.duration_ns(), e.name()) for e in events]
    return [[
        {"kind": next((kind for part, kind in kinds.items() if part in name.lower()), "other"),
         "kernel": name[:60], "stream": stream, "begin_ms": (at - start) * 1e-6, "ms": taken * 1e-6}
        for stream, at, taken, name in kernels
    ] for kernels, start in by_call(events, calls)]  # fmt: skip


def by_call(events: list[Event], calls: int) -> list[tuple[list[Event], int]]:
    """Of each of so many equal calls but the first: its kernels, by their begin, and when the call before
    ended. ValueError where a stream's kernels can't be shared out evenly."""
    shared: list[list[Event]] = [[] for _ in range(calls)]
    for stream in dict.fromkeys(event[0] for event in events):
        own = sorted((event for event in events if event[0] == stream), key=lambda event: event[1])
        each, rest = divmod(len(own), calls)
        if rest:
            raise ValueError(f"events: expected a multiple of {calls} on stream {stream}, got {len(own)}")
        for i, kernels in enumerate(shared):
            kernels += own[i * each : (i + 1) * each]
    ends = [max((at + taken for _, at, taken, _ in kernels), default=0) for kernels in shared]
    return [
        (sorted(kernels, key=lambda event: event[1]), end)
        for kernels, end in zip(shared[1:], ends, strict=False)
    ]


def covered_ms(kernels: list[dict[str, Any]], *kinds: str) -> float:
    """ms in which at least one kernel of these kinds runs."""
    total = reached = 0.0
    for row in sorted((row for row in kernels if row["kind"] in kinds), key=lambda row: row["begin_ms"]):
        stop = row["begin_ms"] + row["ms"]
        total += max(0.0, stop - max(reached, row["begin_ms"]))
        reached = max(reached, stop)
    return total


Work = Callable[[int, int, Any, str], int]
"""(rank, ranks, arguments, where they meet) -> exit status; a function of the script."""


def join(rank: int, ranks: int, where: str) -> None:
    """Take this rank's GPU and meet the others, unless the tests have done so, on CPUs."""
    if dist.is_initialized():
        return
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", init_method=where, rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=120))  # fmt: skip


def on_all_gpus(work: Work, args: Any) -> int:
    """Run `work` in a process for each GPU, or as the rank that torchrun started; the worst status. NVLink
    multicast is off unless NCCL_NVLS_ENABLE says otherwise."""
    import torch.multiprocessing as mp

    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if "RANK" in os.environ:  # torchrun
        return work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args, "env://")
    ranks = torch.cuda.device_count()
    where = f"tcp://127.0.0.1:{random.SystemRandom().randrange(20000, 60000)}"
    processes = mp.spawn(_spawned, (ranks, work, args, where), nprocs=ranks, join=False).processes
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):  # the others wait for it
            time.sleep(5)
            for process in processes:
                process.kill()
        time.sleep(0.2)
    return max(abs(process.exitcode) for process in processes)


def _spawned(rank: int, ranks: int, work: Work, args: Any, where: str) -> None:
    try:
        status = work(rank, ranks, args, where)
    except BaseException:
        traceback.print_exc()
        status = 3
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # groups are not taken down one by one
