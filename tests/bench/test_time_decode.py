"""What tests/gpu/time_decode.py times on a GPU: its calls, their bytes, and that wrong ones are refused."""

from __future__ import annotations

import json

import pytest
import time_decode
import torch
from time_decode import Call
from timed_cpu import gpu  # noqa: F401  (a fixture)

from attnlib.bench import verdict
from attnlib.bench.records import Table
from attnlib.bench.setting import Setting
from attnlib.kernels.decode import launch

SMALL = {
    "batch": Call((40, 40), 4, 2, 16),
    "ragged": Call((40, 7, 100), 4, 2, 16),
}


def test_calls_are_named_apart():
    calls = [*time_decode.CALLS, *time_decode.PAIRS]
    assert len({call.label for call in calls}) == len(calls)
    assert [len(call.lengths) * call.kv_heads for call in time_decode.PAIRS] == [1, 8, 56, 132, 133, 200]


def test_bytes_are_those_of_keys_and_values():
    assert Call((8192,)).bytes == 2 * 8192 * 8 * 128 * 2
    assert SMALL["ragged"].bytes == 2 * 147 * 2 * 16 * 2
    assert Call((8192,)).label == "B1 H32/8 S1x8192 D128"
    assert SMALL["ragged"].label == "B3 H4/2 S1x100 D16 ragged"


@pytest.mark.parametrize("name", SMALL)
def test_right_outputs_pass_and_wrong_ones_do_not(name, device):
    call = SMALL[name]
    inputs = time_decode.make_inputs(call, device)
    judge = time_decode.Judge(call, inputs)
    made = time_decode.implementations(inputs)
    ours = [impl for impl in made if impl.startswith("attnlib")]
    assert len(ours) == 5
    for impl in ours:
        out = made[impl]()()
        judge.judge(out).raise_if_bad(impl)
        assert not judge.judge(out * 1.1).ok
    if name == "ragged":
        with pytest.raises(ValueError, match="SDPA knows no lengths"):
            made["cudnn"]()


@pytest.fixture
def small(gpu, monkeypatch):
    """The script on a CPU in the place of the GPU, with small calls."""
    monkeypatch.setattr(time_decode, "DEVICE", "cpu")
    monkeypatch.setattr(time_decode, "COPIED", 1000)
    for name in ("CALLS", "TUNED"):
        monkeypatch.setattr(time_decode, name, list(SMALL.values()))
    for name in ("BOOK", "SWEEP"):
        monkeypatch.setattr(time_decode, name, Setting("small", 2, 0, 0, 4))
    monkeypatch.setattr(time_decode, "PAIRS", [SMALL["batch"]])
    monkeypatch.setattr(time_decode.timing, "host_us", lambda make: 10.0)
    monkeypatch.setattr(time_decode.device, "num_sms", lambda index: 2)
    monkeypatch.setattr(launch, "counter", lambda index, size: torch.zeros(size, dtype=torch.int32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
def test_the_record(small, tmp_path, capsys):
    path = tmp_path / "decode.json"
    assert time_decode.main(["--out", str(path)]) == 0
    record = json.loads(path.read_text())
    assert set(record["tables"]) == {"calls", "pairs", "host"}
    table = Table.of("calls", record["tables"]["calls"]["rows"], record, False)
    call = SMALL["ragged"]
    row = table.one(call.shape, impl="attnlib")
    assert row["gb_per_s"] == pytest.approx(call.bytes / row["ms"] * 1e-6, rel=1e-3) and "tflops" not in row
    assert verdict.judge(table, call.shape, "attnlib", "attnlib, fixed").word == "tie"
    status = {row["impl"]: row["status"] for row in table.select(call.shape)}
    assert status.pop("copy") == "ok" and status.pop("cudnn") == status.pop("fa3") == "failed"
    status.pop("flash")
    assert len(status) == 5 and set(status.values()) == {"ok"}
    assert "GB/s" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
def test_a_wrong_one_gets_no_time(small, monkeypatch, capsys):
    right = time_decode.attention_decode
    monkeypatch.setattr(time_decode, "attention_decode", lambda *args, **options: 2 * right(*args, **options))
    assert time_decode.main(["--only", "ragged"]) == 1
    assert "wrong max error" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu(capsys):
    assert time_decode.main([]) == 2
    assert "compute capability 9.x" in capsys.readouterr().err
