"""What tests/gpu/time_fp8.py times of the quantizing kernels on a GPU."""

from __future__ import annotations

import pytest
import time_fp8
import torch
from timed_cpu import gpu  # noqa: F401  (a fixture)

from attnlib.bench.setting import Setting
from attnlib.bench.shapes import Shape
from attnlib.kernels.common import device as kernel_device


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
def test_the_pass_over_values(gpu, monkeypatch, capsys):
    monkeypatch.setattr(time_fp8, "DEVICE", "cpu")
    monkeypatch.setattr(time_fp8, "EIGHT", Setting("small", 2, 0, 0, 1))
    monkeypatch.setattr(time_fp8, "QUANTIZED", [Shape(1, 2, 150, 64, False, "float16")])
    monkeypatch.setattr(time_fp8, "ODD", [(2, 3, 70, 40)])
    monkeypatch.setattr(time_fp8, "REPEATS", 1)
    monkeypatch.setattr(time_fp8, "WHOLE", [])
    monkeypatch.setattr(time_fp8, "compile_all", lambda: None)
    monkeypatch.setattr(kernel_device, "num_sms", lambda index: 2)
    assert time_fp8.main(["--values"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("GB/s") == 4 + len(time_fp8.WAYS) and "WRONG" not in shown
    for name in ("attnlib v ", "attnlib v, not centered", "v, one launch, 64 KB", "v (control)", "copy"):
        assert name in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
@pytest.mark.parametrize("field", ["data", "scale", "mean"])
def test_what_is_wrong_with_values_is_told(field, monkeypatch):
    monkeypatch.setattr(time_fp8, "DEVICE", "cpu")
    right = time_fp8.quantize_fp8

    def wrong(x, role):
        made = right(x, role)
        if field == "data":
            made.data.view(torch.uint8)[-1, -1, 0, 0] ^= 1
        else:
            getattr(made, field)[-1, -1] *= 2
        return made

    x = torch.randn(1, 2, 100, 64).half() + 3
    assert time_fp8.amiss(x, time_fp8.ONE_LAUNCH, 1) == ""
    monkeypatch.setattr(time_fp8, "quantize_fp8", wrong)
    assert time_fp8.amiss(x, time_fp8.ONE_LAUNCH, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
def test_what_is_compiled_first(monkeypatch):
    """Each kind of call that is judged or timed, once."""
    seen = []
    monkeypatch.setattr(time_fp8, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(time_fp8, "quantize_fp8", lambda x, *a, **k: seen.append(("v", x.shape[3])))
    monkeypatch.setattr(time_fp8, "attention", lambda q, *a, **k: seen.append(("bf16", q.shape[3])))
    monkeypatch.setattr(time_fp8, "attention_fp8", lambda q, *a, **k: seen.append(("fp8", q.shape[3])))
    for job in time_fp8.jobs():
        time_fp8.compile_one(*job)
    dims = {shape.head_dim for shape in time_fp8.WHOLE}
    assert {d for name, d in seen if name == "v"} == {40, 64, 128, 256}
    assert {d for name, d in seen if name == "bf16"} == {d for name, d in seen if name == "fp8"} == dims


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
def test_whole_calls(gpu, monkeypatch):
    """Each configuration is asked for, and none stays."""
    asked = []

    def attend(q, k, v, causal):
        asked.append((time_fp8.launch_quantize.CENTERING, time_fp8.launch_fp8.fp8_config(128).keep_shift))
        return right(q, k, v, causal=causal, impl="reference")

    right = time_fp8.attention_fp8
    monkeypatch.setattr(time_fp8, "DEVICE", "cpu")
    monkeypatch.setattr(time_fp8, "Judge", lambda tensors, causal: None)
    monkeypatch.setattr(time_fp8, "attention_fp8", attend)
    shape = Shape(1, 1, 100, 64, dtype="float16")
    rows = list(time_fp8.whole_rows(shape, Setting("small", 1, 0, 0, 1)))
    assert [row["status"] for row in rows] == ["ok"] * 6, rows
    one = time_fp8.ONE_LAUNCH
    assert set(asked) == {(way, keeps) for way in (time_fp8.CENTERING, one) for keeps in (False, True)}
    assert time_fp8.launch_quantize.CENTERING is time_fp8.CENTERING
    assert not time_fp8.launch_fp8.fp8_config(64).keep_shift


def test_without_a_gpu(capsys):
    if not torch.cuda.is_available():
        assert time_fp8.main(["--values"]) == 2
