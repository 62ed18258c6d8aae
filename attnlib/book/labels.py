"""Direct labels that do not collide, at line ends and at points, and the provenance line of a figure."""

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from attnlib.book.palette import COLORS, ink_of

POINT = 1 / 72
"""Inches per typographic point."""
HALO = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
"""Background of a text that may lie over a line."""


def spread(
    wanted: Sequence[float], gap: float, low: float = float("-inf"), high: float = float("inf")
) -> list[float]:
    """Positions as near as possible to `wanted`, in the same order, at least `gap` apart, in [low, high].

    Least squares under the order, by pooling neighbors that are too close. When the labels do not all fit
    between `low` and `high`, they keep the gap and leave the range at its upper end.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    pools: list[tuple[float, int]] = []  # (mean of wanted position minus rank * gap, number of labels)
    for rank, i in enumerate(order):
        pools.append((wanted[i] - rank * gap, 1))
        while len(pools) > 1 and pools[-1][0] < pools[-2][0]:
            (low_mean, low_count), (mean, count) = pools[-2:]
            total = low_count + count
            pools[-2:] = [((low_mean * low_count + mean * count) / total, total)]
    means = [mean for mean, count in pools for _ in range(count)]
    top = high - (len(order) - 1) * gap
    placed = [0.0] * len(order)
    for rank, i in enumerate(order):
        placed[i] = max(min(means[rank], top), low) + rank * gap
    return placed


def label_ends(
    axes: Axes, ends: Iterable[tuple[float, float, str, str]], size: float = 6.5, offset: float = 5.0
) -> None:
    """Write each label beside the end of its line, outside the right edge, apart where they would collide.

    `ends` are (x, y, text, color) in data coordinates; `size` and `offset` are in points. Call it when the
    limits of the axes are final: the spacing is found from the laid-out figure. A thin line joins a label to
    its point where it had to move.
    """
    ends = list(ends)
    if not ends:
        return
    axes.figure.draw_without_rendering()  # settles the layout, so that widths and heights are known
    width, height = _size(axes)
    to_axes = axes.transData + axes.transAxes.inverted()
    at = [to_axes.transform((x, y)) for x, y, _, _ in ends]
    placed = spread([y for _, y in at], 1.22 * size / height, low=0.0, high=1.0)
    for (x, y, text, color), (x_axes, y_axes), y_label in zip(ends, at, placed, strict=True):
        moved = abs(y_label - y_axes) * height > 1.5 or (1 - x_axes) * width > 8
        line = {"arrowstyle": "-", "color": color, "lw": 0.5, "shrinkA": 1, "shrinkB": 2}
        line["relpos"] = (0, 0.5)  # from the label's left end: from its middle it would cross a neighbor's
        axes.annotate(
            text,
            (x, y),
            (1 + offset / width, y_label),
            textcoords="axes fraction",
            va="center",
            ha="left",
            fontsize=size,
            color=ink_of(color),
            annotation_clip=False,
            arrowprops=line if moved else None,
        )


def label_points(
    axes: Axes,
    points: Sequence[tuple[float, float, str, str]],
    size: float = 6.5,
    avoid: Sequence[tuple[float, float]] = (),
    paths: Sequence[tuple[int, int]] = (),
    lines: Sequence[tuple[tuple[float, float], tuple[float, float]]] = (),
) -> None:
    """Name points inside the axes: each label goes where it costs least, beside its point if there is room.

    `points` are (x, y, text, color) in data coordinates, with a text of "" if they have no name. What should
    stay free: `avoid`, further points; `paths`, pairs of indices into `points` that a line joins; `lines`,
    pairs of (x, y). The choice is greedy and deterministic.
    """
    if not points:
        return
    axes.figure.draw_without_rendering()
    scale = axes.figure.dpi * POINT
    corner = axes.get_window_extent()
    width, height = _size(axes)
    origin = (corner.x0 / scale, corner.y0 / scale)

    def place(x: float, y: float) -> tuple[float, float]:
        px, py = axes.transData.transform((x, y)) / scale
        return px - origin[0], py - origin[1]

    at = [place(x, y) for x, y, _, _ in points]
    dots = [*at, *(place(x, y) for x, y in avoid)]
    for text in axes.texts:  # a text that rises from left to right covers the diagonal of its box
        if text.get_rotation():
            left, bottom, right, top = _box_of(text, origin, scale)
            dots += [(left + t / 9 * (right - left), bottom + t / 9 * (top - bottom)) for t in range(10)]
    segments = [(at[a], at[b]) for a, b in paths]
    segments += [(place(*a), place(*b)) for a, b in lines]
    boxes = [
        _box_of(text, origin, scale) for text in axes.texts if text.get_text() and not text.get_rotation()
    ]
    named = [i for i in range(len(points)) if points[i][2]]
    for i in sorted(named, key=lambda i: (-round(at[i][1], 3), i)):
        x, y = at[i]
        w, h = 0.56 * size * len(points[i][2]), 1.15 * size
        best = None
        for dx, dy in _offsets(w):
            box = (x + dx, y + dy - h / 2, x + dx + w, y + dy + h / 2)
            outside = max(0, 2 - box[0], box[2] - width) + max(0, 2 - box[1], box[3] - height)
            cost = abs(dy) + 0.6 * abs(dx + w / 2) - 0.3 * w + 40 * outside
            cost += 400 * sum(_overlap(box, other) for other in boxes)
            cost += 60 * sum(_holds(box, dot) for j, dot in enumerate(dots) if j != i)
            cost += 40 * sum(_crosses(box, segment) for segment in segments)
            near = 0.0 if dx > 0 else 1.0 if dx + w < 0 else 0.5  # where the name is nearest to its point
            far = abs(dy) > 8 or dx > 10 or dx + w < -10
            leader = ((x, y), (x + dx + near * w, y + dy)) if far else None
            if leader:
                cost += 40 * sum(_crosses(other, leader) for other in boxes)
                cost += 12 * sum(_crosses(_around(dot), leader) for j, dot in enumerate(dots) if j != i)
            if best is None or cost < best[0] - 1e-9:
                best = (cost, dx, dy, box, near, leader)
        _, dx, dy, box, near, leader = best
        boxes.append(box)
        if leader:
            segments.append(leader)
        line = {"arrowstyle": "-", "color": COLORS["muted"], "lw": 0.4, "shrinkA": 0, "shrinkB": 2}
        line["relpos"] = (near, 0.5)
        axes.annotate(
            points[i][2],
            points[i][:2],
            (dx + near * w, dy),
            textcoords="offset points",
            ha={0.0: "left", 0.5: "center", 1.0: "right"}[near],
            va="center",
            fontsize=size,
            color=ink_of(points[i][3]),
            bbox=HALO,
            arrowprops=line if leader else None,
            zorder=5,
        )


def provenance(figure: Figure, label: str) -> None:
    """Draw where the numbers come from, small and gray, at the lower right."""
    if label:
        figure.supxlabel(label, x=0.995, ha="right", fontsize=5.5, color=COLORS["muted"])


def _size(axes: Axes) -> tuple[float, float]:
    """Width and height of laid-out axes in points."""
    box = axes.get_window_extent()
    return box.width / axes.figure.dpi / POINT, box.height / axes.figure.dpi / POINT


def _box_of(text: Text, origin: tuple[float, float], scale: float) -> tuple[float, float, float, float]:
    """(left, bottom, right, top) of a text in points from the lower left corner of its axes."""
    box = Text.get_window_extent(text)  # of the text alone, without an annotation's arrow
    x, y = origin
    return box.x0 / scale - x, box.y0 / scale - y, box.x1 / scale - x, box.y1 / scale - y


def _offsets(w: float) -> list[tuple[float, float]]:
    """Candidate offsets in points from a point to the left end and middle height of its label of width
    `w`."""
    rises = [0, 5, -5, 9, -9, 13, -13, 18, -18, 24, -24, 31, -31, 39, -39]
    near = [(side, dy) for dy in rises for side in (6, -6 - w)]
    above = [(-w / 2, dy) for dy in (9, -9)]
    far = [(side, dy) for dy in rises for side in (14, -14 - w, 26, -26 - w)]
    return near + above + far


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Share of box `a` that box `b` covers; boxes are (left, bottom, right, top)."""
    w = min(a[2], b[2]) - max(a[0], b[0])
    h = min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, w) * max(0.0, h) / ((a[2] - a[0]) * (a[3] - a[1]))


def _holds(box: tuple[float, ...], dot: tuple[float, float], margin: float = 2.0) -> bool:
    return box[0] - margin < dot[0] < box[2] + margin and box[1] - margin < dot[1] < box[3] + margin


def _around(dot: tuple[float, float], reach: float = 1.5) -> tuple[float, ...]:
    """The box that a point of a chart covers."""
    x, y = dot
    return x - reach, y - reach, x + reach, y + reach


def _crosses(box: tuple[float, ...], segment: tuple[tuple[float, float], tuple[float, float]]) -> bool:
    (ax, ay), (bx, by) = segment
    return any(_holds(box, (ax + t / 24 * (bx - ax), ay + t / 24 * (by - ay)), 0.5) for t in range(25))
