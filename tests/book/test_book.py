"""attnlib.book: each hygiene rule on a planted bad notebook, execution that names what failed, figures,
README."""

import base64
import copy
import json
import re
from pathlib import Path

import pytest
import torch

from attnlib.bench import records
from attnlib.book import build, execution, hygiene, plotting
from attnlib.book import readme as tables_of_readme

HOME, TEMP = "/" + "home/me", "/" + "tmp"  # in two parts: no path of a machine in this file either

BOX = """\
| | |
|---|---|
| **Prerequisites** | chapter 02 |
| **What changes** | one pass |
| **Needs** | nothing |
| **Runs for** | a second |"""

KERNEL = """\
import triton
import triton.language as tl


@triton.jit
def kernel(p_x, n, BLOCK: tl.constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    b_x = tl.load(p_x + o_x, mask=o_x < n)  # [BLOCK]
    b_x = b_x + 1.0
    tl.store(p_x + o_x, b_x, mask=o_x < n)


def attention(q, k, v, causal=True, sm_scale=None):
    return v
"""


def markdown(name: str, source: str) -> dict:
    return {"cell_type": "markdown", "id": f"c03-{name}", "metadata": {}, "source": source}


def code(name: str, source: str, tags: tuple[str, ...] = (), outputs: tuple[dict, ...] = ()) -> dict:
    cell = {"cell_type": "code", "id": f"c03-{name}", "metadata": {"tags": list(tags)}, "source": source}
    return cell | {"outputs": list(outputs), "execution_count": None}


def stream(text: str, name: str = "stdout") -> dict:
    return {"output_type": "stream", "name": name, "text": text}


def said(text: str) -> dict:
    return {"output_type": "display_data", "data": {"text/markdown": text}, "metadata": {}}


def figure(**metadata) -> dict:
    data = {"image/svg+xml": "<svg/>", "text/plain": "a figure"}
    return {"output_type": "display_data", "data": data, "metadata": metadata}


@pytest.fixture
def good() -> dict:
    """A notebook that breaks no rule."""
    cells = [
        markdown("title", f"# 03 Online softmax\n\n{BOX}\n\nHalf: 1/2, see https://example.org/home/page"),
        code(
            "begin",
            'from attnlib.book import lesson\n\nlesson.begin("03_online_softmax")',
            ("hide-input",),
            outputs=(stream("a GPU\n"),),
        ),
        code("kernel", KERNEL, ("kernel",)),
        code(
            "figure",
            "plotting.publish(f, 'ladder', 'bars')\nlesson.verdict(t, '03_online_softmax', '02_tiling')",
            ("hide-input",),
            outputs=(figure(filename="ladder", alt="bars"),),
        ),
        code("merge", "def merge(a, b):\n    raise NotImplementedError", ("exercise",)),
        code("merge-check", "lesson.check(checks.check_merge, merge)", outputs=(stream("✘ not yet\n"),)),
        code("rescale", "def rescale(o, m):\n    raise NotImplementedError", ("exercise",)),
        code("rescale-check", "lesson.check(checks.check_rescale, rescale)"),
    ]
    for count, cell in enumerate((c for c in cells if c["cell_type"] == "code"), start=1):
        cell["execution_count"] = count
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def cell(nb: dict, name: str) -> dict:
    return next(c for c in nb["cells"] if c["id"] == f"c03-{name}")


def problems(nb: dict, folder: Path) -> list[hygiene.Problem]:
    path = folder / "03_online_softmax.ipynb"
    path.write_text(json.dumps(nb))
    return hygiene.check(path)


# Hygiene: (rule, what the message says, how a good notebook is spoilt)

PLANTED = [
    ("valid_format", "nbformat 4.5", lambda nb: nb.update(nbformat_minor=4)),
    (
        "valid_format",
        "not a valid notebook",
        lambda nb: cell(nb, "kernel").update(outputs=[{"output_type": "x"}]),
    ),
    ("valid_format", "kernelspec python3, got None", lambda nb: nb["metadata"].pop("kernelspec")),
    ("stable_ids", "an id such as c03-idea, got 8f3a", lambda nb: cell(nb, "kernel").update(id="8f3a")),
    ("stable_ids", "an id such as c03-idea", lambda nb: cell(nb, "kernel").update(id="c04-kernel")),
    ("stable_ids", "used twice", lambda nb: cell(nb, "kernel").update(id="c03-title")),
    ("execution_order", "count 2, got 7", lambda nb: cell(nb, "kernel").update(execution_count=7)),
    (
        "execution_order",
        "count 7, got None",
        lambda nb: cell(nb, "rescale-check").update(execution_count=None),
    ),
    (
        "no_errors",
        "ValueError: no",
        lambda nb: cell(nb, "figure")["outputs"].append(
            {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []}
        ),
    ),
    (
        "no_stderr",
        "stderr: UserWarning: slow",
        lambda nb: cell(nb, "kernel")["outputs"].append(stream("UserWarning: slow\nmore", "stderr")),
    ),
    (
        "small",
        "less than 3,300,000 bytes",
        lambda nb: cell(nb, "title").update(source="# 03 x" + "y" * hygiene.MAX_BYTES),
    ),
    (
        "no_machine_paths",
        HOME,
        lambda nb: cell(nb, "kernel")["outputs"].append(stream(f"in {HOME}/x.py\n")),
    ),
    ("no_machine_paths", TEMP, lambda nb: cell(nb, "title").update(source=f"# 03 x\n\nSee {TEMP}/out")),
    ("no_machine_paths", "C:", lambda nb: cell(nb, "kernel").update(source=KERNEL + 'p = "C:\\\\data"\n')),
    (
        "no_machine_paths",
        HOME,
        lambda nb: cell(nb, "figure")["outputs"][0]["data"].update({"text/plain": f"'{HOME}'"}),
    ),
    (
        "no_embedded_images",
        "base64 data",
        lambda nb: cell(nb, "title").update(source="# 03 x\n![](data:image/png;base64,AAAA)"),
    ),
    (
        "no_embedded_images",
        "attachment",
        lambda nb: cell(nb, "title").update(attachments={"a.png": {"image/png": "AAAA"}}),
    ),
    (
        "no_noise",
        "execution times",
        lambda nb: cell(nb, "kernel")["metadata"].update(execution={"iopub": "now"}),
    ),
    ("no_noise", "widget state", lambda nb: nb["metadata"].update(widgets={})),
    (
        "box",
        "What changes, Needs, Runs for, got none",
        lambda nb: cell(nb, "title").update(source="# 03 Online softmax\n\n> **Needs:** nothing"),
    ),
    (
        "box",
        "got Prerequisites, What changes, Runs for",
        lambda nb: cell(nb, "title").update(
            source="# 03 x\n\n" + BOX.replace("| **Needs** | nothing |\n", "")
        ),
    ),
    ("title", "the title '# 03 ...'", lambda nb: cell(nb, "title").update(source="# Online softmax")),
    (
        "begins",
        'lesson.begin("03_online',
        lambda nb: cell(nb, "begin").update(source='lesson.begin("02_tiling")'),
    ),
    (
        "sizes",
        "at most 45 lines, got 60",
        lambda nb: cell(nb, "figure").update(source="\n".join(["x = 1"] * 60)),
    ),
    (
        "sizes",
        "at most 28 code cells",
        lambda nb: nb["cells"].extend(
            code(f"more-{i}", "x = 1") | {"execution_count": 8 + i} for i in range(26)
        ),
    ),
    ("named_figures", "figure without name", lambda nb: cell(nb, "figure")["outputs"][0].update(metadata={})),
    (
        "named_figures",
        "figure without name",
        lambda nb: cell(nb, "figure")["outputs"][0]["metadata"].pop("alt"),
    ),
    ("kernel_cell", "one cell tagged 'kernel', got 0", lambda nb: cell(nb, "kernel")["metadata"].pop("tags")),
    ("kernel_cell", "got 2", lambda nb: cell(nb, "figure")["metadata"].update(tags=["kernel"])),
    (
        "kernel_cell",
        "shape comment '# [...]' for block b_x in line 8",
        lambda nb: cell(nb, "kernel").update(
            source=KERNEL.replace("mask=o_x < n)  # [BLOCK]", "mask=o_x < n)")
        ),
    ),
    (
        "kernel_cell",
        "a function attention",
        lambda nb: cell(nb, "kernel").update(source=KERNEL.replace("def attention", "def forward")),
    ),
    (
        "kernel_cell",
        "make_block_ptr is deprecated",
        lambda nb: cell(nb, "kernel").update(source=KERNEL + "x = tl.make_block_ptr\n"),
    ),
    (
        "kernel_cell",
        "at most 60 lines of kernels, got 65",
        lambda nb: cell(nb, "kernel").update(
            source=KERNEL.replace("    b_x = b_x + 1.0\n", "    b_x = b_x\n" * 61)
        ),
    ),
    ("kernel_cell", "not Python", lambda nb: cell(nb, "kernel").update(source=KERNEL + "def\n")),
    ("exercises", "at least 2", lambda nb: cell(nb, "merge")["metadata"].pop("tags")),
    ("exercises", "lesson.check", lambda nb: cell(nb, "merge-check").update(source="merge(1, 2)")),
    (
        "folded_plumbing",
        "the tag 'hide-input' on a cell that calls plotting.publish",
        lambda nb: cell(nb, "figure")["metadata"].pop("tags"),
    ),
    (
        "folded_plumbing",
        "the tag 'hide-input' on a cell that calls lesson.begin",
        lambda nb: cell(nb, "begin")["metadata"].update(tags=["remove-cell"]),
    ),
    (
        "folded_plumbing",
        "no tag 'hide-input' on a cell tagged 'kernel'",
        lambda nb: cell(nb, "kernel")["metadata"]["tags"].append("hide-input"),
    ),
    (
        "folded_plumbing",
        "no tag 'hide-input' on a cell tagged 'exercise'",
        lambda nb: cell(nb, "merge")["metadata"]["tags"].append("hide-input"),
    ),
    (
        "true_verdicts",
        "no record of this chapter gives the verdict '1.070x, noise of this run 1.010: faster'",
        lambda nb: cell(nb, "figure")["outputs"].append(said("1.070x, noise of this run 1.010: faster.")),
    ),
    (
        "judged",
        "a comparison without a verdict (bench.verdict): It is 7% faster.",
        lambda nb: (
            cell(nb, "figure").update(source="lesson.verdict(table, a, b)"),
            cell(nb, "title").update(source="# 03 x\n\nAll is well. It is 7% faster."),
        ),
    ),
]


def test_a_good_notebook_has_no_problem(good, tmp_path):
    assert problems(good, tmp_path) == []


@pytest.mark.parametrize(("rule", "message", "spoil"), PLANTED)
def test_planted_problem_is_found(rule, message, spoil, good, tmp_path):
    bad = copy.deepcopy(good)
    spoil(bad)
    found = [p for p in problems(bad, tmp_path) if p.rule == rule]
    assert any(message in str(p) for p in found), problems(bad, tmp_path)


def test_a_backward_may_be_longer(good, tmp_path):
    """Its cell has three kernels and joins them to autograd; any other kernel of this length is too long."""
    lines = "\n".join(f"    b_x{i} = tl.load(p_x)  # [BLOCK]" for i in range(90))
    longer = f"@triton.jit\ndef more(p_x, BLOCK: tl.constexpr):\n{lines}\n\n\n"
    kernel = cell(good, "kernel")
    source = kernel["source"] if isinstance(kernel["source"], str) else "".join(kernel["source"])
    kernel["source"] = longer + source
    assert {p.rule for p in problems(good, tmp_path)} == {"sizes", "kernel_cell"}
    kernel["source"] += "\n\n\nclass Attention(torch.autograd.Function):\n    pass"
    assert problems(good, tmp_path) == []


def test_every_rule_is_planted():
    assert {rule for rule, _, _ in PLANTED} == set(hygiene.RULES)


def test_a_file_that_is_no_notebook_is_a_problem(tmp_path):
    (tmp_path / "03_x.ipynb").write_text("not json")
    (problem,) = hygiene.check(tmp_path / "03_x.ipynb")
    assert problem.rule == "readable"


def test_the_committed_notebooks_and_readme_are_clean():
    assert build.check() == []


# Execution


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Three small notebooks, the second of which fails, replayed in one go: (folder, out, results,
    messages)."""
    folder, out = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("out")
    sources = {
        "01_naive": [
            "import os\nprint(os.environ['ATTNLIB_REPLAY'], os.environ.get('TRITON_INTERPRET'))\n"
            "print('again')",
            "from attnlib.book import plotting\n"
            "bars = plotting.bar_chart({'a': 1.0, 'b': 2.0}, 'ms')\n"
            "plotting.publish(bars, 'bars', 'b is twice a', data=[{'a': 1.0, 'b': 2.0}])",
        ],
        "02_tiling": ["x = 1", "# a comment\ny = 0\nz = x / y\nprint(z)\nprint(x)", "print('never')"],
        "03_online_softmax": ["print('still executed')"],
    }
    for name, cells in sources.items():
        content = [code(f"{i}", text) | {"execution_count": 9} for i, text in enumerate(cells)]
        nb = {"cells": content, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        (folder / f"{name}.ipynb").write_text(json.dumps(nb))
    messages: list[str] = []
    paths = build.chapters(folder)
    results = execution.execute_all(
        paths, lambda p: out / p.name, mode=execution.REPLAY, jobs=2, say=messages.append
    )
    return folder, out, results, messages


def outputs(path: Path) -> list[list[dict]]:
    return [c["outputs"] for c in json.loads(path.read_text())["cells"]]


def test_a_failure_names_notebook_cell_source_and_error_and_the_others_run(executed):
    folder, out, results, messages = executed
    assert [r.ok for r in results] == [True, False, True]
    failure = results[1].failure
    assert failure.startswith("02_tiling, cell c03-1:")
    assert (
        "| z = x / y" in failure and "| ..." in failure and "ZeroDivisionError: division by zero" in failure
    )
    assert "print(x)" not in failure and failure in messages
    assert "still executed" in str(outputs(out / "03_online_softmax.ipynb"))
    assert sum("ok," in m for m in messages) == 2 and any("[3/3]" in m for m in messages)


def test_executed_copies_are_clean_and_sources_untouched(executed):
    folder, out, *_ = executed
    done = json.loads((out / "01_naive.ipynb").read_text())
    assert [c["execution_count"] for c in done["cells"]] == [1, 2]
    assert [c["id"] for c in done["cells"]] == ["c03-0", "c03-1"]
    assert done["cells"][0]["metadata"] == {"tags": []} and done["metadata"]["language_info"] == {
        "name": "python"
    }
    interpreted = None if torch.cuda.is_available() else 1
    assert outputs(out / "01_naive.ipynb")[0] == [stream([f"1 {interpreted}\n", "again\n"])]
    assert all(not o for o in outputs(folder / "01_naive.ipynb"))


def test_executing_again_gives_the_same_bytes(executed, tmp_path):
    folder, out, *_ = executed
    assert build.replay(["01"], folder, tmp_path, jobs=1)
    assert (tmp_path / "01_naive.ipynb").read_bytes() == (out / "01_naive.ipynb").read_bytes()


def test_figures_come_out_of_nbconvert_under_their_names(executed, tmp_path):
    _, out, *_ = executed
    (tmp_path / "old.svg").write_text("<svg/>")
    files = build.figures(out, tmp_path)
    assert [f.name for f in files] == ["bars.pdf", "bars.svg"] == sorted(f.name for f in tmp_path.iterdir())
    data, _ = plotting.bundle(plotting.bar_chart({"a": 1.0, "b": 2.0}, "ms"), "bars", "b is twice a")
    assert (tmp_path / "bars.svg").read_text() == data["image/svg+xml"]
    assert (tmp_path / "bars.pdf").read_bytes() == base64.b64decode(data["application/pdf"])


def test_a_figure_name_used_twice_is_an_error(executed, tmp_path):
    _, out, *_ = executed
    for name in ("01_naive", "02_tiling"):
        (tmp_path / f"{name}.ipynb").write_bytes((out / "01_naive.ipynb").read_bytes())
    with pytest.raises(ValueError, match="bars.(svg|pdf) is published by 01_naive and by 02_tiling"):
        build.figures(tmp_path, tmp_path / "figures")


def test_a_cell_that_takes_too_long_is_a_failure(tmp_path):
    nb = {
        "cells": [code("slow", "import time\ntime.sleep(60)")],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (tmp_path / "01_naive.ipynb").write_text(json.dumps(nb))
    result = execution.execute(
        tmp_path / "01_naive.ipynb", tmp_path / "out.ipynb", execution.REPLAY, execution.Limits(cell=1)
    )
    assert "cell c03-slow" in result.failure and "more than 1 s" in result.failure


def test_run_in_place_needs_a_gpu_and_keeps_a_failed_notebook(executed, monkeypatch, tmp_path, capsys):
    folder, *_ = executed
    monkeypatch.setenv("ATTNLIB_REPLAY", "1")
    with pytest.raises(ValueError, match="run: expected a CUDA GPU"):
        build.run(folder=folder)
    before = (folder / "02_tiling.ipynb").read_bytes()
    monkeypatch.setattr(records, "can_measure", lambda: True)
    monkeypatch.setattr(build, "BUILD", tmp_path)
    assert build.main(["run", "02", "--source", str(folder)]) == 1
    assert (folder / "02_tiling.ipynb").read_bytes() == before
    assert (tmp_path / "failed" / "02_tiling.ipynb").exists()
    assert "ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["01", "01_naive", "notebooks/01_naive.ipynb"])
def test_notebooks_are_found_by_number_name_or_path(executed, name):
    assert [p.stem for p in build.chapters(executed[0], [name])] == ["01_naive"]


def test_an_unknown_notebook_is_a_wrong_call(executed, capsys):
    assert build.main(["replay", "42", "--source", str(executed[0])]) == 2
    assert "expected one of 01_naive, 02_tiling, 03_online_softmax, got 42" in capsys.readouterr().err


# README and the page of results


SHARES = ("", 0.98), ("_low", 0.97), ("_high", 0.99)
NARROW = ("attnlib", 663), ("padded", 478)


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A record of the last chapter with one step and one peer, and one of host times with one call."""
    shape = {"batch": 4, "heads": 32, "seqlen": 4096, "head_dim": 64, "causal": True, "dtype": "float16"}
    rows = [
        {"impl": impl, **shape, "status": "ok", "ms": 100 / t, "tflops": t, "max_error": 1e-3}
        for impl, t in (("08_production", 398.0), ("fa3", 437.0), ("attnlib", 480.7))
    ]
    lasting = [row | {"tflops": row["tflops"] * 0.9, "ms": row["ms"] / 0.9, "sm_mhz": 1500.0} for row in rows]
    head = {"schema": records.SCHEMA, "gpu": {"name": "NVIDIA H200"}, "date": "2026-11-21"}
    reference = tmp_path / records.REFERENCE_GPU
    path = reference / "19_record.json"
    reference.mkdir()
    tables = {"ladder": {"rows": rows}, "sustained": {"rows": lasting}}
    path.write_text(json.dumps(head | {"notebook": "19_record", "tables": tables}))
    gradients = head | {"notebook": "20_backward", "tables": {"backward": {"rows": rows}}}
    (reference / "20_backward.json").write_text(json.dumps(gradients))
    taught = [row | {"impl": row["impl"].replace("08_production", "15_teaching")} for row in rows]
    teaching = head | {"notebook": "15_teaching", "tables": {"ladder": {"rows": taught}}}
    (reference / "15_teaching.json").write_text(json.dumps(teaching))
    call = {
        "call": "backward 2x16x300x64",
        "kernels_us": 23.4,
        "attnlib_us": 106.2,
        "cudnn_us": 89.6,
        "of_cudnn": 1.18,
    }
    shares = {f"{name}_of_sdpa{end}": x for name in ("attnlib", "control") for end, x in SHARES}
    step = {"batch": 4, "layers": 12, "tokens": 1024, "attnlib_us": 9800.0, "sdpa_us": 10000.0, **shares}
    timed = {"backward": {"rows": [call]}, "step": {"rows": [step]}}
    host = head | {"notebook": "host_time", "tables": timed}
    (reference / "host_time.json").write_text(json.dumps(host))
    speeds = ("attnlib", "ok", 1335.8), ("fa3", "failed", None), ("copy", "ok", 4231.0)
    read = [{"call": "B1 S8192", "impl": x, "status": y, "gb_per_s": z} for x, y, z in speeds]
    cached = [{"call": "B1 S8192", "impl": x, "status": "ok", "ms": y}
              for x, y in (("attnlib", 0.0212), ("attnlib fp8", 0.0165))]  # fmt: skip
    tables = {"calls": {"rows": read}, "fp8": {"rows": cached}}
    decode = head | {"notebook": "decode", "tables": tables}
    (reference / "decode.json").write_text(json.dumps(decode))
    call = {"batch": 2, "heads": 16, "seqlen": 8192, "head_dim": 128, "causal": True, "dtype": "bfloat16"}
    speeds = ("attnlib fp8", "ok", 995.4, 0.0025), ("fa3 fp8", "failed", None, None)
    read = [call | {"impl": w, "status": x, "tflops": y, "rms_error": z} for w, x, y, z in speeds]
    fp8 = head | {"notebook": "fp8", "tables": {"attention": {"rows": read}}}
    (reference / "fp8.json").write_text(json.dumps(fp8))
    call = {"batch": 1, "heads": 12, "seqlen": 4096, "head_dim": 64, "causal": False, "dtype": "float16"}
    speeds = ("attnlib", 0.1), ("monarch, 1 rounds", 0.02)
    read = [call | {"impl": x, "status": "ok", "ms": y} for x, y in speeds]
    monarch = head | {"notebook": "monarch", "tables": {"sweep": {"rows": read}}}
    (reference / "monarch.json").write_text(json.dumps(monarch))
    call |= {"causal": True, "status": "ok"}
    speeds = ("attnlib", 0.5, 0.0022), ("distr G2", 0.557, 0.829)
    read = [call | {"impl": x, "ms": y, "relative_error": z} for x, y, z in speeds]
    distr = head | {"notebook": "distr", "tables": {"attention": {"rows": read}}}
    (reference / "distr.json").write_text(json.dumps(distr))
    call |= {"codes": 10}
    speeds = ("attnlib, forward", 1.548), ("adasplash 2, forward", 4.132)
    read = [call | {"impl": x, "ms": y} for x, y in speeds]
    shares = [{"codes": 10, "seqlen": 4096, "blocks": 0.104}]
    entmax = {"calls": {"rows": []}, "blocks": {"rows": read}, "lists": {"rows": shares}}
    (reference / "entmax.json").write_text(json.dumps(head | {"notebook": "entmax", "tables": entmax}))
    read = [call | {"impl": x, "tflops": y, "ms": 100 / y} for x, y in (("attnlib", 529), ("fa3", 493))]
    slower = [row | {"tflops": row["tflops"] / 2, "ms": row["ms"] * 2} for row in read]
    measured = {"calls": {"rows": read}, "backward": {"rows": slower}}
    read = [call | {"head_dim_v": 128, "impl": x, "tflops": y, "ms": 100 / y} for x, y in NARROW]
    read.append(read[0] | {"impl": "fa3", "status": "failed"})
    measured |= dict.fromkeys(("values", "values_backward"), {"rows": read})
    widths = head | {"notebook": "head_dims", "tables": measured}
    (reference / "head_dims.json").write_text(json.dumps(widths))
    times = {"attnlib": 2.0, "triton": 4.0, "fa3": 2.4, "attnlib (control)": 2.1}
    called = {"call": "D64 2 x 8192 varlen", "varlen": True}
    sequences = [
        called | {"kernel": kernel, "pass": way, "ms": ms, "tflops": 1000 / ms, "round_ms": [ms, ms, ms]}
        for way in ("forward", "backward") for kernel, ms in times.items()
        if way == "forward" or kernel != "fa3"
    ]  # fmt: skip
    batch = [row | {"call": "D64 2 x 8192", "varlen": False} for row in sequences]
    lists = {"short": batch, "equal": sequences, "lengths": []}
    varlen = head | {"notebook": "varlen", "tables": {name: {"rows": rows} for name, rows in lists.items()}}
    (reference / "varlen.json").write_text(json.dumps(varlen))
    tiles = ("M256N64", 500.0), ("M256N64, kept", 550.0), ("M256N64, kept, early wait", 520.0), ("fa3", 440.0)
    read = [call | {"impl": x, "tflops": y, "ms": 100 / y} for x, y in tiles]
    measured = {"calls": {"rows": read}, "more": {"rows": []}}
    kept = head | {"notebook": "kept_shift", "tables": measured}
    (reference / "kept_shift.json").write_text(json.dumps(kept))
    cell = call | {"kind": "causal", "dtype": "bfloat16", "verdict": "faster"}
    ratios = ("forward", 1.2), ("forward", 1.1), ("forward", 1.3), ("backward", 0.9)
    cells = [cell | {"pass": way, "ratio": x, "spread": 1.01, "control": 1.0} for way, x in ratios]
    cells.append(cell | {"head_dim": 72, "pass": "forward", "reason": "attnlib: wrong"})
    (reference / "plane.json").write_text(
        json.dumps(head | {"notebook": "plane", "tables": {"cells": {"rows": cells}}})
    )
    gains = [("attnlib, one GPU", 1, 49.01, 1.0), ("attnlib", 2, 25.6, 1.914)]
    gains.append(("attnlib (control)", 2, 25.3, 1.939))
    read = [
        {"call": "S65536 dense", "causal": False, "seqlen": 65536, "status": "ok", "impl": w, "gpus": x,
         "ms": y, "speedup": z}
        for w, x, y, z in gains
    ]
    read[-1]["control_of"] = "attnlib"
    read.append(read[1] | {"status": "failed", "impl": "ring-flash-attn, FA3, zigzag"})
    passes = dict.fromkeys(("forward", "backward"), {"rows": read})
    two_gpus = head | {"notebook": "distributed", "tables": passes}
    (reference / "distributed.json").write_text(json.dumps(two_gpus))
    kept = {"call": "D128 kept 25%", "implementation": "attnlib", "tflops": 711, "of_ideal": 0.95, "ms": 0.77}
    masks = {"blocks": {"rows": [kept]}, "scores": {"rows": [kept | {"call": "D128 causal, soft cap"}]}}
    (reference / "sparse.json").write_text(json.dumps(head | {"notebook": "sparse", "tables": masks}))
    call = {"batch": 4, "heads": 16, "head_dim": 128, "causal": True, "dtype": "bfloat16", "status": "ok"}
    sides = {"forward": {"seqlen": 8192}, "backward": {"seqlen": 8192},
             "decode": {"seqlen": 1, "seqlen_k": 8192}}  # fmt: skip
    took = ("S2", 1.0), ("attnlib", 3.5)
    read = {way: [call | side | {"impl": x, "ms": y, "share": 0.2} for x, y in took]
            for way, side in sides.items()}  # fmt: skip
    s2 = head | {"notebook": "s2", "tables": {way: {"rows": rows} for way, rows in read.items()}}
    (reference / "s2.json").write_text(json.dumps(s2))
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    return path


def empty(page: Path, between: str = "old\n") -> str:
    """A page with nothing but its markers, and something old between each two."""
    names = tables_of_readme.PAGES[page]
    return "between\n".join(f"<!-- {name} -->\n{between}<!-- /{name} -->\n" for name in names)


@pytest.fixture
def pages(record, tmp_path, monkeypatch) -> list[Path]:
    """README and the page of results in another folder, without tables yet."""
    chosen = {}
    for page, names in tables_of_readme.PAGES.items():
        chosen[tmp_path / page.name] = names
        (tmp_path / page.name).write_text(f"before\n{empty(page)}after\n")
    monkeypatch.setattr(tables_of_readme, "PAGES", chosen)
    return list(chosen)


def test_losses_are_named():
    def row(kind, length, ratio, dtype="bfloat16"):
        own = {"kind": kind, "seqlen": length, "head_dim": 96, "dtype": dtype, "pass": "backward"}
        own |= {"batch": 1, "heads": 16, "causal": kind != "dense"}
        return own | {"ratio": ratio, "control": 1.0, "spread": 1.0}

    ahead = [row("dense", 512, 1.2), row("causal", 1024, 1.0)]
    assert tables_of_readme.losses(ahead) == "attnlib is slower than FlashAttention-3 in no cell."
    behind = [row("dense", 4096, 0.95), row("dense", 512, 0.9), row("gqa8", 1024, 0.97, "float16")]
    assert tables_of_readme.losses([*ahead, *behind]) == (
        "attnlib is slower than FlashAttention-3 in 3 cells, by 3.0% to 10.0%: backward, D = 96, dense, "
        "S = 512, 4096; backward, D = 96, causal, GQA 8:1, fp16, S = 1024."
    )


def test_tables_of_pages_are_drawn_from_the_records(pages):
    assert list(tables_of_readme.stale()) == pages == tables_of_readme.rewrite()
    assert list(tables_of_readme.stale()) == tables_of_readme.rewrite() == []
    readme, results = (page.read_text() for page in pages)
    assert readme.startswith("before\n<!-- ladder -->\n| Step |")
    assert readme.endswith("<!-- /plane -->\nafter\n")
    assert "<!-- /ladder -->\nbetween\n<!-- plane -->\n| " in readme
    assert "<!-- plane -->" not in results and "<!-- modes -->" not in readme
    assert "attnlib is slower than FlashAttention-3 in" in readme
    text = readme + results
    assert "| FA3 | 437 | 393 (1500) |" in text
    taught = text[text.index("<!-- teaching -->") : text.index("<!-- /teaching -->")]
    assert re.search(r"\| 15 The teaching kernel +\| 398 \|.*\| 91 \| 40 \|", taught)
    assert "| attnlib against FA3 | 1.100x, noise not measured | 1.100x, noise not measured |" in text
    assert re.search(r"\| backward 2x16x300x64 +\| 23 \| 106 \| 90 \| 1.18 \|", text)
    assert "| B1 S8192 | 1336 | 4231 |" in text, "a column for each that was at hand"
    assert "| B1 S8192 | 21.2 | 16.5 | – | – | – | – |" in text
    assert "| B2 H16 S8192 D128 causal bf16 | 995 | – | – | – | – | – | 2.5e-03 | – |" in text
    assert "| B1 H12 S4096 D64 dense fp16 | 0.020 | – | – | 0.100 | – |" in text
    assert "| B1 H12 S4096 D64 causal fp16 | 0.557 | – | 0.500 | – | 0.829 | 0.002 | – |" in text
    assert "| D128 kept 25% | 711 | – | – | – | 95% |" in text
    assert "| D128 causal, soft cap | 0.77 | – |" in text
    assert "| 8192 tokens | 5.00x |" + 3 * " 3.5x, noise not measured |" in text
    assert "causal fp16, weights in 10% of the blocks | 1.548 | 4.132 | – | – | – | – |" in text
    assert "| B1 H12 S4096 D64 causal fp16 | 529 | – | 493 | – | 1.073, noise not measured |" in text
    assert "| D64 2 x 8192 varlen | 500 | 250 | 417 | 1.200x, noise 1.050: faster |" in text
    assert "| D64 2 x 8192 varlen | 500 | 250 | – | – |" in text and "| D64 2 x 8192 |" not in text
    assert "D64 causal fp16, M256N64 | 500 | 550 | 440 | 1.100, noise not measured | 1.250, noise" in text
    cells = "1.200 (1.10 to 1.30) | 3, 0, 0 | 0.900 (0.90 to 0.90) | 0, 0, 1 |"
    assert f"| D = 64 | {cells}" in text and f"| **all** | {cells}" in text
    assert "| D = 72 | – | 0, 0, 0 | – | 0, 0, 0 |" in text
    assert "| FA3 | 1.100x, noise not measured |" in text[text.index("<!-- backward -->") :]
    assert "| Forward, TFLOP/s | attnlib | filled up |" in text
    assert text.count("| B1 H12 S4096 D64/128 causal fp16 | 663 | 478 | – | – | – |") == 2
    assert "| Backward, TFLOP/s | attnlib" in text and "fp16 | 264 | – | 246 | – | 1.073" in text
    assert "| S65536 dense, backward | 49.01 | 1.91x | 1.94x | – | – | – |" in text
    share = r"0.980 \(0.970 to 0.990\) \|"
    assert re.search(rf"\| 12 layers, 1024 tokens, batch 4 +\| 9.8 \| 10.0 \| {share} {share}", text)
    assert (
        re.search(r"\| 08 Production kernel +\| 398 \|.*\| 91 \| 40 \|", text)
        and "*NVIDIA H200, 2026-11-21*" in text
    )
    assert "replayed" not in text and "old" not in text


def test_a_stale_table_is_a_problem(pages, executed):
    tables_of_readme.rewrite()
    assert not any("a table differs" in problem for problem in build.check(folder=executed[1]))
    pages[1].write_text(pages[1].read_text().replace("| FA3 | 437 |", "| FA3 | 400 |"))
    assert any("results.md: a table differs" in problem for problem in build.check(folder=executed[1]))


@pytest.mark.parametrize("text", ["", "<!-- ladder -->", "<!-- /ladder --><!-- ladder -->"])
def test_a_page_needs_its_markers(pages, executed, text):
    pages[0].write_text(text)
    problem = "README.md: expected <!-- ladder --> and then <!-- /ladder -->, once each"
    assert problem in build.check(folder=executed[1])
