"""Bugs planted in the source of the portable forward kernel, and a fixture that makes `attention` run it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import ModuleType

import pytest
from families import forget_launches

from attnlib.kernels.portable import forward_kernel

WRONG_VALUES = r"max error .* \(budget .*\), RMS error"
NOT_FINITE = r"values are not finite"
WRONG_LSE = r"LSE: max error"


@dataclass(frozen=True)
class Mutation:
    """A bug: what it does to the source, the case that notices, and what the verdict is.

    The verdict is a regular expression: a mutant that fails for another reason, such as a broken edit that no
    longer runs, proves nothing about the checks.
    """

    bug: str
    right: str
    wrong: str
    caught_by: str
    verdict: str


@pytest.fixture
def use_source(tmp_path, monkeypatch):
    """A function that makes attention() launch the kernel of the given source text."""

    def use(source: str) -> None:
        module = load(source, tmp_path)
        monkeypatch.setattr(forward_kernel, "attention_forward", module.attention_forward)
        forget_launches()  # of what was compiled from another source

    yield use
    forget_launches()


def load(source: str, folder) -> ModuleType:
    """Triton reads the text of a kernel from its file, so the source has to be in one."""
    path = folder / "mutated_forward.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mutated_forward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
