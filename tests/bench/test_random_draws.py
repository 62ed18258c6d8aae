"""The script that draws calls for a GPU: what it draws is valid and varied, and what fails is told."""

from __future__ import annotations

import pytest
import random_draws  # noqa: E402
import torch
from draws import Draw  # noqa: E402


def test_draws_are_the_same_every_time_and_varied():
    calls = [random_draws.draw(n) for n in range(2000)]
    assert calls == [random_draws.draw(n) for n in range(2000)]
    kinds = {random_draws.kind(call) for call, _, _ in calls}
    assert len(kinds) == 3 * 2 * 4
    assert {impl for _, impl, _ in calls} == {None, "triton"}
    assert {deterministic for _, _, deterministic in calls} == {True, False}
    assert {place for call, _, _ in calls for place in call.layouts} == set(range(len(random_draws.LAYOUTS)))
    for call, _, _ in calls:
        assert sum(q for q, _ in call.lengths) > 0 and sum(k for _, k in call.lengths) > 0
        assert 8 <= call.head_dim <= 256 and call.head_dim % 8 == 0
        assert call.varlen or len(call.lengths) == 1
    assert any(0 in pair for call, _, _ in calls for pair in call.lengths)  # empty sequences


def test_draws_of_decoding_are_valid_and_varied():
    calls = [random_draws.draw_decode(n) for n in range(2000)]
    assert calls == [random_draws.draw_decode(n) for n in range(2000)]
    for call in calls:
        starts = call.starts or (0,) * len(call.counts)
        assert all(0 <= s <= n <= call.room for s, n in zip(starts, call.counts, strict=True))
        assert 8 <= call.head_dim <= 256 and call.head_dim % 8 == 0 and call.heads % call.kv_heads == 0
        assert call.page is None or call.lengths is not None or call.room % call.page == 0
    for name in ("dtype", "split", "kind", "page", "causal", "same_launch", "queries"):
        assert len({getattr(call, name) for call in calls}) > 1
    assert any(call.starts for call in calls) and any(call.window for call in calls)
    assert max(sum(call.counts) for call in calls) > 50000


def test_failures_are_counted_and_told(monkeypatch, capsys):
    def check(call: Draw, device, impl, deterministic):
        if call.seed % 10 == 3:
            raise AssertionError(f"bad {call.seed}")

    monkeypatch.setattr(random_draws, "check", check)
    found = random_draws.run(range(50), "cpu", 60)
    assert found["calls"] == 50 and found["failed"] == 5 and sum(found["kinds"].values()) == 50
    assert [failure["number"] for failure in found["failures"]] == [3, 13, 23, 33, 43]
    assert found["failures"][0]["reason"] == "AssertionError: bad 3"
    assert "43" in capsys.readouterr().out
    assert random_draws.run(range(50), "cpu", -1)["calls"] == 0


def test_a_lost_gpu_ends_the_run(monkeypatch):
    def check(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(random_draws, "check", check)
    assert len(random_draws.run(range(50), "cpu", 60)["failures"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert random_draws.main(["--seconds", "1"]) == 2
    assert "need a CUDA GPU" in capsys.readouterr().err
