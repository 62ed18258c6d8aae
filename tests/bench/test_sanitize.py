"""What tests/gpu/sanitize.py makes of the output of compute-sanitizer, which it runs on a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from contextlib import nullcontext
from functools import partial
from itertools import product

import emulated
import pytest
import sanitized
import torch

import attnlib
from attnlib.bench import power
from attnlib.bench.paths import TESTS

SCRIPT = TESTS / "gpu" / "sanitize.py"
spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
sanitize = importlib.util.module_from_spec(spec)
sys.modules["sanitize"] = sanitize  # its dataclass looks itself up
spec.loader.exec_module(sanitize)

CLEAN = """\
========= COMPUTE-SANITIZER
all calls done: 40
========= ERROR SUMMARY: 0 errors
"""
CLEAN_RACES = """\
========= COMPUTE-SANITIZER
all calls done: 40
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""
BEYOND_THE_END = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at attention_forward+0x1a40 in forward.py:140
=========     by thread (31,0,0) in block (2,0,0)
=========     Address 0x7f1e5a000200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1e5a000000 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernelEx [0x2c5e0f] in libcuda.so.1
=========
========= Invalid __global__ write of size 2 bytes
=========     at attention_forward+0x1a40 in forward.py:140
=========     by thread (30,0,0) in block (2,0,0)
=========
========= Program hit unspecified launch failure (error 719) on CUDA API call to cuCtxSynchronize.
=========
========= ERROR SUMMARY: 3 errors
========= ERROR SUMMARY: 120 errors were not printed. Use --print-limit option to adjust the number
"""
RACES = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at attention_forward_hopper+0xf0 in hopper.py:300
=========     and Read access at attention_forward_hopper+0x280 in hopper.py:310 [4096 hazards]
=========
========= Warning: Race reported between Read access at attention_forward_hopper+0x300 in hopper.py:320
========= and Write access at attention_forward_hopper+0x380 in hopper.py:330 [16 hazards]
=========
all calls done: 40
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
BARRIERS = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Missing wait.
=========     at attention_forward_hopper+0xbb10 in hopper.py:98
=========     by thread (128,0,0) in block (0,0,0)
=========     Barrier is located at shared address 0x30408
=========
all calls done: 40
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.parametrize("output", [CLEAN, CLEAN_RACES])
def test_nothing_found(output):
    report = sanitize.parse(output)
    assert (report.errors, report.warnings, report.calls, report.findings) == (0, 0, 40, {})
    assert sanitize.verdict(report, 0) == "ok"


def test_findings_are_counted_by_kind():
    report = sanitize.parse(BEYOND_THE_END)
    assert report.errors == 3, "not the line on errors that were not printed"
    assert report.findings == {
        "Invalid __global__ write of size 2 bytes": 2,
        "Program hit unspecified launch failure (error ?) on CUDA API call to cuCtxSynchronize.": 1,
    }
    assert sanitize.verdict(report, 9) == "3 errors, 0 warnings"


def test_races_are_errors_and_warnings():
    report = sanitize.parse(RACES)
    assert (report.errors, report.warnings) == (1, 1)
    assert list(report.findings) == [
        "Error: Race reported between Write access at attention_forward_hopper+0x? in hopper.py:?",
        "Warning: Race reported between Read access at attention_forward_hopper+0x? in hopper.py:?",
    ]
    assert sanitize.verdict(report, 0) == "1 errors, 1 warnings", "whatever the exit status says"


def test_barriers():
    report = sanitize.parse(BARRIERS)
    assert report.errors == 1 and report.findings == {"Barrier error detected. Missing wait.": 1}


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [
        (CLEAN, None, "timed out"),
        ("", 1, "no summary, status 1"),
        ("========= Error: Target application terminated before first API call\n", 1, "no summary"),
        (CLEAN, 1, "failed with status 1"),
        (CLEAN.replace("all calls done: 40\n", ""), 0, "failed with status 0"),
        (CLEAN.replace("done: 40", "done: 0"), 0, "failed with status 0"),
    ],
)  # fmt: skip
def test_what_did_not_run_to_its_end_does_not_pass(output, status, said):
    assert sanitize.verdict(sanitize.parse(output), status).startswith(said)


def test_the_calls_cover_both_kernels():
    found = list(sanitize.calls())
    for impl in ("hopper", "triton"):
        mine = [call for call in found if isinstance(call, sanitized.Call) and call.impl == impl]
        shapes = [call.shape for call in mine]
        assert {64, 128, 256} <= {s.head_dim for s in shapes}
        assert {True, False} == {s.causal for s in shapes} == {call.varlen for call in mine}
        assert any(call.window for call in mine), "a window"
        assert any(s.seqlen_k not in (None, s.seqlen) for s in shapes), "a shifted diagonal"
        assert any(s.heads_kv not in (None, s.heads) for s in shapes), "grouped heads"
        assert any(s.seqlen % 64 for s in shapes), "a tail"
    decoding = [call for call in found if call.impl == "decode"]
    assert {call.split for call in decoding} == {"none", "fixed", "stream_k"}
    caches = {(call.page, call.same_launch) for call in decoding if call.scales is None}
    assert caches == {*product((None, 16), (False, True)), (64, False)}
    fp8 = {(call.page, call.scales) for call in decoding if call.scales}
    assert fp8 == set(product((None, 16, 64), ("all", "pairs")))
    quantized = [call for call in found if call.impl == "fp8"]
    assert {call.head_dim for call in quantized} == {64, 72, 128, 256}
    assert {(call.causal, call.varlen) for call in quantized} == set(product((True, False), repeat=2))
    assert {call.scaling for call in quantized} == {"block", "head", "tensor"}


def test_the_calls_of_what_is_not_softmax_attention():
    found = list(sanitize.calls())
    assert {"entmax", "monarch", "kept"} <= {call.impl for call in found}
    grouped = [call for call in found if isinstance(call, sanitized.DistrCall)]
    assert {(call.impl, call.rows is None) for call in grouped} == set(
        product(("hopper", "triton"), (True, False))
    )
    assert {call.masked for call in found if call.impl == "monarch"} == {True, False}
    assert {call.head_dim for call in found if call.impl == "kept"} == {64, 128, 256}


def on_a_cpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "cuda", lambda x: x)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def test_the_decoding_calls_run(device):
    """In the interpreter, where there is no GPU to sanitize on."""
    decoding = [call for call in sanitize.calls() if call.impl == "decode"]
    small = [call for call in decoding if call.head_dim == 96]
    small += [call for call in decoding if (call.head_dim, call.page, call.scales) == (64, 16, "pairs")]
    large_pages = [call for call in decoding if call.page == 64]
    small += [min(large_pages, key=lambda call: call.head_dim)]
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            on_a_cpu(patch)
        for call in small:
            [out] = sanitize.run(call)
            assert out.isfinite().all() and not out[0].any()


def test_the_fp8_calls_run(monkeypatch):
    """By the model, where there is no GPU."""
    if not torch.cuda.is_available():
        on_a_cpu(monkeypatch)
        for name in ("attention_fp8", "attention_fp8_varlen"):
            monkeypatch.setattr(attnlib, name, partial(getattr(attnlib, name), impl="reference"))
    for call in (call for call in sanitize.calls() if call.impl == "fp8" and call.head_dim <= 72):
        [out] = sanitize.run(call)
        assert out.isfinite().all() and out.any()


def test_calls_of_what_is_not_softmax_attention_run(monkeypatch):
    """The smallest ones, in the interpreter where there is no GPU."""
    if not torch.cuda.is_available():
        on_a_cpu(monkeypatch)
    chosen = [sanitized.MonarchCall(64, 45, 2, True), sanitized.DistrCall(64, 2, None, True, "triton")]
    assert set(chosen) <= set(sanitize.calls())
    for call in chosen:
        [out] = sanitize.run(call)
        assert out.isfinite().all() and out.any()


def test_an_entmax_call_with_rows_that_see_no_key_runs(monkeypatch):
    if not torch.cuda.is_available():
        on_a_cpu(monkeypatch)
    call = sanitized.EntmaxCall(64, 1.5, True, 64, True)
    assert call in sanitize.calls()
    out, tau, *gradients = sanitize.run(call)
    assert 0 < tau.numel() < out.shape[0] * out.shape[1]
    assert all(x.isfinite().all() and x.any() for x in (out, tau, *gradients))


def test_each_part_of_a_score_is_in_a_call():
    scored = [call for call in sanitize.calls() if isinstance(call, sanitized.ScoredCall)]
    for head_dim in (64, 128, 256):
        found = {call.score for call in scored if (call.head_dim, call.impl) == (head_dim, "hopper")}
        assert found == {"ALiBi", "bias", "table", "sinks", "own"}
    assert {call.score for call in scored if call.impl == "triton"} == {"bias", "sinks", "own"}


@pytest.mark.parametrize(("head_dim", "score", "impl"), [
    (64, "table", "hopper"), *((256, score, "hopper") for score in ("bias", "sinks", "own")),
    (64, "sinks", "triton"), (64, "own", "triton"),
])  # fmt: skip
def test_the_calls_with_scores_run(device, head_dim, score, impl):
    """Without a GPU the Hopper kernels in the emulator, what is plain Triton in the interpreter."""
    call = sanitized.ScoredCall(head_dim, score, 2, impl)
    assert call in sanitize.calls()
    with pytest.MonkeyPatch.context() as patch, emulated.on_the_cpu() if device == "cpu" else nullcontext():
        if device == "cpu":
            on_a_cpu(patch)
        found = sanitize.run(call)
    assert len(found) == 5 + (score != "own") and all(x.isfinite().all() and x.any() for x in found)


# ---------------------------------------------------------------- the command line


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """A compute-sanitizer that prints a given text, on a machine that says it has an H200."""

    def says(output: str, status: int = 0, seconds: float = 0) -> None:
        program = tmp_path / "bin" / "compute-sanitizer"
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f"#!{sys.executable}\n"
            "import sys, time\n"
            "if '--version' in sys.argv:\n"
            "    print('NVIDIA (R) Compute Sanitizer\\nVersion 2025.1.0.0 (build 1)'), sys.exit()\n"
            f"time.sleep({seconds})\n"
            f"print({output!r}); sys.exit({status})\n"
        )
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(power, "device_info", lambda: {"driver": "580.1", "power_limit_w": 700.0})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    return says


def report_of(tmp_path) -> dict:
    return json.loads((tmp_path / "data" / "nvidia-h200" / "sanitizer.json").read_text())


def test_the_report(sanitizer, tmp_path, capsys):
    sanitizer(CLEAN)
    assert sanitize.main([]) == 0
    report = report_of(tmp_path)
    rows = report["tables"]["sanitizer"]["rows"]
    assert [row["tool"] for row in rows] == list(sanitize.TOOLS)
    assert {row["verdict"] for row in rows} == {"ok"} and rows[0]["calls"] == 40
    assert report["gpu"]["name"] == "NVIDIA H200" and {row["version"] for row in rows} == {"2025.1.0.0"}
    # One tool again: the rows of the others stay.
    sanitizer(RACES, status=9)
    assert sanitize.main(["--tool", "racecheck"]) == 1
    rows = report_of(tmp_path)["tables"]["sanitizer"]["rows"]
    assert [row["verdict"] for row in rows] == ["ok", "1 errors, 1 warnings", "ok", "ok"]
    assert "Race reported" in capsys.readouterr().out, "the end of the tool's output is shown"


def test_a_tool_that_takes_too_long_is_stopped(sanitizer, tmp_path):
    sanitizer(CLEAN, seconds=60)
    assert sanitize.main(["--tool", "initcheck", "--limit", "0.5"]) == 1
    [row] = report_of(tmp_path)["tables"]["sanitizer"]["rows"]
    assert row["verdict"] == "timed out" and row["seconds"] < 30


def test_calls_are_shared_out(sanitizer, tmp_path, capsys):
    sanitizer(RACES, status=9)
    assert sanitize.main(["--tool", "racecheck", "--jobs", "3"]) == 1
    [row] = report_of(tmp_path)["tables"]["sanitizer"]["rows"]
    assert (row["calls"], row["errors"], row["warnings"]) == (120, 3, 3)
    assert row["verdict"] == "1 errors, 1 warnings" and set(row["findings"].values()) == {3}
    capsys.readouterr()
    with pytest.raises(SystemExit):
        sanitize.main(["--jobs", "0"])
    assert "--jobs: expected 1 or more, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("parts", [1, 4])
def test_each_call_is_in_one_share(monkeypatch, capsys, parts):
    monkeypatch.setattr(sanitize, "calls", lambda: iter(()))
    seen = []
    monkeypatch.setattr(sanitize, "islice", lambda it, *a: seen.append(list(range(*a[:1], 10, a[2]))) or it)
    for part in range(parts):
        sanitize.main(["--calls", f"{part}/{parts}"])
    assert sorted(sum(seen, [])) == list(range(10))


def test_rows_of_other_code_are_dropped(sanitizer, tmp_path):
    sanitizer(CLEAN)
    assert sanitize.main(["--tool", "memcheck"]) == 0
    path = tmp_path / "data" / "nvidia-h200" / "sanitizer.json"
    path.write_text(json.dumps(report_of(tmp_path) | {"commit": "another"}))
    assert sanitize.main(["--tool", "synccheck"]) == 0
    assert [row["tool"] for row in report_of(tmp_path)["tables"]["sanitizer"]["rows"]] == ["synccheck"]


def test_without_compute_sanitizer(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert sanitize.main([]) == 2
    assert "compute-sanitizer: not on PATH; it comes with the CUDA toolkit" in capsys.readouterr().err


def test_without_a_gpu(sanitizer, monkeypatch, capsys):
    sanitizer(CLEAN)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main([]) == 2
    assert "need a CUDA GPU" in capsys.readouterr().err
