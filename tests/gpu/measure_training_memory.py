"""Measure peak memory and step time of Llama-shaped models on the GPUs of this machine, beside the formulas.

    python tests/gpu/measure_training_memory.py              one GPU: --seconds 170
    torchrun --nproc-per-node 2 tests/gpu/measure_training_memory.py        two; without torchrun: --gpus 2
    --models 1B --contexts 4096 --seconds 60 --out FILE      a part of it, elsewhere
    --again              measure what the record has, too;   --list    what would be measured, in order

Tables `steps_1`, `steps_2`, ... of figures/data/<gpu>/training_memory.json, by the number of GPUs: models of
0.1, 1 and 8 billion parameters, bfloat16 with Adam on float32 copies, synthetic tokens, a sequence for each
GPU. Attention by PyTorch's math path, its fused backends and attnlib; checkpointing of nothing, of all but
attention, of layers; all parameters or LoRA (by peft where it is installed); ZeRO 1 to 3; Adam's states in
host memory. `peak_bytes` is what PyTorch allocated at most in a step, `reserved_bytes` what its allocator
took, `ms` the median of the steps after one that warms up. `predicted_bytes` and `predicted_ms` are
`attnlib.book.training`'s and `training_time`'s, with rates that were set before; `rated_ms` is the same
formula with the rates of this machine, which the tables `rates_1`, ... have: they are measured first.
`mended_bytes`, `mended_ms` and `mended_rated_ms` are the formulas as they were mended after the first run,
the times with the rates of `machine_of` this card and with those measured; `phased_ms` is the time as it was
mended after the second run, with those of `machine_of` (rows until 2026-11-30 lack it).

The most telling settings come first, and the record is written after each. So a run that is cut off, or whose
--seconds are over, is taken up by the next one: it measures what is not there. A setting in which the process
ended is not tried again without --again. Status 0 when all losses that should agree do and nothing failed, 1
otherwise, 2 without a Hopper GPU. `--device cpu` is for the tests: tiny models, bytes counted by
`attnlib.book.live_bytes`.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib.bench import ranks as gpus  # noqa: E402
from attnlib.bench import records  # noqa: E402
from attnlib.bench.host import cores, cpu_name  # noqa: E402
from attnlib.bench.peers import brief  # noqa: E402
from attnlib.book.adam import Home, MasterAdamW  # noqa: E402
from attnlib.book.live_bytes import LiveBytes  # noqa: E402
from attnlib.book.llama import ATTEND  # noqa: E402
from attnlib.book.trainer import Trainer  # noqa: E402
from attnlib.book.training import SHAPES, LlamaShape, Training, memory  # noqa: E402
from attnlib.book.training_time import (  # noqa: E402
    ADAM_BYTES,
    H200,
    H200_BEFORE,
    Machine,
    machine_of,
    mended_ms,
    offloaded,
    phased_ms,
    step_ms,
)

RECORD, RANK, STEPS, LONG_MS = "training_memory", 16, 3, 1500
"""A step that is predicted to take longer than LONG_MS is timed once, by the formula that says more."""
LOSS_TOLERANCE = 2e-3
"""Relative difference of the losses of the first step: bfloat16, the same initial values."""
TINY = LlamaShape(2, 32, 4, 2, 8, 96, 64)
HOW = "context", "batch", "attention", "checkpointing", "lora", "zero", "gpus", "offload"
DONE = "ok", "out of memory", "not run: predicted not to fit"
BEGUN = "begun, and the process ended"

# ---------------------------------------------------------------- what is measured, the most telling first


def on_one(model: str, context: int, kinds: str = "attnlib sdpa math") -> Iterator[tuple[str, Training]]:
    for kind in kinds.split():
        for checkpointing in ("none", "layer", "selective"):
            for lora in (None, RANK):
                yield model, Training(context, 1, kind, checkpointing, lora)


def one_gpu() -> Iterator[tuple[str, Training]]:
    yield from on_one("1B", 4096)
    yield from on_one("1B", 16384, "attnlib sdpa")
    yield from on_one("8B", 4096, "attnlib")
    yield from on_one("1B", 65536, "attnlib")
    yield "1B", Training(4096, offload=True)
    yield from on_one("0.1B", 4096)
    yield from on_one("8B", 16384, "attnlib")
    yield "1B", Training(16384, attention="math")
    yield from on_one("1B", 1024)
    yield from on_one("0.1B", 65536, "attnlib sdpa")
    yield from on_one("0.1B", 16384, "attnlib")
    yield from on_one("0.1B", 1024)
    yield "8B", Training(65536, checkpointing="layer", lora=RANK)
    yield "8B", Training(65536, checkpointing="selective", lora=RANK)
    yield from on_one("1B", 65536, "sdpa")


def several(count: int) -> Iterator[tuple[str, Training]]:
    def spread(model: str, context: int, checkpointing: str = "none", zeros=(3, 2, 1, 0),
               kind: str = "attnlib", offload: bool = False):  # fmt: skip
        for zero in zeros:
            for lora in (None, RANK):
                yield model, Training(context, 1, kind, checkpointing, lora, zero, count, offload)

    yield from spread("1B", 4096)
    yield from spread("8B", 4096, "layer", (3,))
    yield from spread("1B", 16384, "layer", (3, 2))
    yield from spread("0.1B", 4096)
    for zero in (3, 1):
        yield "1B", Training(4096, zero=zero, gpus=count, offload=True)
    yield from spread("1B", 65536, "selective", (3, 2))
    yield from spread("8B", 4096, "layer", (2, 1))
    yield from spread("8B", 16384, "layer", (3, 2))
    yield from spread("1B", 16384, "layer", (1, 0))
    yield "1B", Training(4096, zero=2, gpus=count, offload=True)
    yield from spread("8B", 4096, "none", (3,))
    yield from spread("8B", 65536, "layer", (3,))
    # Last, since each of their terms is in settings above or in those of one GPU.
    for kind in ("math", "sdpa"):
        for checkpointing in ("none", "layer"):
            yield from spread("1B", 4096, checkpointing, kind=kind)
    for how in (how for _, how in spread("1B", 4096, "none", (3, 1), offload=True) if how.lora is not None):
        yield "1B", how
    yield from spread("1B", 4096, "layer", (3, 1), offload=True)


def tiny(count: int) -> Iterator[tuple[str, Training]]:
    zeros = (1, 3) if count > 1 else (0,)
    for zero in zeros:
        yield "tiny", Training(24, 1, "sdpa", "layer", None, zero, count)
    yield "tiny", Training(24, 1, "math", "selective", 4, zeros[-1], count)
    yield "tiny", Training(24, 1, "sdpa", "none", None, 0, count, True)


def chosen(args: argparse.Namespace, count: int) -> list[tuple[str, Training]]:
    if args.device == "cpu":
        return list(tiny(count))
    found = one_gpu() if count == 1 else several(count)
    models, contexts = args.models.split(","), [int(x) for x in args.contexts.split(",")]
    return [(name, how) for name, how in found if name in models and how.context in contexts]


# ---------------------------------------------------------------- one setting


class Meter:
    """Peak bytes of this rank's device, beyond what was there before."""

    def __init__(self, device: str) -> None:
        self.cuda, self.live = device == "cuda", nullcontext() if device == "cuda" else LiveBytes()
        self.before = torch.cuda.memory_allocated() if self.cuda else 0

    def restart(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            self.live.restart()

    def read(self) -> dict[str, int]:
        if not self.cuda:
            return {"peak_bytes": self.live.peak, "reserved_bytes": self.live.peak}
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - self.before
        return {"peak_bytes": peak, "reserved_bytes": torch.cuda.max_memory_reserved()}


def wait(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measured(shape: LlamaShape, how: Training, device: str, long: bool, peft: bool) -> dict[str, Any]:
    """One step that warms up, and those that count."""
    meter = Meter(device)
    with meter.live:
        trainer = Trainer(shape, how, device, peft=peft)
        rank = dist.get_rank() if dist.is_initialized() else 0
        generator = torch.Generator(device).manual_seed(rank)
        tokens = torch.randint(
            0, shape.vocab, (how.batch, how.context), generator=generator, device=device
        )
        taken, losses = [], []
        for i in range(2 if long else 1 + STEPS):
            if i == 1:
                meter.restart()
            begin = wait(device)
            loss = trainer.step(tokens)
            taken.append((wait(device) - begin) * 1e3)
            losses.append(mean_of(loss))
        found = meter.read()
    return {
        "status": "ok", **found, "ms": statistics.median(taken[1:]), "ms_low": min(taken[1:]),
        "ms_high": max(taken[1:]), "first_loss": losses[0], "last_loss": losses[-1],
    }  # fmt: skip


def mean_of(loss: torch.Tensor) -> float:
    """Over ranks."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def predicted(name: str, how: Training, machine: Machine, card: Machine) -> dict[str, Any]:
    """machine: rates that were measured; card: those that were written before."""
    shape = SHAPES.get(name, TINY)
    return {
        "model": name, "parameters": shape.parameters, **{key: asdict(how)[key] for key in HOW},
        "predicted_bytes": memory(shape, how, inside=False).peak,
        "predicted_ms": step_ms(shape, how, H200_BEFORE), "rated_ms": step_ms(shape, how, machine),
        "mended_bytes": memory(shape, how).peak,
        "mended_ms": mended_ms(shape, how, card), "mended_rated_ms": mended_ms(shape, how, machine),
        "phased_ms": phased_ms(shape, how, card),
        "host_bytes": offloaded(shape, how),
    }  # fmt: skip


def row_of(name: str, how: Training, row: dict[str, Any], device: str) -> dict[str, Any]:
    shape, by_peft = SHAPES.get(name, TINY), find_spec("peft") is not None and device == "cuda"
    if how.lora is not None:
        row |= {"adapters": "peft" if by_peft else "attnlib.book"}
    try:
        long = max(row["predicted_ms"], row["mended_ms"]) > LONG_MS
        row |= measured(shape, how, device, long, by_peft)
    except torch.OutOfMemoryError as error:
        row |= {"status": "out of memory", "reason": brief(error)}
        if how.gpus > 1:  # the other ranks may be waiting for this one
            raise
    except RuntimeError as error:
        row |= {"status": "failed", "reason": brief(error)}
        if how.gpus > 1:
            raise
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return row


# ---------------------------------------------------------------- rates of this machine


def per_call(call, count: int = 10) -> float:
    """Seconds of a call on this GPU, back to back."""
    for _ in range(2):
        call()
    begin = wait("cuda")
    for _ in range(count):
        call()
    return (wait("cuda") - begin) / count


def measured_machine() -> Machine:
    """Rates as `Machine` names them, in some ten seconds; without a second GPU all but the link's, which no
    formula of one GPU asks for."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    a, b = torch.randn(4096, 4096, **like), torch.randn(4096, 8192, **like)
    found: dict[str, Any] = {"products": 2 * 4096 * 4096 * 8192 / per_call(lambda: a @ b, 100) / 1e12}
    found |= transfer_rates()
    found["cpu"] = adam_rate(1 << 26, found["bus"], "cuda")
    found["attention"] = {kind: {dim: attention_rates(kind, dim) for dim in (64, 128)} for kind in ATTEND}
    shape = replace(SHAPES["0.1B"], layers=4, vocab=1000)
    trainer = Trainer(shape, Training(64, gpus=dist.get_world_size() if dist.is_initialized() else 1), "cuda")
    tokens = torch.zeros(1, 64, dtype=torch.long, device="cuda")
    found["host"] = per_call(lambda: trainer.step(tokens)) * 1e3 / shape.layers
    return replace(H200, **found)


def transfer_rates() -> dict[str, float]:
    """GB/s of the GPU's memory, of the bus to it and, where there are several, of the link between them."""
    big = torch.empty(1 << 30, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(big)
    found = {"memory": 2 * big.nbytes / per_call(lambda: other.copy_(big)) / 1e9}
    on_host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    room = big.view(torch.uint8)[: on_host.numel()]
    found["bus"] = on_host.nbytes / per_call(lambda: room.copy_(on_host, non_blocking=True)) / 1e9
    if dist.is_initialized() and dist.get_world_size() > 1:
        part = big[: big.numel() // dist.get_world_size()]
        moved = big.nbytes - part.nbytes
        found["link"] = moved / per_call(lambda: dist.all_gather_into_tensor(other, part)) / 1e9
    return found


def adam_rate(elements: int, bus: float, device: str) -> float:
    """GB/s at which the host does Adam's update, by the bytes of the mended formula; all ranks at the same
    time, since they share the host."""
    p = torch.nn.Parameter(torch.zeros(elements, device=device, dtype=torch.bfloat16))
    adam = MasterAdamW([p], home=Home(host=True))
    taken = []
    for _ in range(2):  # the first one warms up
        p.grad = torch.ones_like(p)
        if dist.is_initialized():
            dist.barrier()
        begin = wait(device)
        adam.step()
        taken.append(wait(device) - begin)
    return elements * ADAM_BYTES / (taken[1] - 2 * p.element_size() * elements / bus / 1e9) / 1e9


def attention_rates(kind: str, dim: int) -> tuple[float, float]:
    """TFLOP/s, forward and backward, of a causal call of a model with this head dimension."""
    length = 4096 if kind == "math" else 16384
    q, k, v = (torch.randn(1, heads, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for heads in (32, 8, 8))  # fmt: skip
    flops = 2 * length**2 * 32 * dim
    with torch.no_grad():
        ahead = per_call(lambda: ATTEND[kind](q, k, v))
    out = ATTEND[kind](q, k, v)
    back = per_call(lambda: torch.autograd.grad(out, (q, k, v), out.detach(), retain_graph=True))
    return flops / ahead / 1e12, 2.5 * flops / back / 1e12


def rate_rows(machine: Machine, card: Machine, count: int) -> list[dict[str, Any]]:
    names = "products", "memory", *["link"] * (count > 1), "bus", "cpu", "host"
    rows = [{"rate": name, "measured": getattr(machine, name), "before": getattr(card, name)}
            for name in names]  # fmt: skip
    for kind, by_dim in machine.attention.items():
        for dim, found in by_dim.items():
            expected = card.attends(kind, dim)
            rows += [{"rate": f"{kind}, D = {dim}, {name}", "measured": found[i], "before": expected[i]}
                     for i, name in enumerate(("forward", "backward"))]  # fmt: skip
    return rows


# ---------------------------------------------------------------- the record


class Book:
    """The rows of one number of GPUs in the record, of which rank 0 alone reads and writes."""

    def __init__(self, args: argparse.Namespace, count: int) -> None:
        self.header = records.provenance({
            "timed": "wall time of a step", "gpus": count,
            "cpu": cpu_name(), "threads": torch.get_num_threads(),
        })  # fmt: skip
        self.header["gpu"]["name"] = self.header["gpu"]["name"] or "cpu"
        self.path, self.name = records.report_path(RECORD, self.header, args.out), f"steps_{count}"
        table = records.read(self.path)["tables"].get(self.name) if self.path.exists() else None
        self.rows = {key_of(row): row for row in (table or {"rows": []})["rows"]}
        self.again = args.again

    def known(self, row: dict[str, Any]) -> bool:
        found = self.rows.get(key_of(row))
        return not self.again and found is not None and found["status"] in (*DONE, BEGUN)

    def keep(self, row: dict[str, Any]) -> None:
        self.rows[key_of(row)] = dict(row)
        self.write(self.name, list(self.rows.values()))

    def write(self, name: str, rows: list[dict[str, Any]]) -> None:
        records.add_table(self.path, self.header, name, rows)


def key_of(row: dict[str, Any]) -> tuple:
    return row["model"], *(row[name] for name in HOW)


def show(row: dict[str, Any]) -> str:
    lora = "all" if row["lora"] is None else f"LoRA {row['lora']}"
    where = f"ZeRO {row['zero']}" + (", host" if row["offload"] else "")
    head = f"{row['model']:5} {row['context']:6} {row['attention']:8} {row['checkpointing']:9} {lora:8} "
    head += f"{where:12}"
    # A record from before has no mended predictions.
    row = {f"mended_{name}": row.get(f"predicted_{name}") for name in ("bytes", "ms")} | row
    expected = f"predicted {row['mended_bytes'] / 1e9:7.2f} GB {row['mended_ms']:8.1f} ms"
    if "ms" not in row:
        return f"{head} {row['status']:30} {expected} {row.get('reason', '')}"
    memory_of, time_of = row["peak_bytes"] / row["mended_bytes"], row["ms"] / row["mended_ms"]
    rated = row["ms"] / row.get("mended_rated_ms", row["rated_ms"])
    return (f"{head} {row['peak_bytes'] / 1e9:7.2f} GB {row['ms']:8.1f} ms, {expected}: {memory_of:.3f}, "
            f"{time_of:.2f} ({rated:.2f} by this machine's rates); "
            f"loss {row['first_loss']:.4f}")  # fmt: skip


def disagreeing(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Settings that compute the same first step and have another loss than the first of them; NaN agrees with
    nothing. And settings that failed."""
    found = [show(row) for row in rows if row["status"] in ("failed", BEGUN)]
    first: dict[tuple, float] = {}
    for row in (row for row in rows if row["status"] == "ok"):
        loss = first.setdefault((row["model"], row["context"], row["gpus"]), row["first_loss"])
        both = loss is not None and row["first_loss"] is not None  # a record has None for NaN
        if not both or not abs(row["first_loss"] / loss - 1) <= LOSS_TOLERANCE:
            found.append(f"{show(row)}, expected {loss}")
    return found


# ---------------------------------------------------------------- the ranks


def shared(value: Any) -> Any:
    """Rank 0's value, on all ranks."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def fits(row: dict[str, Any], device: str) -> bool:
    """Whether a setting is worth a try: on several GPUs one that runs out of memory ends the run."""
    if device == "cpu":
        return True
    room = torch.cuda.get_device_properties(0).total_memory
    return row["mended_bytes"] < (1.1 if row["gpus"] == 1 else 0.93) * room


def work(rank: int, count: int, args: argparse.Namespace, where: str) -> int:
    begin = time.monotonic()
    if args.device == "cuda" and count > 1:
        gpus.join(rank, count, where)
    elif count > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=count)
    if args.device == "cuda":  # the tests have a number of their own
        torch.set_num_threads(max(1, cores() // count))
    machine = measured_machine() if args.device == "cuda" else H200
    card = machine_of(torch.cuda.get_device_name() if args.device == "cuda" else None)
    book = Book(args, count) if rank == 0 else None
    if book:
        if args.device == "cuda":
            book.write(f"rates_{count}", rate_rows(machine, card, count))
    for name, how in chosen(args, count):
        row = predicted(name, how, machine, card)
        todo = shared(not book.known(row) and time.monotonic() < begin + args.seconds if book else None)
        if not todo:
            continue
        if not fits(row, args.device):
            row["status"] = "not run: predicted not to fit"
        else:
            if book:
                book.keep(row | {"status": BEGUN})
            row = row_of(name, how, row, args.device)
        if book:
            book.keep(row)
            print(show(row), flush=True)
    if not book:
        return 0
    keys = [key_of({"model": name, **asdict(how)}) for name, how in chosen(args, count)]
    left = [key for key in keys if key not in book.rows]
    bad = disagreeing(list(book.rows.values()))
    print("\n".join([f"{len(left)} settings are left for another run", *bad, str(book.path)]), flush=True)
    return int(bool(bad))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure memory and time of training steps.")
    parser.add_argument("--models", default=",".join(SHAPES), help="(default: %(default)s)")
    parser.add_argument("--contexts", default="1024,4096,16384,65536", help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=170, help="begin no row after so many (%(default)s)")
    parser.add_argument("--gpus", type=int, default=1, help="without torchrun; 1 or all (default: 1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--again", action="store_true", help="measure what the record has, too")
    parser.add_argument("--list", metavar="GPU", nargs="?", const="",
                        help="what would be measured, with predictions for a GPU of this name")  # fmt: skip
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/training_memory.json)")
    args = parser.parse_args(argv)
    if not set(args.models.split(",")) <= set(SHAPES):
        parser.error(f"--models: expected some of {', '.join(SHAPES)}, got {args.models}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    count = int(os.environ.get("WORLD_SIZE", args.gpus))
    if args.list is not None:
        card = machine_of(args.list)
        rows = [predicted(name, how, card, card) | {"status": ""} for name, how in chosen(args, count)]
        print("\n".join(map(show, rows)))
        return 0
    if args.device == "cuda":
        if torch.cuda.device_count() < count or torch.cuda.get_device_capability()[0] != 9:
            print(f"needs {count} GPUs of compute capability 9.x", file=sys.stderr)
            return 2
        if count > 1 and "RANK" not in os.environ and count != torch.cuda.device_count():
            print(f"--gpus: expected 1 or {torch.cuda.device_count()}, got {count}", file=sys.stderr)
            return 2
        if count > 1:
            return gpus.on_all_gpus(work, args)
    elif count > 1:
        return work(int(os.environ["RANK"]), count, args, "env://")
    return work(0, 1, args, "")


if __name__ == "__main__":
    sys.exit(main())
