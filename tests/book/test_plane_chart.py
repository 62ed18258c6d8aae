"""The heat maps of the plane: every cell shows its own row or that it has none, and the table of losses."""

from __future__ import annotations

import pytest

from attnlib.bench import plane, records
from attnlib.bench.plane import Cell
from attnlib.bench.shapes import Shape
from attnlib.book import plane_chart, plotting
from attnlib.book.palette import luminance


def row_of(cell, way, ratio=None, noise=1.005, **more):
    known = {} if ratio is None else {"ratio": ratio, "control": noise, "spread": 1.001}
    return {"kind": cell.kind, "pass": way, **cell.shape.to_dict(), **known, **more}


def table(*rows):
    return records.Table("cells", list(rows), "GPU", "2026-11-23", False)


def every(way, ratio):
    """A row for each cell; `ratio`: cell -> number."""
    return [row_of(cell, way, ratio(cell)) for group in plane.groups() for cell in group]


FIRST = plane.cell("causal", 64, 512)


def panel(figure, title):
    return next(ax for ax in figure.axes if ax.get_title(loc="left") == title)


def numbers(ax):
    """(column, row) -> text."""
    return {
        (int(t.get_position()[0]), int(t.get_position()[1])): t.get_text()
        for t in ax.texts if t.get_text() and t.get_rotation() == 0
    }  # fmt: skip


def hatched(ax, hatch):
    return {(int(p.get_x()), int(p.get_y())) for p in ax.patches if p.get_hatch() == hatch}


@pytest.mark.parametrize("dtype", plane.DTYPES)
def test_every_cell_shows_its_own_row(dtype):
    def ratio(cell):
        shape = cell.shape
        place = plane.DIMS.index(shape.head_dim) * 10 + plane.LENGTHS.index(shape.seqlen)
        return 1 + place / 100 + list(plane.KINDS).index(cell.kind) + 5 * (shape.dtype == "float16")

    figure = plane_chart.plane_chart(table(*every("backward", ratio)), "backward", dtype)
    for kind, one in plane.KINDS.items():
        wanted = {
            (x, y): f"{100 * ratio(plane.cell(kind, d, length, dtype)):.0f}"
            for x, length in enumerate(plane.LENGTHS) for y, d in enumerate(plane.DIMS)
            if plane.KINDS[kind].hides(length)
        }  # fmt: skip
        assert numbers(panel(figure, one.label)) == wanted, kind
        assert not hatched(panel(figure, one.label), "/////")
    words = {"bfloat16": "bf16", "float16": "fp16"}
    assert panel(figure, f"backward, {words[dtype]}")


def test_what_was_not_measured_stays_empty():
    """A row of the other pass, dtype or kind fills no cell, and neighbors are not asked."""
    rows = [row_of(FIRST, "forward", 1.2), row_of(FIRST, "backward", 0.8)]
    rows.append(row_of(plane.cell("causal", 72, 512), "forward", reason="attnlib: wrong"))
    figure = plane_chart.plane_chart(table(*rows), "forward")
    causal = panel(figure, "causal")
    assert numbers(causal) == {(0, 0): "120"}
    assert hatched(causal, "xxxxx") == {(0, 1)}
    assert len(hatched(causal, "/////")) == 50 - 2
    assert len(hatched(panel(figure, "window of 1024 keys"), "/////")) == 30
    figure = plane_chart.plane_chart(table(*rows), "forward", "float16")
    assert all(numbers(panel(figure, one.label)) == {} for one in plane.KINDS.values())
    assert len(hatched(panel(figure, "causal"), "/////")) == 50


def test_ties_are_gray_and_colors_say_who_is_faster():
    tie, _, text = plane_chart.look(row_of(FIRST, "forward", 1.004))
    assert (tie, text) == (plane_chart.FAINT, "100")
    ahead, behind, far = (plane_chart.look(row_of(FIRST, "forward", x))[0] for x in (1.1, 1 / 1.1, 9.0))
    assert int(ahead[5:], 16) > int(ahead[1:3], 16) and int(behind[1:3], 16) > int(behind[5:], 16)
    assert far == plane_chart.look(row_of(FIRST, "forward", plane_chart.FAR))[0]
    assert luminance(far) < luminance(ahead) < 1
    same = plane_chart.look(row_of(FIRST, "forward", 1.004, noise=1.001))[0]
    assert same != plane_chart.FAINT


def test_the_table_of_cells_behind():
    """All below 1, with their verdict; not those that are ahead or have no time."""
    cells = [plane.cell("dense", 96, n) for n in (4096, 512)]
    rows = [row_of(cell, "backward", ratio) for cell, ratio in zip(cells, (0.9, 0.97), strict=True)]
    rows.append(row_of(plane.cell("dense", 96, 1024), "backward", 0.999))  # a tie
    rows.append(row_of(plane.cell("dense", 96, 16384), "backward", 0.972, noise=1.038))  # another
    rows.append(row_of(plane.cell("causal", 224, 512), "forward", 0.95))
    rows.append(row_of(FIRST, "forward", 1.3))
    rows.append(row_of(FIRST, "backward", reason="fa3: failed"))
    found = plane_chart.behind(table(*rows))
    shown = [(line["pass"], line["verdict"], line["S: ratio"], line["least"]) for line in found]
    assert shown == [
        ("forward", "slower", "512: 0.950", 0.95),
        ("backward", "slower", "512: 0.970, 4096: 0.900", 0.9),
        ("backward", "tie", "1024: 0.999, 16384: 0.972", 0.972),
    ]
    assert found[0]["columns"] == "256, FA3 256" and found[0]["known"] == plane_chart.UNKNOWN
    assert found[1]["known"] == plane_chart.KNOWN["backward", 96, None]
    assert plane_chart.behind(table()) == []


def test_what_is_known_is_of_cells_that_are_behind():
    """Each line of KNOWN says something of the reference GPU's record, and no group of it has none."""
    assert plane_chart.columns_of("backward", 160) == (160, 192)
    assert plane_chart.known_of("backward", 128, "dense") != plane_chart.known_of("backward", 128, "gqa8")
    whole = records.load(plane.RECORD, plane.TABLE, gpu=records.REFERENCE_GPU)
    groups = {
        (row["pass"], plane_chart.columns_of(row["pass"], row["head_dim"])[0], row["kind"])
        for row in whole.rows if row.get("ratio", 1) < 1
    }  # fmt: skip
    used = {key if key in plane_chart.KNOWN else (*key[:2], None) for key in groups}
    assert used == set(plane_chart.KNOWN)


def test_over_lengths_tells_steps_from_what_is_around_them():
    """100 us less, and 20 more for each 1024 keys; not of the longest calls, and not of two lengths alone."""

    def rows(d: int, lengths) -> list[dict]:
        cells = [plane.cell("dense", d, n) for n in lengths]
        return [row_of(cell, "backward", 1.0) | {"fa3_ms": 1.0, "attnlib_ms": 0.9 + 2e-5 * cell.shape.seqlen}
                for cell in cells]  # fmt: skip

    longest = row_of(plane.cell("dense", 64, 16384), "backward", 1.0) | {"fa3_ms": 1.0, "attnlib_ms": 9.0}
    few, enough = rows(96, (512, 1024)), rows(64, (512, 1024, 2048, 4096))
    (line,) = plane_chart.over_lengths(table(*enough, longest, *few))
    assert line["D"] == 64 and line["kind"] == "dense"
    assert line["around the steps, µs"] == pytest.approx(-100)
    assert line["for 1024 keys, µs"] == pytest.approx(20.48)
    assert line["off by at most, µs"] == pytest.approx(0, abs=1e-9)


def test_calls_in_turn_stand_beside_their_windows():
    """Of a call that both tables have the lower window; not how a call stood that no table has now."""
    twice, gone = Cell("dense", Shape(4, 16, 4096, 128, False)), plane.cell("gqa8", 96, 1024, "float16")
    cells = [row_of(FIRST, "backward", 0.98), row_of(FIRST, "forward", 0.99), row_of(twice, "forward", 1.2)]
    named = [row_of(twice, "forward", 0.995, noise=1.01), row_of(twice, "backward", reason="fa3: failed")]
    again = [row_of(gone, "forward", 1.1), row_of(FIRST, "backward", 1.02), row_of(twice, "forward", 0.99)]
    found = plane_chart.in_turn(table(*again), table(*cells), table(*named))
    assert [tuple(line.values()) for line in found] == [
        (twice.label, "forward", "0.995x, noise 1.010: tie", "0.990x, noise 1.005: slower"),
        (gone.label, "forward", None, "1.100x, noise 1.005: faster"),
        (FIRST.label, "backward", "0.980x, noise 1.005: slower", "1.020x, noise 1.005: faster"),
    ]
    said = plane_chart.told_in_turn(table(*again), table(*cells), table(*named))
    assert said == (
        "Of 3 calls below 1.0 in windows 2 were measured in turn, from 0.990 to 1.020, 1 below 1.0. "
        "faster: 1, slower: 1, tie: 0."
    )


def test_without_calls_in_turn_a_sentence_says_so():
    behind = table(row_of(FIRST, "backward", 0.98))
    assert "None of the 1 calls" in plane_chart.told_in_turn(None, behind, None)
    assert "None of the 1 calls" in plane_chart.told_in_turn(table(), behind)
    assert plane_chart.told_in_turn(None, table(row_of(FIRST, "forward", 1.1))).startswith("No call")
    assert plane_chart.in_turn(table(), behind) == []


def test_named_calls_have_a_line_each():
    first, last = plane.NAMED[0], plane.NAMED[-1]
    rows = [row_of(last, "backward", 0.9, attnlib_tflops=540.0, fa3_tflops=600.0)]
    rows.append(row_of(first, "forward", 1.07, attnlib_tflops=529.0, fa3_tflops=493.0))
    rows.append(row_of(first, "backward", reason="fa3: failed", attnlib_tflops=470.0))
    found = plane_chart.named(table(*rows))
    assert [line["call"] for line in found] == [first.label, last.label]
    assert (found[0]["forward, attnlib"], found[0]["forward, FA3"]) == (529.0, 493.0)
    assert found[0]["forward, verdict"] == "1.070x, noise 1.005: faster"
    assert found[0]["backward, verdict"] == "not measured (fa3: failed)"
    assert found[0]["backward, FA3"] is None and found[1]["forward, verdict"] is None
    assert found[1]["backward, verdict"].endswith("slower")
    assert all(list(line) == list(found[0]) for line in found)
    assert plane_chart.named(table()) == []


def test_the_alt_text_counts():
    rows = [row_of(FIRST, "forward", 1.2), row_of(FIRST, "backward", 0.8)]
    text = plane_chart.alt_text(table(*rows), "forward")
    assert "bf16" in text and text.endswith("1 cells, from 1.20 to 1.20. faster: 1, slower: 0, tie: 0.")
    assert plane_chart.alt_text(table(*rows), "forward", "float16").endswith(": 0 cells.")
    assert plane_chart.alt_text(table(), "forward").endswith(".")


@pytest.mark.parametrize("rows", [[], every("forward", lambda cell: 1.1)])
def test_it_can_be_published(rows):
    figure = plane_chart.plane_chart(table(*rows), "forward")
    content, _ = plotting.bundle(figure, "plane", plane_chart.alt_text(table(*rows), "forward"))
    assert content["image/svg+xml"].startswith("<")
