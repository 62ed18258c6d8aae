"""Stamps in copies of Gluon kernels, in the emulator: they go in where they should, in order, and change no
result. What they cost is measured on a GPU."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from emulated import on_the_cpu
from timed_cpu import gpu  # noqa: F401 - a fixture

import attnlib
from attnlib.bench import records, sources, timeline
from attnlib.bench.shapes import Shape
from attnlib.bench.stamps import stamped
from attnlib.bench.timeline import Span, after, before
from attnlib.emulator import emulated

ELEVEN = [
    Span("wait for K", before("mbarrier.wait(mem.k_full"), after("mbarrier.wait(mem.k_full")),
    Span("QK", after("mbarrier.wait(mem.k_full"), after("mbarrier.arrive(mem.k_free")),
    Span("softmax", after("mbarrier.arrive(mem.k_free"), after("mbarrier.wait(mem.v_full")),
    Span("PV", after("mbarrier.wait(mem.v_full"), after("mbarrier.arrive(mem.v_free")),
    Span("copy", before("mbarrier.wait(mem.k_free", "produce"), after("load_tile(v_desc", "produce")),
]
FIRST = "flash_forward"
SPANS = {
    "10_tma_wgmma": [
        Span("QK", before("k_t = matrix", FIRST), after("b_s = warpgroup_mma_wait", FIRST)),
        Span("PV", after("mbarrier.wait(v_full", FIRST), after("b_o = warpgroup_mma_wait", FIRST)),
    ],
    "11_warp_specialization": ELEVEN,
    "12_overlap": [  # from one function to another, and from one trip to the next
        Span("QK", after("mbarrier.wait(mem.k_full", "start_scores"), after("b_s = finish(scores")),
        Span(
            "PV",
            after("mbarrier.wait(mem.v_full", "start_values"),
            after("b_o = finish(values", tile="i - 1"),
        ),
    ],
    "13_scheduling": [
        Span(
            "QK",
            before("scores = twelve.start_scores", tile="c + i"),
            after("b_s = twelve.finish(scores", tile="c + i"),
        ),
        Span(
            "job", before("for i in range(1, tiles)", tile="c"), after("for i in range(1, tiles)", tile="c")
        ),
    ],
}
PACKAGE = "attnlib.kernels.hopper.forward_kernel.attention_forward_hopper"
KEPT = "attnlib.kernels.common.kept_shift"
STEP = [
    Span("QK", after("wait_k(mem", "_step", "c"), after("s = warpgroup_mma_wait(len(acc)", "_step", "c"))
] + [
    Span(
        "PV",
        before("o_token = _start_output", "_step", "c"),
        after("acc = warpgroup_mma_wait(0", function, "c"),
    )
    for function in ("_wait_output", "_await_output")
]


def tensors(H: int, S: int, D: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, H, S, D, generator=generator).half() for _ in range(3)]


@pytest.fixture(scope="module")
def traces() -> dict[str, list[dict]]:
    """Rows of each chapter's kernel; the output with stamps is the one without, bit for bit."""
    found = {}
    for step, spans in SPANS.items():
        q, k, v = tensors(2, 512, 64)
        one = timeline.of_step(step, spans, range(1, 7))
        with emulated(vars(one.module)):
            out = one.attention(q, k, v)
        plain = sources.load_step(step)
        with emulated(vars(plain)):
            assert torch.equal(out, plain.attention(q, k, v)), step
        found[step] = one.read()
    return found


@pytest.mark.parametrize("step", SPANS)
def test_time_goes_on(step, traces):
    rows = traces[step]
    assert {row["event"] for row in rows} == {span.event for span in SPANS[step]}
    assert min(row["begin"] for row in rows) == 0 and all(row["begin"] < row["end"] for row in rows)
    lanes: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["tile"]):
        lanes.setdefault((row["event"], row["warpgroup"]), []).append(row)
    for lane in lanes.values():
        assert all(a["end"] <= b["begin"] for a, b in zip(lane, lane[1:], strict=False)), lane


def test_what_follows_in_the_kernel_follows_in_the_trace(traces):
    rows = traces["11_warp_specialization"]
    for w in (0, 1):
        for tile in (1, 2, 3):
            own = {row["event"]: row for row in rows if (row["warpgroup"], row["tile"]) == (w, tile)}
            order = [own[name] for name in ("wait for K", "QK", "softmax", "PV")]
            assert all(a["end"] == b["begin"] for a, b in zip(order, order[1:], strict=False))
    assert {row["warpgroup"] for row in rows if row["event"] == "copy"} == {2}
    assert {row["tile"] for row in rows} == {1, 2, 3}  # the last of 512 queries see 0 to 3


def test_products_overlap_from_chapter_12_on(traces):
    rows = traces["12_overlap"]
    of = {(row["event"], row["warpgroup"], row["tile"]): row for row in rows}
    pairs = [(of["QK", w, i], of["PV", w, i - 1]) for w in (0, 1) for i in (2, 3)]
    assert all(qk["begin"] < pv["begin"] < qk["end"] < pv["end"] for qk, pv in pairs)


def test_package():
    q, k, v = tensors(2, 700, 64)
    one = timeline.of_package(PACKAGE, STEP, range(0, 6), [KEPT])
    with on_the_cpu():
        plain = attnlib.attention(q, k, v, causal=True, impl="hopper")
        with emulated(vars(one.module)):
            out = one.attention(q, k, v, impl="hopper")
        again = attnlib.attention(q, k, v, causal=True, impl="hopper")  # without stamps, as before
    assert torch.equal(out, plain) and torch.equal(again, plain)
    rows = one.read()
    assert {row["event"] for row in rows} == {"QK", "PV"} and {row["warpgroup"] for row in rows} >= {0, 1}
    with on_the_cpu(), pytest.raises(ValueError, match="expected the one that reaches all spans"):
        timeline.of_package(PACKAGE.replace("attention_forward", "other"), STEP, range(2), [KEPT])


# ---------------------------------------------------------------- the copy's source


def test_the_copy_differs_by_its_stamps():
    source = sources.kernel_source(sources.notebook_of("11_warp_specialization"))
    copy = stamped(source, ELEVEN[:4], range(4, 28))
    assert copy.kernel == "flash_forward" and copy.places == 5  # spans that meet share a stamp
    assert copy.spans[0] == ("wait for K", 0, 1) and copy.spans[1] == ("QK", 1, 2)
    text = "\n".join(line for line in copy.source.splitlines() if "attnlib_stamp(" not in line)
    text = re.sub(r"attnlib_clocks( \+ \d+)?, ", "", text)
    added = set(text.splitlines()) - set(ast.unparse(ast.parse(source)).splitlines())
    helper = copy.source[copy.source.index("def attnlib_stamp") :].split("\n@")[0]
    assert {line for line in added if line not in helper} == set()


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (
            Span("x", before("nobody wrote this"), after("tma.store_wait")),
            "in one statement of consume, found 0",
        ),
        (
            Span("x", before("mbarrier.wait(mem"), after("tma.store_wait")),
            "in one statement of consume, found 3",
        ),
        (Span("x", before("slot", "eat"), after("slot")), "expected a function of the kernel .*, got 'eat'"),
    ],
)
def test_places_that_are_not_there(span, message):
    source = sources.kernel_source(sources.notebook_of("11_warp_specialization"))
    with pytest.raises(ValueError, match=message):
        stamped(source, [span], range(4))


@pytest.mark.parametrize("tiles", [range(0), range(4, 10, 2)])
def test_tiles_that_are_no_row(tiles):
    with pytest.raises(ValueError, match="expected at least a span and consecutive tiles"):
        stamped("", ELEVEN, tiles)


# ---------------------------------------------------------------- reading


def test_clocks_wrap_and_missing_stamps_leave_no_row():
    one = timeline.of_step("11_warp_specialization", ELEVEN[:4], range(3, 6))
    with pytest.raises(ValueError, match="expected a call"):
        one.read()
    one.clocks = torch.full((5, 3, 5), timeline.NOTHING, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expected stamps of some of range\(3, 6\)"):
        one.read()
    one.clocks[1, 2, :4] = torch.tensor([2**31 - 10, -(2**31) + 5, -(2**31) + 20, -(2**31) + 30])
    rows = [(row["event"], row["warpgroup"], row["tile"], row["begin"], row["end"]) for row in one.read()]
    assert rows == [("wait for K", 1, 5, 0, 15), ("QK", 1, 5, 15, 30), ("softmax", 1, 5, 30, 40)]


def table(rows: list[dict]) -> records.Table:
    return records.Table("trace", [{"head_dim": 64} | row for row in rows], "GPU", "2026-11-22", False)


def row(event: str, warpgroup: int, tile: int, begin: int, end: int) -> dict:
    return {"event": event, "warpgroup": warpgroup, "tile": tile, "begin": begin, "end": end}


def test_clocks_of_a_table():
    rows = [row("QK", w, i, 10 * i + w, 10 * i + w + 3) for w in (0, 1) for i in (4, 5, 6)]
    rows += [row("PV", w, i, 10 * i + w + 4, 10 * i + w + 9) for w in (0, 1) for i in (4, 5)]
    rows += [row("copy", 2, 4, 0, 1), {"event": "launch", "ms": 1.0, "stamped_ms": 1.1, "noise": 0.01}]
    found = timeline.clocks(table(rows), 64, ("QK", "PV"))
    assert found.shape == (2, 2, 2, 2)  # the producer has neither, and tile 6 no PV
    assert found[1, 0].tolist() == [[41, 44], [45, 50]]
    with pytest.raises(ValueError, match=r"expected some of the table at D = 64, got \['softmax'\]"):
        timeline.clocks(table(rows), 64, ("softmax",))


def test_under_way():
    rows = [
        row("QK", 0, 0, 5, 9),
        row("PV", 1, 0, 8, 12),
        row("QK", 0, 1, 20, 22),
        row("softmax", 0, 0, 9, 30),
    ]
    assert timeline.under_way(rows, ("QK", "PV")) == [(5, 12), (20, 22)]
    assert timeline.under_way(rows, ("copy",)) == []


def test_cost_is_said_with_its_noise():
    def said(stamped_ms: float) -> str:
        launch = {"event": "launch", "ms": 1.0, "stamped_ms": stamped_ms, "noise": 0.02}
        return timeline.cost(table([launch]))

    assert "+5.0% at D = 64 (noise 2.0%)" in said(1.05)
    assert "no difference beyond the noise at D = 64 (noise 2.0%)" in said(0.985)
    with pytest.raises(records.RecordError, match="no row says what the stamps cost"):
        timeline.cost(table([row("QK", 0, 0, 1, 2) | {"event": "QK"}]))


def test_rows_of_a_measurement(gpu, monkeypatch):  # noqa: F811
    """As on a GPU, which here is the emulator: spans, and a row with the cost."""
    one = timeline.of_step("11_warp_specialization", ELEVEN[:4], range(0, 2))
    plain = sources.load_step("11_warp_specialization")
    shape = Shape(1, 1, 129, 64)
    left = timeline.WARPGROUPS, 2, one.copy.places  # by a shape with more warpgroups
    one.clocks = torch.zeros(left, dtype=torch.int32)
    with emulated(vars(one.module)), emulated(vars(plain)):
        rows = timeline.rows(one, [shape], launches=1)
    assert all(found["head_dim"] == 64 for found in rows)
    *spans, launch = rows
    assert len(spans) == 2 * 2 * 4 and launch["event"] == "launch" and launch["noise"] == 0
    assert launch["ms"] == launch["stamped_ms"] == 2.5  # of 3, 1, 2, 3
    assert records.rounded(rows) == rows  # a record can hold them
    right = one.module.attention
    monkeypatch.setattr(one.module, "attention", lambda *args, **options: 2 * right(*args, **options))
    with (
        emulated(vars(one.module)),
        emulated(vars(plain)),
        pytest.raises(RuntimeError, match="timeline: stamped at D = 64: .*"),
    ):
        timeline.rows(one, [shape], launches=1)
