"""A process that warms the caches: everything that would be timed is called, nothing is timed or stored."""

import pytest
import torch
import torch.nn.functional as F
from timed_cpu import gpu  # noqa: F401  (a fixture)

from attnlib.bench import backward, harness, records, setting, sustained, timing
from attnlib.bench.shapes import Shape

SHAPE, DENSE = Shape(1, 2, 32, 16), Shape(1, 2, 32, 16, causal=False)


class Counted:
    """A kernel that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q, k, v, causal, sm_scale):
        self.calls += 1
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)


@pytest.fixture
def warm(gpu, monkeypatch):  # noqa: F811
    """A process that warms the caches, with a GPU that is the CPU."""
    monkeypatch.setenv(setting.WARM, "4")
    return gpu


@pytest.fixture
def no_oracle(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("nothing is judged while the caches are warmed")

    for module, name in ((harness, "Oracle"), (backward, "Judge"), (sustained, "Oracle")):
        monkeypatch.setattr(module, name, refuse)


def stored(path):
    return [file for file in path.rglob("*") if file.is_file()]


def test_how_many_processes_warm(monkeypatch):
    monkeypatch.delenv(setting.WARM, raising=False)
    assert setting.warming() == 0 and setting.in_use(setting.BOOK) is setting.BOOK
    monkeypatch.setenv(setting.WARM, "8")
    assert setting.warming() == 8 and setting.in_use(setting.BOOK) is setting.ONCE
    monkeypatch.setenv(setting.WARM, "yes")
    with pytest.raises(ValueError, match="ATTNLIB_WARM: expected a number of processes, got 'yes'"):
        setting.warming()


def test_it_can_not_measure(warm, monkeypatch):
    assert not records.can_measure()
    monkeypatch.delenv(setting.WARM)
    assert records.can_measure()


def test_every_implementation_is_called_on_every_shape_and_nothing_is_stored(warm, no_oracle, tmp_path):
    kernels = {"one": Counted(), "two": Counted()}
    table = harness.measure("speed", kernels, [SHAPE, DENSE], notebook="00_test")
    assert [row["impl"] for row in table.rows] == ["one", "two"] * 2
    assert all(kernel.calls >= 2 for kernel in kernels.values())
    assert all(len(row["round_ms"]) == 1 for row in table.rows), "one round instead of the book's five"
    assert stored(tmp_path) == []


def test_far_fewer_calls_than_when_measured(gpu, monkeypatch):  # noqa: F811
    calls = {}
    for warming in ("0", "1"):
        monkeypatch.setenv(setting.WARM, warming)
        kernel = Counted()
        harness.collect({"one": kernel}, [SHAPE])
        calls[warming] = kernel.calls
    assert calls["1"] <= calls["0"] / 3


def test_backward_passes_and_sustained_runs_too(warm, no_oracle, monkeypatch, tmp_path):
    times = []
    once = timing.Sustained(1.0, 1.0, 1.0)
    monkeypatch.setattr(timing, "sustained", lambda fn, ms: times.append(ms) or once)
    monkeypatch.setattr(timing, "joules", lambda fn, ms: pytest.fail("no energy is measured"))
    kernel = Counted()
    assert backward.measure("backward", {"one": kernel}, [SHAPE], notebook="00_test").rows[0]["ms"] > 0
    calls = kernel.calls
    assert calls >= 1
    sustained.measure("sustained", {"one": kernel}, [SHAPE], notebook="00_test")
    assert kernel.calls > calls and len(times) == 2  # it and its control
    assert stored(tmp_path) == []


def test_one_function_is_called_a_few_times(warm):
    calls = []
    assert timing.time_ms(lambda: calls.append(1)).median > 0
    assert 1 <= len(calls) <= 4


def test_rows_are_made_and_the_recorded_ones_shown(gpu, monkeypatch, tmp_path):  # noqa: F811
    records.table("00_test", "speed", lambda: [{"ms": 1.0}])
    [file] = stored(tmp_path)
    before = file.read_bytes()
    monkeypatch.setenv(setting.WARM, "1")
    made = []
    table = records.table("00_test", "speed", lambda: made.append(1) or [{"ms": 99.0}])
    assert made and table.rows == [{"ms": 1.0}] and table.replayed
    new = records.table("00_test", "new", lambda: [{"ms": 99.0}])
    assert new.rows == [{"ms": 99.0}] and new.replayed
    assert [file.read_bytes() for file in stored(tmp_path)] == [before]


def test_a_failure_is_raised_only_where_nothing_is_recorded(gpu, monkeypatch):  # noqa: F811
    def fails():
        raise torch.OutOfMemoryError("others hold the memory")

    records.table("00_test", "speed", lambda: [{"ms": 1.0}])
    monkeypatch.setenv(setting.WARM, "1")
    assert records.table("00_test", "speed", fails).rows == [{"ms": 1.0}]
    with pytest.raises(torch.OutOfMemoryError, match="others hold"):
        records.table("00_test", "new", fails)
