"""Rows of a record as text: Markdown tables for pages, a folded HTML table for the data under a chart."""

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence

Mark = Callable[[dict], bool] | Mapping[str, object] | None


def number(value: object) -> str:
    """A cell's text: three significant digits for a float, thousands kept whole, yes/no for a bool, an en
    dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isnan(value) or math.isinf(value):
            return str(value)
        size = abs(value)
        if size >= 100 or value == int(value) and size < 1e6:
            return f"{value:.0f}"
        return f"{value:.1e}" if size < 1e-3 else f"{value:.3g}"
    return str(value)


def columns_of(
    rows: Sequence[dict], columns: Mapping[str, str] | Sequence[str] | None = None
) -> dict[str, str]:
    """key -> header, in order: as given, or every key that some row has, but for lists, which are no cell."""
    if columns is None:
        columns = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], list)))
    if not isinstance(columns, Mapping):
        columns = {key: key.replace("_", " ") for key in columns}
    missing = [key for key in columns if rows and not any(key in row for row in rows)]
    if missing:
        known = sorted({key for row in rows for key in row})
        raise KeyError(
            f"table: columns: expected keys of the rows ({', '.join(known)}), got {', '.join(missing)}"
        )
    return dict(columns)


def matches(row: dict, mark: Mark) -> bool:
    """Whether `mark`, a predicate or key -> value pairs, picks this row."""
    if mark is None:
        return False
    return bool(mark(row)) if callable(mark) else all(row.get(key) == value for key, value in mark.items())


def markdown(
    rows: Sequence[dict],
    columns: Mapping[str, str] | Sequence[str] | None = None,
    mark: Mark = None,
    formats: Mapping[str, str] | None = None,
) -> str:
    """A Markdown table; columns of numbers align right, rows that `mark` picks are bold.

    `formats` gives a column its own format specification ({"ms": ".2f"}). A missing value is an en dash.
    """
    heads = columns_of(rows, columns)
    texts = [[_text(row.get(key), key, formats) for key in heads] for row in rows]
    texts = [[t.replace("|", "\\|").replace("\n", " ") for t in line] for line in texts]
    right = [bool(texts) and all(_numeric(line[i]) for line in texts) for i in range(len(heads))]
    for row, line in zip(rows, texts, strict=True):
        if matches(row, mark):
            line[:] = [f"**{t}**" if t else t for t in line]
    lines = [list(heads.values()), ["---:" if r else ":---" for r in right], *texts]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def details(
    rows: Sequence[dict],
    columns: Mapping[str, str] | Sequence[str] | None = None,
    title: str = "Data of this figure",
) -> str:
    """A folded HTML table. With no `columns`, what is the same in all rows moves to the title line, and
    empty columns go."""
    rows = [dict(row) for row in rows]
    common: list[str] = []
    if columns is None:
        keys = [k for k in columns_of(rows) if any(row.get(k) is not None for row in rows)]
        same = [k for k in keys if len(rows) > 1 and all(row.get(k) == rows[0].get(k) for row in rows)]
        common = [f"{k.replace('_', ' ')} {number(rows[0][k])}" for k in same]
        columns = [k for k in keys if k not in same]
    heads = columns_of(rows, columns)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads.values())
    cells = [[html.escape(number(row.get(key))) for key in heads] for row in rows]
    body = "\n".join("<tr><td>" + "</td><td>".join(line) + "</td></tr>" for line in cells)
    note = f"<p>All rows: {html.escape(', '.join(common))}.</p>\n" if common else ""
    table = (
        f'<table style="text-align:right">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    )
    return (
        f"<details><summary>{html.escape(title)} ({len(rows)} rows)</summary>\n{note}"
        f'<div style="overflow-x:auto">{table}</div>\n</details>'
    )


def _text(value: object, key: str, formats: Mapping[str, str] | None) -> str:
    spec = (formats or {}).get(key)
    plain = spec is None or value is None or isinstance(value, str)
    return number(value) if plain else format(value, spec)


def _numeric(text: str) -> bool:
    return bool(re.fullmatch(r"[\s\d.+\-–%/e]*|nan|-?inf", text))
