"""The script that times generate(): its parts with a tiny model on this machine."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra attnlib[hf]")

import measure_generate as script  # noqa: E402

from attnlib.bench import records, verdict  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.book.training import LlamaShape  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TINY = LlamaShape(layers=1, width=32, heads=4, kv_heads=2, head_dim=16, hidden=48, vocab=100, tied=True)


@pytest.fixture(scope="module")
def models():
    return script.build(TINY, torch.float32, "cpu")


def test_both_models_have_the_same_weights(models):
    ours, theirs = (models[impl].state_dict() for impl in ("attnlib", "sdpa"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert sum(p.numel() for p in models["sdpa"].parameters()) == TINY.parameters
    assert [models[impl].config._attn_implementation for impl in models] == list(models)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_logits_of_a_step_are_judged(models, cache, monkeypatch):
    ids = script.prompts(models["attnlib"], 2, 9)
    found = script.errors(models, ids, cache)
    assert max(found["attnlib"], found["sdpa"]) < 1e-5 * found["size"]
    right = script.logits_of_a_step

    def planted(model, ids, cache):
        return right(model, ids, cache) + 0.1 * (model is models["attnlib"])

    monkeypatch.setattr(script, "logits_of_a_step", planted)
    assert "RMS error of the logits 1.0" in script.wrong(script.errors(models, ids, cache))
    assert script.wrong({"attnlib": math.nan, "sdpa": 1.0, "size": 1.0})
    assert script.wrong({"attnlib": 1.3, "sdpa": 1.0, "size": 1.0})
    assert not script.wrong({"attnlib": 1.2, "sdpa": 1.0, "size": 1.0})


def test_rows(models):
    settings = [script.Setting("dynamic", 2, 7, 4), script.Setting("static", 1, 5, 3)]
    found = list(script.rows(models, settings, 2, time.monotonic() + 1000))
    assert [row["impl"] for row in found] == ["attnlib", "sdpa", "sdpa (control)"] * 2
    assert {row["status"] for row in found} == {"ok"}
    for row in found:
        assert row["same_tokens"] == 1.0 and len(row["round_ms"]) == 2
        assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"] and row["prompt_ms"] > 0
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 1e3 / row["ms"])
    # What the book asks of them: a verdict, and the noise of the run.
    some = [row for row in found if row["cache"] == "dynamic"]
    table = records.Table.of("dynamic", some, {"gpu": {"name": "x"}, "date": "x"}, True)
    judged = verdict.judge(table, Shape.of_row(some[0]), "attnlib", "sdpa")
    assert judged.noise is not None and judged.ratio == pytest.approx(some[1]["ms"] / some[0]["ms"])


def test_what_can_not_run_is_a_row(models, monkeypatch):
    settings = [script.Setting("dynamic", 1, 5, 3), script.Setting("dynamic", 1, 6, 3)]
    [row, _] = script.rows(models, settings, 2, time.monotonic() - 1)
    assert row["status"] == "not run: no time was left" and "no time was left" in script.show(row)
    monkeypatch.setattr(script, "wrong", lambda found: "planted")
    assert {row["status"] for row in script.rows(models, settings, 2, math.inf)} == {"wrong"}
    monkeypatch.undo()

    def fails(*arguments):
        raise RuntimeError("planted")

    monkeypatch.setattr(script, "measured", fails)
    assert {row["reason"] for row in script.rows(models, settings, 2, math.inf)} == {"RuntimeError: planted"}


class Thread(threading.Thread):
    """A process that is none. It can't be ended, so it has to end by itself."""

    def terminate(self) -> None:
        pass


def test_processes_prepare_side_by_side_and_measure_one_after_the_other(monkeypatch):
    settings = [script.Setting(cache, 1, 5, 3) for cache in ("static", "dynamic", "compiled")]
    settings.append(script.Setting("compiled", 2, 5, 3))
    assert script.groups(settings) == [[settings[2]], [settings[3]], settings[:2]]
    asked = script.Asked(TINY, torch.float32, "cpu", 1, math.inf)
    prepared, prepare = [], script.prepare

    def noted(models, setting):
        if setting.batch == 2:
            raise RuntimeError("planted")
        prepared.append(setting.cache)
        prepare(models, setting)

    monkeypatch.setattr(script, "prepare", noted)
    found = list(script.side_by_side(asked, settings, time.monotonic() + 600, Thread))
    told = [(row["cache"], row["impl"], row["status"]) for row in found]
    impls = "attnlib", "sdpa", "sdpa (control)"
    assert told[:4] == [*(("compiled", impl, "ok") for impl in impls), ("compiled", "attnlib", "failed")]
    assert told[4:] == [(cache, impl, "ok") for cache in ("static", "dynamic") for impl in impls]
    assert prepared == ["compiled", "static", "dynamic"] and found[3]["reason"] == "RuntimeError: planted"


def test_what_is_not_ready_in_time_is_a_row(monkeypatch):
    def work(asked, settings, pipe):
        if settings[0].batch == 1:
            pipe.send("ready")  # and ends
        else:
            time.sleep(5)

    monkeypatch.setattr(script, "work", work)
    asked = script.Asked(TINY, torch.float32, "cpu", 2, math.inf)
    settings = [script.Setting("compiled", batch, 5, 3) for batch in (1, 2)]
    begin = time.monotonic()
    found = list(script.side_by_side(asked, settings, begin + 3, Thread))
    status = {row["batch"]: row["status"] for row in found}
    assert status == {1: "failed: its process ended", 2: "not run: not compiled in time"}
    assert time.monotonic() - begin < 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert script.main([]) == 2
    with pytest.raises(SystemExit):
        script.main(["--caches", "paged"])
    assert "--caches: expected some of dynamic, static, compiled, got paged" in capsys.readouterr().err
