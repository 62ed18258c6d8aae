"""Are two SVG or PDF files the same drawing? The same parts in the same order, coordinates within 0.02 pt.

Bytes can't be asked for: NumPy and PyTorch choose their code by the processor, and a coordinate's last bit
follows that choice. Matplotlib hashes such coordinates into the names of an SVG's clips, and a PDF's
compressed streams change their length with them."""

import re
import zlib

TOLERANCE = 0.02
"""Points; a line of our figures is 0.5 pt wide or more."""

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_STREAM = re.compile(rb"(?<=\nstream\n).*?(?=\nendstream)", re.DOTALL)


def difference(old: bytes, new: bytes) -> str | None:
    """The first place where two drawings differ, in words; None if they are the same."""
    if old == new:
        return None
    before, after = (_lines(data) for data in (old, new))
    for number, (one, other) in enumerate(zip(before, after, strict=False), 1):
        if not _alike(one, other):
            return f"line {number}: expected {one[:200]!r}, got {other[:200]!r}"
    if len(before) != len(after):
        return f"expected {len(before)} lines, got {len(after)}"
    return None


def _lines(data: bytes) -> list[str]:
    return (_pdf(data) if data.startswith(b"%PDF") else _svg(data)).splitlines()


def _svg(data: bytes) -> str:
    """Names of parts are their place among the names: what they are hashed from is drawn as well."""
    text = data.decode("utf-8")
    for place, name in enumerate(dict.fromkeys(re.findall(r' id="([^"]+)"', text))):
        text = re.sub(rf'(id="|#){re.escape(name)}(?=["\)])', rf"\g<1>part{place}", text)
    return text


def _pdf(data: bytes) -> str:
    """Streams read, and without what says how long they are: lengths and the table of places at the end."""
    table = data.rindex(b"\nxref\n")
    rest = _STREAM.sub(b"", data[:table])
    rest = re.sub(rb"(?<= 0 obj\n)\d+(?=\nendobj)", b"length", rest)
    streams = [_read(stream) for stream in _STREAM.findall(data[:table])]
    return "\n".join(part.decode("latin-1") for part in (rest, *streams))


def _read(stream: bytes) -> bytes:
    try:
        return zlib.decompress(stream)
    except zlib.error:
        return stream


def _alike(one: str, other: str) -> bool:
    if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return False
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= TOLERANCE for a, b in pairs)
