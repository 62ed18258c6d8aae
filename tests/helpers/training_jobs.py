"""What ranks do in tests of chapter 41's trainer: jobs for `ranks.Ranks`, and what one process does."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from attnlib.book.adam import own
from attnlib.book.trainer import Trainer
from attnlib.book.training import LlamaShape, Training

SHAPE = LlamaShape(2, 24, 4, 2, 8, 40, 50, True)
HOW = Training(16, 2, "sdpa", "layer", loss_rows=9)
SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "measure_training_memory.py"


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(0, SHAPE.vocab, (2, 16), generator=torch.Generator().manual_seed(rank))


def alone(how: Training, steps: int = 2) -> dict[str, torch.Tensor]:
    """All parameters after some steps on both ranks' tokens, in one process."""
    trainer = Trainer(SHAPE, replace(how, batch=4), dtype=torch.float32)
    for _ in range(steps):
        trainer.step(torch.cat([tokens(0), tokens(1)]))
    return {name: p.detach() for name, p in trainer.model.named_parameters()}


def farthest(cases: list[Training], expected: list[dict[str, torch.Tensor]]) -> list[float]:
    """The largest difference of a parameter from one process, for each way to spread a model, relative to how
    far the steps moved it."""
    found = []
    for how, right in zip(cases, expected, strict=True):
        trainer = Trainer(SHAPE, how, dtype=torch.float32)
        begun = {name: whole(p) for name, p in trainer.model.named_parameters()}
        for _ in range(2):
            trainer.step(tokens(dist.get_rank()))
        found.append(max(
            ((whole(p) - right[name]).abs().max() / (right[name] - begun[name]).abs().max().clamp(min=1e-9))
            .item() for name, p in trainer.model.named_parameters() if p.requires_grad
        ))  # fmt: skip
    return found


def whole(p: torch.Tensor) -> torch.Tensor:
    return (p.full_tensor() if p is not own(p) else p).detach().clone()


def measuring_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_training_memory", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(out: Path) -> int:
    """The measuring script, on tiny models."""
    script = measuring_script()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    args = script.arguments(["--device", "cpu", "--out", str(out), "--gpus", str(ranks)])
    return script.work(dist.get_rank() if ranks > 1 else 0, ranks, args, "")
