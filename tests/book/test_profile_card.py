"""The profile card, the road chart and what chapters read of the counters, from a made-up record."""

from __future__ import annotations

import matplotlib.text
import pytest
from profile_rows import profile_row, profile_rows, write_profile

from attnlib.bench.counters import STALLS
from attnlib.bench.records import RecordError
from attnlib.bench.roofline import H200
from attnlib.bench.shapes import TASK
from attnlib.book import build, card, lesson, plotting, road_chart

STEP, BEFORE = "05_two_pass_causal", "04_exp2"


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    monkeypatch.setattr(lesson, "_current", STEP)
    return lambda rows: write_profile(tmp_path, rows)


@pytest.fixture
def shown(monkeypatch):
    import IPython.display

    found = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **options: found.append((data, options)))
    return found


def texts(figure) -> list[str]:
    return [t.get_text() for t in figure.findobj(matplotlib.text.Text) if t.get_text()]


# ---------------------------------------------------------------- what warps do


def test_every_reason_has_one_name():
    named = [reason for _, reasons in card.WAITS.values() for reason in reasons]
    assert sorted(named) == sorted([*STALLS, "other"])


def test_waits_sum_up_reasons():
    stalls = {"short_scoreboard": 0.3, "mio_throttle": 0.2, "selected": 0.4, "other": 0.1}
    found = card.waits_of({"stalls": stalls})
    assert found["shared memory or exp"] == pytest.approx(0.5) and found["issues"] == 0.4
    assert sum(found.values()) == pytest.approx(1) and card.waits_of({"stalls": {}}) == {}
    with pytest.raises(ValueError, match="stalls: expected reasons of .*, got unheard_of"):
        card.waits_of({"stalls": {"unheard_of": 1.0}})


# ---------------------------------------------------------------- the card


def test_bars_marks_and_the_largest_change():
    rows = profile_rows()
    figure = card.profile_card(rows, STEP, BEFORE)
    assert [ax.get_title() for ax in figure.axes] == ["D = 64", "D = 128", "D = 256"]
    for ax, d in zip(figure.axes, (64, 128, 256), strict=True):
        now, then = (next(r for r in rows if (r["impl"], r["head_dim"]) == (i, d)) for i in (STEP, BEFORE))
        widths = [bar.get_width() for bar in ax.patches[: len(card.UNITS)]]
        assert widths == pytest.approx([now[unit] for unit in card.UNITS])
        marks = [line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 2][: len(card.UNITS)]
        assert marks == pytest.approx([then[unit] for unit in card.UNITS])
        bold = [text.get_text() for text in ax.texts if text.get_fontweight() == "bold"]
        assert bold == [f"{now['tensor_pct']:.0f} ({now['tensor_pct'] - then['tensor_pct']:+.0f})"]
        parts = [bar for bar in ax.patches[len(card.UNITS) :] if bar.get_height() > 0.5]
        assert sum(bar.get_width() for bar in parts) == pytest.approx(100)
    assert "before" in texts(figure) and "05 Two-pass causal (bars) after 04 exp2 (thin marks)" in texts(
        figure
    )


def test_a_unit_that_was_not_counted_says_so():
    rows = [profile_row(STEP, shape, 0.5) | {"l2_pct": None} for shape in TASK.values()]
    figure = card.profile_card(rows, STEP, BEFORE)  # of which there is no row: nothing to compare
    assert texts(figure).count("not counted") == 3
    assert "before" not in texts(figure) and "05 Two-pass causal" in texts(figure)
    assert "compared" not in card.alt_text(rows, STEP, BEFORE)


def test_a_card_needs_counters():
    row = profile_row(STEP, TASK["d64"], 0.5)
    for rows in ([], [row | {"issue_pct": None}], [row | {"status": "failed"}], [row | {"pass": "backward"}]):
        with pytest.raises(
            ValueError, match="expected one whose counters were read, got '05_two_pass_causal'"
        ):
            card.profile_card(rows, STEP)
    assert len(card.profile_card([row | {"pass": "backward"}], STEP, direction="backward").axes) == 1


# ---------------------------------------------------------------- what chapters call


def test_chapters_read_counters_from_the_record(record):
    record([profile_row(STEP, shape, 0.5) for shape in TASK.values()])
    row = lesson.counters(STEP, 128)
    assert row["tensor_pct"] == 50 and row["head_dim"] == 128
    found = lesson.counted_intensities(STEP, 128, l2=True)
    assert found == {
        "counted_intensity": row["flops_per_dram_byte"],
        "l2_intensity": row["flops_per_l2_byte"],
    }
    assert set(lesson.counted_intensities(STEP, 128)) == {"counted_intensity"}


def test_what_was_not_counted_is_an_error_with_its_reason(record):
    with pytest.raises(RecordError, match=r"no record .*profile\.json"):
        lesson.counters(STEP, 64)
    row = profile_row(STEP, TASK["d64"], 0.5)
    record([row | {"status": "failed", "reason": "out of registers"}])
    with pytest.raises(
        RecordError, match="'05_two_pass_causal', D = 64, forward: not read: out of registers"
    ):
        lesson.counters(STEP, 64)
    record([row | {"issue_pct": None, "note": "No counters: ncu was not found."}])
    with pytest.raises(RecordError, match="ncu was not found"):
        lesson.counters(STEP, 64)
    with pytest.raises(RecordError, match="expected 1 row with impl='08_production'"):
        lesson.counters("08_production", 64)


def test_chapters_publish_cards(record, shown):
    record(profile_rows())
    lesson.profile_card(STEP, BEFORE)
    lesson.profile_card("attnlib-triton", filename="own_name")
    lesson.road_chart()
    figures = [options["metadata"] for data, options in shown if "image/svg+xml" in data]
    assert [f["filename"] for f in figures] == ["card_05_05_two_pass_causal", "own_name", "road"]
    assert "04 exp2" in figures[0]["alt"] and "D = 64: " in figures[0]["alt"]
    assert shown[1][0]["text/html"].count("<tr>") == 1 + 2 * 3


def test_a_card_from_the_command_line(record, tmp_path, capsys):
    path = record(profile_rows())
    assert build.main(["card", STEP, "--before", BEFORE, "--out", str(tmp_path / "a")]) == 0
    assert (
        build.main(["card", STEP, "--before", BEFORE, "--record", str(path), "--out", str(tmp_path / "b")])
        == 0
    )
    for name in (f"card_{STEP}.svg", f"card_{STEP}.pdf"):
        assert (tmp_path / "a" / name).stat().st_size > 1000
    assert "replayed from" not in (tmp_path / "b" / f"card_{STEP}.svg").read_text()
    assert build.main(["card", STEP, "--before", "unknown", "--out", str(tmp_path)]) == 2
    told = "attnlib.book: card: before: expected a step whose counters were read, got 'unknown'"
    assert told in capsys.readouterr().err
    assert build.main(["card", "unknown", "--out", str(tmp_path)]) == 2
    assert "got 'unknown'" in capsys.readouterr().err


# ---------------------------------------------------------------- the road and the roofline


def test_the_road_has_a_line_for_each_head_dimension():
    rows = [row for row in profile_rows() if (row["impl"], row["head_dim"]) != ("03_online_softmax", 64)]
    figure = road_chart.road_chart(rows)
    assert len(figure.axes) == len(road_chart.PANELS)
    names = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert names[0] == "01 Naive attention" and not {"attnlib-triton", "PyTorch math"} & set(names)
    assert names.index("attnlib") < names.index("FA3")
    lines = [line for line in figure.axes[0].lines if line.get_label().startswith("D =")]
    assert [len(line.get_xdata()) for line in lines] == [
        names.index("attnlib"),
        *[names.index("attnlib") + 1] * 2,
    ]
    assert lines[1].get_xdata()[0] == next(r for r in rows if r["head_dim"] == 128)["tensor_pct"]
    with pytest.raises(ValueError, match="expected rows with counters, got none"):
        road_chart.road_chart([profile_row(STEP, TASK["d64"], 0.5) | {"issue_pct": None}])


def test_the_roofline_shows_what_was_counted():
    point = {"impl": STEP, "intensity": 2048.0, "tflops": 300.0}
    figure = plotting.roofline_chart([point | {"counted_intensity": 1500.0, "l2_intensity": 90.0}], H200)
    drawn = [tuple(line.get_xydata()[0]) for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    assert {(1500.0, 300.0), (90.0, 300.0), (2048.0, 300.0)} <= set(drawn)
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["DRAM bytes, counted", "L2 bytes, counted (no roof here)", "bytes of the model"]
    assert plotting.roofline_chart([point], H200).axes[0].get_legend() is None
