"""What tests/gpu/time_entmax.py times on a GPU: its inputs, its record, and no time for wrong results."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest
import time_entmax
import torch
from timed_cpu import gpu  # noqa: F401  (a fixture)

from attnlib.bench import entmax_peers
from attnlib.bench.records import Table
from attnlib.bench.setting import Setting
from attnlib.bench.shapes import Shape
from attnlib.kernels.reference import entmax as reference

IMPLS = {f"{name}, {way}" for name in ("attnlib", "attnlib, softmax") for way in ("forward", "backward")}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")


def _missing(name: str):
    raise ImportError(name)


@pytest.fixture
def small(gpu, monkeypatch):
    """The script on a CPU in the place of the GPU, with small calls."""
    monkeypatch.setattr(time_entmax, "DEVICE", "cpu")
    monkeypatch.setattr(time_entmax, "LENGTHS", (70,))
    monkeypatch.setattr(time_entmax, "CODES", (2,))
    monkeypatch.setattr(time_entmax, "JUDGED", 20)
    monkeypatch.setattr(time_entmax, "shape_of", lambda n: Shape(1, 1, min(n, 70), 64, True, "bfloat16"))
    monkeypatch.setattr(time_entmax.timing, "estimate_ms", lambda call, cold: 2.0)
    monkeypatch.setattr(time_entmax, "ALONE", (70,))
    for name in ("attention_entmax", "attention"):  # the references, as the interpreter takes seconds
        slow = getattr(time_entmax, name)
        quick = lambda *x, slow=slow, **how: slow(*x, **how, impl="reference")  # noqa: E731
        monkeypatch.setattr(time_entmax, name, quick)
    monkeypatch.setattr(entmax_peers, "package", _missing)
    monkeypatch.setattr(time_entmax, "aside", contextlib.nullcontext)
    monkeypatch.setattr(time_entmax, "captured", lambda call, stream: call)
    monkeypatch.setattr(time_entmax, "compile_all", lambda tune: None)
    monkeypatch.setattr(time_entmax.timing, "host_us", lambda call, n: 1.0)
    for name in ("BOOK", "SWEEP"):
        monkeypatch.setattr(time_entmax, name, Setting("small", 1, 0, 0, 1))


def test_codes_make_blocks_without_weight(monkeypatch):
    monkeypatch.setattr(time_entmax, "DEVICE", "cpu")
    monkeypatch.setattr(time_entmax, "shape_of", lambda n: Shape(1, 1, n, 64, True, "bfloat16"))
    q, k, _, _ = time_entmax.inputs_of(512, 4)
    weights, _ = reference.entmax((q @ k.mT).double() * time_entmax.SCALE, 1.5)
    active = (weights[0, 0].unflatten(0, (-1, 64)).unflatten(2, (-1, 64)) > 0).any(3).any(1)
    blocks = torch.arange(8)
    assert torch.equal(active, blocks[:, None] % 4 == blocks % 4)


def test_the_record(small, tmp_path, capsys):
    path = tmp_path / "entmax.json"
    assert time_entmax.main(["--out", str(path), "--seconds", "inf"]) == 0, capsys.readouterr().out
    record = json.loads(path.read_text())
    assert set(record["tables"]) == {"calls", "lists", "blocks", "kernels"}
    table = Table.of("calls", record["tables"]["calls"]["rows"], record, False)
    status = {row["impl"]: row["status"] for row in table.rows}
    assert {impl: word for impl, word in status.items() if impl in IMPLS} == dict.fromkeys(IMPLS, "ok")
    assert status["adasplash 2, forward"] == "not installed"
    names = [row["kernel"] for row in record["tables"]["kernels"]["rows"][:8]]
    assert names[:4] == ["entmax_bound", "entmax_flags", "entmax_lists", "attention_entmax_forward"]
    assert names[6] == "entmax_lists of queries"
    dense, coded = record["tables"]["lists"]["rows"]
    assert 0 < coded["keys"] < 1 and dense["blocks"] == 1
    assert "left out" not in record["method"] and table.rows[0]["host_us"] == 1.0


def test_what_there_is_no_time_for_is_named(small, tmp_path, capsys):
    path = tmp_path / "entmax.json"
    assert time_entmax.main(["--out", str(path), "--seconds", "0"]) == 0
    assert json.loads(path.read_text())["method"]["left out"] == [
        "kernels, S 70", "blocks, S 16384, 2 codes", "calls, S 70"
    ]  # fmt: skip
    assert "blocks, S 16384, 2 codes" in capsys.readouterr().out


def test_shares_compile_each_configuration_once(monkeypatch):
    """And launch none."""
    from triton.runtime.autotuner import Autotuner

    compiled = []

    def run(*args, grid, warmup, **options):
        assert warmup
        compiled.append((args, options["number"]))

    configs = [SimpleNamespace(all_kwargs=lambda number=number: {"number": number}) for number in range(5)]
    kernel = SimpleNamespace(configs=configs, fn=SimpleNamespace(run=run))
    usual = Autotuner.run
    for share in range(3):
        with entmax_peers.compile_share(share, 3):
            for name in "ab":
                Autotuner.run(kernel, name, grid=(1,), warmup=False)
    assert sorted(compiled) == [((name,), number) for name in "ab" for number in range(5)]
    assert Autotuner.run is usual


def test_adasplash_chooses_in_short_windows(gpu):  # noqa: F811
    """Quantiles of at most 100 calls."""
    assert entmax_peers.choose(lambda: None, (0.5, 0.0, 1.0)) == [2.0, 1.0, 3.0]
    assert len(gpu.order) < 20


def test_one_process_compiles_each_implementation(small):
    work = time_entmax.jobs(False)
    assert len(work) == 6 + time_entmax.SHARES
    work[0]()
    with pytest.raises(ImportError, match="adasplash"):
        work[-1]()


def test_a_wrong_one_gets_no_time(small, monkeypatch, capsys):
    right = time_entmax.attention_entmax
    monkeypatch.setattr(time_entmax, "attention_entmax", lambda *args, **options: 2 * right(*args, **options))
    inputs = time_entmax.inputs_of(70)
    judge = time_entmax.Judge(inputs, True)
    assert not judge.judge(time_entmax.ours()(*inputs[:3])).ok
    assert judge.judge(right(*inputs[:3], causal=True)).ok


def test_tuned_configurations(small):
    """Each differs from the usual one in a tile; their kernels are tested elsewhere."""
    made = time_entmax.tuned(time_entmax.inputs_of(70))
    tiles = [*time_entmax.FORWARD_TILES.values(), *time_entmax.BACKWARD_TILES.values()]
    assert len(made) == 2 + sum(map(len, tiles))
