"""Pictures of a whole space: every configuration that was tried, every tile that a kernel visits."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from attnlib.bench.ladder import measured
from attnlib.book.charts import dims_of, new_figure, rows_of, source_of
from attnlib.book.labels import label_points, provenance
from attnlib.book.palette import COLORS, COLUMN, OURS, WIDE, ink_on, shade

RESOURCES: dict[str, tuple[float, str]] = {
    "registers": (1, "registers per thread"),
    "shared_bytes": (1 / 1024, "shared memory per block (KiB)"),
    "spills": (1, "spilled bytes per thread"),
    "ms": (1, "ms"),
}
"""Key of a row -> (factor, label of its axis)."""

TILES: dict[int, tuple[str, str, str]] = {
    0: ("not visited", "#FFFFFF", ""),
    1: ("visited, no mask", OURS, ""),
    2: ("visited, masked", COLORS["faded"], "////"),
    3: ("visited in vain", "#D9D9D9", ""),
}
"""Category of a tile -> (label, color, hatch)."""

ACCENT = "#B2560D"
"""Of the points of a cloud that a text is about: apart from every blue, in gray too."""


def cloud_chart(
    table: object,
    x: str = "registers",
    head_dims: Sequence[int] | None = None,
    name: Callable[[dict], str | None] | None = None,
    limits: Mapping[str, float] | None = None,
    accent: tuple[str, Callable[[dict], bool]] | None = None,
) -> Figure:
    """Every configuration as a point: TFLOP/s over a resource, a panel a head dimension, a marker for the
    warps.

    x: "registers" (per thread), "shared_bytes" (per block) or another number in the rows. Configurations that
    spill are hollow. `name(row)` gives a text for the few points to be named (default: the fastest of each
    panel, by its blocks and stages); they get a ring. `limits` are vertical lines, label -> x in the unit of
    the rows. accent: (text of the legend, which rows): these have a color and a marker of their own.
    """
    rows = [row for row in rows_of(table) if measured(row) and row.get(x) is not None]
    dims = dims_of(rows, head_dims)
    factor, unit = RESOURCES.get(x, (1, x.replace("_", " ")))
    looks = _looks(rows, accent)
    figure, axes = new_figure(WIDE, 2.3, 1, len(dims), sharey=True, sharex=True)
    best = {d: max((r for r in rows if r["head_dim"] == d), key=lambda r: r["tflops"]) for d in dims}
    for ax, d in zip(axes[0], dims, strict=True):
        for (_, marker, color), members in looks.items():
            for spilled in (True, False):
                here = [r for r in members if r["head_dim"] == d and bool(r.get("spills")) == spilled]
                at = ([r[x] * factor for r in here], [r["tflops"] for r in here])
                face = "none" if spilled else color
                ax.plot(*at, marker=marker, mfc=face, mec=color, ms=3.6, mew=0.8, ls="none", alpha=0.85)
        for text, value in (limits or {}).items():
            ax.axvline(value * factor, color=COLORS["roof"], lw=0.8, ls=":")
            place = {"transform": ax.get_xaxis_transform(), "ha": "right", "va": "bottom"}
            ax.text(value * factor, 1.01, text, fontsize=6, color=COLORS["roof"], **place)
        ax.set_title(f"D = {d}", loc="left")
    axes[0][0].set(ylabel="TFLOP/s", ylim=(0, 1.2 * max(r["tflops"] for r in rows)))
    axes[0][len(dims) // 2].set_xlabel(unit)
    handles = [
        axes[0][0].plot([], [], label=text, marker=marker, color=color, ls="none")[0]
        for text, marker, color in looks
    ]
    if any(r.get("spills") for r in rows):
        hollow = {"marker": "o", "mec": OURS, "mfc": "none", "ls": "none"}
        handles += axes[0][0].plot([], [], label="hollow: spills registers", **hollow)
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), handletextpad=0.1)
    provenance(figure, source_of(table))
    for ax, d in zip(axes[0], dims, strict=True):
        here = [r for r in rows if r["head_dim"] == d]
        texts = [(r, name(r) if name else (config_name(r) if r is best[d] else None)) for r in here]
        named = [(r[x] * factor, r["tflops"], text, "black") for r, text in texts if text]
        ring = {"s": 30, "facecolors": "none", "edgecolors": "black", "linewidths": 0.7, "zorder": 4}
        ax.scatter([x for x, *_ in named], [y for _, y, *_ in named], **ring)
        label_points(ax, named, size=6, avoid=[(r[x] * factor, r["tflops"]) for r, text in texts if not text])
    return figure


def _looks(
    rows: Sequence[dict], accent: tuple[str, Callable[[dict], bool]] | None
) -> dict[tuple[str, str, str], list[dict]]:
    """(text of the legend, marker, color) -> its rows: a look for each number of warps, and the accent."""
    marked = [row for row in rows if accent and accent[1](row)]
    others = [row for row in rows if not any(row is other for other in marked)]
    warps = sorted({row["num_warps"] for row in others})
    looks = {}
    for i, (count, marker) in enumerate(zip(warps, "o^sDvP*", strict=False)):
        color = shade(0.25 + 0.75 * i / max(1, len(warps) - 1))
        looks[f"{count} warps", marker, color] = [row for row in others if row["num_warps"] == count]
    if marked:
        looks[accent[0], "X", ACCENT] = marked
    return looks


def config_name(row: dict) -> str:
    """ "128x64, 3 stages" from the keys block_m, block_n and num_stages of a row, in any case."""
    low = {key.lower(): value for key, value in row.items()}
    blocks = "x".join(str(low[key]) for key in ("block_m", "block_n") if key in low)
    stages = f"{low['num_stages']} stages" if "num_stages" in low else ""
    return ", ".join(part for part in (blocks, stages) if part)


def tile_map(
    panels: np.ndarray | Mapping[str, np.ndarray],
    categories: Mapping[int, tuple[str, str, str]] = TILES,
    numbers: np.ndarray | Mapping[str, np.ndarray] | None = None,
    width: float | None = None,
    aspect: Mapping[str, float] | None = None,
) -> Figure:
    """A picture of the tiles of the score matrix that a kernel visits: rows are query tiles, columns key
    tiles.

    panels: an integer array [query tiles, key tiles] of categories (see TILES), or title -> array for several
    side by side. numbers: arrays of the same shape whose entries >= 0 are written into the tiles, for
    instance the order of the visits. aspect: title -> height of a tile over its width, for tiles that are not
    square.
    """
    aspect = dict(aspect or {})
    panels = dict(panels) if isinstance(panels, Mapping) else {"": np.asarray(panels)}
    numbers = dict(numbers) if isinstance(numbers, Mapping) else {next(iter(panels)): numbers}
    width = width or (COLUMN if len(panels) == 1 else WIDE)
    tall = max(aspect.get(title, 1) * len(tiles) / tiles.shape[1] for title, tiles in panels.items())
    side = (width - 0.35) / len(panels) - 0.22
    figure, axes = new_figure(width, side * tall + 0.85, 1, len(panels))
    for ax, (title, tiles) in zip(axes[0], panels.items(), strict=True):
        _tiles(ax, np.asarray(tiles), categories, numbers.get(title))
        ax.set(title=title, xlabel="key tile", aspect=aspect.get(title, 1))
    axes[0][0].set_ylabel("query tile")
    seen = {int(kind) for tiles in panels.values() for kind in np.unique(tiles)}
    looks = [look for kind, look in categories.items() if kind in seen]
    edge = {"edgecolor": "#444444", "lw": 0.4}
    handles = [Patch(facecolor=color, hatch=hatch, label=text, **edge) for text, color, hatch in looks]
    columns = len(handles) if width >= WIDE else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=1.2)
    return figure


def _tiles(
    ax: Axes, tiles: np.ndarray, categories: Mapping[int, tuple[str, str, str]], numbers: np.ndarray | None
) -> None:
    for kind in np.unique(tiles):
        _, color, hatch = categories[int(kind)]
        squares = [Rectangle((column, row), 1, 1) for row, column in np.argwhere(tiles == kind)]
        look = {"facecolor": color, "edgecolor": "#444444", "lw": 0.4, "hatch": hatch or None}
        ax.add_collection(PatchCollection(squares, clip_on=False, **look))
    if numbers is not None:
        for (row, column), number in np.ndenumerate(numbers):
            if number >= 0:
                _, color, hatch = categories[int(tiles[row, column])]
                box = {"facecolor": color, "edgecolor": "none", "pad": 0.8} if hatch else None
                text = {"ha": "center", "va": "center", "fontsize": 6, "color": ink_on(color), "bbox": box}
                ax.text(column + 0.5, row + 0.5, f"{number:g}", **text)
    rows, columns = tiles.shape
    ax.set(aspect="equal", xlim=(0, columns), ylim=(rows, 0))
    for axis, count in ((ax.xaxis, columns), (ax.yaxis, rows)):
        step = 1 if count <= 10 else 4 if count <= 32 else 16
        axis.set_ticks(np.arange(0, count, step) + 0.5, [str(i) for i in range(0, count, step)])
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
