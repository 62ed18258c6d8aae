"""The roofline: work rate over arithmetic intensity, the roofs of the hardware, the path of the ladder."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnlib.bench.names import is_ours
from attnlib.bench.roofline import Hardware, exp_roof_tflops
from attnlib.book.charts import PLAIN, new_figure
from attnlib.book.labels import label_ends, label_points, provenance
from attnlib.book.palette import COLORS, OURS, WIDE, color_of, label_of, marker_of

COUNTED = {
    "counted_intensity": ("o", 7, "DRAM bytes, counted"),
    "l2_intensity": ("D", 4, "L2 bytes, counted (no roof here)"),
}
"""Key of a point -> its hollow mark, the size of it, and what it stands for."""


def roofline_chart(
    points: Sequence[dict],
    hardware: Hardware,
    measured: Hardware | Mapping[str, float] | None = None,
    exp_head_dims: Sequence[int] = (),
    source: str = "",
    width: float = WIDE,
    height: float = 3.0,
) -> Figure:
    """Both axes logarithmic; roofs of the datasheet (solid) and as measured (dashed); our points joined in
    order.

    points: dicts with impl, intensity (FLOP per byte) and tflops, optionally a label ("" for none); points
    with different "series" (such as "D = 64") get a path each, peers (impl "cudnn") none.
    measured: a Hardware with the measured ceilings, or {"hbm_gbs": GB/s, "tensor_tflops": TFLOP/s, "mode":
    "burst" or "sustained"}; the chart says the mode, and needs it where a point lies above this roof.
    exp_head_dims: head dimensions whose exponential roof is drawn (see `roofline.exp_roof_tflops`).

    Beside the intensity of the model's bytes a point may have what the counters say, "counted_intensity"
    (bytes from DRAM) and "l2_intensity" (bytes from L2): hollow marks, see `lesson.counted_intensities`.
    """
    figure, axes = new_figure(width, height)
    ax = axes[0, 0]
    peak, bandwidth = hardware.tensor_tflops_fp16, hardware.hbm_gbs
    x = [p[key] for p in points for key in ("intensity", *COUNTED) if p.get(key)]
    y = [p["tflops"] for p in points]
    roofs = {d: exp_roof_tflops(d, hardware) for d in exp_head_dims}
    limits = min([*x, 16]) / 2.5, max([*x, 500]) * 8
    floor = min([*y, 20]) / 2.5
    ax.set(xscale="log", yscale="log", xlim=limits, ylim=(floor, 1.4 * max(peak * 1.5, *roofs.values(), 0)))
    ax.set(xlabel="arithmetic intensity (FLOP per byte of HBM traffic)", ylabel="TFLOP/s")
    ax.xaxis.set_major_formatter(PLAIN)
    ax.yaxis.set_major_formatter(PLAIN)

    lines = _roof(ax, bandwidth, peak, "datasheet", COLORS["roof"], "-", above=True)
    if measured:
        if isinstance(measured, Hardware):
            measured = {"hbm_gbs": measured.hbm_gbs, "tensor_tflops": measured.tensor_tflops_fp16}
        gbs, tflops = measured.get("hbm_gbs", bandwidth), measured.get("tensor_tflops", peak)
        kind = f"measured, {measured['mode']}" if "mode" in measured else "measured"
        if "mode" not in measured and max(y, default=0) > tflops:
            raise ValueError(
                "measured: expected a mode, 'burst' or 'sustained', where a point lies above the measured "
                f"roof; the highest has {max(y):.0f} TFLOP/s, the roof {tflops:.0f}"
            )
        lines += _roof(ax, gbs, tflops, kind, COLORS["measured"], (0, (4, 2)), above=False)
    for roof in roofs.values():
        ax.axhline(roof, color=COLORS["muted"], lw=0.9, ls=":")
    provenance(figure, source)
    label_ends(ax, [(limits[1], roof, f"exp, D = {d}", COLORS["muted"]) for d, roof in roofs.items()])
    figure.draw_without_rendering()  # settles the layout, on which the angle of the slopes depends
    slope = f"HBM, datasheet {bandwidth / 1e3:.2g} TB/s"
    _name_slope(ax, bandwidth, f"{slope},\nmeasured {gbs / 1e3:.2g} TB/s" if measured else slope)
    counted = _counted(ax, points)
    _points(ax, points, lines, counted)
    return figure


def _roof(ax: Axes, gbs: float, tflops: float, kind: str, color: str, dash: object, above: bool) -> list:
    """The slope of a bandwidth up to the ridge and the flat roof of a work rate, named; returns both
    lines."""
    low, high = ax.get_xlim()
    corners = [(low, low * gbs / 1e3), (1e3 * tflops / gbs, tflops), (high, tflops)]
    ax.plot(*zip(*corners, strict=True), color=color, ls=dash, lw=1.1, zorder=2)
    look = {
        "textcoords": "offset points",
        "fontsize": 6.5,
        "color": color,
        "va": "bottom" if above else "top",
    }
    flat = f"tensor cores, {kind} {tflops:.0f}" if above else f"{kind} {tflops:.0f}"
    ax.annotate(flat, corners[1], (2, 2) if above else (5, -2), **look)
    return list(pairwise(corners))


def _name_slope(ax: Axes, gbs: float, text: str) -> None:
    """Write above the slope of a bandwidth; the layout must be final, because the angle depends on it."""
    (low, _), (floor, _) = ax.get_xlim(), ax.get_ylim()
    start = 1.3 * max(low, floor * 1e3 / gbs)
    (x0, y0), (x1, y1) = ax.transData.transform([(x, x * gbs / 1e3) for x in (start, 2 * start)])
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    turned = {"va": "bottom", "rotation": angle, "rotation_mode": "anchor", "linespacing": 1.0}
    ax.annotate(
        text,
        (start, start * gbs / 1e3),
        (-3, 3),
        textcoords="offset points",
        fontsize=6.5,
        color=COLORS["roof"],
        **turned,
    )


def _counted(ax: Axes, points: Sequence[dict]) -> list[tuple[float, float]]:
    """Hollow marks at the intensities that were counted, joined to their point; returns where they are."""
    places = []
    for key, (marker, size, name) in COUNTED.items():
        found = [point for point in points if point.get(key)]
        for point in found:
            color = color_of(point.get("impl", "attnlib"))
            x, y = point[key], point["tflops"]
            ax.plot([point["intensity"], x], [y, y], color=color, lw=0.6, ls=":", zorder=2)
            ax.plot(x, y, marker=marker, mfc="none", mec=color, mew=0.8, ms=size, ls="none", zorder=3)
            places.append((x, y))
        if found:
            ax.plot(
                [], [], marker=marker, mfc="none", mec=COLORS["roof"], mew=0.8, ms=size, ls="none", label=name
            )
    if places:
        ax.plot([], [], marker="o", color=COLORS["roof"], ms=4, ls="none", label="bytes of the model")
        ax.legend(loc="lower right", fontsize=6.5, handletextpad=0.2, borderaxespad=0.2)
    return places


def _points(ax: Axes, points: Sequence[dict], lines: Sequence[tuple], avoid: Sequence[tuple]) -> None:
    """Points with their names; those that are ours are joined by arrows, in order, within each series."""
    last: dict[str, int] = {}
    paths = []
    for i, point in enumerate(points):
        impl = point.get("impl", "attnlib")
        here = (point["intensity"], point["tflops"])
        marker = "o" if is_ours(impl) else marker_of(impl).replace(".", "o")  # "." is too small alone
        ax.plot(*here, color=color_of(impl), marker=marker, ms=4.8, mec="white", mew=0.5, ls="none", zorder=4)
        if is_ours(impl):
            series = point.get("series", "")
            if series in last:
                before = points[last[series]]
                paths.append((last[series], i))
                arrow = {"arrowstyle": "-|>", "color": OURS, "lw": 0.9, "shrinkA": 2, "shrinkB": 2}
                start = (before["intensity"], before["tflops"])
                ax.annotate("", here, start, arrowprops={**arrow, "mutation_scale": 6}, zorder=3)
            last[series] = i
    named = []
    for point in points:
        impl = point.get("impl", "attnlib")
        color = OURS if is_ours(impl) else color_of(impl)
        named.append((point["intensity"], point["tflops"], point.get("label", label_of(impl)), color))
    label_points(ax, named, avoid=avoid, paths=paths, lines=lines)
