"""A CPU in the place of the GPU that the harness measures, and something small to measure on it."""

from __future__ import annotations

import math
import types

import pytest
import torch
import torch.nn.functional as F

from attnlib.bench import harness, power, timing
from attnlib.bench.setting import Setting
from attnlib.bench.shapes import Shape

TWO = Setting("test", rounds=2, pause_ms=0, warmup_ms=2, rep_ms=6)
SHAPE = Shape(1, 2, 32, 16)
DENSE = Shape(1, 2, 32, 16, causal=False)


def good(q, k, v, causal, sm_scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)


def all_nan(q, k, v, causal, sm_scale):
    return torch.full_like(q, math.nan)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine whose GPU is the CPU: calls that are timed take as long as `gpu.ms` says. Of those of a
    window one is made, `gpu.timed` has how many were asked for."""
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    monkeypatch.delenv("ATTNLIB_REPLAY", raising=False)
    monkeypatch.setattr(harness, "DEVICE", "cpu")
    monkeypatch.setattr(power, "_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    memory = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(memory))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(memory))
    clock = types.SimpleNamespace(order=[], timed=[], ms=[3.0, 1.0, 2.0])

    def record_ms(fn, calls, cold):
        clock.order.append(fn)
        clock.timed.append(calls)
        fn()
        return (clock.ms * calls)[:calls] if calls > 1 else [2.0]

    monkeypatch.setattr(timing, "_record_ms", record_ms)
    return clock
