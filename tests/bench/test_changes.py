"""Kernels put together from changes, and texts that are compared."""

import json

import pytest

from attnlib.bench import sources
from attnlib.bench.changes import changed, folded, parts, plain

KERNEL = '''import math
import os

# How many.
MANY = 3
a, b = 1, 2


@jit
def inner(x):  # old
    return x + MANY


def unused():
    return os.name


def attention(x):
    return math.floor(inner(x)) + a + b
'''


def test_a_definition_takes_the_place_of_its_namesake() -> None:
    helper = "import numpy as np\n\ndef helper(x):\n    return np.abs(x)\n\n"
    change = helper + "def inner(x):\n    return helper(x)"
    text = changed(KERNEL, change)
    names = [name for part in parts(text) for name in part.names]
    assert names == ["math", "np", "a", "b", "helper", "inner", "attention"]  # nothing reaches the others
    space: dict = {}
    exec(compile(text, "kernel", "exec"), space)
    assert space["attention"](-4.0) == 7


def test_the_text_of_what_stays_is_kept() -> None:
    text = changed(KERNEL, "a, b = 5, 6")
    assert "# How many.\nMANY = 3\na, b = 5, 6\n\n\n@jit\ndef inner(x):  # old" in text
    assert "unused" not in text and "import os" not in text
    assert changed(text, "a, b = 5, 6") == text


def test_a_change_that_replaces_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a definition that the kernel has too, got other"):
        changed(KERNEL, "def other():\n    pass")


def test_only_definitions_and_imports() -> None:
    with pytest.raises(ValueError, match=r"imports at the top level, got 'print\(1\)'"):
        changed(KERNEL, "print(1)")


def test_folding_drops_branches_and_calls() -> None:
    text = '''
def step(x):
    """What it does."""
    on: gl.constexpr = plan.on
    take_turn(x)
    if plan.fp8:
        x = 1
    elif plan.late or plan.fp8:
        x = 2
    else:
        x = 3
    if not plan.fp8 and x:
        x = f(x, 4 if on else 5)
    return x
'''
    found = folded(text, "step", {"plan.fp8": False, "on": True}, ("take_turn",))
    assert found == plain(
        "def step(x):\n    if plan.late:\n        x = 2\n    else:\n        x = 3\n"
        "    if x:\n        x = f(x, 4 if True else 5)\n    return x"
    )
    with pytest.raises(ValueError, match="expected one that the text has, got 'other'"):
        folded(text, "other", {}, ())


def notebook(folder, name: str, *cells: tuple[str, str]) -> None:
    content = [
        {"cell_type": "code", "metadata": {"tags": [tag]}, "source": source.splitlines(True)}
        for tag, source in cells
    ]
    (folder / f"{name}.ipynb").write_text(json.dumps({"cells": content}))


def test_a_notebook_goes_on_where_another_one_ended(tmp_path) -> None:
    notebook(tmp_path, "01_one", ("kernel", KERNEL), ("change", "# change first\na, b = 5, 6"))
    notebook(tmp_path, "02_two", ("change", "# change second, of 01_one\nMANY = 7"))
    texts = sources.kernel_sources(tmp_path / "02_two.ipynb")
    assert list(texts) == ["01_one", "second"]
    assert "a, b = 5, 6" in texts["second"] and "MANY = 7" in texts["second"]
    assert sources.kernel_source(tmp_path / "01_one.ipynb") == texts["01_one"]


def test_what_a_notebook_of_changes_must_have(tmp_path) -> None:
    notebook(tmp_path, "01_none", ("change", "# change first\na, b = 5, 6"))
    with pytest.raises(ValueError, match="01_none: expected one code cell tagged 'kernel', found 0"):
        sources.kernel_sources(tmp_path / "01_none.ipynb")
    notebook(tmp_path, "02_bare", ("kernel", KERNEL), ("change", "a, b = 5, 6"))
    with pytest.raises(ValueError, match="02_bare: expected '# change NAME' as the first line"):
        sources.kernel_sources(tmp_path / "02_bare.ipynb")
