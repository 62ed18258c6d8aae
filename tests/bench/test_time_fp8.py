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
    monkeypatch.setattr(kernel_device, "num_sms", lambda index: 2)
    assert time_fp8.main(["--values"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("GB/s") == 4 + len(time_fp8.ONE) and "WRONG" not in shown
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
    assert time_fp8.amiss(x, time_fp8.OneLaunch(), 1) == ""
    monkeypatch.setattr(time_fp8, "quantize_fp8", wrong)
    assert time_fp8.amiss(x, time_fp8.OneLaunch(), 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
def test_whole_calls(gpu, monkeypatch):
    """Each configuration is asked for, and none stays."""
    asked = []

    def attend(q, k, v, causal):
        asked.append((time_fp8.launch_quantize.ONE_LAUNCH, time_fp8.launch_fp8.fp8_config(128).keep_shift))
        return right(q, k, v, causal=causal, impl="reference")

    right = time_fp8.attention_fp8
    monkeypatch.setattr(time_fp8, "DEVICE", "cpu")
    monkeypatch.setattr(time_fp8, "Judge", lambda tensors, causal: None)
    monkeypatch.setattr(time_fp8, "attention_fp8", attend)
    shape = Shape(1, 1, 100, 64, dtype="float16")
    rows = list(time_fp8.whole_rows(shape, Setting("small", 1, 0, 0, 1)))
    assert [row["status"] for row in rows] == ["ok"] * 6, rows
    one = time_fp8.OneLaunch()
    assert set(asked) == {(None, False), (one, False), (None, True), (one, True)}
    assert time_fp8.launch_quantize.ONE_LAUNCH is None and not time_fp8.launch_fp8.fp8_config(64).keep_shift


def test_without_a_gpu(capsys):
    if not torch.cuda.is_available():
        assert time_fp8.main(["--values"]) == 2
