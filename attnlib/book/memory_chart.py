"""The memories of a GPU, from the registers to HBM: what each holds and how many bytes it moves a second."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from attnlib.book.charts import new_figure
from attnlib.book.labels import provenance
from attnlib.book.palette import COLORS, OURS, WIDE

BYTES = {"PB": 1e15, "TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3}


@dataclass(frozen=True)
class Memory:
    """One level.

    Attributes:
        name: "L2".
        holds: its size, in words: "256 KiB in each SM".
        share: width of its box, 0 to 1: near memories are small.
        documented: bytes a second by the documents of the GPU, of all SMs together; None if they give none.
        measured: bytes a second that a record has; None if none has.
    """

    name: str
    holds: str
    share: float
    documented: float | None
    measured: float | None


def memory_chart(levels: Sequence[Memory], source: str = "") -> Figure:
    """Levels from near to far: on the left what each holds, on the right its rates as bars.

    source: the provenance of the measured rates.
    """
    figure, axes = new_figure(WIDE, 0.6 + 0.48 * len(levels), 1, 2, sharey=True, width_ratios=(1, 1.9))
    boxes, bars = axes[0]
    rates = [rate for level in levels for rate in (level.documented, level.measured) if rate]
    boxes.set(title="what it holds", xlim=(0, 1), ylim=(len(levels) - 0.5, -0.5))
    bars.set(title="bytes per second, all SMs together (logarithmic)", xscale="log")
    bars.set_xlim(min(rates) / 3, 40 * max(rates))
    for y, level in enumerate(levels):
        _box(boxes, y, level)
        _bars(bars, y, level)
        if y:
            arrow = {"arrowstyle": "<->", "color": COLORS["muted"], "lw": 0.7, "shrinkA": 0, "shrinkB": 0}
            boxes.annotate("", (0.5, y - 0.36), (0.5, y - 0.64), arrowprops=arrow)
    for ax in (boxes, bars):
        ax.set(xticks=[], yticks=[])
        ax.minorticks_off()
        ax.grid(visible=False)
        ax.spines[:].set_visible(False)
    provenance(figure, source)
    return figure


def _box(ax: Axes, y: int, level: Memory) -> None:
    left = (1 - level.share) / 2
    look = {"boxstyle": "round,pad=0,rounding_size=0.03", "facecolor": "#E3EEF6", "edgecolor": "#666666"}
    ax.add_patch(FancyBboxPatch((left, y - 0.36), level.share, 0.72, lw=0.6, **look))
    middle = {"ha": "center", "color": COLORS["roof"]}
    ax.text(0.5, y - 0.03, level.name, va="bottom", fontsize=7.5, fontweight="bold", **middle)
    ax.text(0.5, y + 0.05, level.holds, va="top", fontsize=6.5, **middle)


def _bars(ax: Axes, y: int, level: Memory) -> None:
    """The documented rate as a gray bar over the measured one in blue, each with its value at its end."""
    low = ax.get_xlim()[0]
    lines = ("documented", level.documented, "#C9C9C9"), ("measured", level.measured, OURS)
    for offset, (kind, rate, color) in zip((-0.17, 0.17), lines, strict=True):
        if rate:
            ax.barh(y + offset, rate - low, 0.28, left=low, color=color)
        text = f"{in_units(rate)}/s, {kind}" if rate else f"not {kind}"
        look = {"fontsize": 6.5, "color": COLORS["roof" if rate else "muted"], "va": "center"}
        ax.annotate(text, (rate or low, y + offset), (3, 0), textcoords="offset points", **look)


def in_units(size: float) -> str:
    """Bytes in decimal units with three digits: 4.26 TB."""
    unit, value = next((item for item in BYTES.items() if size >= item[1]), ("KB", 1e3))
    return f"{size / value:.3g} {unit}"
