"""Back-to-back runs and energy, with the GPU and NVML replaced."""

from __future__ import annotations

import itertools
import types

import pytest
import torch
import torch.nn.functional as F

from attnlib.bench import harness, power, timing
from attnlib.bench.shapes import Shape
from attnlib.bench.sustained import ROUNDS, measure, method, summary, sustained_rows
from attnlib.bench.timing import Sustained
from attnlib.bench.verdict import judge

SHAPE = Shape(1, 2, 32, 16)


def good(q, k, v, causal, sm_scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)


def wrong(q, k, v, causal, sm_scale):
    return good(q, k, v, False, sm_scale)


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose GPU is the CPU; `order` tells which function was run back to back, and for how long."""
    order = []
    monkeypatch.setattr(harness, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    watts = itertools.count(600.0, 10.0)

    def sustained(call, ms):
        order.append((call, ms))
        return Sustained(2.0, 1500.0, next(watts))

    monkeypatch.setattr(timing, "sustained", sustained)
    monkeypatch.setattr(timing, "joules", lambda call, ms: order.append((call, ms)) or 1.25)
    return order


def test_a_row(gpu):
    row, control = sustained_rows({"ours": good}, [SHAPE], rounds=3)
    flops = 2 * 1 * 2 * 32 * 32 * 16
    assert row["impl"] == "ours" and Shape.of_row(row) == SHAPE and row["status"] == "ok"
    assert (row["ms"], row["sm_mhz"], row["watts"], row["joules"]) == (2.0, 1500.0, 620.0, 1.25)
    assert row["round_ms"] == [2.0] * 3
    assert (control["impl"], control["control_of"], control["ms"]) == ("ours (control)", "ours", 2.0)
    assert control["joules"] is None, "the control is there for the time"
    assert row["tflops"] == pytest.approx(flops / 2e-3 / 1e12)
    assert row["tflops_per_watt"] == pytest.approx(flops / 1.25 / 1e12)
    assert row["max_error"] <= row["budget_max"]


def test_rounds_are_interleaved_and_energy_comes_last(gpu):
    sustained_rows({"a": good, "b": good, "c": good}, [SHAPE], rounds=2, ms=200, energy_ms=3000)
    calls, lengths = zip(*gpu, strict=True)
    assert lengths == (200,) * 8 + (3000,) * 3
    assert len(set(calls[:4])) == len(set(calls[4:8])) == 4 and len(set(calls[8:])) == 3
    gpu.clear()
    row, _ = sustained_rows({"a": good}, [SHAPE], energy_ms=0)
    assert len(gpu) == 2 * ROUNDS and row["joules"] is None and row["tflops_per_watt"] is None


def test_a_wrong_kernel_is_not_run(gpu):
    rows = sustained_rows({"wrong": wrong, "good": good}, [SHAPE])
    assert [row["status"] for row in rows] == ["wrong", "ok", "ok"] and "max error" in rows[0]["reason"]
    assert not {"ms", "tflops", "watts", "tflops_per_watt"} & set(rows[0])


def test_a_kernel_that_is_wrong_after_the_timing_gets_no_speed(gpu, monkeypatch):
    state = types.SimpleNamespace(timed=False)
    monkeypatch.setattr(timing, "joules", lambda call, ms: setattr(state, "timed", True))
    row, _ = sustained_rows({"later": lambda *args: good(*args) * (1.5 if state.timed else 1)}, [SHAPE])
    assert state.timed and row["status"] == "wrong" and "ms" not in row


def test_without_nvml():
    row = summary(SHAPE, [Sustained(2.0, None, None), Sustained(4.0, None, None)], [None])
    assert row["ms"] == 3.0 and row["tflops"] > 0
    assert row["sm_mhz"] is row["watts"] is row["joules"] is row["tflops_per_watt"] is None


def test_bad_arguments(gpu, monkeypatch):
    with pytest.raises(ValueError, match="rounds: expected at least 1, got 0"):
        sustained_rows({"ours": good}, [SHAPE], rounds=0)
    with pytest.raises(ValueError, match="'fa9' has no function and is no peer"):
        sustained_rows({"fa9": None}, [SHAPE])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        sustained_rows({"ours": good}, [SHAPE])


def test_measure_stores_and_replays(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    monkeypatch.setenv("ATTNLIB_REPLAY", "0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    table = measure("sustained", {"ours": good}, [SHAPE], notebook="00_test")
    assert [row["impl"] for row in table.rows] == ["ours"] and len(table.controls) == 1
    assert judge(table, SHAPE, "ours", "ours").noise == 1.0
    monkeypatch.setenv("ATTNLIB_REPLAY", "1")
    assert measure("sustained", {"ours": None}, [SHAPE], notebook="00_test").rows == table.rows


def test_method_says_what_the_options_were():
    words = method(ms=200, rounds=3, energy_ms=2000, kind="normal")
    assert (words["ms"], words["rounds"], words["energy_ms"], words["inputs"]) == (200, 3, 2000, "normal")


# ---------------------------------------------------------------- the energy counter


class FakeNvml:
    """Stands for pynvml: a board at 700 W whose counter, in mJ, changes ten times a second."""

    NVML_CLOCK_SM = 1

    def __init__(self, clock) -> None:
        self.clock = clock

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 1500

    def nvmlDeviceGetPowerUsage(self, handle):
        return 400_000  # what ran before is in it

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return 10**9 + int(self.clock.now * 10) * 70_000


def test_energy_of_a_call(monkeypatch):
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(power, "_device", lambda: (FakeNvml(clock), "handle"))
    assert power.energy() == 10**6
    sampler = power.Sampler()
    for step in range(201):  # 2 s, looked at every 10 ms
        clock.now = step * 0.01 + 0.003
        joules = power.energy()
        if not sampler.energy or joules != sampler.energy[-1][1]:
            sampler.energy.append((clock.now, joules))
    assert sampler.mean_watts() == pytest.approx(700, rel=0.01)
    sampler.energy = sampler.energy[: power.MIN_UPDATES]
    assert sampler.mean_watts() is None, "too short"


def test_joules_is_mean_power_times_the_time_of_a_call(monkeypatch):
    sampler = power.Sampler()
    monkeypatch.setattr(timing, "_back_to_back", lambda fn, ms: (2.0, sampler))
    assert timing.joules(lambda: None) is None
    monkeypatch.setattr(sampler, "mean_watts", lambda: 650.0)
    assert timing.joules(lambda: None) == 1.3


def test_the_sampler_notes_when_the_counter_changes(monkeypatch):
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(power, "_device", lambda: (FakeNvml(clock), "handle"))
    monkeypatch.setattr(power, "INTERVAL_S", 0.0)
    with power.Sampler() as sampler:
        while len(sampler.energy) < 10:
            clock.now += 1e-5
    levels = [joules for _, joules in sampler.energy]
    assert levels == sorted(set(levels)), "only changes are noted"
    assert sampler.mean_watts() is not None


def test_a_board_that_counts_no_energy(monkeypatch):
    class NoCounter(FakeNvml):
        def nvmlDeviceGetTotalEnergyConsumption(self, handle):
            raise RuntimeError("not supported")

    monkeypatch.setattr(power, "_device", lambda: (NoCounter(None), "handle"))
    monkeypatch.setattr(power, "INTERVAL_S", 0.0)
    assert power.energy() is None
    with power.Sampler() as sampler:
        while len(sampler.samples) < 20:
            pass
    assert sampler.mean_watts() is None and sampler.medians() == (1500.0, 400.0)
    monkeypatch.setattr(power, "_device", lambda: None)
    assert power.energy() is None


def test_back_to_back(monkeypatch):
    """All calls lie between one pair of events."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 50.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(power, "_device", lambda: None)
    monkeypatch.setattr(timing, "estimate_ms", lambda fn, cold: 10.0)
    assert timing.sustained(lambda: log.append("call"), ms=50) == (10.0, None, None)
    assert log == ["event", *["call"] * 5, "event", "wait"]
