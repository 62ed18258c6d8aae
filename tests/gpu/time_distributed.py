"""Time attention of one sequence over the GPUs of this machine, beside one GPU and the peers.

    python tests/gpu/time_distributed.py             some 100 s; figures/data/<gpu>/distributed.json
    torchrun --nproc-per-node 2 tests/gpu/time_distributed.py        the same
    python tests/gpu/time_distributed.py --tune      NCCL's programs; no record
    python tests/gpu/time_distributed.py --lengths 65536 --seconds 40          less; --out FILE elsewhere

Five tables. `forward`, `backward`: bfloat16 B1 H16 D128, causal and dense. `timeline`:
what ran when in one forward and one backward pass of rank 0, by PyTorch's profiler. `checks`: the errors that
were found before anything was timed. `memory`: what a forward and a backward pass need for each row.
Peers: PyTorch's context_parallel with cuDNN; ring-flash-attn on FlashAttention-3 where ATTNLIB_PEERS_EXTRA
names a file with `make_ring_flash_attn`; a peer that is missing or fails is a row with the reason.
A sample is a window of calls back to back that begins at the same time on all ranks; a call's time is that
of the slowest rank, the median of the rounds, in which all that is compared takes turns. Tensors lie as
(B, S, H, D), each larger than the L2. Status 0 when all of attnlib's results were right, 1 otherwise, 2 with
fewer than two Hopper GPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention  # noqa: E402
from attnlib import distributed as cp  # noqa: E402
from attnlib.bench import records  # noqa: E402
from attnlib.bench.names import CONTROL  # noqa: E402
from attnlib.bench.peers import brief  # noqa: E402
from attnlib.bench.ranks import (  # noqa: E402
    join,
    kernel_events,
    late,
    on_all_gpus,
    window_ms,
    worst_error,
)
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.distributed import links  # noqa: E402

HEADS, HEAD_DIM, DTYPE = 16, 128, torch.bfloat16
LENGTHS = 65536, 131072, 262144, 524288
WINDOW_MS, ROUNDS_MS, MOST_ROUNDS = 60, 300, 5
"""A window is as many calls as take so long; rounds of an implementation take so long, two at least."""
ONE, OURS, ULYSSES = "attnlib, one GPU", "attnlib", "attnlib, ulysses"
ALL_UP_TO = 131072
LONGEST = ONE, OURS, "torch context_parallel, cuDNN, alltoall", "ring-flash-attn, FA3, zigzag"
"""Who is timed beyond that length."""
TOLERANCE = 4e-3
"""Relative RMS difference from one GPU: some three roundings to bfloat16."""


class Case(NamedTuple):
    length: int
    causal: bool

    @property
    def flops(self) -> float:
        return 4 * HEADS * HEAD_DIM * self.length**2 / (2 if self.causal else 1)

    @property
    def label(self) -> str:
        return f"S{self.length} {'causal' if self.causal else 'dense'}"

    @property
    def shape(self) -> Shape:
        return Shape(1, HEADS, self.length, HEAD_DIM, self.causal, str(DTYPE).removeprefix("torch."))


class Timed(NamedTuple):
    """forward() -> this rank's output; inputs: of which the backward pass gives gradients; leave(): undo what
    making it did."""

    forward: Callable[[], torch.Tensor]
    inputs: Sequence[torch.Tensor]
    leave: Callable[[], None] = lambda: None
    alone: bool = False


def whole(case: Case) -> list[torch.Tensor]:
    """q, k, v and d_out of the whole sequence, equal on all ranks."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = 1, case.length, HEADS, HEAD_DIM
    return [
        torch.randn(shape, generator=generator, device="cuda", dtype=DTYPE).transpose(1, 2) for _ in range(4)
    ]


def own(x: torch.Tensor, case: Case) -> torch.Tensor:
    """This rank's rows, in memory as (B, S, H, D)."""
    return cp.shard(x, causal=case.causal).transpose(1, 2).contiguous().transpose(1, 2)


# ---------------------------------------------------------------- who is timed


def one_gpu(case: Case, tensors: list[torch.Tensor]) -> Timed:
    inputs = [x.detach().requires_grad_() for x in tensors[:3]]
    return Timed(lambda: attention(*inputs, causal=case.causal), inputs, alone=True)


def ours(case: Case, tensors: list[torch.Tensor], method: str = "auto") -> Timed:
    inputs = [own(x, case).requires_grad_() for x in tensors[:3]]
    return Timed(lambda: cp.attention(*inputs, causal=case.causal, method=method), inputs)


def of_torch(case: Case, tensors: list[torch.Tensor], rotate: str) -> Timed:
    """PyTorch's context_parallel, whose `is_causal` wants head and tail balanced, as it does by itself."""
    from torch.distributed.tensor.experimental._attention import context_parallel, set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    inputs = [x.detach().contiguous().clone() for x in tensors[:3]]
    inside = context_parallel(mesh, buffers=inputs, buffer_seq_dims=[2] * 3, no_restore_buffers=set(inputs))
    inside.__enter__()
    for x in inputs:
        x.requires_grad_()

    def forward() -> torch.Tensor:
        set_rotate_method(rotate)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=case.causal)

    return Timed(forward, inputs, lambda: inside.__exit__(None, None, None))


def ring_flash_attn(case: Case, tensors: list[torch.Tensor]) -> Timed:
    file = os.environ.get("ATTNLIB_PEERS_EXTRA")
    if not file:
        raise ImportError("ATTNLIB_PEERS_EXTRA names no file")
    if not case.causal:
        raise ValueError("its zigzag ring is causal")
    spec = importlib.util.spec_from_file_location("peers_extra", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install_flash_attn_shim()
    call = module.make_ring_flash_attn(*(own(x, case) for x in tensors[:3]))
    inside = inspect.getclosurevars(call).nonlocals
    inputs = [inside[name].requires_grad_() for name in ("qq", "kk", "vv")]
    return Timed(call, inputs)


MAKERS: dict[str, Callable[[Case, list[torch.Tensor]], Timed]] = {
    ONE: one_gpu,
    OURS: ours,
    OURS + CONTROL: ours,
    ULYSSES: lambda case, tensors: ours(case, tensors, "ulysses"),
    "torch context_parallel, cuDNN, alltoall": lambda case, tensors: of_torch(case, tensors, "alltoall"),
    "torch context_parallel, cuDNN, allgather": lambda case, tensors: of_torch(case, tensors, "allgather"),
    "ring-flash-attn, FA3, zigzag": ring_flash_attn,
}


# ---------------------------------------------------------------- right first


def checked(case: Case) -> list[dict[str, Any]]:
    """Output and gradients of each method beside those of one GPU."""
    *tensors, d_out = whole(case)
    single = one_gpu(case, tensors)
    out = single.forward()
    expected = [out.detach(), *torch.autograd.grad(out, single.inputs, d_out)]
    found = []
    for method in ("all_gather", "ring", "ulysses"):
        timed = ours(case, tensors, method)
        out = timed.forward()
        results = [out.detach(), *torch.autograd.grad(out, timed.inputs, own(d_out, case))]
        for name, x, y in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
            off = worst_error(x, own(y, case))
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


def timed_rows(case: Case, until: float, backward: bool) -> list[dict[str, Any]]:
    *tensors, d_out = whole(case)
    made, rows = {}, {}
    for name, make in MAKERS.items():
        if case.length > ALL_UP_TO and name not in LONGEST:
            continue
        row = {"call": case.label, **case.shape.to_dict(), "impl": name}
        if name.endswith(CONTROL):
            row["control_of"] = name.removesuffix(CONTROL)
        for which in ("forward", "backward")[: 1 + backward]:
            rows[name, which] = {**row, "pass": which, "gpus": 1 if name == ONE else dist.get_world_size()}
        try:
            made[name] = make(case, tensors)
        except Exception as failure:
            for which in ("forward", "backward")[: 1 + backward]:
                missing = isinstance(failure, ImportError | OSError)
                rows[name, which] |= {"status": "not installed" if missing else "refused",
                                      "reason": brief(failure)}  # fmt: skip
    calls, samples, counts = {}, {}, {}
    for name, timed in made.items():
        shard = d_out if timed.alone else own(d_out, case)
        for which, call in passes(timed, shard).items():
            if (name, which) not in rows or late(until):
                continue
            try:
                for _ in range(2 if case.length <= ALL_UP_TO else 1):
                    first = window_ms(call, 1, timed.alone)
                calls[name, which], samples[name, which] = (call, timed.alone), []
                counts[name, which] = max(1, min(5, round(WINDOW_MS / first)))
            except Exception as failure:
                rows[name, which] |= {"status": "failed", "reason": brief(failure)}
    if samples:
        slowest = max(window_ms(*_with(calls[key], 1)) for key in list(calls)[:1])
        rounds = max(2, min(MOST_ROUNDS, round(ROUNDS_MS / max(slowest, WINDOW_MS))))
        order = list(calls)
        for i in range(rounds):
            if i and late(until):
                break
            random.Random(i).shuffle(order)  # the same on all ranks
            for key in order:
                samples[key].append(window_ms(*_with(calls[key], counts[key])))
    for timed in reversed(made.values()):  # contexts end in the reverse of their order
        timed.leave()
    for key, taken in samples.items():
        flops = case.flops * (2.5 if key[1] == "backward" else 1)
        ms = statistics.median(taken)
        rows[key] |= {"status": "ok", "ms": ms, "ms_low": min(taken), "ms_high": max(taken)}
        rows[key] |= {"round_ms": taken, "rounds": len(taken)}
        rows[key]["tflops_per_gpu"] = flops / ms / 1e9 / rows[key]["gpus"]
    for (_, which), row in rows.items():
        single = rows[ONE, which].get("ms")
        if "ms" in row and single:
            row["speedup"] = single / row["ms"]
    return [{"status": "not timed: no time was left", **row} for row in rows.values()]


def _with(call: tuple[Callable[[], Any], bool], count: int) -> tuple[Callable[[], Any], int, bool]:
    return call[0], count, call[1]


def memory_rows(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Peak memory of a forward and backward pass beyond its inputs, of this rank."""
    found = []
    for length in lengths:
        case = Case(length, True)
        *tensors, d_out = whole(case)
        timed, grad = ours(case, tensors), own(d_out, case)
        del tensors, d_out
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(timed.forward(), timed.inputs, grad)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        found.append({"call": case.label, "rows": length // dist.get_world_size(), "bytes": peak,
                      "bytes_per_row": peak / (length // dist.get_world_size())})  # fmt: skip
    return found


# ---------------------------------------------------------------- what ran when

KINDS = {"nccl": "transfer", "attention_forward": "attention", "attention_backward": "attention",
         "add_rows": "merge"}  # fmt: skip


def timeline(case: Case) -> list[dict[str, Any]]:
    """Kernels of one forward and one backward pass, ms from the first one's begin."""
    *tensors, d_out = whole(case)
    timed = ours(case, tensors)
    found = []
    for which, call in passes(timed, own(d_out, case)).items():
        for _ in range(2):
            window_ms(call, 1)
        found += [{"pass": which, "call": case.label, **event} for event in kernel_events(call, KINDS)]
    return found


def tune(case: Case) -> None:
    """Numbers of NCCL's programs beside each other."""
    *tensors, d_out = whole(case)
    calls = {}
    for ctas in (4, 8, 16, 32):
        for which, call in passes(ours(case, tensors), own(d_out, case)).items():
            def with_programs(call=call, ctas=ctas):
                links.CTAS = ctas
                call()

            calls[f"{ctas:2} programs", which] = with_programs
    single = one_gpu(case, tensors)
    calls |= {(ONE, which): call for which, call in passes(single, d_out).items()}
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for i in range(6):
        for key, call in calls.items():
            taken = window_ms(call, 1 if i == 0 else 3, key[0] == ONE)
            if i:
                samples[key].append(taken)
    medians = {key: statistics.median(taken) for key, taken in samples.items()}
    for (name, which), ms in medians.items():
        gain = medians[ONE, which] / ms
        print(f"{case.label:16} {which:9} {name:36} {ms:9.3f} ms  {gain:.3f}x", flush=True)


# ---------------------------------------------------------------- the ranks


def show(row: dict[str, Any]) -> str:
    head = f"{row['call']:16} {row['pass']:9} {row['impl']:42}"
    if "ms" not in row:
        return f"{head} {row['status']} {row.get('reason', '')}"
    times = f"{row['ms']:9.3f} ms ({row['ms_low']:.3f} to {row['ms_high']:.3f})"
    return f"{head} {times}  {row['tflops_per_gpu']:5.0f} TFLOP/s each  {row.get('speedup', 0):.3f}x"


def work(rank: int, ranks: int, args: argparse.Namespace, where: str) -> int:
    join(rank, ranks, where)
    begin = time.monotonic()
    if args.tune:
        if rank:
            sys.stdout = open(os.devnull, "w")
        for causal in (True, False):
            tune(Case(args.lengths[0], causal))
        return 0
    names = "checks", "forward", "backward", "timeline", "memory"
    tables: dict[str, dict[str, list]] = {name: {"rows": []} for name in names}
    for causal in (True, False):
        tables["checks"]["rows"] += checked(Case(min(8192, args.lengths[0]), causal))
        tables["checks"]["rows"] += checked(Case(args.lengths[0], causal))
    wrong = sum(row["status"] != "ok" for row in tables["checks"]["rows"])
    if rank == 0:
        for row in tables["checks"]["rows"]:
            print(*row.values(), flush=True)
    tables["timeline"]["rows"] = timeline(Case(args.lengths[0], True))
    tables["memory"]["rows"] = memory_rows(args.lengths[:2])
    until = begin + args.seconds
    for length in args.lengths:
        for causal in (True, False):
            torch.cuda.empty_cache()
            if wrong or late(until):
                continue
            backward = length < LENGTHS[-1] or causal
            rows = timed_rows(Case(length, causal), until, backward)
            for row in rows:
                tables[row["pass"]]["rows"].append(row)
            if rank == 0:
                print(*map(show, rows), f"{time.monotonic() - begin:.0f} s", sep="\n", flush=True)
    if rank == 0:
        header = records.provenance({
            "gpus": ranks, "link": "NCCL " + ".".join(map(str, torch.cuda.nccl.version())),
            "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE"), "nccl_programs": links.CTAS,
            "timed": "windows of calls back to back, slowest rank, median of rounds",
        })  # fmt: skip
        path = records.report_path("distributed", header, args.out)
        records.write_report(path, header, tables)
        print(path, flush=True)
    dist.barrier()
    return int(wrong > 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time attention over the GPUs of this machine.")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=100,
                        help="begin no length after so many (default: %(default)s)")  # fmt: skip
    parser.add_argument("--tune", action="store_true", help="settings beside each other; write no record")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/distributed.json)")
    args = parser.parse_args(argv)
    args.lengths = [int(length) for length in args.lengths.split(",")]
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability()[0] != 9:
        print("needs two GPUs of compute capability 9.x", file=sys.stderr)
        return 2
    return on_all_gpus(work, args)


if __name__ == "__main__":
    sys.exit(main())
