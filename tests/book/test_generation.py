"""The table of generate(): from a record, and without one."""

from __future__ import annotations

import pytest

from attnlib.bench import records, tables
from attnlib.bench.shapes import Shape
from attnlib.book import generation, readme


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    return tmp_path


def rows(cache: str, ours: float, theirs: float) -> list[dict]:
    shape = Shape(16, 32, 1, 64, False, "bfloat16", 8, 513)
    found = []
    for impl, ms, control in (("attnlib", ours, False), ("sdpa", theirs, False), ("sdpa", theirs, True)):
        row = {"impl": impl + " (control)" * control, "call": "batch 16, 512 tokens", "cache": cache}
        row |= {**shape.to_dict(), "status": "ok", "ms": ms, "round_ms": [ms, ms * 1.001, ms * 0.999]}
        row |= {"tokens_per_s": 16e3 / ms, "prompt_ms": 10 * ms}
        found.append(row | ({"control_of": "sdpa"} if control else {}))
    return found


def write(folder, found: dict[str, list[dict]], gpu: str = "NVIDIA H200") -> None:
    header = {"gpu": {"name": gpu}, "date": "2026-11-23", "commit": "x", "method": {}}
    path = folder / records.gpu_slug(gpu) / "generate.json"
    records.write_report(path, {"notebook": "generate", "schema": 1, **header},
                         {name: {"rows": some} for name, some in found.items()})  # fmt: skip


def test_without_a_record(folder):
    assert generation.tables() == [] and generation.lines([]) == []
    assert readme.generate_table() == generation.WAITING


def test_lines(folder):
    other = Shape(1, 32, 1, 64, False, "bfloat16", 8, 513).to_dict()
    missing = [{"impl": "attnlib", "call": "batch 1, 512 tokens", "status": "out of memory", **other}]
    write(folder, {"compiled": rows("compiled", 2.0, 3.0) + missing, "dynamic": rows("dynamic", 8.0, 8.0)})
    found = generation.tables("nvidia-h200")
    assert [table.name for table in found] == ["dynamic", "compiled"]
    tie, faster, stopped = generation.lines(found)
    assert tie["attnlib"] == tie["sdpa"] == "2000" and tie["against"].endswith("tie")
    assert faster["attnlib"] == "8000" and faster["against"].startswith("1.500x")
    assert faster["against"].endswith("faster") and faster["prompt"] == "1.50x"
    told = {"cache": faster["cache"], "gpu": "H200"}
    assert stopped == {"call": "batch 1, 512 tokens", **told, "attnlib": "out of memory"}
    text = readme.generate_table()
    assert "NVIDIA H200, 2026-11-23" in text and "| batch 16, 512 tokens | it grows | 2000 | 2000 |" in text
    assert tables.markdown(generation.lines(found), generation.COLUMNS) in text


def test_a_cache_that_only_another_gpu_has_measured(folder):
    """Not in place of one that the reference GPU has; with the name of its own."""
    missing = [{**row, "status": "not run"} for row in rows("compiled", 2.0, 3.0)[:1]]
    write(folder, {"compiled": missing, "dynamic": rows("dynamic", 8.0, 8.0)})
    other = {"compiled": rows("compiled", 2.0, 3.0), "dynamic": rows("dynamic", 9.0, 9.0)}
    write(folder, other, "NVIDIA H100")
    dynamic, compiled = generation.lines(generation.tables())
    assert (dynamic["gpu"], compiled["gpu"]) == ("H200", "H100") and dynamic["attnlib"] == "2000"
    assert readme.generate_table().endswith("*NVIDIA H200, 2026-11-23; NVIDIA H100, 2026-11-23*")
