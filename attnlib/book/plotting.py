"""Charts and their publication: everything a notebook needs to draw, behind one name."""

import base64
import html
import io
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from attnlib.bench import tables
from attnlib.book.card import profile_card
from attnlib.book.charts import (
    bar_chart,
    error_chart,
    ladder_chart,
    line_chart,
    new_figure,
    rounded,
    rows_of,
    samples_chart,
    source_of,
    sweep_chart,
)
from attnlib.book.labels import label_ends, label_points, provenance, spread
from attnlib.book.maps import TILES, cloud_chart, config_name, tile_map
from attnlib.book.memory_chart import memory_chart
from attnlib.book.palette import (
    COLORS,
    COLUMN,
    DASHES,
    MARKERS,
    WIDE,
    color_of,
    dash_of,
    label_of,
    marker_of,
    shade,
    style,
)
from attnlib.book.road_chart import road_chart
from attnlib.book.roofline_chart import roofline_chart
from attnlib.book.thread_map import thread_map
from attnlib.book.timeline_chart import timeline_chart

__all__ = [
    "COLORS",
    "COLUMN",
    "DASHES",
    "MARKERS",
    "SCREEN",
    "TILES",
    "WIDE",
    "bar_chart",
    "bundle",
    "cloud_chart",
    "color_of",
    "config_name",
    "dash_of",
    "error_chart",
    "label_ends",
    "label_of",
    "label_points",
    "ladder_chart",
    "line_chart",
    "marker_of",
    "memory_chart",
    "new_figure",
    "profile_card",
    "provenance",
    "publish",
    "road_chart",
    "roofline_chart",
    "rounded",
    "rows_of",
    "samples_chart",
    "shade",
    "source_of",
    "spread",
    "style",
    "sweep_chart",
    "thread_map",
    "tile_map",
    "timeline_chart",
]

_FONT_DATES = logging.getLogger("fontTools.ttLib.tables._h_e_a_d")
"""Warns of the font that has the prime of m' when it is embedded: its date counts from another epoch."""

SCREEN = 128
"""CSS pixels per inch of a figure in the HTML book: print text of 8 pt comes out at 14 px."""


def publish(
    figure: Figure,
    name: str,
    alt: str,
    data: object = None,
    columns: Mapping[str, str] | Sequence[str] | None = None,
) -> None:
    """Show a figure as the output of a notebook cell, as SVG and PDF, under a name that nbconvert gives to
    its files.

    name: file name without ending, unique over the book. alt: what the figure shows and says, in a sentence
    or two, for readers who do not see it. data: a `records.Table` or rows, shown folded below the figure;
    `columns` picks from them. Drawing the same figure again gives the same bytes, on another processor
    the same to a coordinate's last bits."""
    from IPython.display import display

    content, metadata = bundle(figure, name, alt)
    display(content, metadata=metadata, raw=True)
    _close(figure)
    if data is not None:
        folded = tables.details(rows_of(data), columns)
        display({"text/html": folded, "text/plain": f"[data of {name}: {len(rows_of(data))} rows]"}, raw=True)


def bundle(figure: Figure, name: str, alt: str) -> tuple[dict[str, str], dict[str, object]]:
    """The MIME bundle of a figure and its metadata, as `publish` displays them.

    nbconvert's ExtractOutputPreprocessor reads `filename` and writes NAME.svg and NAME.pdf; MyST-NB reads
    `alt` and `width`."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise ValueError(f"publish: name: expected lower-case letters, digits, '-' and '_', got {name!r}")
    if not alt.strip():
        raise ValueError(f"publish: alt: expected a description of figure {name!r}, got an empty text")
    alt = " ".join(alt.split())
    style()
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # each drawing would move the axes a little further
    pdf = base64.b64encode(_render(figure, "pdf")).decode("ascii")
    content = {
        "image/svg+xml": _accessible(_compact(_render(figure, "svg").decode("utf-8")), alt),
        "application/pdf": pdf,
        "text/plain": f"[figure {name}: {alt}]",
    }
    width = f"{figure.get_figwidth() * SCREEN:.0f}px"
    return content, {"filename": name, "alt": alt, "image/svg+xml": {"alt": alt, "width": width}}


def _render(figure: Figure, kind: str) -> bytes:
    """The figure as a file, without date, program or version in it. Style applies at drawing time, so it is
    set here too."""
    style()
    _FONT_DATES.setLevel(logging.ERROR)
    before = os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    absent = {"pdf": ("Creator", "Producer", "CreationDate"), "svg": ("Creator", "Date")}[kind]
    buffer = io.BytesIO()
    try:
        figure.savefig(buffer, format=kind, metadata=dict.fromkeys(absent))
    finally:
        if before is None:
            del os.environ["SOURCE_DATE_EPOCH"]
        else:
            os.environ["SOURCE_DATE_EPOCH"] = before
    return buffer.getvalue()


def _compact(svg: str) -> str:
    """The SVG with each path on one line and its coordinates to 0.01 pt, which makes notebooks a third
    smaller."""

    def number(found: re.Match) -> str:
        return f"{float(found.group()):.2f}".rstrip("0").rstrip(".")

    def shorten(path: re.Match) -> str:
        return f' d="{" ".join(re.sub(r"-?[0-9]+[.][0-9]+", number, path.group(1)).split())}"'

    return re.sub(r' d="([^"]*)"', shorten, svg)


def _accessible(svg: str, alt: str) -> str:
    """The SVG with a role and a title, which screen readers read and browsers show."""
    svg = re.sub(r"<svg ", '<svg role="img" ', svg, count=1)
    title = f"<title>{html.escape(alt, quote=False)}</title>\n"
    return re.sub(r"(<svg [^>]*>\n?)", lambda found: found.group(1) + " " + title, svg, count=1)


def _close(figure: Figure) -> None:
    """Forget a figure that pyplot holds, so that the notebook does not show it a second time."""
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(figure)
