"""Heat maps of the plane of `bench.plane`, attnlib beside FlashAttention-3, a cell for each call; tables of
those in which FlashAttention-3 took less time, in windows and in turn; and one of the named calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, product
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from attnlib.bench import plane
from attnlib.bench.plane import KINDS, Cell
from attnlib.bench.shapes import DTYPES
from attnlib.bench.verdict import ABSENT, TIE, tally
from attnlib.book.charts import new_figure, rows_of, source_of
from attnlib.book.labels import provenance
from attnlib.book.palette import COLORS, OURS, WIDE, ink_on
from attnlib.kernels.hopper.configs import hopper_config
from attnlib.kernels.hopper.configs_backward import hopper_backward_config

FAR = 1.25
"""Ratio from which on, and below its inverse, colors no longer change."""
FAINT = "#DADADA"
SHADES = sns.blend_palette([COLORS["fa3"], "#FFFFFF", OURS], as_cmap=True)
SCALE = Normalize(-math.log(FAR), math.log(FAR))

FA3_COLUMNS = 64, 96, 128, 192, 256
"""Columns that FlashAttention-3's kernels compute with."""
UNKNOWN = "unknown"
KNOWN = {
    ("backward", 96, None): "its steps; tested, and not it: K and V in registers, the products of dQ",
    ("backward", 128, "dense"): "its steps; tested, and not it: the wait for Q",
    ("backward", 192, None): "before and behind its steps; not the passes around it",
}
"""What the lab (docs/lab/hopper.md, hopper-backward.md) knows of a loss, by pass, the columns that attnlib
computes, and the kind of call; kind None: of all that have no line of their own. `over_lengths` tells steps
from what is around them."""


def plane_chart(table: object, way: str, dtype: str = "bfloat16") -> Figure:
    """Time of FlashAttention-3 over that of attnlib, in percent, of one pass and dtype: a panel for each
    kind, a row for each head dimension, a column for each length. Ties are gray; what was not measured is
    hatched. The sixth place has the scale."""
    found = {cell: row for row in rows_of(table) for cell, own in [plane.key(row)] if own == way}
    figure, axes = new_figure(WIDE, 4.4, 2, 3)
    figure.get_layout_engine().set(wspace=0.02, hspace=0.05)
    *panels, last = axes.flat
    for ax, kind in zip(panels, KINDS, strict=True):
        _panel(ax, kind, dtype, found)
    for ax in axes[:, 0]:
        ax.set_ylabel("head dimension D")
    axes[1, 0].set_xlabel("sequence length S")
    _scale(last, f"{way}, {DTYPES[dtype][0]}")
    provenance(figure, source_of(table))
    return figure


def _scale(ax: Axes, title: str) -> None:
    """What the colors mean, in the place of a panel."""
    ax.set_title(title, loc="left", fontweight="bold")
    ax.set_axis_off()
    ticks = [1 / FAR, 0.9, 1, 1.1, FAR]
    bar = ax.figure.colorbar(
        ScalarMappable(SCALE, SHADES), cax=ax.inset_axes((0.02, 0.84, 0.96, 0.07)), orientation="horizontal",
        extend="both", ticks=[math.log(x) for x in ticks],
    )  # fmt: skip
    bar.ax.set_xticklabels([f"{100 * x:.0f}" for x in ticks])
    bar.ax.tick_params(labelsize=6.5)
    bar.ax.minorticks_off()
    bar.set_label("time of FA3 / time of attnlib, percent:\nabove 100 attnlib is faster", fontsize=6.5)
    edge = {"edgecolor": COLORS["muted"], "lw": 0.5}
    handles = [
        Patch(facecolor=FAINT, label="tie: inside the noise", **edge),
        Patch(facecolor="white", hatch="/////", label="not measured", **edge),
        Patch(facecolor="white", hatch="xxxxx", label="no time: wrong or failed", **edge),
    ]
    ax.legend(handles=handles, loc="lower left", handlelength=1.6, handleheight=1.2, labelspacing=0.7)


def _panel(ax: Axes, kind: str, dtype: str, found: Mapping[Cell, dict[str, Any]]) -> None:
    ax.set_title(KINDS[kind].label, loc="left")
    ax.set(xlim=(0, len(plane.LENGTHS)), ylim=(len(plane.DIMS), 0))
    for x, length in enumerate(plane.LENGTHS):
        for y, d in enumerate(plane.DIMS):
            if KINDS[kind].hides(length):
                _cell(ax, x, y, found.get(plane.cell(kind, d, length, dtype)))
    blank = sum(not KINDS[kind].hides(length) for length in plane.LENGTHS)
    if blank:  # they come first, as the lengths grow
        text = "no key hidden:\nthe same call as causal"
        ax.text(blank / 2, len(plane.DIMS) / 2, text, rotation=90, ha="center", va="center", fontsize=6.5)
    ax.set_xticks([x + 0.5 for x in range(len(plane.LENGTHS))], [_short(n) for n in plane.LENGTHS])
    ax.set_yticks([y + 0.5 for y in range(len(plane.DIMS))], [str(d) for d in plane.DIMS])
    ax.tick_params(length=0, pad=2, labelsize=6.5)
    ax.grid(False)
    ax.spines[:].set_visible(False)


def _short(length: int) -> str:
    return str(length) if length < 1024 else f"{length // 1024}k"


def _cell(ax: Axes, x: int, y: int, row: dict[str, Any] | None) -> None:
    """A row of the record as a cell of a panel."""
    face, hatch, text = look(row)
    box = Rectangle((x, y), 1, 1, facecolor=face, edgecolor="white", lw=0.8)
    ax.add_patch(box)
    if hatch:
        ax.add_patch(Rectangle((x + 0.06, y + 0.06), 0.88, 0.88, fill=False, hatch=hatch, lw=0,
                               edgecolor=COLORS["muted"]))  # fmt: skip
    ax.text(x + 0.5, y + 0.53, text, ha="center", va="center", fontsize=5.8, color=ink_on(face))


def look(row: dict[str, Any] | None) -> tuple[str, str, str]:
    """(color, hatch, text) of a cell; row: None where it was not measured."""
    if row is None:
        return "#FFFFFF", "/////", ""
    word, ratio = plane.verdict_of(row).word, row.get("ratio")
    if word == ABSENT:
        return "#FFFFFF", "xxxxx", ""
    if word == TIE:
        return FAINT, "", f"{100 * ratio:.0f}"
    return to_hex(SHADES(SCALE(math.log(ratio)))), "", f"{100 * ratio:.0f}"


def words(rows: Sequence[dict[str, Any]]) -> str:
    """How often each verdict came."""
    return tally([plane.verdict_of(row).word for row in rows])


def summary(table: object, way: str, dtype: str) -> str:
    """How many cells of one pass and dtype were measured, where their ratios lie, and their verdicts."""
    rows = [row for row in rows_of(table) if (row["pass"], row["dtype"]) == (way, dtype)]
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    ends = f", from {min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
    return f"{len(ratios)} cells{ends}. {words(rows)}".rstrip(". ") + "."


def alt_text(table: object, way: str, dtype: str = "bfloat16") -> str:
    """The chart in words, for readers who do not see it."""
    return (
        f"Heat maps of the time of FA3 over that of attnlib, {way}, {DTYPES[dtype][0]}, by head dimension "
        f"and length, for causal, dense, grouped and windowed calls: {summary(table, way, dtype)}"
    )


# ---------------------------------------------------------------- where FlashAttention-3 took less time


def columns_of(way: str, head_dim: int) -> tuple[int, int]:
    """Columns that attnlib and FlashAttention-3 compute for a head dimension."""
    config = hopper_config(head_dim) if way == "forward" else hopper_backward_config(head_dim)
    return config.width(head_dim), min(n for n in FA3_COLUMNS if n >= head_dim)


def known_of(way: str, columns: int, kind: str) -> str:
    """What is known of a loss."""
    return KNOWN.get((way, columns, kind)) or KNOWN.get((way, columns, None), UNKNOWN)


def _place(row: dict[str, Any]) -> tuple[int, ...]:
    """Where a row stands in a table: by pass, dtype, kind and head dimension."""
    kind, way = list(plane.ALL).index(row["kind"]), plane.PASSES.index(row["pass"])
    return way, plane.DTYPES.index(row["dtype"]), kind, row["head_dim"]


def behind(table: object) -> list[dict[str, Any]]:
    """Where attnlib took longer, slower or a tie, for a table: a line for each pass, kind, dtype, head
    dimension and verdict, with its lengths and their ratios."""
    rows = [row for row in rows_of(table) if row.get("ratio", 1) < 1]

    def line(row: dict[str, Any]) -> tuple[Any, ...]:
        return *_place(row), plane.verdict_of(row).word

    lines = []
    for _, group in groupby(sorted(rows, key=lambda row: (*line(row), row["seqlen"])), line):
        group = list(group)
        first = group[0]
        way, d = first["pass"], first["head_dim"]
        own, theirs = columns_of(way, d)
        lines.append({
            "pass": way, "kind": KINDS[first["kind"]].label, "dtype": DTYPES[first["dtype"]][0], "D": d,
            "verdict": plane.verdict_of(first).word,
            "least": min(row["ratio"] for row in group),
            "S: ratio": ", ".join(f"{row['seqlen']}: {row['ratio']:.3f}" for row in group),
            "columns": f"{own}, FA3 {theirs}", "known": known_of(way, own, first["kind"]),
        })  # fmt: skip
    return lines


def over_lengths(table: object, way: str = "backward") -> list[dict[str, Any]]:
    """How much longer attnlib takes than FlashAttention-3 in calls without groups and windows: microseconds
    that do not depend on the length, and those for each 1024 keys.

    All cells have as many tokens, so what programs do before and behind their steps is the same at all
    lengths, and steps grow with the length. Two numbers are fitted to the differences at the lengths below
    16384, where calls do not run at the power limit yet; "off by at most" is what the fit leaves.
    """
    shorter = [row for row in rows_of(table)
               if row["pass"] == way and row["seqlen"] < max(plane.LENGTHS) and "ratio" in row]  # fmt: skip
    lines = []
    for dtype, kind, d in product(plane.DTYPES, ("dense", "causal"), plane.DIMS):
        rows = [row for row in shorter if (row["dtype"], row["kind"], row["head_dim"]) == (dtype, kind, d)]
        if len(rows) < 3:
            continue
        lengths = np.array([row["seqlen"] for row in rows]) / 1024
        longer = np.array([1e3 * (row["attnlib_ms"] - row["fa3_ms"]) for row in rows])
        step, start = np.polyfit(lengths, longer, 1)
        lines.append({
            "kind": KINDS[kind].label, "dtype": DTYPES[dtype][0], "D": d,
            "around the steps, µs": start, "for 1024 keys, µs": step,
            "off by at most, µs": np.abs(longer - start - step * lengths).max(),
        })  # fmt: skip
    return lines


def in_turn(settled: object, *windows: object) -> list[dict[str, Any]]:
    """A line for each call of table `settled`: its verdict there, and in windows, those of tables `cells` and
    `named`. Of a call that both of these have it is the lower one."""
    before, lines = _lowest(*windows), []
    for row in sorted(rows_of(settled), key=lambda row: (*_place(row), row["seqlen"])):
        cell, way = plane.key(row)
        old = before.get((cell, way))
        lines.append({
            "call": cell.label, "pass": way,
            "in windows": plane.verdict_of(old).cell() if old else None,
            "in turn": plane.verdict_of(row).cell(),
        })  # fmt: skip
    return lines


def told_in_turn(settled: object, *windows: object) -> str:
    """In sentences: how many of the calls that took longer than FlashAttention-3's in windows were measured
    in turn, and what came of it. settled: None where that was not measured."""
    below = {call for call, row in _lowest(*windows).items() if row["ratio"] < 1}
    if not below:
        return "No call is below 1.0 in windows."
    rows = [row for row in rows_of(settled or []) if plane.key(row) in below]
    if not rows:
        return f"None of the {len(below)} calls below 1.0 was measured in turn yet (`--settled`)."
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    ends = f", from {min(ratios):.3f} to {max(ratios):.3f}" if ratios else ""
    return (
        f"Of {len(below)} calls below 1.0 in windows {len(rows)} were measured in turn{ends}, "
        f"{sum(ratio < 1 for ratio in ratios)} below 1.0. {words(rows)}."
    )


def _lowest(*windows: object) -> dict[tuple[Cell, str], dict[str, Any]]:
    """The rows that have a ratio, by call; of two of one call the lower one."""
    found: dict[tuple[Cell, str], dict[str, Any]] = {}
    for row in (row for table in windows for row in rows_of(table or []) if "ratio" in row):
        call = plane.key(row)
        if call not in found or row["ratio"] < found[call]["ratio"]:
            found[call] = row
    return found


# ---------------------------------------------------------------- calls that were asked for by name


def named(table: object) -> list[dict[str, Any]]:
    """A line for each of `plane.NAMED` that was measured, with TFLOP/s of both and the verdict, by pass."""
    found = {plane.key(row): row for row in rows_of(table)}
    lines = []
    for cell in plane.NAMED:
        own = {way: row for way in plane.PASSES if (row := found.get((cell, way)))}
        if own:
            lines.append({"call": cell.label} | {
                name: text for way in plane.PASSES for name, text in _columns(way, own.get(way)).items()
            })  # fmt: skip
    return lines


def _columns(way: str, row: dict[str, Any] | None) -> dict[str, Any]:
    """Those of one pass; None where it has no number."""
    speeds = {f"{way}, {name}": (row or {}).get(f"{name}_tflops") for name in (plane.OURS, plane.PEER)}
    said = plane.verdict_of(row).cell() if row else None
    return {name.replace(plane.PEER, "FA3"): x for name, x in speeds.items()} | {f"{way}, verdict": said}
