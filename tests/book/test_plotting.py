"""Plotting: figures of printed size, the same bytes each time, readable in gray, labels that do not
collide."""

import base64
import functools
import itertools
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field

import matplotlib
import matplotlib.text
import numpy as np
import pytest
from chosen import more, with_more
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from profile_rows import profile_rows

from attnlib.bench.names import PEERS, number
from attnlib.bench.roofline import H200
from attnlib.bench.shapes import TASK, sweep
from attnlib.book import labels, palette, plotting
from attnlib.book.chapters import GLUON_FROM, STEPS

IMPLS = [step for step, _ in STEPS] + list(PEERS)
LABEL = "NVIDIA H200, 2026-11-21"


@dataclass
class Table:
    """What charts need of a records.Table."""

    rows: list[dict] = field(default_factory=list)
    label: str = LABEL


def row(impl: str, shape, tflops: float) -> dict:
    ms = 100 / tflops
    errors = {"max_error": 5e-4, "rms_error": 2e-5, "budget_max": 2e-3, "budget_rms": 1e-4}
    speed = {"status": "ok", "ms": ms, "ms_p20": ms * 0.98, "ms_p80": ms * 1.03, "tflops": tflops}
    return {"impl": impl, **shape.to_dict(), **speed, **errors}


@pytest.fixture(scope="module")
def ladder() -> Table:
    return Table([row(impl, s, 40.0 * (i + 1)) for i, impl in enumerate(IMPLS) for s in TASK.values()])


@pytest.fixture(scope="module")
def lengths() -> Table:
    shapes = [s for d in (64, 128) for c in (True, False) for s in sweep(d, causal=c)]
    impls = enumerate(("03_online_softmax", "08_production", "cudnn", "fa3"), start=4)
    return Table([row(impl, s, 50.0 * i + s.seqlen / 500) for i, impl in impls for s in shapes])


@pytest.fixture(scope="module")
def cloud() -> Table:
    rows = []
    for d, m, n, warps, stages in itertools.product((64, 128), (64, 128), (32, 64), (4, 8), (2, 3)):
        registers = min(255, m * d // (32 * warps) + 200)
        config = {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
        use = {"registers": registers, "spills": 64 * (registers == 255), "shared_bytes": 2 * d * (m + 2 * n)}
        speed = {"tflops": 100.0 + m + n + warps, "ms": 1.0, "status": "ok"}
        rows.append({"impl": "06_autotuning", "head_dim": d, **config, **use, **speed})
    return Table(rows)


POINTS = [
    {"impl": "01_naive", "intensity": 32.0, "tflops": 50.0},
    *({"impl": s, "intensity": 2048.0, "tflops": 150.0 + 60 * i} for i, (s, _) in enumerate(STEPS[1:])),
    {"impl": "fa3", "intensity": 2048.0, "tflops": 610.0},
]


SAMPLES = {
    "D = 64": {"64x64": [1.0, 1.1, 0.9, 1.3], "128x64": [1.2, 1.25, 1.2, 1.6]},
    "D = 128": {"a": [1.0, 2.0]},
}


@pytest.fixture(scope="module")
def charts(ladder, lengths, cloud) -> dict[str, Figure]:
    n, m = np.mgrid[:6, :6]
    tiles = np.where(m < n, 1, np.where(m == n, 2, 0))
    measured = {"hbm_gbs": 4296.0, "tensor_tflops": 680.0, "mode": "burst"}
    line = ([512, 1024, 2048], [1.0, 2.0, 4.0])
    return {
        "ladder": plotting.ladder_chart(ladder, mark="05_two_pass_causal"),
        "sweep": plotting.sweep_chart(lengths, causal=True, mark="08_production"),
        "sweep-both": plotting.sweep_chart(lengths),
        "roofline": plotting.roofline_chart(POINTS, H200, measured, (64, 128, 256), source=LABEL),
        "error": plotting.error_chart(ladder),
        "samples": plotting.samples_chart(SAMPLES, "time over the shortest median", source=LABEL),
        "cloud": plotting.cloud_chart(cloud, limits={"255 registers": 255}),
        "cloud-shared": plotting.cloud_chart(cloud, x="shared_bytes"),
        "cloud-accent": plotting.cloud_chart(cloud, accent=("64 rows", lambda row: row["BLOCK_M"] == 64)),
        "tiles": plotting.tile_map({"one loop": tiles, "two loops": tiles}),
        "card": plotting.profile_card(Table(profile_rows()), "13_scheduling", "12_overlap"),
        "card-alone": plotting.profile_card(Table(profile_rows()), "01_naive"),
        "road": plotting.road_chart(Table(profile_rows())),
        "roofline-counted": plotting.roofline_chart(
            [point | {"counted_intensity": 0.7 * point["intensity"]} for point in POINTS], H200, source=LABEL
        ),
        "bars": plotting.bar_chart(
            {"zeros": 760.0, "random": 672.0}, "TFLOP/s", {"datasheet": 989.0}, source=LABEL
        ),
        "lines": plotting.line_chart(
            {"math": line, "a": line, "b": line}, "S", "GiB", "xy", limits={"all": 9.0}
        ),
    }


@pytest.fixture(scope="module")
def bundles(charts) -> Callable[[str], tuple[dict, dict]]:
    """plotting.bundle of each chart, drawn when it is first asked for."""
    return functools.cache(lambda name: plotting.bundle(charts[name], name, "what it shows"))


CHARTS = [
    *("ladder", "sweep", "sweep-both", "roofline", "error", "samples"),
    *("cloud", "cloud-shared", "cloud-accent", "tiles", "bars", "lines"),
    *("card", "card-alone", "road", "roofline-counted"),
]
WRITTEN = with_more(("ladder", "cloud", "tiles", "card"), CHARTS)
"""Lines and names, points, patches, bars with a legend; test_replay.py writes every figure of the book."""


def texts(figure: Figure) -> list[str]:
    return [t.get_text() for t in figure.findobj(matplotlib.text.Text) if t.get_text() and t.get_visible()]


# Files


@pytest.mark.parametrize("name", WRITTEN)
def test_files_are_the_same_when_drawn_again(charts, bundles, name):
    again, _ = plotting.bundle(charts[name], name, "what it shows")
    assert bundles(name)[0] == again


def test_files_are_the_same_for_a_new_figure(bundles, ladder):
    figure = plotting.ladder_chart(ladder, mark="05_two_pass_causal")
    drawn, _ = plotting.bundle(figure, "ladder", "what it shows")
    assert drawn == bundles("ladder")[0]


@pytest.mark.parametrize("name", WRITTEN)
def test_files_have_exact_size_embedded_fonts_and_no_date(charts, bundles, name):
    figure, (data, metadata) = charts[name], bundles(name)
    svg = data["image/svg+xml"]
    width = float(re.search(r'width="([\d.]+)pt"', svg).group(1))
    assert width == pytest.approx(72 * figure.get_figwidth()) and width in (
        72 * palette.COLUMN,
        72 * palette.WIDE,
    )
    pdf = base64.b64decode(data["application/pdf"])
    assert pdf.startswith(b"%PDF") and b"/Type3" not in pdf
    for mark in (b"CreationDate", b"Matplotlib"):
        assert mark not in pdf and mark not in svg.encode()
    assert len(svg) + len(data["application/pdf"]) < 250_000
    assert metadata["filename"] == name


def test_a_prime_in_a_label_warns_of_nothing(caplog):
    figure, axes = plotting.new_figure(plotting.COLUMN, 2)
    axes[0, 0].set_xlabel("query $m'$")
    plotting.bundle(figure, "prime", "No data.")
    assert not caplog.records


def test_svg_is_accessible(charts):
    svg = plotting.bundle(charts["bars"], "bars", 'zeros > random & "so"\n on')[0]["image/svg+xml"]
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root[0].tag.endswith("title") and root[0].text == 'zeros > random & "so" on'


def test_metadata_is_what_nbconvert_and_myst_nb_read(charts):
    _, metadata = plotting.bundle(charts["bars"], "bars", "zeros are faster")
    assert metadata["filename"] == "bars"
    assert metadata["image/svg+xml"] == {"alt": "zeros are faster", "width": "416px"}


@pytest.mark.parametrize(
    ("name", "alt"), [("Ladder", "x"), ("a/b", "x"), ("a.svg", "x"), ("", "x"), ("ok", "  ")]
)
def test_names_and_alternative_texts_are_checked(name, alt):
    with pytest.raises(ValueError, match="publish: (name|alt): expected"):
        plotting.bundle(plotting.bar_chart({"a": 1.0}, "ms"), name, alt)


def test_publish_displays_the_figure_and_its_data(monkeypatch, ladder):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **options: shown.append((data, options)))
    plotting.publish(plotting.ladder_chart(ladder), "ladder", "bars", data=ladder, columns=["impl", "tflops"])
    (figure, options), (table, _) = shown
    assert set(figure) == {"image/svg+xml", "application/pdf", "text/plain"}
    assert options["metadata"]["filename"] == "ladder" and options["raw"]
    assert table["text/html"].count("<tr>") == len(ladder.rows) + 1


def test_publish_closes_a_figure_of_pyplot(monkeypatch):
    import IPython.display

    matplotlib.use("agg")
    from matplotlib import pyplot

    monkeypatch.setattr(IPython.display, "display", lambda *a, **k: None)
    figure, _ = pyplot.subplots()
    plotting.publish(figure, "empty", "an empty figure")
    assert figure.number not in pyplot.get_fignums()


# What is drawn


@pytest.mark.parametrize("name", [n for n in CHARTS if n not in ("tiles", "lines")])
def test_charts_say_where_the_numbers_come_from(charts, name):
    assert any(LABEL in text for text in texts(charts[name]))


@pytest.mark.parametrize("name", CHARTS)
def test_no_text_overlaps_another_or_leaves_the_figure(charts, name):
    figure = charts[name]
    figure.draw_without_rendering()
    frame = figure.bbox
    boxes = []
    for text in figure.findobj(matplotlib.text.Text):
        if text.get_text().strip() and text.get_visible() and not text.get_rotation():
            box = matplotlib.text.Text.get_window_extent(text)  # without an annotation's arrow
            if box.width > 0:
                boxes.append((text.get_text(), box))
    hidden = {t for ax in figure.axes for t in _hidden_ticks(ax)}
    for text, box in boxes:
        if text not in hidden:
            assert frame.x0 - 1 <= box.x0 and box.x1 <= frame.x1 + 1, f"{text!r} leaves the figure"
            assert frame.y0 - 1 <= box.y0 and box.y1 <= frame.y1 + 1, f"{text!r} leaves the figure"
    for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2):
        wide = min(box_a.x1, box_b.x1) - max(box_a.x0, box_b.x0)
        tall = min(box_a.y1, box_b.y1) - max(box_a.y0, box_b.y0)
        assert a in hidden or b in hidden or wide < 1.5 or tall < 2.5, f"{a!r} overlaps {b!r}"


def test_lines_from_names_to_points_cross_no_other_name():
    """Eight points under each other: most names have to stand away from theirs."""
    figure = Figure(figsize=(3, 2))
    ax = figure.subplots()
    ax.set(xlim=(0, 10), ylim=(0, 10))
    points = [(9.9, 5 + i / 4, "" if i == 3 else f"name {i}", "black") for i in range(8)]
    labels.label_points(ax, points)
    figure.draw_without_rendering()
    names = [text for text in ax.texts if text.get_text()]
    assert [text.get_text() for text in names] == [f"name {i}" for i in reversed(range(8)) if i != 3]
    boxes = [matplotlib.text.Text.get_window_extent(text) for text in names]
    leaders = 0
    for i, text in enumerate(names):
        if text.arrow_patch is not None:
            leaders += 1
            assert not any(leader_of(text).intersects_bbox(box) for j, box in enumerate(boxes) if j != i)
    assert leaders > 2


def leader_of(text):
    """The line from a name to its point, in pixels."""
    return text.arrow_patch.get_path().transformed(text.arrow_patch.get_transform())


@pytest.mark.parametrize("seed", [23, 117, 224])
def test_lines_from_names_to_points_pass_by_other_points(seed):
    """Three names among eight more points, drawn so that the next free place of a name is behind a point."""
    draw = random.Random(seed)
    places = [tuple(round(draw.uniform(3, 7), 1) for _ in range(2)) for _ in range(11)]
    figure = Figure(figsize=(3, 2))
    ax = figure.subplots()
    ax.set(xlim=(0, 10), ylim=(0, 10))
    labels.label_points(ax, [(*places[i], f"name {i}", "black") for i in range(3)], avoid=places[3:])
    figure.draw_without_rendering()
    leaders = [(text.xy, leader_of(text)) for text in ax.texts if text.arrow_patch is not None]
    assert leaders
    for (own, line), dot in itertools.product(leaders, places):
        x, y = ax.transData.transform(dot)
        around = matplotlib.transforms.Bbox([[x - 1, y - 1], [x + 1, y + 1]])
        assert tuple(own) == dot or not line.intersects_bbox(around), dot


def test_lines_to_the_ends_of_lines_cross_no_name():
    """Four lines that end in one point."""
    figure = Figure(figsize=(3, 2))
    ax = figure.subplots()
    ax.set(xlim=(0, 10), ylim=(0, 10))
    labels.label_ends(ax, [(10, 5, f"a long name, {i}", "black") for i in range(4)])
    figure.draw_without_rendering()
    boxes = [matplotlib.text.Text.get_window_extent(text) for text in ax.texts]
    for i, text in enumerate(ax.texts):
        assert not any(leader_of(text).intersects_bbox(box) for j, box in enumerate(boxes) if j != i)


def _hidden_ticks(ax) -> set[str]:
    """Labels of ticks outside the limits, which matplotlib keeps but does not draw."""
    hidden = set()
    for axis, (low, high) in ((ax.xaxis, sorted(ax.get_xlim())), (ax.yaxis, sorted(ax.get_ylim()))):
        for tick in axis.get_major_ticks():
            if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                hidden.add(tick.label1.get_text())
    return hidden


def test_ladder_shows_every_number_and_the_lines_of_the_rivals(charts):
    shown = texts(charts["ladder"])
    for i in range(len(IMPLS)):
        assert shown.count(f"{40 * (i + 1)}") >= 3
    assert shown.count("peak 989") == 3
    assert "05 Two-pass causal" in shown


def crossings(figure: Figure) -> list[str]:
    """Texts in axes that a vertical line crosses where no bar covers it."""
    figure.draw_without_rendering()
    found = []
    for ax in figure.axes:
        lines = [line for line in ax.lines if len(set(line.get_xdata())) == 1]
        for text in (t for t in ax.texts if t.get_text()):
            box = matplotlib.text.Text.get_window_extent(text)
            bars = [bar.get_window_extent() for bar in ax.patches if bar.get_width()]
            if any(bar.x0 <= box.x0 and box.x1 <= bar.x1 and bar.y0 <= box.y0 + 1 for bar in bars
                   if bar.y0 < (box.y0 + box.y1) / 2 < bar.y1):  # fmt: skip
                continue
            for line in lines:
                (x, _), (_, y0), (_, y1) = (
                    line.get_transform().transform(point)
                    for point in (
                        (line.get_xdata()[0], 0),
                        (0, min(line.get_ydata())),
                        (0, max(line.get_ydata())),
                    )
                )
                low, high = sorted((y0, y1))
                if box.x0 < x < box.x1 and low < box.y1 and box.y0 < high:
                    found.append(text.get_text())
    return found


@pytest.mark.parametrize("rivals", [(640.0, 680.0), (95.0, 130.0), *more([(60.0, 200.0), (300.0, 330.0)])])
def test_no_line_crosses_a_value_of_the_ladder(ladder, rivals):
    speeds = dict(zip(("cudnn", "fa3"), rivals, strict=True))
    rows = [row(r["impl"], s, speeds.get(r["impl"], r["tflops"]))
            for s in TASK.values() for r in ladder.rows if r["head_dim"] == s.head_dim]  # fmt: skip
    figure = plotting.ladder_chart(rows, mark="05_two_pass_causal")
    assert crossings(figure) == []
    drawn = {line.get_xdata()[0] for line in figure.axes[0].lines if len(set(line.get_xdata())) == 1}
    assert drawn >= set(rivals), "the lines of the rivals are there"


def test_a_line_across_a_value_is_seen(ladder):
    figure = plotting.ladder_chart(ladder)
    ax = figure.axes[0]
    ax.plot([120, 120], [-0.5, 0.5], zorder=1)  # the first bar ends at 40, its value stands beside it
    assert crossings(figure) == ["40"]


def test_ladder_says_what_is_not_there(ladder):
    rows = [r for r in ladder.rows if r["impl"] != "fa3"]
    rows += [{"impl": "fa3", **s.to_dict(), "status": "not installed"} for s in TASK.values()]
    assert texts(plotting.ladder_chart(rows)).count("not installed") == 3


def test_sweep_labels_each_line_once_a_row(charts):
    for name in ("08 Production kernel", "cuDNN", "FA3"):
        assert texts(charts["sweep"]).count(name) == 1
        assert texts(charts["sweep-both"]).count(name) == 2


def test_sweep_starts_at_zero_and_contains_the_lines(charts):
    for ax in charts["sweep-both"].axes:
        low, high = ax.get_ylim()
        assert low == 0 and max(line.get_ydata().max() for line in ax.lines) < high


def test_spilled_configurations_are_hollow(charts, cloud):
    drawn = [line for ax in charts["cloud"].axes for line in ax.lines if str(line.get_marker()) in "o^sDvP*"]
    hollow = sum(len(line.get_xdata()) for line in drawn if line.get_markerfacecolor() == "none")
    assert hollow == sum(r["spills"] > 0 for r in cloud.rows) > 0


def test_the_accent_of_a_cloud_holds_its_rows_and_no_other(charts, cloud):
    lines = [line for ax in charts["cloud-accent"].axes for line in ax.lines]
    lines = [line for line in lines if line.get_marker() in list("o^X")]
    marked = [line for line in lines if line.get_marker() == "X"]
    rows = sum(r["BLOCK_M"] == 64 for r in cloud.rows)
    assert sum(len(line.get_xdata()) for line in marked) == rows > 0
    assert sum(len(line.get_xdata()) for line in lines) == len(cloud.rows)
    assert not [line for ax in charts["cloud"].axes for line in ax.lines if line.get_marker() == "X"]


def test_missing_head_dim_is_an_error(ladder):
    with pytest.raises(ValueError, match=r"head_dims: expected some of \[64, 128, 256\].*got \(96,\)"):
        plotting.ladder_chart(ladder, head_dims=(96,))


# Colors


def linear(color: str) -> np.ndarray:
    """sRGB to linear light."""
    return np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)])


def test_one_color_one_meaning():
    colors = [palette.COLORS[peer] for peer in PEERS] + [palette.OURS]
    assert len(set(colors)) == len(colors)
    steps = [palette.color_of(step) for step, _ in STEPS]
    assert len(set(steps)) == len(steps) and not set(steps) & {palette.COLORS[peer] for peer in PEERS}


def test_gray_print_tells_lines_apart():
    """By marker and dash pattern where the color is gone; the blues of the steps go from light to dark."""
    looks = [(palette.marker_of(peer), str(palette.dash_of(peer))) for peer in [*PEERS, "ours"]]
    assert len({marker for marker, _ in looks}) == len(looks) == len({dash for _, dash in looks})
    gluon = [step for step, _ in STEPS if number(step) >= GLUON_FROM]
    for part in ([step for step, _ in STEPS if step not in gluon], gluon):
        grays = [palette.luminance(palette.color_of(step)) for step in part]
        assert len(grays) > 1 and grays == sorted(grays, reverse=True)
    assert len({palette.marker_of(step) for step, _ in STEPS}) == len(STEPS)


@pytest.mark.parametrize("name", [*PEERS, *(step for step, _ in STEPS), "roof", "measured"])
def test_names_are_readable_on_white(name):
    color = palette.color_of(name) if name not in palette.COLORS else palette.COLORS[name]
    assert 1.05 / (palette.luminance(palette.ink_of(color)) + 0.05) >= 4.5
    assert 1.05 / (palette.luminance(color) + 0.05) >= 1.9, "a line too light to see"


def test_colors_stay_apart_with_a_color_vision_deficiency():
    """Machado et al. 2009, severity 1: protanopia and deuteranopia."""
    protan = [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ]
    deutan = [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]
    colors = [linear(palette.COLORS[name]) for name in (*PEERS, "ours")]
    for matrix in (protan, deutan):
        seen = [np.clip(np.array(matrix) @ color, 0, 1) ** (1 / 2.2) for color in colors]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 0.15


# Labels


@pytest.mark.parametrize(
    ("wanted", "gap", "low", "high"),
    [([5, 5, 5], 2, 0, 10), ([0, 0.1, 9.9, 10], 1, 0, 10), ([3, 1, 2], 0.1, 0, 10), ([9, 9.5, 10], 3, 0, 10)],
)
def test_spread_keeps_order_gap_and_range(wanted, gap, low, high):
    placed = plotting.spread(wanted, gap, low, high)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    ordered = [placed[i] for i in order]
    assert all(b - a >= gap - 1e-9 for a, b in itertools.pairwise(ordered))
    assert ordered[0] >= low - 1e-9 and ordered[-1] <= high + 1e-9


def test_spread_moves_nothing_that_has_room():
    assert plotting.spread([1.0, 5.0, 9.0], 2.0, 0.0, 10.0) == [1.0, 5.0, 9.0]
    assert plotting.spread([5.0, 5.0], 2.0) == [4.0, 6.0]
    assert plotting.spread([], 1.0) == []


def test_a_point_above_a_measured_roof_needs_the_mode_of_the_roof():
    """The same roof and points: refused without a word, drawn with it."""
    roof = {"hbm_gbs": 4296.0, "tensor_tflops": 680.0}
    with pytest.raises(ValueError, match="expected a mode, .* the highest has 810 TFLOP/s, the roof 680"):
        plotting.roofline_chart(POINTS, H200, roof)
    figure = plotting.roofline_chart(POINTS, H200, roof | {"mode": "sustained"})
    assert "measured, sustained 680" in [text.get_text() for text in figure.axes[0].texts]
    plotting.roofline_chart(POINTS, H200, roof | {"tensor_tflops": 820.0})
