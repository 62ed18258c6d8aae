"""Writing in one step, and reading imports from a text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnlib.bench import imports
from attnlib.bench.files import write_atomically


def test_a_file_is_written_with_its_folder_and_can_be_read_by_others(tmp_path):
    path = tmp_path / "new" / "folder" / "text"
    write_atomically(path, "µ\n")
    assert path.read_bytes() == "µ\n".encode() and path.stat().st_mode & 0o777 == 0o644
    write_atomically(path, "second")
    assert path.read_text() == "second" and os.listdir(path.parent) == ["text"]


@pytest.mark.parametrize("step", ["chmod", "replace"])
def test_a_crash_keeps_the_old_text_and_leaves_nothing(tmp_path, monkeypatch, step):
    path = tmp_path / "text"
    write_atomically(path, "old")

    def crash(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, step, crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["text"]


def test_names_of_every_form_of_import():
    source = """
import a.b, c as d
from e import f, g as h
def later():
    from ..near import i
    from . import j
"""
    names = imports.imported_names(source, ("pack", "room"))
    assert names == {"a.b", "c", "e.f", "e.g", "pack.near.i", "pack.room.j"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "pack/__init__.py": "from pack.top import thing",
        "pack/top.py": "import torch\nfrom pack.room import low",
        "pack/room/__init__.py": "value = 1",
        "pack/room/low.py": "from . import value\nimport pack.room.lower",
        "pack/room/lower.py": "from pack.top import thing",
        "pack/alone.py": "import os.path",
    }
    for name, text in files.items():
        write_atomically(tmp_path / name, text)
    return tmp_path


def test_an_import_leads_to_the_file_that_holds_the_name(tree):
    def direct(name: str) -> set[str]:
        found = imports.imported_files(tree / name, root=tree)
        return {str(path.relative_to(tree)) for path in found}

    assert direct("pack/__init__.py") == {"pack/top.py"}
    assert direct("pack/top.py") == {"pack/room/low.py"}
    assert direct("pack/room/low.py") == {"pack/room/__init__.py", "pack/room/lower.py"}
    assert direct("pack/alone.py") == set()


def test_reach_follows_every_step_and_finds_a_circle(tree):
    def reach(name: str) -> set[str]:
        found = imports.reach([tree / name], lambda path: imports.imported_files(path, root=tree))
        return {str(path.relative_to(tree)) for path in found}

    circle = {"pack/top.py", "pack/room/low.py", "pack/room/lower.py"}
    assert reach("pack/__init__.py") == reach("pack/top.py") == circle | {"pack/room/__init__.py"}
    assert reach("pack/alone.py") == set()
