"""The one setting of the book, and the control row that shows the noise of a run; the GPU is replaced."""

import json
import math

import pytest
import torch
from timed_cpu import DENSE, SHAPE, TWO, all_nan, good, gpu  # noqa: F401  (gpu: a fixture)

from attnlib.bench import backward, harness, ladder, names, records, timing
from attnlib.bench.setting import BOOK, SWEEP, Setting
from attnlib.book import chapters


class WrongLater:
    """Right when it and its control are first judged, wrong after they were timed."""

    calls = 0

    def __call__(self, q, k, v, causal, sm_scale):
        self.calls += 1
        return good(q, k, v, causal, sm_scale) * (1 if self.calls <= 2 else 1.5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rounds": 0}, "rounds: expected an int of at least 1, got 0"),
        ({"rounds": 2.5}, "rounds: expected an int of at least 1, got 2.5"),
        ({"rounds": 3, "pause_ms": -1}, "pause_ms: expected milliseconds, at least 0, got -1"),
        ({"rounds": 3, "rep_ms": math.nan}, "rep_ms: expected milliseconds, at least 0, got nan"),
    ],
)
def test_a_setting_is_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        Setting("test", **wrong)


@pytest.mark.parametrize("option", ["rounds", "rep_ms", "warmup_ms"])
def test_a_comparison_can_not_choose_its_windows(gpu, monkeypatch, option):
    """Neither when it measures nor in a replay."""
    for replay in ("0", "1"):
        monkeypatch.setenv("ATTNLIB_REPLAY", replay)
        with pytest.raises(TypeError, match=option):
            harness.measure("speed", {"ours": good}, [SHAPE], notebook="00_test", **{option: 5})


def test_the_record_says_how_it_was_measured(gpu):
    harness.measure("speed", {"ours": good}, [SHAPE], notebook="00_test", setting=TWO)
    path = records.data_dir() / "nvidia-h200" / "00_test.json"
    how = json.loads(path.read_text())["method"]
    fields = ("setting", "rounds", "pause_ms", "warmup_ms", "rep_ms")
    assert [how[field] for field in fields] == ["test", 2, 0, 2, 6]
    assert harness.method()["pause_ms"] == BOOK.pause_ms > 0 and "burst" in how["mode"]


def test_the_control_is_the_last_of_ours_that_works(gpu):
    rows = harness.collect({"a": good, "b": good, "bad": all_nan, "math": None}, [DENSE], setting=TWO)
    assert [row["impl"] for row in rows] == ["a", "b", "bad", "math", "b (control)"]
    assert rows[-1]["control_of"] == "b" and rows[-1]["ms"] == 2.0 and "max_error" in rows[-1]
    rows = harness.collect({"math": None}, [DENSE], setting=TWO)
    assert rows[-1]["control_of"] == "math" and rows[-1]["status"] == "ok"
    rows = harness.collect({"a": good, "b": good}, [DENSE], setting=TWO, control="a")
    assert rows[-1]["control_of"] == "a"
    rows = harness.collect({"bad": all_nan}, [DENSE], setting=TWO)
    assert [row["impl"] for row in rows] == ["bad"], "nothing works, so there is nothing to repeat"
    with pytest.raises(ValueError, match="control: expected one of a, b, got 'c'"):
        harness.collect({"a": good, "b": good}, [DENSE], control="c")


def test_a_control_that_turns_out_wrong_has_no_time(gpu):
    rows = harness.collect({"later": WrongLater()}, [SHAPE], setting=TWO)
    assert rows[-1]["impl"] == "later (control)"
    assert rows[-1]["status"] == "wrong" and "ms" not in rows[-1]


def test_ladders_do_not_show_the_control(gpu):
    table = harness.measure("speed", {"01_naive": good}, [SHAPE], notebook="00_test", setting=TWO)
    assert [row["impl"] for row in table.rows] == ["01_naive"]
    assert [row["impl"] for row in table.controls] == ["01_naive (control)"]
    loaded = records.load("00_test", "speed")
    assert (loaded.rows, loaded.controls) == (table.rows, table.controls)
    shown, _ = ladder.ladder_rows([*table.rows, *table.controls], head_dims=(16,))
    assert [row["impl"] for row in shown] == ["01_naive"]


def test_every_window_begins_with_a_pause(gpu, monkeypatch):
    log = []
    monkeypatch.setattr(timing, "rest", lambda setting: log.append("rest"))
    monkeypatch.setattr(timing, "samples_ms", lambda *a, **k: log.append("window") or [1.0])
    harness.collect({"a": good, "b": good}, [SHAPE], setting=TWO)
    assert log == ["rest", "window"] * 6
    log.clear()
    timing.time_ms(lambda: None, setting=TWO)
    assert log == ["rest", "window"] * 2


def test_the_pause_waits_for_the_gpu_first(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(timing.time, "sleep", log.append)
    timing.rest(Setting("test", rounds=1, pause_ms=250))
    assert log == ["wait", 0.25]


def test_a_backward_has_a_control_too(gpu):
    rows = backward.collect({"20_x": good, "math": None}, [DENSE], setting=TWO)
    assert [row["impl"] for row in rows] == ["20_x", "math", "20_x (control)"]
    assert rows[-1]["control_of"] == "20_x" and rows[-1]["round_ms"] == [2.0, 2.0]
    assert backward.measure("speed", {"20_x": good}, [SHAPE], notebook="20_x", setting=TWO).controls


def test_the_reader_s_name_of_a_control():
    assert names.label("cudnn (control)") == "cuDNN (control)"
    assert names.number("03_online_softmax (control)") == 3
    assert chapters.label("03_online_softmax (control)") == "03 Online softmax (control)"


def test_sweeps_have_the_windows_of_the_book():
    """A step has the same number everywhere only if its windows are the same everywhere."""
    assert (SWEEP.pause_ms, SWEEP.warmup_ms, SWEEP.rep_ms) == (BOOK.pause_ms, BOOK.warmup_ms, BOOK.rep_ms)
    assert SWEEP.rounds < BOOK.rounds and BOOK.window_ms == BOOK.pause_ms + BOOK.warmup_ms + BOOK.rep_ms
