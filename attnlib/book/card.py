"""The profile card: what each unit of the GPU did during a step, and what its warps waited for.

One picture, the same through the book. A panel for each head dimension has a bar for each unit, in percent of
its peak, and under them one bar of all cycles of resident warps, split by what the warp did or waited for.
Thin marks are the step before. Rows come from `attnlib.bench.profiling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from attnlib.bench.counters import OTHER, STALLS
from attnlib.bench.names import is_ours
from attnlib.book.charts import new_figure, rows_of, source_of
from attnlib.book.labels import HALO
from attnlib.book.palette import COLORS, OURS, WIDE, color_of, ink_on, label_of

UNITS = {
    "tensor_pct": "tensor cores",
    "xu_pct": "exponential unit",
    "fma_pct": "FMA",
    "alu_pct": "ALU",
    "issue_pct": "issue slots",
    "shared_pct": "shared memory",
    "l2_pct": "L2",
    "dram_pct": "DRAM",
}
"""Field of a row -> name of its bar."""

WAITS: dict[str, tuple[str, tuple[str, ...]]] = {
    "issues": ("#333333", ("selected",)),
    "is ready": ("#56B4E9", ("not_selected",)),
    "a fixed latency": ("#949494", ("wait",)),
    "a busy pipe": ("#ECE133", ("math_pipe_throttle", "dispatch_stall")),
    "tensor cores": ("#029E73", ("gmma",)),
    "shared memory or exp": ("#DE8F05", ("short_scoreboard", "mio_throttle")),
    "global memory": ("#D55E00", ("long_scoreboard", "lg_throttle", "tex_throttle", "membar", "drain")),
    "a barrier": ("#CC78BC", ("barrier",)),
    "other": ("#DDDDDD", ("no_instruction", "branch_resolving", "imc_miss", "sleeping", "misc", OTHER)),
}
"""What a resident warp does in a cycle -> color, and Nsight Compute's reasons that it sums up: it issues, is
ready while another warp is chosen, or waits for one of the others. A fixed latency is that of its own
instruction before. Exponentials share a queue with shared memory. Warps that a warp-specialized kernel parks
wait for a barrier, too."""

WHAT = {"fp8": " in FP8", "values": ", quantizing values", "decode": ", decoding"}
"""Pass -> what a card's title says of it."""

NO_WAIT = ("issues", "is ready")
"""Those of `WAITS` in which a warp waits for nothing."""

DATA = ("impl", "head_dim", "time_us", "clock_mhz", *UNITS, "l2_bytes", "dram_read_bytes", "dram_write_bytes")
DATA += ("l2_hit_pct", "occupancy_pct", "registers", "instructions_per_score")
"""Columns of the data folded below a card."""

SHOWN = 0.11
"""A part of the lower bar has its percentage in it from this share on."""

_NOW, _BEFORE = 8.35, 9.1  # heights of the two bars of warps, under those of the units


def waits_of(row: Mapping) -> dict[str, float]:
    """Shares of `WAITS` in all cycles of resident warps; they sum to 1. Empty where none were counted."""
    stalls = row.get("stalls") or {}
    if not stalls:
        return {}
    unknown = set(stalls) - {*STALLS, OTHER}
    if unknown:
        raise ValueError(f"stalls: expected reasons of {', '.join(STALLS)}, got {', '.join(sorted(unknown))}")
    return {name: sum(stalls.get(r, 0.0) for r in reasons) for name, (_, reasons) in WAITS.items()}


def longest_wait(row: Mapping) -> tuple[str, float]:
    """What warps wait for most, by the names of `WAITS`, and its share of all their cycles."""
    return _largest({name: share for name, share in waits_of(row).items() if name not in NO_WAIT}, row)


def first_stall(row: Mapping) -> str:
    """The most frequent wait of warps, by the name that Nsight Compute gives it."""
    no_wait = [reason for name in NO_WAIT for reason in WAITS[name][1]]
    stalls = row.get("stalls") or {}
    return _largest({r: share for r, share in stalls.items() if r not in no_wait}, row)[0].replace("_", " ")


def _largest(waits: Mapping[str, float], row: Mapping) -> tuple[str, float]:
    if not waits:
        raise ValueError(f"row: expected one with stalls, got {row.get('impl')!r} without")
    return max(waits.items(), key=lambda item: item[1])


def busiest(row: Mapping) -> tuple[str, float]:
    """The unit with the highest share of its peak, by the names of `UNITS`, and that share in percent."""
    shares = {name: row[unit] for unit, name in UNITS.items() if row.get(unit) is not None}
    if not shares:
        raise ValueError(f"row: expected one with counters, got {row.get('impl')!r} without")
    return max(shares.items(), key=lambda item: item[1])


def profile_card(table: object, step: str, before: str | None = None, direction: str = "forward") -> Figure:
    """The card of an implementation, a panel for each head dimension that the rows have of it; thin marks are
    those of `before`, and the unit that changed most has its change beside it.

    `table` is a `records.Table` or rows of `profiling.profile`. ValueError if it has no counters of `step`.
    """
    rows = {row["head_dim"]: row for row in _rows(table, step, direction)}
    if not rows:
        raise ValueError(f"profile_card: step: expected one whose counters were read, got {step!r}")
    earlier = {row["head_dim"]: row for row in _rows(table, before, direction)} if before else {}
    figure, axes = new_figure(WIDE, 3.0, 1, len(rows), sharey=True)
    for ax, (d, row) in zip(axes[0], sorted(rows.items()), strict=True):
        _panel(ax, row, earlier.get(d), OURS if is_ours(step) else color_of(step))
        ax.set_title(f"D = {d}", pad=11)
        clock = f"{row['time_us'] / 1e3:.2f} ms at {row['clock_mhz']:.0f} MHz" if row.get("clock_mhz") else ""
        ax.annotate(clock, (0.5, 1), (0, 3), "axes fraction", "offset points", ha="center", fontsize=6.5)
    _names(axes[0], bool(earlier))
    tools = sorted({row["tool"] for row in rows.values()})
    source = ", ".join(filter(None, [source_of(table), *tools]))
    _key(figure, label_of(step) + WHAT.get(direction, ""), before if earlier else None, source)
    return figure


def alt_text(table: object, step: str, before: str | None = None, direction: str = "forward") -> str:
    """The card in words, for readers who do not see it."""
    rows = sorted(_rows(table, step, direction), key=lambda row: row["head_dim"])
    parts = []
    for row in rows:
        units = sorted((u for u in UNITS if row.get(u) is not None), key=lambda unit: -row[unit])[:3]
        busy = ", ".join(f"{UNITS[unit]} {row[unit]:.0f}%" for unit in units)
        name, share = longest_wait(row) if row.get("stalls") else ("", 0.0)
        wait = f"; warps wait for {name} {100 * share:.0f}% of their cycles" if name else ""
        parts.append(f"D = {row['head_dim']}: {busy}{wait}")
    compared = f", compared with {label_of(before)}" if counted(table, before, direction) else ""
    what = label_of(step) + WHAT.get(direction, "")
    return f"Profile card of {what}{compared}. The busiest units at {'. '.join(parts)}."


def counted(table: object, step: str | None, direction: str = "forward") -> bool:
    """Whether the table has counters of an implementation."""
    return bool(_rows(table, step, direction))


def _rows(table: object, impl: str | None, direction: str) -> list[dict]:
    found = [r for r in rows_of(table) if r["impl"] == impl and r["pass"] == direction]
    return [row for row in found if row["status"] == "ok" and row.get("issue_pct") is not None]


def _panel(ax: Axes, row: Mapping, before: Mapping | None, color: str) -> None:
    changes = {unit: row[unit] - before[unit] for unit in UNITS if before and _both(row, before, unit)}
    most = max(changes, key=lambda unit: abs(changes[unit]), default=None)
    for y, unit in enumerate(UNITS):
        if row.get(unit) is None:
            ax.text(2, y, "not counted", va="center", fontsize=6, style="italic", color=COLORS["muted"])
            continue
        ax.barh(y, row[unit], height=0.62, color=color, zorder=2)
        text = f"{row[unit]:.0f}" + (f" ({changes[unit]:+.0f})" if unit == most else "").replace("-", "−")
        end = row[unit]
        if unit in changes:
            ax.plot([before[unit]] * 2, [y - 0.42, y + 0.42], color="#111111", lw=1.1, zorder=4)
            if before[unit] < end + 6 * len(text) + 9:  # no room for the text between the bar and the mark
                end = max(end, before[unit])
        weight = "bold" if unit == most else "normal"
        ax.annotate(text, (end, y), (3, 0), textcoords="offset points", va="center_baseline",
                    fontsize=6.5, fontweight=weight, bbox=HALO, zorder=3)  # fmt: skip
    _warps(ax, _NOW, 0.66, waits_of(row))
    if before:
        _warps(ax, _BEFORE, 0.34, waits_of(before))
    ax.set(xlim=(0, 150), ylim=(_BEFORE + 0.3 if before else _NOW + 0.5, -0.6))
    ax.set_xticks([0, 50, 100])
    ax.axvline(100, ymin=0.0, color=COLORS["roof"], lw=0.6, ls=":", zorder=1)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)


def _both(row: Mapping, before: Mapping, unit: str) -> bool:
    return row.get(unit) is not None and before.get(unit) is not None


def _warps(ax: Axes, y: float, height: float, shares: Mapping[str, float]) -> None:
    """The bar of warp-cycles at height y."""
    start = 0.0
    for name, share in shares.items():
        color, width = WAITS[name][0], 100 * share
        ax.barh(y, width, left=start, height=height, color=color, ec="white", lw=0.4, zorder=2)
        if share >= SHOWN and height > 0.5:
            ax.text(start + width / 2, y, f"{width:.0f}", ha="center", va="center_baseline", fontsize=6.5,
                    color=ink_on(color), zorder=3)  # fmt: skip
        start += width


def _names(axes: Sequence[Axes], compared: bool) -> None:
    at = {**{name: y for y, name in enumerate(UNITS.values())}, "warps": _NOW}
    at |= {"before": _BEFORE} if compared else {}
    axes[0].set_yticks(list(at.values()), list(at))
    axes[0].get_yticklabels()[-1].set_fontsize(6 if compared else 7)
    axes[len(axes) // 2].set_xlabel("% of the unit's peak; of all cycles of the resident warps", fontsize=7)


def _key(figure: Figure, name: str, before: str | None, source: str) -> None:
    """Whose card it is, what the colors of the lower bar mean, and below it where the numbers come from."""
    text = name + (f" (bars) after {label_of(before)} (thin marks)" if before else "")
    figure.suptitle(text, x=0.01, ha="left", fontsize=8, fontweight="bold")
    height = figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, 0.56 / height, 1, 1 - 0.56 / height))
    patches = [Patch(color=color, label=name) for name, (color, _) in WAITS.items()]
    figure.legend(
        handles=patches, loc="lower center", bbox_to_anchor=(0.5, 0.1 / height), ncols=5, fontsize=6,
        title="A warp in a cycle: it issues, is ready while another is chosen, or waits for",
        title_fontsize=6,
        handlelength=0.9, handleheight=0.8, columnspacing=1.2, handletextpad=0.4, borderpad=0,
    )  # fmt: skip
    figure.text(0.995, 0.03 / height, source, ha="right", va="bottom", fontsize=5.5, color=COLORS["muted"])
