"""The comparison of drawings sees what a reader would see, and nothing else."""

import re
import zlib

import matplotlib.pyplot as plt
import pytest

from attnlib.book import plotting
from tests.helpers.drawings import TOLERANCE, difference


def drawn(kind: str, moved: float = 0.0, color: str = "tab:blue", label: str = "ms", points=3) -> bytes:
    """A small chart; moved: points (1/72 inch) by which the axes lie further right."""
    plotting.style()
    figure, axes = plt.subplots(figsize=(3, 2))
    axes.set_position([0.2 + moved / 72 / 3, 0.2, 0.7, 0.7])
    axes.plot(range(points), [1.0, 2.0, 4.0, 8.0][:points], color=color)
    axes.set_ylabel(label)
    data = plotting._render(figure, kind)
    plt.close(figure)
    return data


@pytest.mark.parametrize("kind", ["svg", "pdf"])
def test_last_bits_of_coordinates_are_no_difference(kind):
    """A shift below the tolerance changes bytes, of an SVG also the names of its clips."""
    one, other = drawn(kind), drawn(kind, moved=TOLERANCE / 4)
    assert one != other
    assert difference(one, other) is None
    if kind == "svg":
        names = [re.findall(rb'<clipPath id="(\w+)"', data) for data in (one, other)]
        assert names[0] != names[1]


@pytest.mark.parametrize("kind", ["svg", "pdf"])
@pytest.mark.parametrize(
    "change", [{"moved": 4 * TOLERANCE}, {"color": "tab:red"}, {"label": "s"}, {"points": 4}], ids=str
)
def test_what_is_drawn_otherwise_is_a_difference(kind, change):
    assert "expected" in difference(drawn(kind), drawn(kind, **change))


def test_a_pdf_is_read_through_its_compression():
    """Two compressions of the same content are the same drawing; a stroke more is a difference."""

    def pdf(content: bytes, level: int) -> bytes:
        stream = zlib.compress(content, level)
        length = str(len(stream)).encode()
        body = b"%PDF-1.4\n9 0 obj\n<< /Length 10 0 R >>\nstream\n" + stream + b"\nendstream\nendobj\n"
        return body + b"10 0 obj\n" + length + b"\nendobj\nxref\n0 2\n" + length + b"\n%%EOF\n"

    content = b"\n".join(b"%d 2.5 l" % i for i in range(100))
    assert pdf(content, 1) != pdf(content, 9)
    assert difference(pdf(content, 1), pdf(content, 9)) is None
    assert difference(pdf(content, 9), pdf(content + b"\nS", 9)) == "expected 110 lines, got 111"
