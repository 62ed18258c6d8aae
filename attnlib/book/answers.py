"""The checks and the solutions of a notebook's exercises, as modules.

`lesson` has these functions, too; who compiles kernels without a GPU takes them from here, since `lesson`
switches Triton's interpreter on."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from attnlib.bench.sources import notebooks_dir


def _load_file(path: Path, name: str) -> ModuleType:
    if not path.exists():
        raise FileNotFoundError(
            f"{name}: expected the file {path.name} in notebooks/{path.parent.name}, found none"
        )
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton looks up the globals of a kernel through its module
    spec.loader.exec_module(module)
    return module


def checks(notebook: str) -> ModuleType:
    """The module of checks of a notebook's exercises: functions check_x(answer) that raise AssertionError
    with a hint."""
    return _load_file(notebooks_dir() / "checks" / f"{notebook}.py", f"attnlib_checks_{notebook}")


def solutions(notebook: str) -> ModuleType:
    """The module of solutions of a notebook's exercises: x solves what check_x checks."""
    return _load_file(notebooks_dir() / "solutions" / f"{notebook}.py", f"attnlib_solutions_{notebook}")


def exercises(notebook: str) -> list[str]:
    """Names x of the exercises of a notebook, one for each function check_x in its checks."""
    return [name.removeprefix("check_") for name in vars(checks(notebook)) if name.startswith("check_")]
