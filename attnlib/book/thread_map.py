"""Pictures of a tile over the threads that hold it."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attnlib.book.charts import new_figure
from attnlib.book.palette import COLORS, OURS, WIDE, ink_on

WARPS = "#E3EEF6", "#FBE6D2", "#DDEFE7", "#EFE3F0"
"""Light colors of warps, taken in turn; the label beside the rows says the same."""


def thread_map(panels: Mapping[str, tuple[np.ndarray, np.ndarray]], marked: int) -> Figure:
    """Tiles as grids of elements, with the number of the thread in its warp on each run of elements that one
    thread holds.

    panels: title -> (warps, threads), integers [rows, columns] as `layouts.owners` gives them. marked: the
    thread of warp 0 whose elements are dark. Each row is held by one warp: ValueError if not.
    """
    tallest = max(len(warps) for warps, _ in panels.values())
    figure, axes = new_figure(WIDE, 0.65 + 0.115 * tallest, 1, len(panels))
    for ax, (title, (warps, threads)) in zip(axes[0], panels.items(), strict=True):
        if not (warps == warps[:, :1]).all():
            raise ValueError(f"panels: expected rows that are held by one warp each in {title!r}")
        for row, held in enumerate(threads):
            _runs(ax, row, held, int(warps[row, 0]), marked)
        _name_warps(ax, warps[:, 0], threads.shape[1])
        rows, columns = threads.shape
        ax.set(title=title, xlabel="column", xlim=(0, columns), ylim=(rows, 0))
        ax.set_xticks(np.arange(0, columns, 8) + 0.5, [str(i) for i in range(0, columns, 8)])
        ax.set_yticks(np.arange(0, rows, 4) + 0.5, [str(i) for i in range(0, rows, 4)])
        ax.tick_params(length=0)
        ax.grid(visible=False)
        ax.spines[:].set_visible(False)
    axes[0][0].set_ylabel("row")
    return figure


def _equal(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where runs of equal values begin and end."""
    return pairwise([0, *(np.flatnonzero(np.diff(values)) + 1), len(values)])


def _runs(ax: Axes, row: int, held: np.ndarray, warp: int, marked: int) -> None:
    """One row of a tile: a box with its thread for each run of columns that a thread holds."""
    for start, end in _equal(held):
        dark = warp == 0 and held[start] == marked
        color = OURS if dark else WARPS[warp % len(WARPS)]
        edge = {"edgecolor": "#666666", "lw": 0.35, "clip_on": False}
        ax.add_patch(Rectangle((start, row), end - start, 1, facecolor=color, **edge))
        text = {"ha": "center", "va": "center", "fontsize": 5.5, "color": ink_on(color)}
        text["fontweight"] = "bold" if dark else "normal"
        ax.text((start + end) / 2, row + 0.54, str(held[start]), **text)


def _name_warps(ax: Axes, warps: np.ndarray, columns: int) -> None:
    """The number of the warp beside the rows that it holds."""
    for start, end in _equal(warps):
        place = {"ha": "left", "va": "center", "rotation": 90, "fontsize": 6.5, "color": COLORS["roof"]}
        ax.text(columns + 0.5, (start + end) / 2, f"warp {warps[start]}", **place)
