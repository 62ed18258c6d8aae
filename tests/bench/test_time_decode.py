"""What tests/gpu/time_decode.py times on a GPU: its calls, their bytes, and that wrong ones are refused."""

from __future__ import annotations

import json

import pytest
import time_decode
import torch
import tune_decode
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
    assert len(ours) == 7 + 2 * (name == "batch")
    assert ("cudnn" in made) == ("flash" in made) == (name == "batch")
    for impl in ours:
        out = made[impl]()()
        judge.judge(out).raise_if_bad(impl)
        assert not judge.judge(out * 1.1).ok


@pytest.mark.parametrize("name", SMALL)
def test_the_same_numbers_in_fp8(name, device):
    call = SMALL[name]
    inputs = time_decode.make_fp8_inputs(call, device)
    judge = time_decode.Judge(call, inputs)
    for impl, make in time_decode.in_fp8(inputs).items():
        out = make()()
        judge.judge(out).raise_if_bad(impl)
        assert not judge.judge(out * 1.1).ok
        assert time_decode.Run(impl, call).bytes == call.bytes // (2 if "fp8" in impl else 1)


SHORT = Setting("small", 2, 0, 0, 1)


@pytest.fixture
def small(gpu, monkeypatch):
    """The script on a CPU in the place of the GPU, with small calls."""
    monkeypatch.setattr(time_decode, "DEVICE", "cpu")
    monkeypatch.setattr(time_decode, "COPIED", 1000)
    for name in ("CALLS", "TUNED"):
        monkeypatch.setattr(time_decode, name, list(SMALL.values()))
    for name in ("BOOK", "SWEEP"):
        monkeypatch.setattr(time_decode, name, SHORT)
    monkeypatch.setattr(time_decode, "PAIRS", [SMALL["batch"]])
    monkeypatch.setattr(time_decode.node, "wait", lambda: None)
    monkeypatch.setattr(time_decode.timing, "host_us", lambda make: 10.0)
    monkeypatch.setattr(time_decode.device, "num_sms", lambda index: 2)
    monkeypatch.setattr(launch, "counter", lambda index, size: torch.zeros(size, dtype=torch.int32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
def test_the_record(small, tmp_path, capsys, monkeypatch):
    for name in ("CALLS", "TUNED"):
        monkeypatch.setattr(time_decode, name, [SMALL["ragged"]])
    path = tmp_path / "decode.json"
    assert time_decode.main(["--out", str(path)]) == 0
    record = json.loads(path.read_text())
    assert set(record["tables"]) == {"calls", "pairs", "fp8", "host"}
    ours = {row["impl"]: row["status"] for row in record["tables"]["fp8"]["rows"]}
    assert len(ours) == 9 and set(ours.values()) == {"ok"}
    table = Table.of("calls", record["tables"]["calls"]["rows"], record, False)
    call = SMALL["ragged"]
    row = table.one(call.shape, impl="attnlib")
    assert row["gb_per_s"] == pytest.approx(call.bytes / row["ms"] * 1e-6, rel=1e-3) and "tflops" not in row
    assert verdict.judge(table, call.shape, "attnlib", "attnlib, fixed").word == "tie"
    status = {row["impl"]: row["status"] for row in table.select(call.shape)}
    peers = [status.pop(impl) for impl in list(status) if not impl.startswith("attnlib")]
    assert "not installed" in peers and peers.count("ok") == 2, peers  # the copies
    assert len(status) == 7 and set(status.values()) == {"ok"}
    assert table.one(call.shape, impl="copy")["percent_of_copy"] == 100
    assert "GB/s" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
def test_tables_of_their_own_go_into_the_record(small, tmp_path, monkeypatch):
    path = tmp_path / "decode.json"
    monkeypatch.setattr(time_decode, "CALLS", [SMALL["batch"]])
    assert time_decode.main(["--fp8", "--out", str(path)]) == 0
    first = json.loads(path.read_text())["tables"]
    assert time_decode.main(["--host", "--out", str(path)]) == 0
    second = json.loads(path.read_text())["tables"]
    assert set(first) == {"fp8"} and set(second) == {"fp8", "host"}
    assert second["fp8"]["rows"] == first["fp8"]["rows"]
    monkeypatch.setattr(time_decode, "CLEAN", [SMALL["ragged"]])
    assert time_decode.main(["--clean", "--out", str(path)]) == 0
    third = json.loads(path.read_text())
    assert set(third["tables"]) == {"fp8", "host", "clean"} and "256 MiB read" in third["method"]["timer"]
    ours = [row["impl"] for row in third["tables"]["clean"]["rows"] if row["impl"].startswith("attnlib")]
    assert ours == ["attnlib", "attnlib, pages of 64", "attnlib (control)"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
def test_a_wrong_one_gets_no_time(small, monkeypatch, capsys):
    right = time_decode.attention_decode
    monkeypatch.setattr(time_decode, "attention_decode", lambda *args, **options: 2 * right(*args, **options))
    assert time_decode.main(["--only", "ragged"]) == 1
    assert "wrong max error" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
def test_candidates_are_right_and_stand_in_a_table(small, monkeypatch, capsys):
    monkeypatch.setattr(tune_decode, "TUNED", dict.fromkeys(tune_decode.PARTS, [Call((40, 7), 4, 2, 16)]))
    monkeypatch.setattr(tune_decode, "SWEEP", Setting("small", 1, 0, 0, 1))
    monkeypatch.setattr(tune_decode, "LARGE", dict(list(tune_decode.LARGE.items())[:2]))
    assert tune_decode.main([]) == 0
    shown = capsys.readouterr().out
    rows = [f"attnlib, {name}" for name in tune_decode.NEXT]
    rows += ["attnlib, as it chooses", *[f"attnlib, {name}" for name in tune_decode.LARGE]]
    rows += [f"attnlib fp8, {name}" for name in tune_decode.TILES]
    rows += [f"attnlib fp8, pages of {page}, {name}" for page in (16, 64) for name in tune_decode.TILES]
    rows += [f"attnlib, pages of {page}{more}" for page in (16, 64) for more in ("", ", 3 stages")]
    rows += [f"attnlib fp8, pages of {page}" for page in (16, 64)]
    controls_and_copies = 4 + 4 + 4 + 5
    assert all(row in shown for row in rows) and shown.count("GB/s") == len(rows) + controls_and_copies
    right = tune_decode.with_config
    monkeypatch.setattr(tune_decode, "with_config", lambda *args, **rest: lambda: 2 * right(*args, **rest)())
    assert tune_decode.main(["--only", "pages"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu(capsys):
    assert time_decode.main([]) == 2
    assert "compute capability 9.x" in capsys.readouterr().err


PACKAGED = ["flashinfer", "flashinfer, persistent", "flashinfer, xqa", "cudnn, lengths"]


@pytest.mark.parametrize("name", PACKAGED)
def test_a_peer_that_is_not_there_is_named(name, device, monkeypatch, tmp_path):
    """And where it may lie instead."""
    made = time_decode.implementations(time_decode.make_inputs(SMALL["batch"], device))
    package = "cudnn" if name.startswith("cudnn") else "flashinfer"
    monkeypatch.setitem(time_decode.sys.modules, package, None)
    with pytest.raises(ImportError, match=f"^{package}"):
        made[name]()
    monkeypatch.setenv("ATTNLIB_PEERS", str(tmp_path))
    (tmp_path / "a_peer.py").write_text("found = True")
    assert time_decode.decode_peers.package("a_peer").found


def test_pages_hold_the_caches(device):
    k = torch.randn(2, 3, 64, 8)
    pages = time_decode.decode_peers.in_pages(k, -k, None, 16)
    whole = pages.k[pages.table.long()].flatten(1, 2).transpose(1, 2)
    assert torch.equal(whole, k) and pages.used.tolist() == [64, 64]
    assert torch.equal(pages.v[pages.table.long()].flatten(1, 2).transpose(1, 2), -k)
    begins, listed, last = time_decode.decode_peers._listed(
        pages._replace(used=torch.tensor([17, 64], dtype=torch.int32)), 16
    )
    assert begins.tolist() == [0, 2, 6] and last.tolist() == [1, 16]
    assert listed.tolist() == [*pages.table[0, :2].tolist(), *pages.table[1].tolist()]
