"""The whole road in counters: one line of the chart for each step and peer, one panel for each counter."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from attnlib.bench.ladder import order
from attnlib.bench.names import is_ours
from attnlib.book.charts import PLAIN, dims_of, new_figure, rows_of, source_of
from attnlib.book.labels import provenance
from attnlib.book.palette import COLORS, WIDE, label_of, shade

PANELS: dict[str, tuple[str, float, str]] = {
    "tensor_pct": ("tensor cores\n(% of peak)", 1, "linear"),
    "xu_pct": ("exponential unit\n(% of peak)", 1, "linear"),
    "issue_pct": ("issue slots\n(% of peak)", 1, "linear"),
    "l2_bytes": ("L2 traffic\n(GB)", 1e-9, "log"),
    "instructions_per_score": ("instructions\nper score", 1, "log"),
}
"""Field of a row -> the panel's title, what turns the field into its unit, and its scale."""

LEFT_OUT = {"attnlib-triton", "math"}
"""The package's portable kernel, made from chapter 08's, and a peer of so many bytes and instructions that
the differences of all others could not be seen."""

_LOOK = {64: (shade(0.0), "o"), 128: (shade(0.5), "s"), 256: (shade(1.0), "^")}


def road_chart(table: object, direction: str = "forward") -> Figure:
    """Counters by step, from the first to the package, and below them the peers; a line for each head
    dimension. A step whose counters were not read has a gap. ValueError if no row has any."""
    rows = [row for row in rows_of(table) if row["pass"] == direction and row.get("issue_pct") is not None]
    if not rows:
        raise ValueError("road_chart: table: expected rows with counters, got none")
    dims = dims_of(rows, None)
    impls = order({row["impl"] for row in rows} - LEFT_OUT)
    ours = sum(is_ours(impl) for impl in impls)
    at = {impl: i + (0.5 if i >= ours else 0) for i, impl in enumerate(impls)}
    cells = {(row["impl"], row["head_dim"]): row for row in rows}
    figure, axes = new_figure(WIDE, 0.85 + 0.165 * len(at), 1, len(PANELS), sharey=True)
    for ax, (field, (title, factor, scale)) in zip(axes[0], PANELS.items(), strict=True):
        for d in dims:
            found = {impl: cells.get((impl, d), {}).get(field) for impl in at}
            _line(ax, at, {i: v * factor for i, v in found.items() if v is not None}, d)
        ax.set_title(title, fontsize=7)
        ax.set(xscale=scale, ylim=(max(at.values()) + 0.6, -0.6))
        if scale == "log":
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=8))
            ax.xaxis.set_major_formatter(PLAIN)
            ax.xaxis.set_minor_formatter(NullFormatter())
        else:
            ax.set_xlim(0, 100)
            ax.set_xticks([0, 50, 100])
        ax.tick_params(axis="y", length=0)
    axes[0][0].set_yticks(list(at.values()), [label_of(impl) for impl in at])
    handles = [ax_line for ax_line in axes[0][0].lines if ax_line.get_label().startswith("D =")]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(dims), fontsize=7, handlelength=1.5)
    provenance(figure, source_of(table))
    return figure


def alt_text(table: object) -> str:
    """The ends of the road in words, for readers who do not see the chart."""
    rows = {(r["impl"], r["head_dim"]): r for r in rows_of(table) if r["pass"] == "forward"}
    ends = []
    for (impl, d), row in sorted(rows.items()):
        if impl in ("01_naive", "attnlib", "fa3") and row.get("tensor_pct") is not None:
            ends.append(f"{label_of(impl)} {row['tensor_pct']:.0f} at D = {d}")
    return "Counters by step, from the first to the package, and of the peers. Tensor cores, % of peak: " + (
        ", ".join(ends) or "none counted") + "."  # fmt: skip


def _line(ax: Axes, at: Mapping[str, float], values: Mapping[str, float], head_dim: int) -> None:
    """One head dimension in one panel: steps joined in order, peers alone."""
    color, marker = _LOOK.get(head_dim, (COLORS["muted"], "D"))
    steps = [impl for impl in values if is_ours(impl)]
    look = {"color": color, "marker": marker, "ms": 3.2, "mec": "white", "mew": 0.3}
    ax.plot([values[i] for i in steps], [at[i] for i in steps], lw=0.9, label=f"D = {head_dim}", **look)
    peers = [impl for impl in values if not is_ours(impl)]
    ax.plot([values[i] for i in peers], [at[i] for i in peers], ls="none", label="_peers", **look)
