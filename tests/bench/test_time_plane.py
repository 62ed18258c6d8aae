"""tests/gpu/time_plane.py without a GPU: its cells, its record, and no time for a wrong result."""

from __future__ import annotations

import json
import types
from dataclasses import replace

import pytest
import time_plane
import torch
from timed_cpu import gpu  # noqa: F401  (a fixture)

from attnlib.bench import backward, peers, plane, records
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import make_inputs
from attnlib.bench.plane import KINDS, Cell
from attnlib.bench.setting import Setting
from attnlib.bench.shapes import Shape
from attnlib.kernels.reference.gradients import visible
from attnlib.params import mask_window

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU in the place of the GPU")
KIND = {
    "causal": Shape(1, 2, 40, 16, dtype="bfloat16"),
    "dense": Shape(2, 2, 40, 16, False),
    "gqa4": Shape(1, 8, 40, 16, heads_kv=2),
    "window": Shape(1, 2, 40, 16),
}
SMALL = [[Cell(kind, shape)] for kind, shape in KIND.items()]


def plain(q, k, v, causal, sm_scale, window=None):
    """Attention that knows windows, on (B, H, S, D)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    seen = visible(q.shape[2], k.shape[2], mask_window(causal, window))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=sm_scale)


def package(q, k, v, causal, sm_scale, window_size=None):
    """FlashAttention-3 as its package has it: (B, S, H, D)."""
    return plain(*(x.transpose(1, 2) for x in (q, k, v)), causal, sm_scale, window_size).transpose(1, 2)


@pytest.fixture
def small(gpu, monkeypatch):
    monkeypatch.setitem(plane.ALL, "window", KINDS["window"]._replace(window=(7, 0)))
    monkeypatch.setattr(plane, "groups", lambda: iter(SMALL))
    monkeypatch.setattr(plane, "DIMS", (16,))
    monkeypatch.setattr(time_plane, "compile_all", lambda cells: None)
    monkeypatch.setattr(time_plane, "ROUNDS", Setting("small", 2, 0, 0, 1))
    monkeypatch.setattr(time_plane, "IN_TURN", Setting("small, in turn", 3, 0, 0, 0))
    monkeypatch.setattr(time_plane, "ours", lambda window, *call: plain(*call, window))
    monkeypatch.setattr(peers, "_fa3_forward", lambda: package)


def rows_of(path, table="cells"):
    return json.loads(path.read_text())["tables"][table]["rows"]


def test_the_cells():
    cells = [cell for group in plane.groups() for cell in group]
    assert len(set(cells)) == len(cells) == 2 * 10 * (5 * 4 + 3)
    bf16, fp16 = cells[: len(cells) // 2], cells[len(cells) // 2 :]
    assert fp16 == [Cell(kind, replace(shape, dtype="float16")) for kind, shape in bf16]
    first = list(plane.groups())[: len(KINDS)]
    assert {(cell.kind, cell.shape.seqlen) for group in first for cell in group} == {
        (kind, 4096) for kind in KINDS
    }
    for kind, shape in cells:
        assert shape.batch * shape.seqlen == plane.TOKENS
        assert shape.heads == shape.kv_heads * KINDS[kind].group
        assert 1024 <= shape.heads * shape.head_dim <= 2048


def test_the_named_calls():
    """Once each, of the kind that their shape says, and each window hides keys."""
    assert len(set(plane.NAMED)) == len(plane.NAMED)
    for cell in plane.NAMED:
        one = plane.ALL[cell.kind]
        assert cell.shape.causal == one.causal and not one.varlen, cell
        assert cell.shape.heads == cell.shape.kv_heads * one.group, cell
        assert one.window is None or one.window[0] + 1 < cell.shape.seqlen, cell
    assert [cell.label for cell in plane.NAMED] == [
        "B1 H40 S6000 D80 causal fp16", "B2 H16 S4000 D96 causal fp16", "B2 H16 S3000 D192 causal fp16",
        "B4 H16 S4096 D128 dense fp16", "B2 H16 S8192 D128 dense fp16", "B1 H8 S16384 D256 dense fp16",
        "B4 H32/8 S4096 D128 causal fp16", "B2 H16 S8192 D128 causal fp16, window of 1024 keys",
        "B4 H32 S4096 D64 causal fp16, window of 256 keys", "B16 H32 S1024 D64 causal fp16",
        "B2 H16 S8192 D128 causal fp16",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_of_the_pairs_that_see_each_other(kind):
    cell = plane.cell(kind, 64, 2048)
    pairs = int(visible(2048, 2048, mask_window(cell.shape.causal, KINDS[kind].window)).sum())
    assert cell.pairs == pytest.approx(pairs, rel=1e-3)
    assert cell.flops("backward") == 2.5 * cell.flops("forward") == 2.5 * 4 * 8 * 16 * 64 * cell.pairs


@pytest.mark.parametrize("length", [256, 1024, 4096])
def test_varlen_cells_have_sequences_of_different_lengths(length):
    """About as many tokens in all as the plane's, and pairs that are counted sequence by sequence."""
    cell, dense = plane.cell("varlen", 192, length), plane.cell("varlendense", 192, length)
    assert len(cell.lengths) == cell.shape.batch == len(set(cell.lengths)) and min(cell.lengths) > 0
    assert 0.8 < sum(cell.lengths) / plane.TOKENS < 1.2 and max(cell.lengths) <= 2 * length
    assert dense.pairs * cell.shape.batch == sum(n * n for n in cell.lengths)
    assert dense.pairs == 2 * cell.pairs
    assert plane.cell("causal", 192, length).lengths == (length,) * cell.shape.batch


def test_the_record(small, tmp_path, capsys):
    path = tmp_path / "plane.json"
    assert time_plane.main(["--out", str(path)]) == 0, capsys.readouterr().out
    rows = rows_of(path)
    assert [plane.key(row) for row in rows] == [(cell, way) for (cell,) in SMALL for way in plane.PASSES]
    for row in rows:
        assert (row["attnlib_status"], row["fa3_status"]) == ("ok", "ok"), row
        assert len(row["round_ratios"]) == 2 and row["attnlib_of_budget"] <= 1
        found = plane.verdict_of(row)
        assert found.noise is not None and found.word == row["verdict"]
        cell, way = plane.key(row)
        assert row["attnlib_tflops"] == pytest.approx(cell.flops(way) / row["attnlib_ms"] * 1e-9, rel=1e-4)


def test_heads_that_lie_side_by_side(small, tmp_path, monkeypatch, capsys):
    """Of the gradient of the output, too; in a table of its own."""
    seen = []

    def watched(window, *call):
        out = plain(*call, window)
        inputs = [x for x in call if isinstance(x, torch.Tensor)]
        seen.append([x.transpose(1, 2).is_contiguous() for x in inputs])
        if out.requires_grad:
            out.register_hook(lambda grad: seen.append([grad.transpose(1, 2).is_contiguous()]))
        return out

    monkeypatch.setattr(time_plane, "ours", watched)
    path = tmp_path / "plane.json"
    assert time_plane.main(["--side-by-side", "--out", str(path)]) == 0, capsys.readouterr().out
    rows = rows_of(path, plane.SIDE_BY_SIDE_TABLE)
    assert [plane.key(row) for row in rows] == [(cell, way) for (cell,) in SMALL for way in plane.PASSES]
    assert all(map(all, seen)) and {len(one) for one in seen} == {1, 3}
    seen.clear()
    assert time_plane.main(["--out", str(path)]) == 0
    assert not any(map(any, seen)) and {*json.loads(path.read_text())["tables"]} == {"cells", "side_by_side"}


@pytest.mark.parametrize("fault", ["everywhere", "in another head", "without the window"])
def test_a_wrong_result_has_no_ratio(small, tmp_path, monkeypatch, capsys, fault):
    def wrong(window, *call):
        out = plain(*call, None if fault == "without the window" else window)
        if fault == "everywhere":
            return out * 1.1
        return torch.cat([out[:, :1] * 1.1, out[:, 1:]], 1) if fault == "in another head" else out

    monkeypatch.setattr(time_plane, "ours", wrong)
    path = tmp_path / "plane.json"
    assert time_plane.main(["--out", str(path)]) == 1
    for row in rows_of(path):
        bad = row["kind"] == "window" or fault != "without the window"
        assert (row["attnlib_status"] == "wrong") == bad == ("ratio" not in row), row
    assert "attnlib: wrong" in capsys.readouterr().out


def test_a_resumed_run_measures_the_others(small, tmp_path, monkeypatch, capsys):
    path = tmp_path / "plane.json"
    assert time_plane.main(["--seconds", "-1", "--out", str(path)]) == 0
    assert rows_of(path) == [] and capsys.readouterr().out.count("\n  ") == 2 * len(SMALL)
    monkeypatch.setattr(plane, "groups", lambda: iter(SMALL[:2]))
    assert time_plane.main(["--out", str(path)]) == 0
    before = rows_of(path)
    monkeypatch.setattr(plane, "groups", lambda: iter(SMALL))
    capsys.readouterr()
    assert time_plane.main(["--resume", "--out", str(path)]) == 0
    assert rows_of(path)[:4] == before and len(rows_of(path)) == 2 * len(SMALL)
    assert "dense" not in capsys.readouterr().out


def test_a_pass_alone_is_measured_again(small, tmp_path, monkeypatch, capsys):
    """The rows of the other pass stay in the record."""
    path = tmp_path / "plane.json"
    assert time_plane.main(["--out", str(path)]) == 0
    before = {plane.key(row): row for row in rows_of(path)}
    monkeypatch.setenv("ATTNLIB_COMMIT", "another")
    assert time_plane.main(["--passes", "backward", "--out", str(path)]) == 0
    after = {plane.key(row): row for row in rows_of(path)}
    assert list(after) == list(before)
    assert all((row["commit"] == "another") is (way == "backward") for (_, way), row in after.items())
    assert all(after[key] == before[key] for key in before if key[1] == "forward")


def test_a_dtype_alone_is_measured(small, tmp_path):
    path = tmp_path / "plane.json"
    assert time_plane.main(["--dtypes", "bfloat16", "--passes", "forward", "--out", str(path)]) == 0
    assert [plane.key(row) for row in rows_of(path)] == [(SMALL[0][0], "forward")]
    assert time_plane.main(["--dtypes", "float16", "--resume", "--out", str(path)]) == 0
    assert len(rows_of(path)) == 1 + 2 * 3


def test_what_is_behind_is_measured_again_in_turn(small, gpu, tmp_path, monkeypatch, capsys):
    """The calls of both tables with a ratio below 1.0, each once, in single calls; the tables stay."""
    monkeypatch.setattr(plane, "NAMED", [SMALL[1][0], Cell("causal", Shape(1, 2, 24, 16))])
    path = tmp_path / "plane.json"
    for table in ([], ["--named"]):
        assert time_plane.main([*table, "--out", str(path)]) == 0
    record = json.loads(path.read_text())
    windows = record["method"]
    for table in ("cells", "named"):
        for row in record["tables"][table]["rows"]:
            row["ratio"] = 0.97 if row["pass"] == "backward" and row["kind"] in ("causal", "dense") else 1.0
    path.write_text(json.dumps(record))
    before = {table: rows_of(path, table) for table in ("cells", "named")}
    gpu.timed.clear()
    capsys.readouterr()
    assert time_plane.main(["--settled", "--out", str(path)]) == 0
    calls = [SMALL[0][0], SMALL[1][0], plane.NAMED[1]]
    rows = rows_of(path, plane.SETTLED_TABLE)
    assert [plane.key(row) for row in rows] == [(cell, "backward") for cell in calls]
    assert all(row.keys() == before["cells"][0].keys() and len(row["round_ratios"]) == 3 for row in rows)
    # Of attnlib, its control and FlashAttention-3: three rounds of one call, after six that tell how long.
    assert gpu.timed.count(1) == len(calls) * 3 * (3 + 1) and gpu.timed.count(5) == len(calls) * 3
    record = json.loads(path.read_text())
    assert {table: rows_of(path, table) for table in before} == before
    assert record["method"]["setting"] == "small, in turn" and "in turn" in record["method"]["mode"]
    assert record["tables"]["cells"]["method"] == windows
    assert time_plane.main(["--settled", "--resume", "--out", str(path)]) == 0
    assert rows_of(path, plane.SETTLED_TABLE) == rows


def test_single_calls_in_turn():
    """Too short for a second call, whatever the call takes."""
    one = time_plane.IN_TURN
    assert (one.rounds, one.window_ms) == (60, 0)
    assert time_plane.method(one)["rounds"] == 60


@pytest.mark.parametrize("name", [plane.TABLE, plane.NAMED_TABLE, plane.SETTLED_TABLE])
def test_the_record_says_how_each_table_was_measured(name):
    """A table of another run than the header's has a method of its own."""
    record = records.read(records.data_dir() / records.REFERENCE_GPU / f"{plane.RECORD}.json")
    table = record["tables"][name]
    rounds = {len(row["round_ratios"]) for row in table["rows"] if "ratio" in row}
    assert rounds == {table.get("method", record["method"])["rounds"]} and record["notebook"] == plane.RECORD


def test_without_a_record_nothing_is_behind(small, tmp_path):
    path = tmp_path / "plane.json"
    assert time_plane.main(["--settled", "--out", str(path)]) == 0 and not path.exists()


def test_named_calls_have_a_table_of_their_own(small, tmp_path, monkeypatch, capsys):
    named = [Cell("window256", Shape(1, 2, 40, 16)), Cell("gqa4", Shape(1, 8, 24, 16, heads_kv=2))]
    monkeypatch.setattr(plane, "NAMED", named)
    monkeypatch.setitem(plane.ALL, "window256", plane.ALL["window256"]._replace(window=(5, 0)))
    path = tmp_path / "plane.json"
    assert time_plane.main(["--out", str(path)]) == 0
    before = rows_of(path)
    assert time_plane.main(["--named", "--out", str(path)]) == 0, capsys.readouterr().out
    assert rows_of(path) == before
    rows = rows_of(path, plane.NAMED_TABLE)
    assert [plane.key(row) for row in rows] == [(cell, way) for cell in named for way in plane.PASSES]
    assert all("ratio" in row and len(row["round_ratios"]) == 2 for row in rows)
    capsys.readouterr()
    assert time_plane.main(["--named", "--resume", "--out", str(path)]) == 0
    assert rows_of(path, plane.NAMED_TABLE) == rows and "window of 256" not in capsys.readouterr().out


def test_named_calls_can_be_the_first_table(small, tmp_path, monkeypatch):
    monkeypatch.setattr(plane, "NAMED", SMALL[0])
    path = tmp_path / "plane.json"
    assert time_plane.main(["--named", "--out", str(path)]) == 0
    assert time_plane.main(["--resume", "--out", str(path)]) == 0
    assert len(rows_of(path)) == 2 * len(SMALL) and len(rows_of(path, plane.NAMED_TABLE)) == 2


def test_the_sampled_gradients_have_the_budget_of_the_group():
    shape = Shape(1, 8, 96, 32, heads_kv=2, dtype="bfloat16")
    tensors = backward.make_gradient(shape, device="cpu"), *make_inputs(shape, device="cpu")
    sample = time_plane.GradientSample(KINDS["gqa4"], None, *tensors)
    d_out, q, k, v = tensors
    whole = GradientOracle(d_out[:, 4:], q[:, 4:], k[:, 1:], v[:, 1:], True)
    for name in ("dk", "dv"):
        assert torch.allclose(sample.oracle.truth[name], whole.truth[name])
        assert 0.5 < sample.oracle.budget[name].rms / whole.budget[name].rms < 2
    assert torch.allclose(sample.oracle.truth["dq"][:, 0], whole.truth["dq"][0])


def test_without_fa3_or_a_gpu_nothing_is_timed(gpu, monkeypatch, capsys):
    monkeypatch.setattr(peers, "_fa3_forward", lambda: (_ for _ in ()).throw(ImportError("no build")))
    assert time_plane.main([]) == 2 and "no build" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert time_plane.main([]) == 2 and "compute capability 9.x" in capsys.readouterr().err


def test_fa3s_operators_get_the_window(monkeypatch):
    seen = []

    def fwd(*call):
        seen.append(call[25:27])
        return call[0], None

    def bwd(*call):
        seen.append(call[17:19])

    fa3 = peers._FA3Operators.__new__(peers._FA3Operators)
    fa3.operators = types.SimpleNamespace(fwd=fwd, bwd=bwd)
    monkeypatch.setattr(peers, "_fa3_forward", lambda: fa3)
    tensors = [torch.zeros(1, 2, 8, 16) for _ in range(4)]
    for window in ((7, 0), None):
        peer = peers.fa3(window)
        peer.make(*tensors[1:], True, 1.0)()
        peer.make_backward(*tensors, True, 1.0)()
    assert seen == [(7, 0)] * 3 + [(-1, -1)] * 3
