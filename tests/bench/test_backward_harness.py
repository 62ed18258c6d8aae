"""The comparison of backward passes, with the GPU replaced: what is judged, timed and credited."""

import json
import math
import types

import pytest
import torch
import torch.nn.functional as F
from timed_cpu import gpu  # noqa: F401  (a fixture)

from attnlib.bench import backward as bench_backward
from attnlib.bench import peers, records, roofline
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.setting import Setting
from attnlib.bench.shapes import Shape
from attnlib.book import lesson

TWO = Setting("test", rounds=2, pause_ms=0, warmup_ms=2, rep_ms=5)
SHAPE = Shape(2, 2, 40, 16)


def good(q, k, v, causal, sm_scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)


class Faulty(torch.autograd.Function):
    """The right output with a wrong gradient."""

    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale, fault):
        ctx.save_for_backward(q, k, v)
        ctx.call = causal, sm_scale, fault
        return good(q, k, v, causal, sm_scale)

    @staticmethod
    def backward(ctx, d_out):
        causal, sm_scale, fault = ctx.call
        with torch.enable_grad():
            tensors = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            gradients = torch.autograd.grad(good(*tensors, causal, sm_scale), tensors, d_out)
        return *fault(*gradients), None, None, None


def faulty(fault):
    return lambda *call: Faulty.apply(*call, fault)


FAULTS = {
    "dq": lambda dq, dk, dv: (dq * 1.1, dk, dv),
    "dk": lambda dq, dk, dv: (dq, dk * math.nan, dv),
    "dv": lambda dq, dk, dv: (dq, dk, torch.cat((dv[:, :, :-1], 0 * dv[:, :, -1:]), 2)),
}


def rows_of(implementations, **options):
    rows = bench_backward.collect(implementations, [SHAPE], setting=TWO, **options)
    return {row["impl"]: row for row in rows if "control_of" not in row}


def test_a_good_backward_gets_errors_and_the_speed_of_five_products(gpu):
    row = rows_of({"13_x": good})["13_x"]
    assert row["status"] == "ok", row.get("reason")
    assert row["tflops"] == pytest.approx(2.5 * roofline.flops(SHAPE) / row["ms"] * 1e-9)
    for name in ("dq", "dk", "dv"):
        assert 0 < row[f"{name}_max"] <= row[f"{name}_budget_max"]
        assert 0 < row[f"{name}_rms"] <= row[f"{name}_budget_rms"]


@pytest.mark.parametrize("name", FAULTS)
def test_one_wrong_gradient_is_enough(gpu, name):
    row = rows_of({"13_x": faulty(FAULTS[name])})["13_x"]
    assert row["status"] == "wrong" and f"{name}:" in row["reason"]
    assert "ms" not in row and "tflops" not in row


def test_memory_and_missing_peers_end_nothing(gpu, monkeypatch):
    def no_memory(*call):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(peers, "_fa3_forward", lambda: (_ for _ in ()).throw(ImportError("no build")))
    rows = rows_of({"13_x": no_memory, "fa3": None, "math": None, "13_y": good})
    found = {impl: row["status"] for impl, row in rows.items()}
    assert found == {"13_x": "out of memory", "fa3": "not installed", "math": "ok", "13_y": "ok"}


@pytest.mark.parametrize("deterministic", [False, True])
def test_fa3_gets_its_own_layout_and_gives_ours(deterministic, gpu, monkeypatch):
    """The operator's argument list: 6 tensors, 3 outputs, 6 empty options, then scale, mask and 5 more."""
    seen = []

    def fwd(*call):
        q, k, v = (x.transpose(1, 2) for x in call[:3])
        out = good(q, k, v, call[24], call[23])
        return out.transpose(1, 2).contiguous(), torch.zeros(*q.shape[:3])

    def bwd(*call):
        assert len(call) == 22 and call[9:15] == (None,) * 6 and call[17:] == (-1, -1, 0.0, deterministic, 0)
        d_out, q, k, v = (x.transpose(1, 2).detach() for x in call[:4])
        seen.append(tuple(call[0].shape))
        with torch.enable_grad():
            tensors = [x.requires_grad_() for x in (q, k, v)]
            gradients = torch.autograd.grad(good(*tensors, call[16], call[15]), tensors, d_out)
        for target, gradient in zip(call[6:9], gradients, strict=True):
            target.copy_(gradient.transpose(1, 2))
        return ()

    operators = types.SimpleNamespace(fwd=fwd, bwd=bwd)
    fa3 = peers._FA3Operators.__new__(peers._FA3Operators)
    fa3.operators = operators
    monkeypatch.setattr(peers, "_fa3_forward", lambda: fa3)
    monkeypatch.setitem(peers.PEERS, "fa3", peers.fa3(deterministic=deterministic))
    row = rows_of({"fa3": None})["fa3"]
    assert row["status"] == "ok", row.get("reason")
    assert set(seen) == {(2, 40, 2, 16)}


def test_the_judge_of_parts_is_the_oracle_of_the_whole(monkeypatch):
    shape = Shape(2, 4, 33, 16, True, heads_kv=2)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, h, 33, 16, generator=generator).half() for h in (4, 2, 2)]
    d_out = bench_backward.make_gradient(shape, device="cpu")
    whole = GradientOracle(d_out, *tensors, causal=True)
    monkeypatch.setattr(bench_backward, "_CHUNK_BYTES", 1)
    judge = bench_backward.Judge(d_out, *tensors, True)
    assert len(judge.parts) == 4
    gradients = [(whole.truth[name] * 1.0001).half() for name in ("dq", "dk", "dv")]
    for name, verdict in judge.judge(*gradients).items():
        other = whole.judge(*gradients)[name]
        assert verdict.ok and other.ok
        assert verdict.max_error == other.max_error
        assert verdict.rms_error == pytest.approx(other.rms_error)
    gradients[1][1, 1] += 1  # the last key head of the last batch entry
    found = {name: verdict.ok for name, verdict in judge.judge(*gradients).items()}
    assert found == {"dq": True, "dk": False, "dv": True}


def test_measure_stores_and_replays(gpu, monkeypatch):
    monkeypatch.setattr(lesson, "_current", "20_backward")
    options = {"setting": TWO}
    table = lesson.measure_backward("backward", {"13_x": good}, [SHAPE], **options)
    assert not table.replayed and table.one(SHAPE, impl="13_x")["status"] == "ok"
    path = records.data_dir() / "nvidia-h200" / "20_backward.json"
    assert "2.5" in json.loads(path.read_text())["method"]["flops"]
    monkeypatch.setenv("ATTNLIB_REPLAY", "1")
    again = lesson.measure_backward("backward", {"13_x": good}, [SHAPE], **options)
    assert again.replayed and again.rows == table.rows


@pytest.mark.parametrize("name", [None, *FAULTS])
def test_verify_gradients_catches(name, monkeypatch):
    shown = []
    monkeypatch.setattr(lesson, "_display", shown.append)
    options = {"head_dims": (16,), "lengths": (1, 40), "kinds": ("normal", "large")}
    if name is None:
        lesson.verify_gradients(good, **options)
        assert "✘" not in shown[0]["text/markdown"] and "1, 40" in shown[0]["text/markdown"]
    else:
        with pytest.raises(AssertionError, match="gradients are wrong in"):
            lesson.verify_gradients(faulty(FAULTS[name]), **options)
        assert "✘" in shown[0]["text/markdown"]
