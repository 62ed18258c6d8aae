"""Timing on several GPUs of one machine: a process for each, windows of calls that begin together, kernels of
one rank over time. Scripts of tests/gpu use it."""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

HEAD_START = 4_000_000
"""Clocks, some 2 ms, in which the host of a rank gets ahead of its GPU."""


def window_ms(call: Callable[[], Any], count: int, alone: bool = False, clocks: int = HEAD_START) -> float:
    """ms of a call, on the slowest rank; `alone`: rank 0 runs it and the others wait."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    taken = torch.zeros(1, device="cuda")
    if not alone or dist.get_rank() == 0:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(clocks)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        taken[0] = begin.elapsed_time(end) / count
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


def late(until: float) -> bool:
    """Whether rank 0's clock is beyond it; all ranks answer alike."""
    flag = torch.tensor([float(time.monotonic() > until)], device="cuda")
    dist.broadcast(flag, 0)
    return bool(flag.item())


def worst_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative RMS difference of the worst rank."""
    difference = (found.float() - expected.float()).square().mean() / expected.float().square().mean()
    worst = difference.sqrt().nan_to_num(nan=float("inf")).reshape(1)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def kernel_events(call: Callable[[], Any], kinds: dict[str, str]) -> list[dict[str, Any]]:
    """This rank's kernels in one call, by PyTorch's profiler: ms from the first one's begin. kinds: part of a
    kernel's name -> its kind; "other" where none fits."""
    from torch.profiler import ProfilerActivity, profile

    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    events = [e for e in seen.profiler.kineto_results.events() if e.device_type().name == "CUDA"]
    # Without PyTorch's notes about what NCCL does.
    events = sorted((e for e in events if not e.name().startswith("nccl:")), key=lambda e: e.start_ns())
    return [
        {"kind": next((kind for part, kind in kinds.items() if part in e.name().lower()), "other"),
         "kernel": e.name()[:60], "stream": e.device_resource_id(),
         "begin_ms": (e.start_ns() - events[0].start_ns()) * 1e-6, "ms": e.duration_ns() * 1e-6}
        for e in events
    ]  # fmt: skip


Work = Callable[[int, int, Any, str], int]
"""(rank, ranks, arguments, where they meet) -> exit status; a function of the script."""


def join(rank: int, ranks: int, where: str) -> None:
    """Take this rank's GPU and meet the others."""
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
