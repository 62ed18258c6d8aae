"""The task's harness: its lines, its formula, its gate; and the hole in the original gate, closed."""

import math

import pytest
import torch
import torch.nn.functional as F

from attnlib import task
from attnlib.bench.shapes import TASK, Shape

SHAPE = Shape(1, 2, 32, 16)


def good(q, k, v, causal=True, sm_scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)


@pytest.fixture
def clock(monkeypatch):
    """Every call of a kernel takes 2 ms, every call of SDPA 3 ms."""
    monkeypatch.setattr(
        task, "_latency_ms", lambda fn, warmup, rep: (fn(), 3.0 if fn.__name__ == "sdpa" else 2.0)[1]
    )


def run(forward, shape=SHAPE):
    return task.run(shape, forward=forward, device="cpu")


def test_a_good_kernel(clock):
    result = run(good)
    assert result.correct and result.max_diff <= 1e-2
    assert (result.latency_ms, result.sdpa_latency_ms, result.speedup) == (2.0, 3.0, 1.5)
    assert result.tflops == pytest.approx(4 * 1 * 2 * 32 * 32 * 16 / 2 / 2e-3 / 1e12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.02])
def test_one_bad_value_fails(clock, bad):
    """NaN above all: `nan > 1e-2` is false, so a gate written that way lets it pass."""

    def kernel(q, k, v, causal, sm_scale):
        out = good(q, k, v, causal, sm_scale)
        out[0, 0, 31, 3] += bad
        return out

    result = run(kernel)
    assert not result.correct and result.message.startswith("FAIL: max_diff")
    assert "after" not in result.message  # a kernel that is wrong is not even timed
    assert result.tflops == 0.0 and result.latency_ms == 999999.0
    assert result.test_metrics.endswith("correct=0")


def test_a_kernel_that_is_wrong_after_the_timing_fails(clock):
    calls = []

    def kernel(q, k, v, causal, sm_scale):
        calls.append(1)
        return good(q, k, v, causal, sm_scale) * (1.0 if len(calls) == 1 else math.nan)

    result = run(kernel)
    assert not result.correct and "after the timing" in result.message and result.tflops == 0.0


def test_exceptions_and_wrong_shapes_are_reported(clock):
    def raises(q, k, v, causal, sm_scale):
        raise ValueError("head_dim: expected 64, got 16")

    assert run(raises).message == "ERROR: custom kernel failed: head_dim: expected 64, got 16"
    assert "expected (1, 2, 32, 16) torch.float16" in run(lambda q, k, v, **kw: q.float()).message
    assert not run(lambda q, k, v, **kw: q.transpose(1, 2)).correct


def test_report_has_the_lines_of_the_task(clock):
    lines = task.report(SHAPE, run(good)).splitlines()
    assert lines[0] == "Config: batch=1, seqlen=32, nheads=2, headdim=16, causal=True, dtype=float16"
    assert lines[1] == "FLOPs: 0.0000 TFLOPs per forward pass"
    assert lines[2] == "TRAIN_METRICS: max_diff=0.000000e+00 mean_diff=0.000000e+00"
    assert lines[3] == (
        "TRAIN_METRICS: latency_ms=2.000 tflops=0.0 sdpa_latency_ms=3.000 sdpa_tflops=0.0 "
        "speedup_vs_sdpa=1.500"
    )
    assert lines[4] == (
        "TEST_METRICS: speedup_vs_sdpa=1.5000 tflops=0.0000 latency_ms=2.0000 sdpa_latency_ms=3.0000 "
        "max_diff=0.000000e+00 correct=1"
    )
    assert task.report(TASK["d256"], task.Result()).splitlines()[1] == "FLOPs: 1.0995 TFLOPs per forward pass"


def test_report_of_a_failure():
    lines = task.report(SHAPE, task.Result(message="ERROR: custom kernel failed: x")).splitlines()
    assert lines[2:] == [
        "ERROR: custom kernel failed: x",
        "TEST_METRICS: speedup_vs_sdpa=0.0000 tflops=0.0000 latency_ms=999999.0000 "
        "sdpa_latency_ms=999999.0000 max_diff=1.000000e+00 correct=0",
    ]


def test_inputs_follow_the_task(clock):
    seen = []

    def kernel(q, k, v, causal, sm_scale):
        seen.append((q, k, v, causal, sm_scale))
        return good(q, k, v, causal, sm_scale)

    task.run(SHAPE, seed=7, forward=kernel, device="cpu")
    torch.manual_seed(7)
    q, k, v = (torch.randn(1, 2, 32, 16, dtype=torch.float16) for _ in range(3))
    assert all(torch.equal(a, b) for a, b in zip(seen[0], (q, k, v), strict=False))
    assert seen[0][3:] == (True, 0.25)


def test_timer_takes_the_upper_median(monkeypatch):
    times = iter([5.0, 1.0, 4.0, 2.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def elapsed_time(self, end):
            return next(times)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = []
    assert task._latency_ms(lambda: calls.append(1), warmup=3, rep=4) == 4.0
    assert len(calls) == 3 + 4


def test_cli_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert task.main(["--all"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["--batch", "1"], ["--all", "--batch", "1"], ["--all", "--rep", "0"]]
)
def test_cli_rejects_bad_arguments(arguments):
    with pytest.raises(SystemExit) as status:
        task.main(arguments)
    assert status.value.code == 2


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [*((name, value, 1) for name in ("batch", "seqlen", "nheads", "headdim") for value in (0, -1)),
     ("rep", 0, 1), ("warmup", -1, 0)],
)  # fmt: skip
def test_cli_names_a_number_that_is_too_small(option, value, least, capsys):
    sizes = {"batch": 1, "seqlen": 64, "nheads": 1, "headdim": 64} | {option: value}
    with pytest.raises(SystemExit) as status:
        task.main([word for name, size in sizes.items() for word in (f"--{name}", str(size))])
    assert status.value.code == 2
    assert f"--{option}: expected at least {least}, got {value}" in capsys.readouterr().err


@pytest.mark.parametrize(("bad", "status"), [(None, 0), ("d128", 1)])
def test_cli_table_and_exit_status(monkeypatch, capsys, bad, status):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def fake(shape, **options):
        if shape == TASK.get(bad):
            return task.Result(message="FAIL: max_diff nan is not within 0.01")
        return task.Result(1e-3, 1e-5, 0.8, 345.6, 1.0, 276.0, 1.25, True)

    monkeypatch.setattr(task, "run", fake)
    assert task.main(["--all"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["shape", "d64", "d128", "d256"]
    assert "345.6" in lines[1] and ("FAIL" in lines[2]) == bool(bad)
    one = ["--batch", "2", "--seqlen", "8192", "--nheads", "16", "--headdim", "128", "--causal"]
    assert task.main([*one, "--output-dir", "somewhere"]) == status
    assert f"correct={1 - status}" in capsys.readouterr().out


def test_custom_attention_forward_is_attnlib(monkeypatch):
    """A thin call: same tensors, mask and scale, whatever `attention` returns."""
    import sys
    import types

    fake = types.ModuleType("attnlib.api")
    fake.attention = lambda q, k, v, *, causal, sm_scale: (q, k, v, causal, sm_scale)
    monkeypatch.setitem(sys.modules, "attnlib.api", fake)
    assert task.custom_attention_forward("q", "k", "v") == ("q", "k", "v", True, None)
    assert task.custom_attention_forward("q", "k", "v", causal=False, sm_scale=0.5)[3:] == (False, 0.5)
