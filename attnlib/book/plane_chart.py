"""Heat maps of the plane of `bench.plane`, attnlib beside FlashAttention-3, a cell for each call; a table of
those in which FlashAttention-3 took less time; and one of the named calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

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
    ("backward", 96, None): "inferred: one of two parts of K and V in registers, not both",
    ("backward", 128, "dense"): f"{UNKNOWN}; it is not the wait for Q",
    ("backward", 192, None): f"{UNKNOWN}; in the kernel, not in the passes around it",
}
"""What the lab (docs/lab/hopper.md, hopper-backward.md) knows of a loss, by pass, the columns that attnlib
computes, and the kind of call; kind None: of all that have no line of their own. What is inferred was not
tested by itself."""


class Panel(NamedTuple):
    """Columns of one heat map: texts of the axis -> (kind, length)."""

    title: str
    columns: dict[str, tuple[str, int]]
    dtype: str = "bfloat16"


def panels() -> list[Panel]:
    """One for each kind, and one for what is measured in fp16, too."""
    lengths = {_short(n): n for n in plane.LENGTHS}
    found = [
        Panel(one.label, {text: (kind, n) for text, n in lengths.items()}) for kind, one in KINDS.items()
    ]
    fp16 = {f"{kind}\n{_short(4096)}": (kind, 4096) for kind in ("causal", "dense")}
    return [*found, Panel("fp16", fp16, "float16")]


def _short(length: int) -> str:
    return str(length) if length < 1024 else f"{length // 1024}k"


def plane_chart(table: object, way: str) -> Figure:
    """Time of FlashAttention-3 over that of attnlib, in percent, of one pass: a panel for each kind, a row
    for each head dimension, a column for each length. Ties are gray; what was not measured is hatched."""
    found = {cell: row for row in rows_of(table) for cell, own in [plane.key(row)] if own == way}
    figure, axes = new_figure(WIDE, 4.9, 2, 3)
    figure.get_layout_engine().set(wspace=0.02, hspace=0.05)
    for ax, panel in zip(axes.flat, panels(), strict=True):
        _panel(ax, panel, found)
    for ax in axes[:, 0]:
        ax.set_ylabel("head dimension D")
    axes[1, 0].set_xlabel("sequence length S")
    ticks = [1 / FAR, 0.9, 1, 1.1, FAR]
    bar = figure.colorbar(
        ScalarMappable(SCALE, SHADES), ax=list(axes.flat), location="bottom", aspect=60, shrink=0.8, pad=0.02,
        extend="both", ticks=[math.log(x) for x in ticks],
    )  # fmt: skip
    bar.ax.set_xticklabels([f"{x:.0%}" for x in ticks])
    bar.ax.minorticks_off()
    bar.set_label(f"time of FA3 / time of attnlib, {way}, percent: above 100 attnlib is faster", fontsize=7)
    edge = {"edgecolor": COLORS["muted"], "lw": 0.5}
    handles = [
        Patch(facecolor=FAINT, label="tie: inside the noise", **edge),
        Patch(facecolor="white", hatch="/////", label="not measured", **edge),
        Patch(facecolor="white", hatch="xxxxx", label="no time: wrong or failed", **edge),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, handlelength=1.2)
    provenance(figure, source_of(table))
    return figure


def _panel(ax: Axes, panel: Panel, found: Mapping[Cell, dict[str, Any]]) -> None:
    ax.set_title(panel.title, loc="left")
    ax.set(xlim=(0, len(plane.LENGTHS)), ylim=(len(plane.DIMS), 0))
    for x, (kind, length) in enumerate(panel.columns.values()):
        for y, d in enumerate(plane.DIMS):
            if hides(kind, length):
                _cell(ax, x, y, found.get(plane.cell(kind, d, length, panel.dtype)))
    blank = sum(not hides(*column) for column in panel.columns.values())
    if blank:  # they come first, as the lengths grow
        text = "no key hidden:\nthe same call as causal"
        ax.text(blank / 2, len(plane.DIMS) / 2, text, rotation=90, ha="center", va="center", fontsize=6.5)
    ax.set_xticks([x + 0.5 for x in range(len(panel.columns))], list(panel.columns))
    ax.set_yticks([y + 0.5 for y in range(len(plane.DIMS))], [str(d) for d in plane.DIMS])
    ax.tick_params(length=0, pad=2, labelsize=6.5)
    if panel.dtype != "bfloat16":  # labels of two lines, the first of which is a word
        ax.tick_params("x", labelsize=5.2)
    ax.grid(False)
    ax.spines[:].set_visible(False)


def hides(kind: str, length: int) -> bool:
    """Whether a kind's call of this length is one of its own: a window as wide as the sequence hides
    nothing."""
    window = KINDS[kind].window
    return window is None or window[0] + 1 < length


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


def alt_text(table: object, way: str) -> str:
    """The chart in words, for readers who do not see it."""
    rows = [row for row in rows_of(table) if row["pass"] == way]
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    ends = f", from {min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
    return (
        f"Heat maps of the time of FA3 over that of attnlib, {way}, by head dimension and length, for "
        f"causal, dense, grouped and windowed calls: {len(ratios)} cells{ends}. {words(rows)}."
    )


# ---------------------------------------------------------------- where FlashAttention-3 took less time


def columns_of(way: str, head_dim: int) -> tuple[int, int]:
    """Columns that attnlib and FlashAttention-3 compute for a head dimension."""
    config = hopper_config(head_dim) if way == "forward" else hopper_backward_config(head_dim)
    return config.width(head_dim), min(n for n in FA3_COLUMNS if n >= head_dim)


def known_of(way: str, columns: int, kind: str) -> str:
    """What is known of a loss."""
    return KNOWN.get((way, columns, kind)) or KNOWN.get((way, columns, None), UNKNOWN)


def behind(table: object) -> list[dict[str, Any]]:
    """Where attnlib took longer, slower or a tie, for a table: a line for each pass, kind, dtype, head
    dimension and verdict, with its lengths and their ratios."""
    rows = [row for row in rows_of(table) if row.get("ratio", 1) < 1]

    def line(row: dict[str, Any]) -> tuple[Any, ...]:
        kind, word = list(KINDS).index(row["kind"]), plane.verdict_of(row).word
        return plane.PASSES.index(row["pass"]), row["dtype"] == "float16", kind, row["head_dim"], word

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
