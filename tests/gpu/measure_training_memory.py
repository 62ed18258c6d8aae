"""Measure peak memory and step time of small Llama-shaped models on this GPU, beside the formulas.

    python tests/gpu/measure_training_memory.py           some 80 s; figures/data/<gpu>/training_memory.json
    python tests/gpu/measure_training_memory.py --shapes 0.1B --contexts 1024     less, no record

One table, `steps`: models of 0.1 and 1 billion parameters, bfloat16 with Adam on float32 copies, one sequence
of synthetic tokens; attention by PyTorch's math path, its fused backends and attnlib; with and without
checkpointing of layers; all parameters or LoRA. `peak_bytes` is what PyTorch allocated at most in a step
(`reserved_bytes`: what its allocator took), `ms` the median of three steps after one that warms up,
`predicted_bytes` and `predicted_ms` what `attnlib.book.training` says, whose rates were set before. A
setting that does not fit is a row, too. Losses of the three kinds of attention are compared. Status 0 when
they agree, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention  # noqa: E402
from attnlib.bench import records  # noqa: E402
from attnlib.bench.peers import brief  # noqa: E402
from attnlib.book.llama import Llama, MasterAdamW  # noqa: E402
from attnlib.book.training import SHAPES, Machine, Training, memory, step_ms  # noqa: E402

CONTEXTS = 1024, 4096, 16384
STEPS, RANK = 3, 16
LOSS_TOLERANCE = 2e-3
"""Relative difference of the losses of the first step: bfloat16, the same initial values."""


def math_path(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


ATTEND = {"math": math_path, "sdpa": fused, "attnlib": lambda q, k, v: attention(q, k, v, causal=True)}


def settings(context: int) -> Iterator[Training]:
    for kind in ATTEND:
        for checkpointing in ("none", "layer"):
            for lora in (None, RANK) if kind == "attnlib" else (None,):
                yield Training(context, 1, kind, checkpointing, lora)


def measured(name: str, how: Training) -> dict[str, Any]:
    """One step that warms up and three that count, and the peak of these."""
    shape = SHAPES[name]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(shape, ATTEND[how.attention], how.checkpointing == "layer", how.loss_rows)
    model.to(torch.bfloat16)
    if how.lora is not None:
        model.adapt(how.lora)
    adam = MasterAdamW(list(model.parameters()))
    generator = torch.Generator("cuda").manual_seed(1)
    tokens = torch.randint(0, shape.vocab, (how.batch, how.context), generator=generator, device="cuda")
    taken, losses = [], []
    for i in range(1 + STEPS):
        if i == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = model(tokens)
        loss.backward()
        adam.step()
        losses.append(loss.item())  # waits for the loss alone
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - begin) * 1e3)
    return {
        "status": "ok", "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "reserved_bytes": torch.cuda.max_memory_reserved(), "ms": statistics.median(taken[1:]),
        "ms_low": min(taken[1:]), "ms_high": max(taken[1:]), "first_loss": losses[0], "last_loss": losses[-1],
    }  # fmt: skip


def row_of(name: str, how: Training, until: float) -> dict[str, Any]:
    shape = SHAPES[name]
    row = {
        "model": name, "parameters": shape.parameters, "context": how.context, "batch": how.batch,
        "attention": how.attention, "checkpointing": how.checkpointing, "lora": how.lora, "gpus": 1,
        "predicted_bytes": memory(shape, how).peak, "predicted_ms": step_ms(shape, how, Machine()),
    }  # fmt: skip
    room = torch.cuda.get_device_properties(0).total_memory
    if row["predicted_bytes"] > 4 * room:
        return row | {"status": "not run: predicted to need more than four times the memory"}
    if time.monotonic() > until:
        return row | {"status": "not run: no time was left"}
    try:
        row |= measured(name, how)
    except torch.OutOfMemoryError:
        row["status"] = "out of memory"
    except RuntimeError as error:
        row |= {"status": "failed", "reason": brief(error)}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return row


def show(row: dict[str, Any]) -> str:
    lora = "all" if row["lora"] is None else f"LoRA {row['lora']}"
    head = f"{row['model']:5} {row['context']:6} {row['attention']:8} {row['checkpointing']:6} {lora:8}"
    expected = f"predicted {row['predicted_bytes'] / 1e9:7.2f} GB {row['predicted_ms']:8.1f} ms"
    if "ms" not in row:
        return f"{head} {row['status']:40} {expected} {row.get('reason', '')}"
    of = row["peak_bytes"] / row["predicted_bytes"], row["ms"] / row["predicted_ms"]
    return (f"{head} {row['peak_bytes'] / 1e9:7.2f} GB {row['ms']:8.1f} ms  {expected}  "
            f"{of[0]:.2f} and {of[1]:.2f} of that, loss {row['first_loss']:.4f}")  # fmt: skip


def agreeing(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether all ways to compute the same first step have the same loss. NaN does not agree."""
    good = True
    for name in {(row["model"], row["context"]) for row in rows}:
        losses = [row["first_loss"] for row in rows if (row["model"], row["context"]) == name and "ms" in row]
        good &= all(abs(loss / losses[0] - 1) <= LOSS_TOLERANCE for loss in losses)
    return good and all(row["status"] != "failed" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure memory and time of training steps.")
    parser.add_argument("--shapes", default="0.1B,1B", help="(default: %(default)s)")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=85, help="begin no row after so many (%(default)s)")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/training_memory.json)")
    args = parser.parse_args(argv)
    names, contexts = args.shapes.split(","), [int(length) for length in args.contexts.split(",")]
    if not set(names) <= set(SHAPES):
        parser.error(f"--shapes: expected some of {', '.join(SHAPES)}, got {args.shapes}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("needs a GPU of compute capability 9.x", file=sys.stderr)
        return 2
    until, rows = time.monotonic() + args.seconds, []
    for name in names:
        for context in contexts:
            for how in settings(context):
                rows.append(row_of(name, how, until))
                print(show(rows[-1]), flush=True)
    good = agreeing(rows)
    if args.out or (names == ["0.1B", "1B"] and contexts == list(CONTEXTS)):
        header = records.provenance({"timed": "wall time of a step, median of three", "rates": "Machine()"})
        path = records.report_path("training_memory", header, args.out)
        records.add_table(path, header, "steps", rows)
        print(path)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
