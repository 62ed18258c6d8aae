"""Functions run on processes that are the ranks of a group, all of them with one start of Python."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from attnlib.emulator.interpreter import save_work

IMPORTED = ["attnlib.distributed", "torch.distributed.device_mesh", "triton.runtime.interpreter"]
"""Once for all ranks on CPUs, which are forks of a process that has done so."""


class Ranks:
    """Processes that stay, and do one job after another. backend: "gloo", or "nccl" for a GPU each."""

    def __init__(self, count: int, timeout: float = 240.0, backend: str = "gloo") -> None:
        context = mp.get_context("spawn" if backend == "nccl" else "forkserver")
        if backend != "nccl":
            context.set_forkserver_preload(IMPORTED)
        store = os.path.join(tempfile.mkdtemp(), "store")
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, count, store, theirs, timeout, backend), daemon=True
            )
            process.start()
            theirs.close()  # else nobody hears that the process is gone
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, job: Callable, *args: Any, timeout: float = 240.0) -> list[Any]:
        """What `job(*args)` returns on each rank. AssertionError with a rank's traceback if one raises."""
        found = self.outcomes(job, *args, timeout=timeout)
        for rank, (ok, value) in enumerate(found):
            assert ok, f"rank {rank}: {value}"
        return [value for _, value in found]

    def outcomes(self, job: Callable, *args: Any, timeout: float = 240.0) -> list[tuple[bool, Any]]:
        """(True, result) or (False, traceback) of each rank; (False, "died") of one that is gone."""
        for pipe in self.pipes:
            pipe.send((job, args))
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout):
                self.close()  # an answer that comes later would be taken for that of another job
                found.append((False, f"no answer in {timeout} s"))
                continue
            try:
                found.append(pipe.recv())
            except EOFError:
                self.processes[rank].join(5)
                found.append((False, "died"))
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, count: int, store: str, pipe, timeout: float, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    elif os.environ.get("TRITON_INTERPRET") == "1":
        save_work()
    dist.init_process_group(
        backend, store=dist.FileStore(store, count), rank=rank, world_size=count,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    while True:
        function, args = pipe.recv()
        try:
            answer = True, function(*args)
        except Exception:
            answer = False, traceback.format_exc()
        pipe.send(answer)
