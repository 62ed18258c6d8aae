"""The chart of a timeline: lanes, window, colors, names."""

from __future__ import annotations

import pytest

from attnlib.bench import records
from attnlib.book import plotting
from attnlib.book.palette import luminance
from attnlib.book.timeline_chart import event_colors, timeline_chart


def table(events: dict[str, tuple[int, int]], tiles: int = 6, trip: int = 1000) -> records.Table:
    rows = [
        {"head_dim": 64, "event": event, "warpgroup": w, "tile": i,
         "begin": trip * i + 300 * w + begin, "end": trip * i + 300 * w + end}
        for w in (0, 1) for i in range(tiles) for event, (begin, end) in events.items()
    ]  # fmt: skip
    rows.append({"head_dim": 64, "event": "launch", "ms": 1.0, "stamped_ms": 1.1, "noise": 0.01})
    return records.Table("timeline", rows, "GPU", "2026-11-22", False)


IN_ORDER = {"wait for K": (0, 30), "QK": (30, 250), "softmax": (250, 700), "PV": (700, 980)}
LATE = IN_ORDER | {"PV": (200, 600)}


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize(("events", "lanes"), [(IN_ORDER, 2), (LATE, 4)])
def test_a_second_lane_where_events_overlap(events, lanes):
    figure = timeline_chart(table(events), {64: (1, 3)}, ["consumer 0", "consumer 1"])
    (ax,) = figure.axes
    assert len({round(bar.get_y(), 3) for bar in ax.patches}) == lanes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["consumer 0", "consumer 1", "in flight"]
    assert ax.get_xlim() == (0, 2000)


def test_each_event_is_named_once():
    figure = timeline_chart(table(IN_ORDER), {64: (1, 3)}, says={"QK": "QKᵀ"}, titles={64: "said above"})
    (ax,) = figure.axes
    key = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    named = [text for text in texts(ax) if text]
    assert sorted(named + key) == ["PV", "QKᵀ", "softmax", "wait for K"]
    assert "wait for K" in key and "softmax" in named  # into the bars where there is room
    assert ax.get_title(loc="left") == "D = 64: said above"


def test_the_line_below_is_the_time_with_a_product_in_flight():
    figure = timeline_chart(table({"QK": (0, 100), "softmax": (100, 900)}), {64: (1, 2)})
    spans = [tuple(line.get_xdata()) for line in figure.axes[0].lines]
    assert [tuple(map(int, span)) for span in spans] == [(0, 100), (300, 400)]


def test_colors_differ():
    colors = event_colors(["wait for Q", "QK", "softmax", "PV", "O leaves", "copy"])
    assert len(set(colors.values())) == 6


def test_two_waits_can_be_told_apart_without_a_color():
    colors = event_colors(["wait for K", "QK", "wait for V"])
    assert abs(luminance(colors["wait for K"]) - luminance(colors["wait for V"])) > 0.5
    figure = timeline_chart(table(IN_ORDER | {"wait for V": (980, 995)}), {64: (1, 3)})
    (ax,), (legend,) = figure.axes, figure.legends
    hatched = {text.get_text(): patch.get_hatch() for text, patch in
               zip(legend.get_texts(), legend.get_patches(), strict=True)}  # fmt: skip
    assert hatched["wait for K"] is None and hatched["wait for V"]
    assert sum(bool(bar.get_hatch()) for bar in ax.patches) == 4  # of two warpgroups and two tiles


def test_a_window_that_is_not_there():
    with pytest.raises(ValueError, match="panels: expected two tiles of 0 to 5 in order, got 3, 9"):
        timeline_chart(table(IN_ORDER), {64: (3, 9)})


def test_the_same_bytes_each_time():
    made = [
        plotting.bundle(timeline_chart(table(LATE), {64: (1, 4)}), "timeline", "Two warpgroups.")[0]
        for _ in range(2)
    ]
    assert made[0] == made[1]
