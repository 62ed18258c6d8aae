"""Charts of measured attention: each takes a `records.Table` (or its rows) and returns a figure of printed
size.

The roofline is in roofline_chart.py, configurations and tiles are in maps.py; `plotting` offers all of them.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnlib.bench.ladder import TENSOR_PEAK, measured, order, task_rows
from attnlib.bench.names import is_ours
from attnlib.book.labels import HALO, label_ends, provenance
from attnlib.book.palette import (
    COLORS,
    COLUMN,
    OURS,
    WIDE,
    color_of,
    dash_of,
    ink_on,
    label_of,
    marker_of,
    style,
)

PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
"""Ticks of a logarithmic axis as plain numbers."""


ROOM = 0.19
"""Width of a value and its distance from the bar's end, as a share of a panel of the ladder chart."""


def rows_of(table: object) -> list[dict]:
    """The rows of a `records.Table`, or a list of rows as it is."""
    return list(getattr(table, "rows", table))


def source_of(table: object) -> str:
    """The provenance label of a `records.Table`; empty for plain rows."""
    return str(getattr(table, "label", ""))


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **kw: object
) -> tuple[Figure, np.ndarray]:
    """A figure of this size in inches in the book's style, and its axes as an array [rows, columns]."""
    style()
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.03, h_pad=0.03, wspace=0.03, hspace=0.03)
    return figure, figure.subplots(rows, columns, squeeze=False, **kw)


def dims_of(rows: Iterable[dict], head_dims: Sequence[int] | None) -> list[int]:
    """The head dimensions to draw: those asked for that the rows have; ValueError if that is none."""
    present = sorted({row["head_dim"] for row in rows})
    chosen = [d for d in (head_dims or present) if d in present]
    if not chosen:
        raise ValueError(f"head_dims: expected some of {present} (those in the rows), got {head_dims}")
    return chosen


def ladder_chart(
    table: object,
    mark: str | None = None,
    head_dims: Sequence[int] = (64, 128, 256),
    causal: bool = True,
    peak: float = TENSOR_PEAK,
) -> Figure:
    """A bar for each step and peer with its value, a panel for each head dimension; FA3, cuDNN and the
    datasheet peak across, without crossing a value.

    Whiskers run from the 20th to the 80th percentile. `mark` is the step of the chapter: dark, its name bold.
    """
    rows = rows_of(table)
    dims = dims_of(rows, head_dims)
    cells = {d: task_rows(rows, d, causal) for d in dims}
    at = _lines_of(impl for found in cells.values() for impl in found)
    figure, axes = new_figure(WIDE, 0.8 + 0.19 * len(at), 1, len(dims), sharey=True)
    for ax, d in zip(axes[0], dims, strict=True):
        ax.axvline(peak, color=COLORS["roof"], lw=0.8, ls=":")
        ax.text(peak, -0.62, f"peak {peak:.0f}", ha="right", va="bottom", fontsize=6, color=COLORS["roof"])
        ax.set_title(f"D = {d}", pad=9)  # above what names the peak
        ax.set(xlim=(0, peak * 1.03), ylim=(max(at.values()) + 0.6, -0.65))
        beside = {y: _ladder_bar(ax, y, impl, cells[d].get(impl), mark) for impl, y in at.items()}
        for rival in ("cudnn", "fa3"):
            if measured(cells[d].get(rival)):
                _reference_line(ax, rival, cells[d][rival]["tflops"], at[rival], beside)
        ax.set_xticks([0, 400, 800])
    _name_lines(axes[0], at, mark)
    axes[0][len(dims) // 2].set_xlabel("TFLOP/s" + ("" if causal else ", dense"))
    provenance(figure, source_of(table))
    return figure


def _lines_of(impls: Iterable[str]) -> dict[str, float]:
    """Implementation -> its height in a chart of one line each, with a gap between steps and peers."""
    ordered = order(set(impls))
    ours = sum(is_ours(impl) for impl in ordered)
    return {impl: i + (0.45 if i >= ours else 0) for i, impl in enumerate(ordered)}


def _name_lines(axes: Sequence[Axes], at: Mapping[str, float], mark: str | None) -> None:
    axes[0].set_yticks(list(at.values()), [label_of(impl) for impl in at])
    for tick, impl in zip(axes[0].get_yticklabels(), at, strict=True):
        tick.set_fontweight("bold" if impl == mark else "normal")
    for ax in axes:
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)


def _band(row: dict) -> tuple[float, float]:
    """TFLOP/s at the 80th and at the 20th percentile of time: (slow, fast)."""
    ms = row["ms"]
    return row["tflops"] * ms / (row.get("ms_p80") or ms), row["tflops"] * ms / (row.get("ms_p20") or ms)


def _ladder_bar(
    ax: Axes, y: float, impl: str, row: dict | None, mark: str | None
) -> tuple[float, float] | None:
    """A bar with its value inside its end, or beside it where the bar is too short: then the range of x that
    the text covers is returned."""
    room = ROOM * ax.get_xlim()[1]
    if not measured(row):
        status = (row or {}).get("status", "not measured")
        ax.text(12, y, status, va="center", fontsize=6, style="italic", color=COLORS["muted"], bbox=HALO)
        return 0.0, room * len(status) / 4
    faded = is_ours(impl) and mark not in (None, impl)
    color = COLORS["faded"] if faded else OURS if is_ours(impl) else color_of(impl)
    slow, fast = _band(row)
    ax.barh(y, row["tflops"], height=0.7, color=color, zorder=2)
    ax.plot([slow, fast], [y, y], color="#111111", lw=0.9, zorder=3, solid_capstyle="butt")
    text = f"{row['tflops']:.0f}" if row["tflops"] >= 10 else f"{row['tflops']:.1f}"
    if min(slow, row["tflops"]) < room:
        end = max(fast, row["tflops"])
        _value(ax, end, y, text, bold=impl == mark)
        return end, end + room
    look = {"fontsize": 6.5, "fontweight": "bold" if impl == mark else "normal", "color": ink_on(color)}
    place = {"textcoords": "offset points", "ha": "right", "va": "center_baseline"}
    ax.annotate(text, (min(slow, row["tflops"]), y), (-3, 0), zorder=4, **place, **look)
    return None


def _reference_line(
    ax: Axes, rival: str, x: float, end: float, beside: Mapping[float, tuple[float, float] | None]
) -> None:
    """A vertical line at x from the top to height `end`, with a gap at each text beside a bar that it would
    cross. Bars cover the line."""
    start = -0.5
    crossed = [y for y, text in sorted(beside.items()) if y < end and text and text[0] <= x <= text[1]]
    for y in [*crossed, None]:
        stop = end if y is None else y - 0.5
        if stop > start:
            ax.plot([x, x], [start, stop], color=color_of(rival), lw=1, ls=dash_of(rival), zorder=1)
        start = start if y is None else y + 0.5


def _value(ax: Axes, x: float, y: float, text: str, bold: bool) -> None:
    """A number to the right of a bar's end."""
    weight = "bold" if bold else "normal"
    style = {"textcoords": "offset points", "va": "center", "fontsize": 6.5, "fontweight": weight}
    ax.annotate(text, (x, y), (3, 0), bbox=HALO, zorder=4, **style)


def sweep_chart(
    table: object,
    head_dims: Sequence[int] | None = None,
    impls: Sequence[str] | None = None,
    causal: bool | None = None,
    mark: str | None = None,
    width: float = WIDE,
    height: float = 1.9,
) -> Figure:
    """TFLOP/s over the sequence length, a panel for each head dimension, the band of percentiles 20 to 80.

    With `causal=None` and both kinds in the rows, causal is the upper row of panels and dense the lower.
    Lines are named at their right end, in the last panel of the row that has them. `mark` is drawn thicker.
    """
    rows = rows_of(table)
    dims = dims_of(rows, head_dims)
    present = {bool(row.get("causal", True)) for row in rows}
    kinds = sorted(present if causal is None else {causal}, reverse=True)
    names = order(impls or {row["impl"] for row in rows})
    figure, axes = new_figure(
        width, 0.25 + height * len(kinds), len(kinds), len(dims), sharey="row", sharex=True
    )
    ends: dict[tuple[int, str], tuple[Axes, tuple]] = {}  # the last panel of a row wins
    for i, kind in enumerate(kinds):
        for ax, d in zip(axes[i], dims, strict=True):
            for impl in names:
                here = [r for r in rows if r["impl"] == impl and r["head_dim"] == d and measured(r)]
                here = [r for r in here if bool(r.get("causal", True)) == kind]
                if here:
                    end = _sweep_line(ax, impl, sorted(here, key=lambda r: r["seqlen"]), impl == mark)
                    ends[i, impl] = (ax, end)
            ax.set_title(f"D = {d}" + (", causal" if kind else ", dense") * (len(kinds) > 1))
            _length_axis(ax, sorted({r["seqlen"] for r in rows}))
        axes[i][0].set_ylabel("TFLOP/s")
        axes[i][0].set_ylim(0, axes[i][0].get_ylim()[1])  # shared by the row; after all lines are drawn
    axes[-1][len(dims) // 2].set_xlabel("sequence length S")
    provenance(figure, source_of(table))
    for ax in axes.flat:
        label_ends(ax, [end for owner, end in ends.values() if owner is ax])
    return figure


def _sweep_line(ax: Axes, impl: str, rows: list[dict], strong: bool) -> tuple[float, float, str, str]:
    x, y = [r["seqlen"] for r in rows], [r["tflops"] for r in rows]
    color = color_of(impl)
    low, high = zip(*[_band(r) for r in rows], strict=True)
    ax.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
    ax.plot(x, y, color=color, marker=marker_of(impl), ls=dash_of(impl), lw=1.8 if strong else 1.1, ms=3.2)
    return x[-1], y[-1], label_of(impl), color


def _length_axis(ax: Axes, lengths: Sequence[float]) -> None:
    """log2 axis with some of the lengths themselves as ticks: those that have room, from the last one
    down."""
    ax.set_xscale("log", base=2)
    apart = (max(lengths) / min(lengths)) ** 0.22
    shown: list[float] = []
    for length in sorted(lengths, reverse=True):
        if not shown or shown[-1] / length >= apart:
            shown.append(length)
    ax.xaxis.set_major_locator(FixedLocator(shown))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(
        FuncFormatter(lambda v, _: f"{v / 1024:g}k" if v >= 1024 and v % 256 == 0 else f"{v:g}")
    )


def error_chart(
    table: object, head_dims: Sequence[int] | None = None, causal: bool = True, mark: str | None = None
) -> Figure:
    """Largest error (filled) and RMS error (hollow) against fp64 with their budgets, a panel a head
    dimension."""
    rows = rows_of(table)
    dims = dims_of(rows, head_dims)
    cells = {d: task_rows(rows, d, causal) for d in dims}
    at = _lines_of(
        impl for found in cells.values() for impl, row in found.items() if row.get("max_error") is not None
    )
    figure, axes = new_figure(WIDE, 0.95 + 0.17 * len(at), 1, len(dims), sharey=True, sharex=True)
    for ax, d in zip(axes[0], dims, strict=True):
        for kind, gray in (("rms", COLORS["measured"]), ("max", COLORS["roof"])):
            budgets = {impl: cells[d].get(impl, {}).get(f"budget_{kind}") for impl in at}
            for impl, y in at.items():
                _error_point(ax, cells[d].get(impl, {}).get(f"{kind}_error"), y, impl, hollow=kind == "rms")
                if budgets[impl]:
                    ax.plot([budgets[impl]] * 2, [y - 0.73, y + 0.73], color=gray, lw=1.0, zorder=2)
            drawn = [budget for budget in budgets.values() if budget]
            if drawn:
                name = "RMS budget" if kind == "rms" else "budget"
                ax.text(drawn[0], -0.78, name, ha="center", va="bottom", fontsize=5.5, color=gray)
        ax.set(xscale="log", ylim=(max(at.values()) + 0.75, -0.75))
        ax.set_title(f"D = {d}", pad=10)
    _name_lines(axes[0], at, mark)
    axes[0][len(dims) // 2].set_xlabel("error against fp64: ○ RMS, ● largest")
    provenance(figure, source_of(table))
    return figure


def _error_point(ax: Axes, error: float | None, y: float, impl: str, hollow: bool) -> None:
    if error:
        color = OURS if is_ours(impl) else color_of(impl)
        ax.plot(
            error, y, marker="o", ms=4.2, mfc="white" if hollow else color, mec=color, ls="none", zorder=3
        )


def bar_chart(
    bars: Mapping[str, float],
    unit: str,
    lines: Mapping[str, float] | None = None,
    mark: str | None = None,
    source: str = "",
    colors: Mapping[str, str] | None = None,
    width: float = COLUMN,
    digits: str = ".3g",
) -> Figure:
    """Horizontal bars, name -> value, each with its value; `lines` are reference values across, named on top.

    A name that is a key of the palette ("cudnn") takes its color and label. digits: a format specification.
    """
    figure, axes = new_figure(width, 0.62 + 0.22 * len(bars) + 0.12 * bool(lines))
    ax = axes[0, 0]
    top = max([*bars.values(), *(lines or {}).values()])
    for i, (name, value) in enumerate(bars.items()):
        ours = OURS if mark in (None, name) else COLORS["faded"]
        color = (colors or {}).get(name) or (COLORS[name] if name in COLORS else ours)
        ax.barh(i, value, height=0.68, color=color, zorder=2)
        _value(ax, value, i, format(value, digits), bold=name == mark)
    for text, value in (lines or {}).items():
        ax.axvline(value, color=COLORS["roof"], lw=0.8, ls=":", zorder=1)
        side = "right" if value > 0.6 * top else "center"
        ax.text(value, -0.58, text, ha=side, va="bottom", fontsize=6)
    ax.set(xlabel=unit, ylim=(len(bars) - 0.45, -0.55), xlim=(0, top * 1.16))
    _name_lines([ax], {name: i for i, name in enumerate(bars)}, mark)
    provenance(figure, source)
    return figure


def rounded(values: Iterable[float], digits: int = 4) -> list[float]:
    """To so many significant digits: of what a chapter computes when its figure is drawn, the last digits
    depend on the processor, and a committed figure is the same on all."""
    return [float(f"{value:.{digits}g}") for value in values]


def line_chart(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    log: str = "",
    source: str = "",
    limits: Mapping[str, float] | None = None,
    width: float = COLUMN,
    height: float = 2.1,
) -> Figure:
    """Lines named at their ends, name -> (x, y); limits: horizontal lines, name -> y.

    A name that is a key of the palette ("cudnn", "03_online_softmax") takes its color, marker and label;
    other names are black and grays. log: "x", "y" or "xy" (x as base 2).
    """
    figure, axes = new_figure(width, height)
    ax = axes[0, 0]
    ends = []
    grays = [name for name in lines if name not in COLORS and not is_ours(name)]
    for name, (x, y) in lines.items():
        if name in grays:
            i = grays.index(name)
            color, marker, dash = ("#111111", "#777777", "#A5A5A5")[i % 3], "osD^v"[i % 5], "-"
        else:
            color, marker, dash = color_of(name), marker_of(name), dash_of(name)
        ax.plot(x, y, color=color, marker=marker, ls=dash)
        ends.append((x[-1], y[-1], label_of(name), color))
    xs = sorted({float(v) for x, _ in lines.values() for v in x})
    for text, value in (limits or {}).items():
        ax.axhline(value, color=COLORS["roof"], lw=0.8, ls=":")
        ends.append((xs[-1], value, text, COLORS["roof"]))
    if "y" in log:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(PLAIN)
    else:
        ax.set_ylim(0, ax.get_ylim()[1])
    if "x" in log:
        _length_axis(ax, xs)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    provenance(figure, source)
    label_ends(ax, ends)
    return figure


def samples_chart(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    xlabel: str,
    source: str = "",
    line: float | None = 1.0,
    width: float = WIDE,
) -> Figure:
    """Repeated measurements as they are: a point for each, their median, and a line between the quartiles.

    panels: title -> name -> samples, in this order from the top; names may differ from panel to panel.
    line: a reference value across.
    """
    counts = [len(samples) for samples in panels.values()]
    figure, axes = new_figure(
        width, 0.6 + 0.2 * len(panels) + 0.15 * sum(counts), len(panels), sharex=True, height_ratios=counts
    )
    for ax, (title, samples) in zip(axes[:, 0], panels.items(), strict=True):
        names = [name for name, values in samples.items() for _ in values]
        place = {"x": [value for values in samples.values() for value in values], "y": names, "ax": ax}
        sns.stripplot(**place, color=OURS, jitter=False, size=3, alpha=0.6)  # jitter is drawn at random
        middle = {"estimator": "median", "errorbar": ("pi", 50), "linestyle": "none", "marker": "|"}
        sns.pointplot(**place, **middle, color="#111111", markersize=7, err_kws={"linewidth": 0.9})
        if line is not None:
            ax.axvline(line, color=COLORS["roof"], lw=0.8, ls=":", zorder=0)
        ax.set(xlabel="", ylabel="")
        ax.set_title(title, loc="left")
        ax.tick_params(axis="y", length=0)
    axes[-1, 0].set_xlabel(xlabel)
    provenance(figure, source)
    return figure
