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
    monkeypatch.setattr(time_fp8, "SWEEP", Setting("small", 1, 0, 0, 1))
    monkeypatch.setattr(time_fp8, "QUANTIZED", [Shape(1, 2, 150, 64, False, "float16")])
    real = time_fp8.attention_fp8
    monkeypatch.setattr(
        time_fp8, "attention_fp8", lambda *given, **told: real(*given, **told | {"impl": "reference"})
    )
    monkeypatch.setattr(time_fp8, "WHOLE", [Shape(1, 2, 150, 64, True, "float16")])
    monkeypatch.setattr(kernel_device, "num_sms", lambda index: 2)
    assert time_fp8.main(["--values"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("GB/s") == 4 and shown.count("TFLOP/s") == 3
    for name in ("attnlib fp8, with the pass", "attnlib bf16 ", "attnlib bf16 (control)"):
        assert name in shown
    for name in ("attnlib v ", "attnlib v, not centered", "attnlib v (control)", "copy"):
        assert name in shown


def test_without_a_gpu(capsys):
    if not torch.cuda.is_available():
        assert time_fp8.main(["--values"]) == 2
