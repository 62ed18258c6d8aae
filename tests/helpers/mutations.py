"""Bugs planted in the source of a kernel."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Mutation:
    """A bug: an edit of a source, the name of the case that notices, and what the verdict is.

    `verdict` is a regular expression: a mutant that fails for another reason, such as an edit that no longer
    runs, proves nothing about the checks. `more`: further edits that belong to it. `module`: whose source it
    is, where there are several.
    """

    bug: str
    right: str
    wrong: str
    caught_by: str
    verdict: str
    more: tuple[tuple[str, str], ...] = ()
    module: ModuleType | None = None

    def __str__(self) -> str:
        name = "" if self.module is None else self.module.__name__.rpartition(".")[2] + ": "
        return name + self.bug

    @property
    def kind(self) -> tuple[ModuleType | None, str]:
        """That of the bugs of one file that one call notices."""
        return self.module, self.caught_by

    def of(self, source: str) -> str:
        """The source with the bug. AssertionError unless what is edited is in it exactly once."""
        for right, wrong in ((self.right, self.wrong), *self.more):
            assert source.count(right) == 1, f"the kernel has changed; expected once: {right}"
            source = source.replace(right, wrong)
        return source


def check_places(mutations: Iterable[Mutation], module: ModuleType | None = None) -> None:
    """AssertionError unless each can be planted: also those that are tested where every case is. module: of
    those that name none."""
    for mutation in mutations:
        mutation.of(inspect.getsource(mutation.module or module))


def load(source: str, folder: Path) -> ModuleType:
    """Import a source. Triton reads the text of a kernel from its file, so it has to be in one."""
    path = folder / "mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mutant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
