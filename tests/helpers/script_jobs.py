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
    module = script(name)
    for key, value in (changes or {}).items():
        assert hasattr(module, key), key
        setattr(module, key, value)
    return module.work(dist.get_rank(), dist.get_world_size(), module.arguments(arguments), "")
