"""Which files of this project a Python source imports, read from its text: nothing is run."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from attnlib.bench.paths import ROOT

Node = TypeVar("Node")


@functools.cache
def imported_names(source: str, package: tuple[str, ...] = ()) -> frozenset[str]:
    """Dotted names that a source imports, at its top or in a function.

    `from a import b` gives "a.b", whether b is a module or what a module holds. package: the folders of the
    source, for relative imports; empty where it is in no package.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = [*above, *([node.module] if node.module else [])]
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return frozenset(names)


def file_of(name: str, root: Path = ROOT) -> Path | None:
    """The file below `root` that a dotted name of `imported_names` comes from; None if it is not from there.

    For "a.b" that is a/b.py, a/b/__init__.py, or where b is what module a holds, the file of a.
    """
    parts = name.split(".")
    for last in range(len(parts), 0, -1):
        path = root.joinpath(*parts[:last])
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if found.is_file():
                return found
    return None


def imported_files(file: Path, text: str | None = None, root: Path = ROOT) -> set[Path]:
    """Files below `root` that a file imports itself; `text`: its Python source where it is not all of the
    file. Packages that Python loads on the way to a module are not among them unless something is imported
    from their `__init__.py`."""
    package = file.relative_to(root).parent.parts if file.is_relative_to(root) else ()
    names = imported_names(file.read_text(encoding="utf-8") if text is None else text, package)
    return {found for name in names if (found := file_of(name, root)) is not None}


def reach(start: Iterable[Node], direct: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """All that `direct` leads to from `start`, in any number of steps. What is in `start` is among it only
    where the way leads back."""
    seen: set[Node] = set()
    todo = list(start)
    while todo:
        new = set(direct(todo.pop())) - seen
        seen |= new
        todo += new
    return seen
