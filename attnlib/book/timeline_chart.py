"""What each warpgroup of a kernel does when, over the clock of its SM."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attnlib.bench.records import Table
from attnlib.bench.timeline import under_way
from attnlib.book.charts import new_figure
from attnlib.book.labels import provenance
from attnlib.book.palette import COLORS, WIDE, ink_on, shade

PRODUCTS = "QK", "PV"
"""Events in which the tensor cores have work."""
EVENT_COLORS = {"QK": shade(0.6), "PV": shade(0.1), "softmax": COLORS["grid"]}
_OTHERS = "#B8860B", "#7A5195", "#5B8C5A"  # of events that are no product, softmax or wait, in order
_WAIT = "#111111"
_HATCHES = "//////", "xxxxxx"  # on white: of the second and the third wait
_SIZE = 6.5


def timeline_chart(
    table: Table,
    panels: Mapping[int, tuple[int, int]],
    names: Sequence[str] = (),
    says: Mapping[str, str] | None = None,
    titles: Mapping[int, str] | None = None,
    width: float = WIDE,
) -> Figure:
    """A panel for each head dimension, a lane for each warpgroup; a second one where its events overlap. A
    black line below is drawn where at least one product is in flight: from its start until its wait is
    passed, which can be after it was done.

    table: rows of `timeline.rows`. panels: head dimension -> (first, last) tile of the first warpgroup that
    is shown. names: of the warpgroups, in order of their numbers. says: event -> what the chart calls it.
    titles: head dimension -> what follows "D = 64: " above a panel.
    """
    says, titles = dict(says or {}), dict(titles or {})
    rows = {d: [row for row in table.select(head_dim=d) if "begin" in row] for d in panels}
    events = list(dict.fromkeys(row["event"] for found in rows.values() for row in found))
    colors = event_colors(events)
    lanes = {d: _lanes(found) for d, found in rows.items()}
    height = 0.55 + sum(0.5 + 0.17 * (len(found) + 1) for found in lanes.values())
    figure, axes = new_figure(width, height, len(panels), 1)
    bars: dict[str, list[tuple]] = {}
    looks = _looks(colors)
    for ax, (d, (first, last)) in zip(axes[:, 0], panels.items(), strict=True):
        low, high = _window(rows[d], first, last)
        shown = [row for row in rows[d] if row["end"] > low and row["begin"] < high]
        _draw(ax, shown, lanes[d], looks, low)
        below = len(lanes[d]) + 0.1
        for begin, end in under_way(shown, PRODUCTS):
            ends = [max(begin, low) - low, min(end, high) - low]
            ax.plot(ends, [below, below], color=_WAIT, lw=1.6, solid_capstyle="butt")
        ax.set(xlim=(0, high - low), ylim=(below + 0.45, -0.55))
        _name_lanes(ax, lanes[d], names, below if under_way(shown, PRODUCTS) else None)
        ax.set_title(f"D = {d}" + (f": {titles[d]}" if d in titles else ""), loc="left", fontweight="normal")
        ax.grid(visible=False)
        for row in shown:
            left, right = max(row["begin"], low) - low, min(row["end"], high) - low
            place = ax, left, right, lanes[d].index(_lane(row, lanes[d]))
            bars.setdefault(row["event"], []).append(place)
    axes[-1, 0].set_xlabel("clocks of the SM")
    provenance(figure, table.label)
    _label(figure, {event: bars[event] for event in events if event in bars}, colors, says)
    return figure


def event_colors(events: Sequence[str]) -> dict[str, str]:
    """Of each event: products blue, the softmax light gray, the first wait black and others white, which are
    hatched; what is left by its order."""
    colors, others, waits = dict(EVENT_COLORS), iter(_OTHERS), iter([_WAIT])
    for event in events:
        if event not in colors:
            wait = event.startswith("wait")
            colors[event] = next(waits, "white") if wait else next(others, COLORS["muted"])
    return {event: colors[event] for event in events}


def _looks(colors: Mapping[str, str]) -> dict[str, dict]:
    """Of each event: how its bars are drawn. Two waits differ in gray, too: one is black, one hatched."""
    hatches = iter(_HATCHES)
    return {
        event: {"color": color, "lw": 0}
        if color != "white"
        else {"facecolor": color, "edgecolor": _WAIT, "lw": 0.4, "hatch": next(hatches, None)}
        for event, color in colors.items()
    }


Lane = tuple[int, frozenset[str]]
"""A warpgroup, and events of it that never overlap."""


def _lanes(rows: Sequence[Mapping]) -> list[Lane]:
    found = []
    for warpgroup in sorted({row["warpgroup"] for row in rows}):
        own = [row for row in rows if row["warpgroup"] == warpgroup]
        lanes: list[set[str]] = []
        for event in sorted({row["event"] for row in own}, key=_rank):
            room = (lane for lane in lanes if not _overlap(own, lane | {event}))
            lane = next(room, None)
            if lane is None:
                lanes.append({event})
            else:
                lane.add(event)
        found += [(warpgroup, frozenset(lane)) for lane in lanes]
    return found


def _rank(event: str) -> tuple[bool, str]:
    """The order in which events take a lane: PV last, so that what overlaps goes below."""
    return event == "PV", event


def _overlap(rows: Sequence[Mapping], events: set[str]) -> bool:
    spans = sorted((row["begin"], row["end"]) for row in rows if row["event"] in events)
    return any(after[0] < before[1] for before, after in zip(spans, spans[1:], strict=False))


def _lane(row: Mapping, lanes: Sequence[Lane]) -> Lane:
    return next(lane for lane in lanes if lane[0] == row["warpgroup"] and row["event"] in lane[1])


def _window(rows: Sequence[Mapping], first: int, last: int) -> tuple[int, int]:
    """Clocks from the beginning of one tile to that of another, or to its end where it is the last."""
    least = min(row["warpgroup"] for row in rows)
    own = [row for row in rows if row["warpgroup"] == least]
    tiles = {row["tile"] for row in own}
    if first not in tiles or last not in tiles or first >= last:
        raise ValueError(
            f"panels: expected two tiles of {min(tiles)} to {max(tiles)} in order, got {first}, {last}"
        )
    return tuple(min(row["begin"] for row in own if row["tile"] == tile) for tile in (first, last))


def _draw(ax: Axes, rows: Sequence[Mapping], lanes: Sequence[Lane], looks: Mapping[str, dict], low: int):
    for row in rows:
        y, left, length = lanes.index(_lane(row, lanes)), row["begin"] - low, row["end"] - row["begin"]
        ax.barh(y, length, left=left, height=0.8, **looks[row["event"]])
        ax.vlines(left, y - 0.4, y + 0.4, color="white", lw=0.4)


def _name_lanes(ax: Axes, lanes: Sequence[Lane], names: Sequence[str], below: float | None) -> None:
    """Each warpgroup's name at its first lane, and that of the line below."""
    numbers = [warpgroup for warpgroup, _ in lanes]
    first = {warpgroup: numbers.index(warpgroup) for warpgroup in dict.fromkeys(numbers)}
    texts = [names[w] if w < len(names) else f"warpgroup {w}" for w in first]
    places = list(first.values())
    if below is not None:
        texts, places = [*texts, "in flight"], [*places, below]
    ax.set(yticks=places, yticklabels=texts)
    ax.tick_params(axis="y", length=0)


def _label(figure: Figure, bars: Mapping[str, list], colors: Mapping[str, str], says: Mapping[str, str]):
    """Write each event's name into the first of its bars with room for it, or into a key above."""
    figure.draw_without_rendering()  # settles the layout, so that widths are known
    key, looks = {}, _looks(colors)
    for event, places in bars.items():
        name, color = says.get(event, event), colors[event]
        for ax, left, right, y in places:
            look = {"ha": "center", "va": "center", "fontsize": _SIZE, "color": ink_on(color)}
            text = ax.text((left + right) / 2, y, name, **look)
            (x0, _), (x1, _) = ax.transData.transform([(left, y), (right, y)])
            if text.get_window_extent().width < 0.9 * (x1 - x0):
                break
            text.remove()
        else:
            key[name] = Rectangle((0, 0), 1, 1, **looks[event] | {"lw": 0.6})
    if key:
        look = {"ncols": 4, "handlelength": 1.2, "loc": "outside upper center"}
        figure.legend(list(key.values()), list(key), **look)
