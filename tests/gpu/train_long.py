"""Train a small Llama-shaped model on one long sequence, on one GPU and on all of this machine.

    python tests/gpu/train_long.py      0.1B, 131072 tokens, 4 steps, 60 s; figures/data/<gpu>/train_long.json
    --tokens 32768 --steps 3 --model 1B --checkpointing selective        others; --out FILE elsewhere

On several GPUs parameters, gradients and Adam's states are spread by FSDP2 (ZeRO 3), and the sequence by
`attnlib.distributed`: each rank has its rows of the tokens, knows their positions and the token after each,
and all of the model but attention works on them alone. Table `steps`: loss, gradient norm and ms of each
step. `runs`: bytes at the peak, tokens a second. `agreement`: how far the two runs are apart, and how far
they may be: the loss and the gradient norm of each step, and of the first step each parameter's gradient.
The difference is roundings to bfloat16, in another order.

    torchrun --nproc-per-node 2 tests/gpu/train_long.py --device cpu --tokens 64 --out FILE

A tiny model in float32 on processes of the CPU, to try it without GPUs.

Status 0 when they agree, 1 otherwise, 2 with fewer than two Hopper GPUs.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention  # noqa: E402
from attnlib import distributed as cp  # noqa: E402
from attnlib.bench import ranks, records  # noqa: E402
from attnlib.book.adam import own  # noqa: E402
from attnlib.book.long_sequence import rows_of  # noqa: E402
from attnlib.book.trainer import Trainer  # noqa: E402
from attnlib.book.training import SHAPES, LlamaShape, Training  # noqa: E402

RECORD = "train_long"
TOLERANCE = {"loss": 1e-3, "gradient norm": 1e-2, "gradients of the first step": 5e-2}
"""Relative; of the gradients the RMS of the farthest parameter."""
TINY = LlamaShape(2, 24, 4, 2, 8, 40, 50, True)


class Run(NamedTuple):
    """steps: a row each. gradients: of the first step, whole, by parameter."""

    steps: list[dict[str, Any]]
    gradients: dict[str, torch.Tensor]
    peak: int

    @property
    def ms(self) -> float:
        """Of the steps after the first."""
        return statistics.median(row["ms"] for row in self.steps[1:])


def sequence(args: argparse.Namespace) -> tuple[LlamaShape, torch.Tensor]:
    """The model's shape, and the tokens (1, S), equal on all ranks."""
    shape = TINY if args.device == "cpu" else SHAPES[args.model]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape.vocab, (1, args.tokens), generator=generator)
    return shape, tokens.to(ranks.device())


def trained(args: argparse.Namespace, gpus: int) -> Run:
    """The steps on this GPU alone, or on all."""
    shape, tokens = sequence(args)
    impl = "reference" if args.device == "cpu" else None
    attend, rows = partial(attention, causal=True, impl=impl), None
    if gpus > 1:
        attend = partial(cp.attention, causal=True, impl=impl)
        tokens, rows = rows_of(tokens)
    how = Training(args.tokens, 1, "attnlib", args.checkpointing, None, 3 if gpus > 1 else 0, gpus)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    trainer = Trainer(shape, how, args.device, dtype, attend=attend)
    steps, gradients = [], {}
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for i in range(args.steps):
        ranks.wait()
        begin = time.perf_counter()
        loss = trainer.model(tokens, rows)
        loss.backward()
        ranks.wait()
        taken = time.perf_counter() - begin
        parameters = dict(trainer.model.named_parameters())
        squares = sum(own(p.grad).float().square().sum() for p in parameters.values())
        loss = loss.detach()
        if gpus > 1:
            dist.all_reduce(squares)
            dist.all_reduce(loss)
            loss /= gpus
        if not i:
            gradients = {name: whole(p.grad).clone() for name, p in parameters.items()}
        begin = time.perf_counter()
        trainer.adam.step()
        ranks.wait()
        taken += time.perf_counter() - begin
        steps.append({"gpus": gpus, "step": i, "loss": loss.item(), "grad_norm": squares.sqrt().item(),
                      "ms": taken * 1e3})  # fmt: skip
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    return Run(steps, gradients, peak)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if x is not own(x) else x


def apart(one: Run, several: Run) -> list[dict[str, Any]]:
    """Rows of `agreement`. NaN agrees with nothing."""
    found = {
        name: max(abs(b[key] / a[key] - 1) for a, b in zip(one.steps, several.steps, strict=True))
        for name, key in (("loss", "loss"), ("gradient norm", "grad_norm"))
    }
    off = {
        name: ((several.gradients[name].float() - x.float()).square().mean() / x.float().square().mean())
        .sqrt().item() for name, x in one.gradients.items()
    }  # fmt: skip
    worst = max(off, key=lambda name: float("inf") if off[name] != off[name] else off[name])
    found["gradients of the first step"] = off[worst]
    return [
        {"what": name, "apart": value, "tolerance": TOLERANCE[name],
         "parameter": worst if "first" in name else None,
         "status": "ok" if value <= TOLERANCE[name] else "wrong"}
        for name, value in found.items()
    ]  # fmt: skip


def work(rank: int, count: int, args: argparse.Namespace, where: str) -> int:
    ranks.join(rank, count, where)
    header = records.provenance({
        "gpus": count, "model": args.model, "tokens": args.tokens, "checkpointing": args.checkpointing,
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE"), "timed": "wall time of a step",
    })  # fmt: skip
    header["gpu"]["name"] = header["gpu"]["name"] or "cpu"
    path, found = records.report_path(ranks.record_name(RECORD, count), header, args.out), []

    def write() -> None:
        records.add_table(path, header, "steps", [row for run in found for row in run.steps])
        records.add_table(path, header, "runs", [
            {"gpus": run.steps[0]["gpus"], "ms": run.ms, "tokens": args.tokens, "peak_bytes": run.peak,
             "tokens_per_s": args.tokens / run.ms * 1e3} for run in found
        ])  # fmt: skip
        for row in found[-1].steps:
            print(*(f"{name} {value:.6g}" for name, value in row.items()), flush=True)

    for gpus in (1, count):
        if gpus > 1 or rank == 0:
            found.append(trained(args, gpus))
            if rank == 0:
                write()
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        dist.barrier()
    if rank:
        return 0
    rows = apart(*found)
    records.add_table(path, header, "agreement", rows)
    print(*(" ".join(map(str, row.values())) for row in rows), path, sep="\n", flush=True)
    return int(any(row["status"] != "ok" for row in rows))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on one long sequence, on one GPU and on all.")
    parser.add_argument("--model", default="0.1B", choices=list(SHAPES), help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=131072, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--checkpointing", default="none", choices=("none", "selective", "layer"),
                        help="(default: %(default)s)")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/train_long.json)")
    return parser.parse_args(argv)


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
