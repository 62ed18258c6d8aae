"""The plane of calls that attnlib and FlashAttention-3 are compared on: head dimension x length x kind x
dtype.

`tests/gpu/time_plane.py` measures it, a row of the record for each cell and pass; `book.plane_chart` shows
them. Calls that are asked for by name (`NAMED`) have a table of their own. Those of both tables in which
FlashAttention-3 took less time are measured a second time, in turn without pauses: table `settled`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from attnlib.bench.backward import FLOPS
from attnlib.bench.shapes import Shape
from attnlib.bench.verdict import Verdict

RECORD, TABLE, NAMED_TABLE, SETTLED_TABLE = "plane", "cells", "named", "settled"
SIDE_BY_SIDE_TABLE = "side_by_side"
OURS, PEER = "attnlib", "fa3"
DIMS = 64, 72, 80, 96, 112, 128, 160, 192, 224, 256
LENGTHS = 512, 1024, 2048, 4096, 16384
TOKENS = 16384
PASSES = "forward", "backward"
DTYPES = "bfloat16", "float16"


class Kind(NamedTuple):
    """Which keys a query sees, and how many query heads share a head of keys. window: as of `attention`.
    varlen: sequences lie one after the other, and differ in length."""

    label: str
    causal: bool = True
    group: int = 1
    window: tuple[int, int] | None = None
    varlen: bool = False

    def hides(self, length: int) -> bool:
        """Whether its calls of this length are calls of their own: a window as wide as the sequence hides
        nothing, and they are those of the causal kind."""
        return self.window is None or self.window[0] + 1 < length


KINDS = {
    "causal": Kind("causal"),
    "dense": Kind("dense", causal=False),
    "gqa8": Kind("causal, GQA 8:1", group=8),
    "gqa4": Kind("causal, GQA 4:1", group=4),
    "window": Kind("window of 1024 keys", window=(1023, 0)),
}
OTHERS = {
    "gqa8dense": Kind("GQA 8:1", causal=False, group=8),
    "gqa8window": Kind("window of 1024 keys, GQA 8:1", group=8, window=(1023, 0)),
    "window256": Kind("window of 256 keys", window=(255, 0)),
    "gqa2": Kind("causal, GQA 2:1", group=2),
    "gqa16": Kind("causal, GQA 16:1", group=16),
    "varlen": Kind("varlen, causal", varlen=True),
    "varlendense": Kind("varlen", causal=False, varlen=True),
    "varlenwindow": Kind("varlen, window of 1024 keys", window=(1023, 0), varlen=True),
    "varlengqa8": Kind("varlen, causal, GQA 8:1", group=8, varlen=True),
    "varlengqa4": Kind("varlen, causal, GQA 4:1", group=4, varlen=True),
}
"""Kinds of calls that are tuned, or measured as `NAMED`, beside those of the plane."""
ALL = KINDS | OTHERS


class Cell(NamedTuple):
    """One call; its two passes are timed."""

    kind: str
    shape: Shape

    @property
    def label(self) -> str:
        one = ALL[self.kind]
        return self.shape.label + (f", {one.label}" if one.window else "")

    @property
    def pairs(self) -> float:
        """Queries and keys that see each other, of a head: an area, as the FLOPs of `roofline` are counted;
        with a window, exactly. Of varlen sequences the average over all."""
        causal, window = ALL[self.kind].causal, ALL[self.kind].window
        if window is None:
            return sum(n * n for n in self.lengths) / len(self.lengths) / (2 if causal else 1)
        wide = [(n, min(n, window[0] + 1)) for n in self.lengths]
        return sum(w * (w + 1) / 2 + (n - w) * w for n, w in wide) / len(wide)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the sequences; varlen from a 64th to twice what the shape says, which is about their average."""
        n, count = self.shape.seqlen, self.shape.batch
        if not ALL[self.kind].varlen:
            return (n,) * count
        return tuple(n * ((37 * i + 64) % 128 + 1) // 64 for i in range(count))

    def flops(self, way: str) -> float:
        """That a pass is credited with."""
        forward = 4 * self.shape.batch * self.shape.heads * self.shape.head_dim * self.pairs
        return forward * (FLOPS if way == "backward" else 1)


NAMED = [
    Cell("causal", Shape(1, 40, 6000, 80)),
    Cell("causal", Shape(2, 16, 4000, 96)),
    Cell("causal", Shape(2, 16, 3000, 192)),
    Cell("dense", Shape(4, 16, 4096, 128, False)),
    Cell("dense", Shape(2, 16, 8192, 128, False)),
    Cell("dense", Shape(1, 8, 16384, 256, False)),
    Cell("gqa4", Shape(4, 32, 4096, 128, heads_kv=8)),
    Cell("window", Shape(2, 16, 8192, 128)),
    Cell("window256", Shape(4, 32, 4096, 64)),
    Cell("causal", Shape(16, 32, 1024, 64)),
    Cell("causal", Shape(2, 16, 8192, 128)),
]
"""Calls that are asked for by name, in fp16, as the task is. Where only a length was named they have 16384
tokens; windows are at the task's shapes of their head dimensions."""


def cell(kind: str, head_dim: int, length: int, dtype: str = "bfloat16") -> Cell:
    """With about as many tokens and columns in all as every other."""
    heads = 16 if head_dim <= 128 else 8
    one = ALL[kind]
    return Cell(
        kind, Shape(TOKENS // length, heads, length, head_dim, one.causal, dtype, heads // one.group)
    )


def groups() -> Iterator[list[Cell]]:
    """All cells, those of one dtype, kind and length together, in the order of measuring: a run that is cut
    off leaves whole columns, first one in the middle, then both ends."""
    for dtype in DTYPES:
        for length in (4096, 16384, 1024, 512, 2048):
            for kind, one in KINDS.items():
                if one.hides(length):
                    yield [cell(kind, d, length, dtype) for d in DIMS]


def key(row: Mapping[str, Any]) -> tuple[Cell, str]:
    """The cell and the pass that a row of the record has measured."""
    return Cell(row["kind"], Shape.of_row(row)), row["pass"]


def verdict_of(row: Mapping[str, Any]) -> Verdict:
    """On attnlib against FlashAttention-3."""
    numbers = [row.get(name) for name in ("ratio", "control", "spread")]
    return Verdict(OURS, PEER, Shape.of_row(row), *numbers, reason=row.get("reason", ""))
