"""The scripts of tests/gpu that need several GPUs, on two processes of a CPU: what they write, and that they
end in time."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import distributed_jobs
import pytest
import script_jobs as jobs
from distributed_jobs import Case
from ranks import Ranks

from attnlib.bench.paths import ROOT

README = ROOT / "README.md"
QUICK = {"SETTLE_MS": 1, "TIMED_MS": 1, "ROUNDS": range(2, 3), "CALL_SECONDS": 0}


def tables(path) -> dict[str, list[dict]]:
    return {name: table["rows"] for name, table in json.loads(path.read_text())["tables"].items()}


def test_time_distributed(two, tmp_path):
    out = tmp_path / "record.json"
    arguments = ["--device", "cpu", "--out", str(out), "--lengths", "16,32"]
    assert two.run(jobs.run, "time_distributed", arguments, QUICK) == [0, 0]
    found = tables(out)
    assert {row["status"] for row in found["checks"]} == {"ok"}
    in_order = {(row["call"], row["result"]) for row in found["checks"] if row["method"] == "rows in order"}
    assert in_order == {("S16 causal", name) for name in ("out", "dq", "dk", "dv")}
    for which in ("forward", "backward"):
        rows = {(row["call"], row["impl"]): row for row in found[which]}
        assert [call for call, impl in rows if impl == "attnlib"][:2] == ["S16 causal", "S16 dense"]
        for name in ("attnlib, one GPU", "attnlib, one GPU, on each", "attnlib", "attnlib (control)",
                     "attnlib, without transfers", "attnlib, rows in order", "attnlib, ulysses"):  # fmt: skip
            row = rows["S16 causal", name]
            assert row["status"] == "ok" and row["rounds"] == 2 and row["speedup"] > 0, row
        others = {call for call, impl in rows if impl == "attnlib, rows in order"}
        assert others == {"S16 causal"}, others
        for call in ("S16 dense", "S32 causal"):
            row = rows[call, "attnlib"]
            assert row["status"] == "ok" and row["rms_from_one_gpu"] <= 4e-3, row
        assert ("S32 dense", "torch context_parallel, cuDNN, alltoall") in rows or which == "backward"
        assert rows["S16 causal", "ring-flash-attn, FA3, zigzag"]["status"] == "not installed"


def test_time_distributed_of_long_calls(two, tmp_path):
    """Those alone, with the peers, in a table that is all there."""
    out, long = tmp_path / "record.json", {**QUICK, "LONG": 1.5 * 4 * 32 * 32 * 16 * 128}
    arguments = ["--device", "cpu", "--out", str(out), "--lengths", "16,32", "--long", "--rounds", "2"]
    assert two.run(jobs.run, "time_distributed", arguments, long) == [0, 0]
    found = tables(out)
    assert [row["call"] for row in found["backward"] if row["impl"] == "attnlib"] == ["S32 dense"]
    names = {"attnlib, one GPU", "attnlib, one GPU, on each", "attnlib", "attnlib (control)"}
    names |= {"ring-flash-attn, FA3, ring", "torch context_parallel, cuDNN, alltoall"}
    assert {row["impl"] for row in found["backward"]} == names and "forward" not in found


def test_time_distributed_of_a_wrong_result(two, tmp_path):
    """What is right at the lengths that are checked first may be wrong at a later one."""
    out = tmp_path / "record.json"
    arguments = ["--device", "cpu", "--out", str(out), "--lengths", "16,32"]
    assert two.run(jobs.run_wrong_beyond, 16, arguments, QUICK) == [1, 1]
    found = tables(out)
    assert {row["status"] for row in found["checks"]} == {"ok"}
    for which in ("forward", "backward"):
        status = {row["call"]: row["status"] for row in found[which] if row["impl"] == "attnlib"}
        assert status["S16 causal"] == "ok" and status["S32 causal"] == "wrong"


def test_time_distributed_on_four_ranks(tmp_path):
    """Every method and the hybrid, in a record of another name; and the hybrid is exact."""
    ranks, out = Ranks(4), tmp_path / "record.json"
    try:
        arguments = ["--device", "cpu", "--out", str(out), "--lengths", "64"]
        assert ranks.run(jobs.run, "time_distributed", arguments, QUICK) == [0] * 4
        hybrid = [Case(causal, method="ring", mesh=(2, 2)) for causal in (True, False)]
        for found in ranks.run(distributed_jobs.many_errors, hybrid):
            assert max(map(max, found)) <= 1e-6, found
        for what in ("attention", "unshard"):
            for error, after in ranks.run(distributed_jobs.one_rank_of_a_mesh, what):
                assert error != "no error" and "did not come" not in error and after == "no error", error
    finally:
        ranks.close()
    found = tables(out)
    methods = {"all_gather", "ring", "ulysses", "rows in order", "hybrid"}
    assert {row["method"] for row in found["checks"]} == methods
    for which in ("forward", "backward"):
        rows = {row["impl"]: row for row in found[which] if row["call"] == "S64 causal"}
        for name in ("attnlib", "attnlib, without transfers", "attnlib, ring", "attnlib, hybrid"):
            assert rows[name]["status"] == "ok" and len(rows[name]["rank_ms"]) == 4, rows[name]
        assert rows["attnlib, one GPU"]["rank_ms"][1:] == [None] * 3


def test_time_distributed_out_of_time(two, tmp_path):
    out = tmp_path / "record.json"
    arguments = ["--device", "cpu", "--out", str(out), "--lengths", "16"]
    tuned = [*arguments, "--tune", "--settings", "heads", "--rounds", "3"]
    assert two.run(jobs.run, "time_distributed", tuned, QUICK) == [0, 0]
    assert two.run(jobs.run, "time_distributed", [*arguments, "--seconds", "0"], QUICK) == [0, 0]
    found = tables(out)
    assert {row["impl"] for row in found["settings_backward"]} >= {"attnlib, one GPU", "one group of heads"}
    assert {row["status"] for row in found["forward"]} == {"not timed: no time was left"}


def test_time_fastattention(two, tmp_path):
    out = tmp_path / "record.json"
    small = {"LAYER_LENGTHS": (32, 64), "LAYER_HEADS": 4, "LAYER_KV_HEADS": 2, "OUTPUTS": 24, "HEAD_DIM": 16,
             "CHUNKS": (1, 2, 4), "WINDOW_MS": 1, "IMPL": "reference"}  # fmt: skip
    arguments = ["--device", "cpu", "--out", str(out), "--tables", "all_reduce"]
    assert two.run(jobs.run, "time_fastattention", arguments, small) == [0, 0]
    rows = {(row["seqlen"], row["impl"]): row for row in tables(out)["all_reduce"]}
    assert {row["gpus"] for row in rows.values()} == {2}
    for length in (32, 64):
        for name in ("1 chunk", "4 chunks", "4 chunks (control)", "4 chunks, first large",
                     "4 chunks, room for NCCL", "row_parallel_output"):  # fmt: skip
            assert rows[length, name]["rms_from_one_gpu"] <= 4e-3
        assert "exposed_ms" in rows[length, "no AllReduce, 2 chunks"]


def test_a_sum_over_more_ranks_is_rounded_more_often():
    """By chance, with the share of the whole that each sum has: one GPU, parts of three, sums of two and of
    three."""
    script = jobs.script("time_fastattention")
    assert script.tolerance(3) == pytest.approx(script.ROUNDING * math.sqrt(1 + 1 + 2 / 3 + 1))


def test_what_the_profile_says_of_a_call():
    """A transfer under attention, and one for which attention has to wait."""
    script = jobs.script("time_distributed")
    kernels = [{"kind": kind, "begin_ms": begin, "ms": ms} for kind, begin, ms in (
        ("transfer", 0.5, 2), ("attention", 1, 3), ("transfer", 4, 2), ("attention", 6, 1), ("merge", 7, 1))]
    assert script.of_call(kernels) == {"ms": 8, "transfer_begins": 0.5, "attention_begins": 1,
                                       "transfer_ms": 4, "idle_ms": 3}  # fmt: skip


def test_each_call_has_an_order_of_its_own(monkeypatch):
    """What a window follows changes its clock."""
    script = jobs.script("time_distributed")
    monkeypatch.setattr(script.ranks, "late", lambda until: False)
    monkeypatch.setattr(script, "ROUNDS", range(3, 4))

    def order(seed: str) -> list[str]:
        taken: list[str] = []
        calls = {name: SimpleNamespace(take=lambda name=name: taken.append(name)) for name in "abcdefgh"}
        script.in_rounds(calls, 0.0, seed)
        return taken

    first, again, other = (order(f"S64 causal {which}") for which in ("forward", "forward", "backward"))
    assert first == again != other and sorted(first) == sorted(3 * "abcdefgh")


def test_a_script_on_cpus_under_torchrun(tmp_path):
    """As README has it for a machine without GPUs."""
    out = tmp_path / "record.json"
    command = re.search(r"`(torchrun .*train_long.py --device cpu [^`]*)`", README.read_text())[1].split()
    assert subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", *command[1:],
                           "--out", str(out)], cwd=ROOT, timeout=200).returncode == 0  # fmt: skip
    assert [row["status"] for row in tables(out)["agreement"]] == ["ok"] * 3


def test_train_long(two, tmp_path):
    """A model trained on one sequence over two ranks is that of one rank, selective checkpointing too."""
    out = tmp_path / "record.json"
    arguments = ["--device", "cpu", "--out", str(out), "--tokens", "44", "--steps", "3", "--checkpointing"]
    exact = {"TOLERANCE": {"loss": 1e-5, "gradient norm": 1e-5, "gradients of the first step": 1e-5}}
    assert two.run(jobs.run, "train_long", [*arguments, "selective"], exact) == [0, 0]
    found = tables(out)
    steps = [(row["gpus"], row["step"]) for row in found["steps"]]
    assert steps == [(gpus, i) for gpus in (1, 2) for i in range(3)]
    assert [row["status"] for row in found["agreement"]] == ["ok"] * 3
    assert found["steps"][2]["loss"] < found["steps"][0]["loss"]
