"""tests/gpu/time_s2.py without a GPU: its judges notice what is wrong in any row, and its record."""

from __future__ import annotations

import json

import pytest
import time_s2
import torch
from cases import INTERPRETER_REMARKS
from timed_cpu import gpu  # noqa: F401  (a fixture)

from attnlib import S2Pattern, attention
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.setting import Setting
from attnlib.bench.shapes import Shape

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU as the GPU")]
PATTERN = S2Pattern(2, local_blocks=1, stride=2)
HYBRID = S2Pattern(2, local_blocks=1, stride=2, dense_heads=1)


def tensors_of(length: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, length, 16, generator=rng).bfloat16() for _ in range(4)]


def differentiated(tensors, mask) -> tuple[torch.Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = attention(*leaves, block_mask=mask, impl="reference")
    return torch.autograd.grad(out, leaves, tensors[3])


@pytest.mark.parametrize("pattern", [PATTERN, HYBRID], ids=["sparse", "hybrid"])
@pytest.mark.parametrize("judged", [64, 512], ids=["last rows", "all"])
def test_the_last_rows_are_judged(pattern, judged, monkeypatch):
    for name in ("JUDGED", "JUDGED_DENSE"):
        monkeypatch.setattr(time_s2, name, judged)
    tensors, mask = tensors_of(320), pattern.mask(320)
    out = attention(*tensors[:3], block_mask=mask, impl="reference")
    gradients = differentiated(tensors, mask)
    for head in range(2):
        judge = time_s2.Judge(tensors, pattern, head, True)
        assert all(verdict.ok for found in (out, gradients) for verdict in judge.verdicts(found))
        whole = GradientOracle(tensors[3], *tensors[:3], mask=mask.to_dense()).truth
        for name, truth in judge.gradients.truth.items():
            assert torch.allclose(truth, whole[name][:, head : head + 1, judge.rows], atol=1e-12)
        for wrong in (0, 1, 2):  # a late row of one gradient, 0 in place of what it is
            bad = [x.clone() for x in gradients]
            bad[wrong][:, head, -40:-30] = 0
            assert [v.ok for v in judge.verdicts(bad)] == [i != wrong for i in range(3)]
        bad = out.clone()
        bad[:, head, -1] = float("nan")
        assert not next(judge.verdicts(bad)).ok


def test_the_definition_of_the_judge_is_that_of_the_mask():
    for pattern in (PATTERN, HYBRID):
        rows = torch.arange(320)
        seen = torch.stack([time_s2.seen_by(pattern, head, rows, 320) for head in range(2)])
        assert torch.equal(seen, pattern.mask(320).to_dense()[0])


@pytest.fixture
def small(gpu, monkeypatch):
    monkeypatch.setattr(time_s2, "DEVICE", "cpu")
    monkeypatch.setattr(time_s2, "LENGTHS", (200,))
    monkeypatch.setattr(time_s2, "CACHES", (200,))
    monkeypatch.setattr(time_s2, "HYBRID_LENGTHS", (200,))
    for name, value in {"BATCH": 1, "HEADS": 2, "WIDTH": 16, "PATTERN": PATTERN}.items():
        monkeypatch.setattr(time_s2, name, value)
    dense = S2Pattern(2, dense_heads=2)
    patterns = {"S2": PATTERN, time_s2.WHOLE: PATTERN, "S2, 2 dense heads": HYBRID, "attnlib": dense}
    monkeypatch.setattr(time_s2, "PATTERNS", patterns)
    monkeypatch.setattr(time_s2, "shape_of", lambda n: Shape(1, 2, n, 16, True, "bfloat16"))
    monkeypatch.setattr(time_s2, "SWEEP", Setting("small", 1, 0, 0, 1))
    monkeypatch.setattr(time_s2.copies_alone, "call_of", lambda q, k, v, mask: lambda: torch.zeros_like(q))
    slow = time_s2.attention  # what is timed: the reference, as the interpreter takes seconds
    monkeypatch.setattr(time_s2, "attention", lambda *x, **how: slow(*x, **how, impl="reference"))
    monkeypatch.setattr(time_s2, "in_form", lambda mask, shape, **changes: (
        lambda q, k, v: time_s2.attention(q, k, v, block_mask=mask)))  # fmt: skip
    monkeypatch.setattr(time_s2, "backward_in_form", lambda tensors, leads, **changes: time_s2.differentiated(
        lambda q, k, v: time_s2.attention(q, k, v, block_mask=time_s2.PATTERN.mask(q.shape[2])), tensors))


def test_the_record(small, tmp_path, capsys):
    path = tmp_path / "s2.json"
    assert time_s2.main(["--out", str(path)]) == 0, capsys.readouterr().out
    tables = json.loads(path.read_text())["tables"]
    assert set(tables) == {"forward", "backward", "decode"}
    for name in ("forward", "backward"):
        rows = {row["impl"]: row for row in tables[name]["rows"] if "control_of" not in row}
        forward = {time_s2.COPIES, time_s2.WHOLE}
        others = forward if name == "forward" else {time_s2.LATE, time_s2.LEAVES}
        assert set(rows) == {"S2", "S2, 2 dense heads", "attnlib"} | others
        assert rows["S2"]["share"] < rows["S2, 2 dense heads"]["share"] < rows["attnlib"]["share"] == 1
        assert "mask_ms" in rows["S2"] and all(row["status"] == "ok" for row in rows.values())
    kept, dense = (row["cache_bytes"] for row in tables["decode"]["rows"][:2])
    assert kept < dense == 2 * 2 * 256 * 16 * 2


def test_tables_are_added_to_the_record(small, tmp_path, monkeypatch):
    path = tmp_path / "s2.json"
    monkeypatch.setattr(time_s2, "prefill_rows", lambda n, gradients, setting: iter([{
        "impl": "S2", "seqlen": n, "status": "ok", "gradients": gradients}]))  # fmt: skip
    monkeypatch.setattr(time_s2, "LENGTHS", (1, 2))
    for name in ("forward", "backward"):
        assert time_s2.main(["--out", str(path), "--tables", name]) == 0
    tables = json.loads(path.read_text())["tables"]
    found = {name: [(row["seqlen"], row["gradients"]) for row in tables[name]["rows"]] for name in tables}
    assert found == {"forward": [(1, False), (2, False)], "backward": [(1, True), (2, True)]}
    with pytest.raises(SystemExit):
        time_s2.main(["--tables", "sideways"])


def test_a_wrong_one_gets_no_time(small, monkeypatch):
    right = time_s2.attention
    monkeypatch.setattr(time_s2, "attention", lambda *args, **how: 2 * right(*args, **how))
    *rows, copies = time_s2.prefill_rows(200, False, time_s2.SWEEP)
    assert {row["status"] for row in rows} == {"wrong"} and not any("ms" in row for row in rows)
    assert copies["impl"] == time_s2.COPIES and copies["status"] == "ok"
    assert "wrong" in time_s2.show("forward", rows[0])
