"""Records: what is shown is what is stored, nothing is invented, and a crash never leaves half a file."""

import json
import math
import os

import pytest
import torch

from attnlib.bench import power, records
from attnlib.bench.records import RecordError, Table
from attnlib.bench.shapes import Shape

SHAPE = Shape(1, 2, 64, 16)
ROW = {"impl": "ours", **SHAPE.to_dict(), "ms": 1.23456789}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty data folder, and no GPU."""
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    for name in ("ATTNLIB_REPLAY", "ATTNLIB_PAPER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


def pretend_gpu(monkeypatch, name="NVIDIA H200", date="2026-11-21", commit="abc"):
    """This machine has a GPU of that name, on that day."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: name)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    header = records.provenance

    def provenance(method=None):
        with monkeypatch.context() as patch:
            patch.setattr(power, "device_info", lambda: {"driver": "580", "power_limit_w": 700.0})
            patch.setattr(records, "_commit", lambda: commit)
            return {**original(method), "date": date}

    original = getattr(header, "original", header)
    provenance.original = original
    monkeypatch.setattr(records, "provenance", provenance)


def pretend_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def never():
    raise AssertionError("a replay must not measure")


def test_measured_and_replayed_tables_hold_the_same_rows(data, monkeypatch):
    pretend_gpu(monkeypatch)
    measured = records.table("00_test", "speed", lambda: [ROW], method={"rounds": 3})
    rows = [{**ROW, "ms": 1.2346}]
    assert measured == Table("speed", rows, "NVIDIA H200", "2026-11-21", False, commit="abc")
    assert measured.label == "NVIDIA H200, 2026-11-21"
    pretend_no_gpu(monkeypatch)
    replayed = records.table("00_test", "speed", never)
    assert replayed == Table("speed", measured.rows, measured.gpu, measured.date, True, commit="abc")
    assert replayed.label == "replayed from NVIDIA H200, 2026-11-21"
    monkeypatch.setenv("ATTNLIB_PAPER", "1")
    assert replayed.label == measured.label


def test_record_says_where_it_comes_from(data, monkeypatch):
    pretend_gpu(monkeypatch)
    records.table("00_test", "speed", lambda: [ROW], method={"rounds": 3})
    record = json.loads((data / "nvidia-h200" / "00_test.json").read_text())
    assert record["schema"] == records.SCHEMA and record["notebook"] == "00_test"
    assert record["gpu"] == {"name": "NVIDIA H200", "driver": "580", "power_limit_w": 700.0}
    assert record["torch"] == torch.__version__ and record["cuda"] == torch.version.cuda
    assert (record["commit"], record["date"], record["method"]) == ("abc", "2026-11-21", {"rounds": 3})
    assert {"triton", "cudnn"} <= set(record)


def test_tables_of_one_run_merge_in_one_file(data, monkeypatch):
    pretend_gpu(monkeypatch)
    records.table("00_test", "a", lambda: [{"x": 1}])
    records.table("00_test", "b", lambda: [{"x": 2}])
    records.table("00_test", "a", lambda: [{"x": 3}])
    record = json.loads((data / "nvidia-h200" / "00_test.json").read_text())
    assert record["tables"] == {"a": {"rows": [{"x": 3}]}, "b": {"rows": [{"x": 2}]}}


def test_a_table_that_is_kept_keeps_its_date_and_method(data, monkeypatch):
    pretend_gpu(monkeypatch, date="2026-11-21", commit="old")
    records.table("00_test", "a", lambda: [{"x": 1}], method={"rounds": 3})
    pretend_gpu(monkeypatch, date="2026-12-01", commit="new")
    records.table("00_test", "b", lambda: [{"x": 2}], method={"rounds": 5})
    pretend_gpu(monkeypatch, date="2026-12-24", commit="newest")
    records.table("00_test", "b", lambda: [{"x": 2}], method={"rounds": 5})
    assert records.load("00_test", "a").date == "2026-11-21"
    assert records.load("00_test", "b").date == "2026-12-24"
    tables = json.loads((data / "nvidia-h200" / "00_test.json").read_text())["tables"]
    assert (tables["a"]["commit"], tables["a"]["method"]) == ("old", {"rounds": 3})
    assert set(tables["b"]) == {"rows"}


def test_tables_that_are_not_asked_for_are_replayed(data, monkeypatch):
    pretend_gpu(monkeypatch)
    for name in ("a", "b"):
        records.table("00_test", name, lambda: [{"x": 1}])
    monkeypatch.setenv("ATTNLIB_TABLES", "b,c")
    a, b = records.table("00_test", "a", never), records.table("00_test", "b", lambda: [{"x": 2}])
    assert (a.rows, a.replayed, b.rows, b.replayed) == ([{"x": 1}], True, [{"x": 2}], False)


def test_own_gpu_first_then_the_reference_gpu(data, monkeypatch):
    pretend_gpu(monkeypatch)
    for name in ("a", "b"):
        records.table("00_test", name, lambda: [{"x": "reference"}])
    pretend_gpu(monkeypatch, "NVIDIA H100 80GB HBM3")
    records.table("00_test", "a", lambda: [{"x": "own"}])
    assert (data / "nvidia-h100-80gb-hbm3" / "00_test.json").exists()
    monkeypatch.setenv("ATTNLIB_REPLAY", "1")
    assert records.table("00_test", "a", never).rows == [{"x": "own"}]
    other = records.table("00_test", "b", never)
    assert (other.rows, other.gpu) == ([{"x": "reference"}], "NVIDIA H200")
    assert records.load("00_test", "a", gpu="nvidia-h200").rows == [{"x": "reference"}]
    pretend_no_gpu(monkeypatch)
    assert records.load("00_test", "a").rows == [{"x": "reference"}]


def test_what_was_not_at_hand_is_left_out():
    rows = [{"impl": i, "status": s} for i, s in (("a", "ok"), ("b", "not installed"), ("a", "failed"))]
    table = records.Table("t", rows, "NVIDIA H200", "2026-11-21", replayed=True)
    assert [row["status"] for row in table.measured().rows] == ["ok", "failed"]


def test_a_table_of_another_gpu_where_the_reference_has_none(data, monkeypatch):
    pretend_gpu(monkeypatch)
    records.table("00_test", "a", lambda: [{"x": "reference"}])
    for name, date in (("NVIDIA H100 PCIe", "2026-11-24"), ("NVIDIA H100 80GB HBM3", "2026-11-23")):
        pretend_gpu(monkeypatch, name, date)
        for table in ("a", "b"):
            records.table("00_test", table, lambda name=name: [{"x": name}], method={"gpus": 2})
    pretend_no_gpu(monkeypatch)
    assert records.load_anywhere("00_test", "a").rows == [{"x": "reference"}]
    found = records.load_anywhere("00_test", "b")
    assert found.rows == [{"x": "NVIDIA H100 PCIe"}], "the latest"
    assert found.label == "replayed from 2 NVIDIA H100 PCIe, 2026-11-24"
    with pytest.raises(RecordError, match="no table 'b'"):
        records.load("00_test", "b")
    with pytest.raises(RecordError, match="no table 'c'"):
        records.load_anywhere("00_test", "c")


def test_what_was_not_recorded_is_an_error(data, monkeypatch):
    with pytest.raises(RecordError, match="no record .*nvidia-h200.*00_test.json"):
        records.table("00_test", "speed", never)
    pretend_gpu(monkeypatch)
    records.table("00_test", "speed", lambda: [ROW])
    pretend_no_gpu(monkeypatch)
    with pytest.raises(RecordError, match="no table 'power'; tables: speed"):
        records.load("00_test", "power")
    with pytest.raises(RecordError, match="no record .*nvidia-b200"):
        records.load("00_test", "speed", gpu="nvidia-b200")


def damaged(**changes):
    """A record, of which something is changed."""
    origin = {"gpu": {"name": "NVIDIA H200"}, "date": "2026-11-21"}
    return json.dumps({"schema": 1, **origin, "tables": {"speed": {"rows": []}}, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("\0\xff\xfe", "is not JSON"),
        pytest.param("[" * 200_000, "is not JSON: .*recursion", id="deep"),
        ("[]", "expected schema 1, got None"),
        ('{"schema": 2}', "expected schema 1, got 2"),
        (damaged(tables=None), "expected an object as 'tables', got None"),
        (damaged(tables=[]), "expected an object as 'tables', got \\[\\]"),
        (damaged(tables={"speed": None}), "expected objects as rows of table 'speed', got None"),
        (damaged(tables={"speed": {"rows": [1]}}), "as rows of table 'speed', got \\[1\\]"),
        (damaged(tables={"speed": {"rows": [], "date": 1}}), "'speed': expected a string as 'date', got 1"),
        (damaged(gpu=None), "expected an object with a 'name' as 'gpu', got None"),
        (damaged(gpu={}), "expected an object with a 'name' as 'gpu', got {}"),
        (damaged(date=None), "expected a string as 'date', got None"),
    ],
)
def test_a_file_that_is_no_record_is_an_error_and_is_not_overwritten(data, monkeypatch, text, message):
    path = data / "nvidia-h200" / "00_test.json"
    path.parent.mkdir()
    path.write_text(text, encoding="latin-1")
    with pytest.raises(RecordError, match=f"{path}.*{message}"):
        records.load("00_test", "speed")
    pretend_gpu(monkeypatch)
    with pytest.raises(RecordError, match=message):
        records.table("00_test", "speed", never)  # found before the time of measuring is spent
    assert path.read_text(encoding="latin-1") == text


def test_a_folder_is_no_record(data):
    path = data / "nvidia-h200" / "00_test.json"
    path.mkdir(parents=True)
    with pytest.raises(RecordError, match=f"^{path} can't be read: Is a directory"):
        records.load("00_test", "speed")


def test_select_and_one():
    rows = [{**ROW, "impl": impl, "causal": causal} for impl in ("a", "b") for causal in (True, False)]
    table = Table("t", rows, "GPU", "2026-11-21", True)
    assert [row["causal"] for row in table.select(impl="a")] == [True, False]
    assert table.select(impl="c") == []
    assert table.one(SHAPE, impl="b") == rows[2]
    with pytest.raises(RecordError, match="expected 1 row with impl='c', B1 H2 S64 D16 causal fp16, found 0"):
        table.one(SHAPE, impl="c")
    with pytest.raises(RecordError, match="expected 1 row with impl='a', found 2"):
        table.one(impl="a")
    with pytest.raises(RecordError, match="no column .'implementation'"):
        table.select(implementation="a")


def test_shapes_that_differ_in_optional_fields_are_told_apart():
    grouped = Shape(1, 2, 64, 16, heads_kv=1)
    table = Table("t", [ROW, {"impl": "ours", **grouped.to_dict(), "ms": 2.0}], "GPU", "2026-11-21", True)
    assert table.one(SHAPE)["ms"] == ROW["ms"]
    assert table.one(grouped)["ms"] == 2.0


def test_rounding():
    assert records.rounded(123456.789) == 123460.0
    assert records.rounded(1.23456e-7) == 1.2346e-7
    assert records.rounded({"a": (math.pi, [True, 7, "x", None])}) == {"a": [3.1416, [True, 7, "x", None]]}
    assert records.rounded([math.nan, math.inf, -math.inf]) == [None, None, None]
    assert records.rounded(torch.tensor(2.5)) == 2.5
    assert isinstance(records.rounded(torch.tensor(3)), int)
    with pytest.raises(TypeError, match="got set"):
        records.rounded({"a": {1}})
    with pytest.raises(TypeError, match="expected str keys, got 1"):
        records.rounded({1: 2})


def test_encoding_is_json_with_one_row_on_a_line():
    value = {"b": {"rows": [{"y": 1, "x": None}, {"x": "é"}]}, "a": [], "c": {}, "d": [1, 2]}
    text = records.encode(value)
    assert json.loads(text) == value
    lines = text.splitlines()
    assert '   {"x": null, "y": 1},' in lines
    assert lines[1] == ' "a": [],'
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.encode({"a": math.nan})


def test_same_values_give_the_same_bytes(tmp_path):
    records.write_json(tmp_path / "a.json", {"x": 1, "y": [{"b": 1, "a": 2}]})
    records.write_json(tmp_path / "b.json", {"y": [{"a": 2, "b": 1}], "x": 1})
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_crash_while_writing_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    records.write_json(path, {"x": 1})

    def crash(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="disk full"):
        records.write_json(path, {"x": 2})
    assert json.loads(path.read_text()) == {"x": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_a_measurement_that_fails_writes_nothing(data, monkeypatch):
    pretend_gpu(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        records.table("00_test", "speed", lambda: [{"ms": 1 / 0}])
    with pytest.raises(TypeError, match="produce: expected a list of dicts, got dict"):
        records.table("00_test", "speed", lambda: {"ms": 1})
    assert list(data.rglob("*.json")) == []


def test_folders_and_names(monkeypatch):
    monkeypatch.delenv("ATTNLIB_DATA", raising=False)
    assert records.data_dir().parts[-2:] == ("figures", "data")
    assert records.gpu_slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    with pytest.raises(ValueError, match="notebook: expected a name"):
        records.load("../secrets", "t")


def test_can_measure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("ATTNLIB_REPLAY", "0")
    assert records.can_measure()
    monkeypatch.setenv("ATTNLIB_REPLAY", "1")
    assert not records.can_measure()
    monkeypatch.delenv("ATTNLIB_REPLAY")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not records.can_measure()


class FakeNvml:
    """Stands for pynvml: a card whose clock falls while it works."""

    NVML_CLOCK_SM = 1

    def __init__(self):
        self.clock = 2000

    def nvmlSystemGetDriverVersion(self):
        return b"580.1"

    def nvmlDeviceGetPowerManagementLimit(self, handle):
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle, kind):
        assert kind == self.NVML_CLOCK_SM
        self.clock = max(1500, self.clock - 100)
        return self.clock

    def nvmlDeviceGetPowerUsage(self, handle):
        return 650_500


def test_power_is_sampled_and_the_second_half_has_settled(monkeypatch):
    monkeypatch.setattr(power, "_device", lambda nvml=FakeNvml(): (nvml, "handle"))  # noqa: B008
    monkeypatch.setattr(power, "INTERVAL_S", 0.0)
    assert power.device_info() == {"driver": "580.1", "power_limit_w": 700.0}
    with power.Sampler() as sampler:
        while len(sampler.samples) < 20:
            pass
    assert sampler.samples[0] == (1900.0, 650.5)
    assert sampler.medians(settled=True) == (1500.0, 650.5)


def test_without_nvml_everything_is_none(monkeypatch):
    monkeypatch.setattr(power, "_device", lambda: None)
    with power.Sampler() as sampler:
        pass
    assert sampler.medians() == (None, None)
    assert power.device_info() == {"driver": None, "power_limit_w": None}
    assert power.read() is None


def test_nvml_that_stops_answering_ends_the_samples_quietly(monkeypatch):
    class Broken(FakeNvml):
        def nvmlDeviceGetPowerUsage(self, handle):
            raise RuntimeError("GPU is lost")

    monkeypatch.setattr(power, "_device", lambda: (Broken(), "handle"))
    with power.Sampler() as sampler:
        pass
    assert sampler.medians() == (None, None)
