"""`python -m attnlib.book run`: caches are warmed first, side by side; a run stops in time and names what is
left."""

import json
import time
from pathlib import Path

import pytest

from attnlib.bench import records, setting
from attnlib.book import build, execution, warm

SEEN = """\
import json, os
from pathlib import Path
names = ("ATTNLIB_WARM", "ATTNLIB_CACHE", "ATTNLIB_REPLAY")
with Path("seen.jsonl").open("a") as file:
    file.write(json.dumps([NAME, *(os.environ.get(name) for name in names)]) + "\\n")
"""


def notebook(path: Path, *cells: str) -> Path:
    content = [
        {"cell_type": "code", "id": f"c-{i}", "metadata": {}, "source": source, "outputs": [],
         "execution_count": None}
        for i, source in enumerate(cells)
    ]  # fmt: skip
    path.write_text(json.dumps({"cells": content, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


@pytest.fixture
def book(tmp_path):
    """Two notebooks that note what they see; the first fails in the middle."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    notebook(folder / "01_naive.ipynb", "NAME = 'one'", "1 / 0", SEEN)
    notebook(folder / "02_tiling.ipynb", "NAME = 'two'", SEEN)
    return folder


def seen(folder: Path) -> dict[str, list]:
    lines = [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]
    return {name: values for name, *values in lines}


def test_all_cells_are_executed_and_nothing_is_kept(book, monkeypatch):
    monkeypatch.delenv("ATTNLIB_REPLAY", raising=False)
    monkeypatch.setattr(warm.os, "cpu_count", lambda: 4)
    before = {path: path.read_bytes() for path in book.iterdir()}
    said = []
    results = warm.warm(build.chapters(book), execution.Limits(), said.append)
    assert {result.notebook: result.ok for result in results} == {"01_naive": False, "02_tiling": True}
    found = seen(book)
    assert sorted(found) == ["one", "two"], "a cell that fails stops no other"
    assert all(values[0] == "2" and values[2] is None for values in found.values())
    assert not Path(found["one"][1]).exists(), "a choice made by timing is not kept"
    assert {path: path.read_bytes() for path in before} == before
    assert "2 notebooks, 2 at a time" in said[0] and said[1].startswith("1 of 2 notebooks warmed, ")
    [warning] = said[2:]
    assert warning.startswith("warning, while warming: 01_naive, cell c-1:")
    assert "ZeroDivisionError: division by zero" in warning


@pytest.mark.parametrize(
    ("cores", "notebooks", "expected"), [(16, 14, 8), (16, 3, 3), (1, 14, 1), (None, 2, 1)]
)
def test_half_as_many_processes_as_cores(cores, notebooks, expected, monkeypatch):
    monkeypatch.setattr(warm.os, "cpu_count", lambda: cores)
    assert warm.processes(notebooks) == expected


def test_warming_has_an_end(book, monkeypatch):
    monkeypatch.setattr(warm, "SECONDS", -1)
    said = []
    assert warm.warm(build.chapters(book), execution.Limits(), said.append) == []
    assert said[1].startswith("0 of 2 notebooks warmed") and not (book / "seen.jsonl").exists()


def test_a_run_warms_unless_it_is_told_not_to(monkeypatch, tmp_path):
    notebook(tmp_path / "01_naive.ipynb", "NAME = 'one'", SEEN)  # not asked for: neither warmed nor run
    notebook(tmp_path / "02_tiling.ipynb", "NAME = 'two'", SEEN)
    warmed = []
    monkeypatch.setattr(records, "can_measure", lambda: True)
    monkeypatch.setattr(warm, "warm", lambda paths, limits: warmed.append([path.stem for path in paths]))
    monkeypatch.setenv(setting.WARM, "3")
    call = ["run", "02", "--source", str(tmp_path), "--out", str(tmp_path / "out")]
    assert build.main([*call, "--cold"]) == 0 and not warmed
    assert build.main(call) == 0
    assert warmed == [["02_tiling"]] and "one" not in seen(tmp_path)
    assert seen(tmp_path)["two"][0] is None, "what is measured never takes the mode from the caller"


def test_a_run_stops_in_time_and_names_what_is_left(tmp_path, capsys):
    notebook(tmp_path / "01_naive.ipynb", "print('done')")
    notebook(tmp_path / "02_tiling.ipynb", "import time\ntime.sleep(300)")
    notebook(tmp_path / "03_online_softmax.ipynb", "print('never')")
    out, start = tmp_path / "out", time.monotonic()
    # Only the second notebook uses up the time: the first is done before it begins.
    assert build.run(["01"], tmp_path, out)
    assert not build.run(["02", "03"], tmp_path, out, minutes=0.05)
    assert time.monotonic() - start < 120
    said = capsys.readouterr().out
    assert "left: 02_tiling 03_online_softmax" in said
    assert "TimeoutError: the time for all notebooks was over" in said
    assert "03_online_softmax: not begun, the time is over" in said
    assert (out / "01_naive.ipynb").exists() and not (out / "03_online_softmax.ipynb").exists()


def test_minutes_have_to_be_more_than_none(tmp_path, capsys):
    notebook(tmp_path / "01_naive.ipynb", "print('done')")
    assert build.main(["run", "--source", str(tmp_path), "--out", str(tmp_path), "--minutes", "0"]) == 2
    assert "minutes: expected more than 0, got 0.0" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["--timeout -1", "--timeout nan", "--jobs 0", "--jobs -1"])
def test_limits_under_which_nothing_runs_are_refused(limit, tmp_path, capsys):
    notebook(tmp_path / "01_naive.ipynb", "print('done')")
    folders = ["--source", str(tmp_path), "--out", str(tmp_path / "out")]
    assert build.main(["replay", *folders, *limit.split()]) == 2
    name = limit.split()[0].removeprefix("--")
    assert f"attnlib.book: {name}: expected more than 0, got " in capsys.readouterr().err
    assert build.main(["replay", *folders, "--timeout", "inf"]) == 2
    assert "attnlib.book: timeout: expected a finite number, got inf" in capsys.readouterr().err


def test_a_folder_that_can_not_be_made_is_named(tmp_path, capsys):
    path = notebook(tmp_path / "01_naive.ipynb", "print('done')")
    assert build.main(["figures", "--source", str(tmp_path), "--out", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
