"""Scripts of tests/gpu on the ranks of a test: small, on the CPU, from begin to end."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

FOLDER = Path(__file__).resolve().parents[1] / "gpu"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, arguments: list[str], changes: dict[str, object] | None = None) -> int:
    """`work` of a script on this rank. changes: its constants."""
    return _work(script(name), arguments, changes or {})


def run_wrong_beyond(length: int, arguments: list[str], changes: dict[str, object]) -> int:
    """time_distributed's, whose own attention is wrong for sequences that are longer than this."""
    module = script("time_distributed")
    ours = module.MAKERS[module.OURS]

    def wrong(case, tensors):
        timed = ours(case, tensors)
        return timed._replace(forward=lambda: timed.forward() * (1.1 if case.length > length else 1))

    module.MAKERS = {**module.MAKERS, module.OURS: wrong}
    return _work(module, arguments, changes)


def _work(module: ModuleType, arguments: list[str], changes: dict[str, object]) -> int:
    for key, value in changes.items():
        assert hasattr(module, key), key
        setattr(module, key, value)
    return module.work(dist.get_rank(), dist.get_world_size(), module.arguments(arguments), "")
