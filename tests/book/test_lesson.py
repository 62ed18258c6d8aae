"""Lessons: kernels from cells, diffs, tables, verification that catches bugs, forgiving exercises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnlib.bench import ladder, names, records, sources, tables
from attnlib.bench.paths import ROOT
from attnlib.book import answers, chapters, lesson

KERNEL = """\
import torch
import triton
import triton.language as tl


@triton.jit
def copy_kernel(p_x, p_y, n, BLOCK: tl.constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    b_x = tl.load(p_x + o_x, mask=o_x < n)  # [BLOCK]
    tl.store(p_y + o_x, b_x, mask=o_x < n)


def attention(q, k, v, causal=True, sm_scale=None):
    scores = (q.float() @ k.float().mT) * (sm_scale or q.shape[-1] ** -0.5)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
    x = (scores.softmax(-1) @ v.float()).to(q.dtype).contiguous()
    y = torch.empty_like(x)
    copy_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y
"""


def notebook(path: Path, *cells: tuple[str, list[str]]) -> Path:
    """A notebook file with code cells of (source, tags)."""
    content = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {"tags": tags}, "source": source.splitlines(True)}
        for i, (source, tags) in enumerate(cells)
    ]
    path.write_text(json.dumps({"cells": content, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A folder with two steps in it, which lesson takes for the book's."""
    notebook(tmp_path / "03_online_softmax.ipynb", ("x = 1", []), (KERNEL, ["kernel"]))
    notebook(tmp_path / "04_exp2.ipynb", (KERNEL.replace("softmax(-1)", "softmax(dim=-1)"), ["kernel"]))
    for module in lesson, answers:
        monkeypatch.setattr(module, "notebooks_dir", lambda: tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in [name for name in sys.modules if name.startswith("attnlib_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.fixture
def shown(monkeypatch):
    """What a lesson displays, as a list of MIME bundles."""
    bundles = []
    monkeypatch.setattr(lesson, "_display", bundles.append)
    return bundles


# Kernels


def test_kernel_runs_from_its_cell(book):
    module = lesson.load_kernel("03_online_softmax")
    q, k, v = (torch.randn(1, 2, 33, 16, device=lesson.device()) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(module.attention(q, k, v), expected, atol=1e-5, rtol=1e-4)


def test_kernel_file_is_private_and_outside_of_the_repository(book):
    path = Path(lesson.load_kernel("03_online_softmax").__file__)
    assert path.read_text() == KERNEL
    assert path.is_relative_to(book / "cache")
    assert path.parent.parent.stat().st_mode & 0o077 == 0
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_a_damaged_kernel_file_is_written_again(book):
    """By a crash, or by somebody else's program."""
    path = Path(lesson.load_kernel("03_online_softmax").__file__)
    for name in [name for name in sys.modules if name.startswith("attnlib_kernel_03_online_softmax")]:
        del sys.modules[name]
    path.write_bytes(b"\xff\xfe\0")
    assert Path(lesson.load_kernel("03_online_softmax").__file__) == path
    assert path.read_text() == KERNEL


@pytest.mark.parametrize("text", [b"\xff", b"{", b"[" * 99_999, b"[]", b'{"cells": null}', b'{"cells": [1]}'])
def test_a_file_that_is_no_notebook(tmp_path, text):
    path = tmp_path / "01_naive.ipynb"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=f"^{path}: expected a notebook, got "):
        sources.kernel_source(path)


def test_same_source_is_the_same_module_and_an_edit_is_a_new_one(book):
    first = lesson.load_kernel("03_online_softmax")
    assert lesson.load_kernel("03_online_softmax") is first
    edited = KERNEL.replace("softmax(-1)", "softmax(dim=-1)")
    notebook(book / "03_online_softmax.ipynb", (edited, ["kernel"]))
    assert lesson.load_kernel("03_online_softmax") is not first


def test_a_cell_that_fails_is_not_kept(book):
    with pytest.raises(ZeroDivisionError):
        sources.load_source("broken", "1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        sources.load_source("broken", "1 / 0\n")


@pytest.mark.parametrize("kernels", [0, 2])
def test_needs_exactly_one_kernel_cell(book, kernels):
    notebook(book / "03_online_softmax.ipynb", *[(KERNEL, ["kernel"])] * kernels, ("x = 1", []))
    with pytest.raises(ValueError, match=f"03_online_softmax: expected one code cell.*found {kernels}"):
        lesson.kernel_source("03_online_softmax")


def test_missing_notebook_is_named(book):
    with pytest.raises(FileNotFoundError, match="05_two_pass_causal.ipynb"):
        lesson.load_kernel("05_two_pass_causal")


def test_diff_shows_only_what_changed(book, shown):
    lesson.show_diff("03_online_softmax", "04_exp2")
    plain = shown[0]["text/plain"]
    assert plain.startswith("03 Online softmax → 04 exp2: 1 line added, 1 removed")
    changed = [line for line in plain.splitlines()[1:] if line[0] in "+-"]
    assert [line[0] for line in changed] == ["-", "+"] and "dim=-1" in changed[1]
    assert len(plain.splitlines()) < 10
    assert "<span" in shown[0]["text/html"] and "&lt;" not in plain


# Tables and texts


def test_table_marks_aligns_and_escapes():
    rows = [{"a": "x|y", "n": 1.23456, "m": None}, {"a": "z", "n": 1234.5, "m": 2}]
    lines = tables.markdown(rows, {"a": "A", "n": "N", "m": "M"}, mark={"a": "z"}).splitlines()
    assert lines[0] == "| A | N | M |"
    assert lines[1] == "| :--- | ---: | ---: |"
    assert lines[2] == "| x\\|y | 1.23 | – |"
    assert lines[3] == "| **z** | **1234** | **2** |"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (True, "yes"), (7, "7"), (0.0, "0"), (2.0, "2"), (512.34, "512"), (0.012345, "0.0123"),
        (3.2e-5, "3.2e-05"), (float("nan"), "nan"), ("text", "text"),
    ],
)  # fmt: skip
def test_numbers_as_text(value, text):
    assert tables.number(value) == text


def test_unknown_column_is_an_error():
    with pytest.raises(KeyError, match="expected keys of the rows .a., got b"):
        tables.markdown([{"a": 1}], ["a", "b"])


def test_folded_data_moves_constants_to_the_title():
    rows = [
        {"impl": "a", "dtype": "float16", "ms": 1.0, "empty": None},
        {"impl": "<b>", "dtype": "float16", "ms": 2.0},
    ]
    page = tables.details(rows)
    assert page.startswith("<details><summary>") and page.endswith("</details>")
    assert "All rows: dtype float16." in page and "&lt;b&gt;" in page and "empty" not in page


def test_say_shows_markdown(shown):
    lesson.say("**3** TFLOP/s")
    assert shown == [{"text/markdown": "**3** TFLOP/s", "text/plain": "**3** TFLOP/s"}]


# The ladder


def attention_row(impl: str, head_dim: int, tflops: float | None, **more) -> dict:
    from attnlib.bench.shapes import TASK

    row = {"impl": impl, **TASK[f"d{head_dim}"].to_dict(), "status": "ok", "max_error": 1e-3}
    row |= (
        {"ms": None, "status": "not installed"} if tflops is None else {"ms": 100 / tflops, "tflops": tflops}
    )
    return row | more


def test_ladder_orders_compares_and_says_what_is_missing():
    rows = [
        attention_row(i, d, t)
        for i, t in (("cudnn", 500.0), ("02_tiling", 50.0), ("fa3", None))
        for d in (64, 128)
    ]
    rows += [attention_row("attnlib", d, 400.0) for d in (64, 128)]
    table, columns = ladder.ladder_rows(rows, label=chapters.label)
    assert [row["impl"] for row in table] == ["02_tiling", "attnlib", "cudnn", "fa3"]
    assert columns["of_rival"] == "% of cuDNN"  # FA3 is not there
    assert table[1]["of_rival"] == "80 / 80" and table[3]["tflops_64"] == "not installed"
    assert table[0]["of_peak"] == "5.1 / 5.1" and table[3]["ms"] == "–"
    assert "tflops_256" not in columns


def test_ladder_prefers_fa3_and_the_shape_of_the_task():
    rows = [attention_row("fa3", 64, 437.0), attention_row("attnlib", 64, 400.0)]
    rows += [attention_row("attnlib", 64, 111.0, seqlen=16384, batch=1)]  # longer, but not the task's
    table, columns = ladder.ladder_rows(rows, label=chapters.label)
    assert columns["of_rival"] == "% of FA3" and table[0]["tflops_64"] == "400"


def test_ladder_of_no_rows_is_an_error():
    with pytest.raises(ValueError, match="ladder_rows: rows"):
        ladder.ladder_rows([])


def test_ladder_bolds_the_chapter(shown, monkeypatch):
    monkeypatch.setattr(lesson, "_current", "02_tiling")
    lesson.ladder([attention_row("02_tiling", 64, 50.0), attention_row("cudnn", 64, 400.0)])
    assert "**02 Tiling**" in shown[0]["text/markdown"] and "**cuDNN**" not in shown[0]["text/markdown"]


def test_harmonic_mean():
    assert ladder.harmonic_mean([100.0, 300.0]) == pytest.approx(150.0)
    with pytest.raises(ValueError, match="at least one"):
        ladder.harmonic_mean([])


def test_steps_have_names_and_numbers():
    numbers = [names.number(step) for step, _ in chapters.STEPS]
    assert numbers == sorted(set(numbers)) and names.number("attnlib") > numbers[-1]
    assert chapters.label("03_online_softmax") == "03 Online softmax" and chapters.label("fa3") == "FA3"
    assert names.number("cudnn") is None and not names.is_ours("math") and names.is_ours("attnlib")


def test_what_the_package_made_of_a_step_stands_beside_it_under_a_name_of_its_own():
    impls = ["fa3", names.PORTABLE, "10_tma_wgmma", "08_production", "06_autotuning"]
    assert ladder.order(impls) == ["06_autotuning", "08_production", names.PORTABLE, "10_tma_wgmma", "fa3"]
    assert names.is_ours(names.PORTABLE) and chapters.label(names.PORTABLE) != chapters.label("08_production")


# Verification


def test_verify_passes_a_right_kernel(book, shown):
    lesson.verify(
        lesson.load_kernel("03_online_softmax").attention, lengths=(1, 17), kinds=("normal", "large")
    )
    text = shown[0]["text/markdown"]
    assert "✘" not in text and "1, 17" in text and "large" in text


def plain(q, k, v, causal, sm_scale, fault=""):
    """Attention in fp32 with a fault."""
    scale = sm_scale * (1.02 if fault == "wrong scale" else 1)
    scores = (q.float() @ k.float().mT) * scale
    if causal:
        shift = 2 if fault == "off-by-one mask" else 1
        scores = scores.masked_fill(torch.ones_like(scores).triu(shift) > 0, float("-inf"))
    weights = scores.exp() if fault == "no running max" else (scores - scores.amax(-1, keepdim=True)).exp()
    weights = (weights / weights.sum(-1, keepdim=True)).nan_to_num(0 if fault == "" else torch.nan)
    out = (weights @ v.float()).to(q.dtype)
    if fault == "skipped tail":
        out[:, :, q.shape[2] // 16 * 16 :] = 0
    if fault == "NaN":
        out[..., 0] = torch.nan
    return out


@pytest.mark.parametrize("fault", ["wrong scale", "off-by-one mask", "no running max", "skipped tail", "NaN"])
def test_verify_catches(fault, shown):
    with pytest.raises(AssertionError, match="attention is wrong in"):
        lesson.verify(lambda *a: plain(*a, fault=fault), lengths=(1, 17, 129))
    assert "✘" in shown[0]["text/markdown"]


def test_verify_accepts_the_same_code_without_a_fault(shown):
    lesson.verify(plain, lengths=(1, 17, 129))


# Beginning a notebook


def test_begin_says_what_is_replayed(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    monkeypatch.setenv("ATTNLIB_REPLAY", "1")
    monkeypatch.setattr(lesson, "_current", None)
    with pytest.raises(RuntimeError, match="lesson.begin"):
        lesson.current()
    lesson.begin("03_online_softmax")
    out = capsys.readouterr().out
    assert lesson.current() == "03_online_softmax" and out.count("\n") == 1
    (tmp_path / "nvidia-h200").mkdir()
    (tmp_path / "nvidia-h200" / "03_online_softmax.json").write_text("{}")
    with pytest.raises(records.RecordError, match="03_online_softmax.json: expected schema 1, got None"):
        lesson.begin("03_online_softmax")
    assert "replayed from records of nvidia-h200 that tables and charts name, where" in out
    assert torch.__version__.split("+")[0] in out


def test_begin_refuses_an_unknown_notebook():
    with pytest.raises(ValueError, match="begin: notebook: expected one of 00_how_we_measure"):
        lesson.begin("99_nothing")


def test_measurements_go_to_the_notebook_that_began(tmp_path, monkeypatch):
    from attnlib.bench import records

    row = {"name": "copy", "gbs": 4296.0}
    gpu = {"name": "NVIDIA H200"}
    record = {"schema": records.SCHEMA, "notebook": "03_online_softmax", "gpu": gpu, "date": "2026-11-21"}
    folder = tmp_path / records.REFERENCE_GPU
    folder.mkdir()
    (folder / "03_online_softmax.json").write_text(
        json.dumps({**record, "tables": {"copy": {"rows": [row]}}})
    )
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    monkeypatch.setenv("ATTNLIB_REPLAY", "1")
    monkeypatch.setattr(lesson, "_current", "03_online_softmax")

    def never():
        raise AssertionError("a replay measures nothing")

    table = lesson.table("copy", never)
    assert table.rows == [row] and table.label == "replayed from NVIDIA H200, 2026-11-21"


def test_import_after_triton_is_a_clear_error_without_a_gpu():
    hide = "import torch; torch.cuda.is_available = lambda: False; "
    code = hide + "import triton; from attnlib.book import lesson"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(ROOT)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env | {"PYTHONPATH": root}
    )
    assert (
        result.returncode and "import attnlib.book.lesson first, or set TRITON_INTERPRET=1" in result.stderr
    )


# Exercises


def test_check_reports_and_never_raises(capsys):
    def check_double(answer):
        if answer(3) != 6:
            raise AssertionError(f"double(3): expected 6, got {answer(3)}")

    def stub(x):
        raise NotImplementedError

    for answer in (stub, lambda x: x, lambda x: x / 0, None, lambda x: 2 * x):
        lesson.check(check_double, answer)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "✘ not yet: still to be written"
    assert lines[1] == "✘ not yet: double(3): expected 6, got 3"
    assert "ZeroDivisionError" in lines[2] and "TypeError" in lines[3]
    assert lines[4] == "✔ right"


def test_exercises_are_the_checks(book):
    (book / "checks").mkdir()
    (book / "checks" / "03_online_softmax.py").write_text(
        "def check_merge(answer):\n    assert answer() == 1\n"
    )
    assert lesson.exercises("03_online_softmax") == ["merge"]
    with pytest.raises(FileNotFoundError, match=re.escape("03_online_softmax.py in notebooks/solutions")):
        lesson.solutions("03_online_softmax")
