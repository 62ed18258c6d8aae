"""When each warpgroup of a Gluon kernel does what, in clocks of its SM.

A copy of the kernel with stamps (see `stamps`) runs in the kernel's place, and one CTA of the launch writes
down its clock. The copy is slower than the kernel; `rows` measures by how much, for the same table. A stamp
also keeps instructions on their side of it: a wait that the assembler would move up stays where the source
has it.

Triton's own profiler, Proton, can stamp clocks too. It is not used here: its records have the scope's name
but not the number of the tile, its scopes must stand in the kernel's source, and it asks for a GPU before it
compiles, so that neither the emulator nor a compiler for sm_90 could check the copy.
"""

from __future__ import annotations

import importlib
import inspect
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

from attnlib import api
from attnlib.bench import harness, records, sources
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.bench.stamps import CLOCKS, Span, Stamped, after, before, stamped
from attnlib.kernels.common import launcher

__all__ = [
    "CLOCKS",
    "Span",
    "Timeline",
    "after",
    "before",
    "clocks",
    "cost",
    "method",
    "of_package",
    "of_step",
    "of_text",
    "rows",
    "under_way",
]

WARPGROUPS = 5  # of a CTA at most: four of consumers, one with the producer
NOTHING = -1  # a place without a stamp; a clock may read so once in 2^32


class Timeline:
    """A kernel's copy with stamps.

    module: the copy's. plain: the attention of the kernel itself. replaces: the full name of a kernel of the
    package, in whose place the package's launcher gets the copy; None where the copy has a launcher.
    """

    def __init__(
        self, module: ModuleType, copy: Stamped, tiles: range, plain: Callable, replaces: str | None = None
    ) -> None:
        self.module, self.copy, self.tiles, self.plain, self.replaces = module, copy, tiles, plain, replaces
        self.clocks: torch.Tensor | None = None
        """int32 (warpgroups, tiles, places) of the last launch."""

    def attention(self, q, k, v, causal=True, sm_scale=None, **options) -> torch.Tensor:
        """The attention of the kernel, by its copy with stamps."""
        if self.clocks is None or self.clocks.device != q.device:
            places = WARPGROUPS, len(self.tiles), self.copy.places
            self.clocks = torch.full(places, NOTHING, dtype=torch.int32, device=q.device)
        with self._in_place() as attention:
            return attention(q, k, v, causal=causal, sm_scale=sm_scale, **options)

    @contextmanager
    def _in_place(self) -> Iterator[Callable]:
        copy = _Launched(getattr(self.module, self.copy.kernel), self.clocks)
        with ExitStack() as stack:
            if self.replaces is None:
                stack.enter_context(mock.patch.dict(vars(self.module), {self.copy.kernel: copy}))
                yield self.module.attention
            else:
                stack.enter_context(launcher.through_triton())  # what is prepared is another kernel
                stack.enter_context(launcher.replaced(self.replaces, copy))
                yield self.plain

    def read(self) -> list[dict[str, Any]]:
        """Rows of the last launch: event, warpgroup, tile, begin and end in clocks, the first begin at 0.

        ValueError if it left no whole span, say because no tile has one of the numbers that are kept.
        """
        if self.clocks is None:
            raise ValueError(
                "timeline: expected a call of `attention` before its clocks are read, found none"
            )
        clocks = self.clocks.cpu().tolist()
        found = []
        for event, begin, end in self.copy.spans:
            for w, kept in enumerate(clocks):
                for tile, places in zip(self.tiles, kept, strict=True):
                    if NOTHING not in (places[begin], places[end]):
                        found.append((w, event, tile, places[begin], places[end]))
        if not found:
            raise ValueError(f"timeline: expected stamps of some of {self.tiles}, found none")
        anchor = found[0][3]  # 32 bits wrap
        found = [(*row[:3], *(_signed(clock - anchor) for clock in row[3:])) for row in found]
        start = min(row[3] for row in found)
        return [
            {"event": event, "warpgroup": w, "tile": tile, "begin": begin - start, "end": end - start}
            for w, event, tile, begin, end in sorted(found, key=lambda row: (row[0], row[3], row[4]))
        ]


class _Launched:
    """Takes the place of a kernel: `kernel[grid](...)` launches the copy, with the buffer before all others.
    Returns nothing, so that no launcher takes the copy for the kernel later."""

    def __init__(self, kernel: Any, clocks: torch.Tensor) -> None:
        self.kernel, self.clocks = kernel, clocks

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args, **kwargs) -> None:
            self.kernel[grid](self.clocks, *args, **kwargs)

        return launch


def _signed(clocks: int) -> int:
    return (clocks + 2**31) % 2**32 - 2**31


def of_step(step: str, spans: Sequence[Span], tiles: range) -> Timeline:
    """Of the kernel cell of a notebook, such as "11_warp_specialization"."""
    text = sources.kernel_source(sources.notebook_of(step))
    return of_text(step, text, sources.load_step(step).attention, spans, tiles)


def of_text(name: str, text: str, plain: Callable, spans: Sequence[Span], tiles: range) -> Timeline:
    """Of a kernel's text, whose attention is `plain`."""
    copy = stamped(text, spans, tiles)
    return Timeline(sources.load_source(f"{name}_stamped", copy.source), copy, tiles, plain)


def of_package(kernel: str, spans: Sequence[Span], tiles: range, within: Sequence[str] = ()) -> Timeline:
    """Of a kernel that the package's `attention` launches, by its full name, such as
    "attnlib.kernels.hopper.forward_kernel.attention_forward_hopper". within: modules beside the kernel's
    whose functions have places of spans, too. Spans of one event may end in different functions, of which a
    configuration runs one."""
    module, _, name = kernel.rpartition(".")
    copy = stamped(_source_with(module, within), spans, tiles)
    if copy.kernel != name:
        raise ValueError(f"kernel: expected the one that reaches all spans, {copy.kernel}, got {name}")
    return Timeline(sources.load_source(f"{name}_stamped", copy.source), copy, tiles, _attention, kernel)


def _source_with(module: str, others: Sequence[str]) -> str:
    """A module's source with that of others, whose functions it calls as `other.function`, before it."""
    text, parts = inspect.getsource(importlib.import_module(module)), []
    for other in others:
        name = other.rpartition(".")[2]
        parts.append(inspect.getsource(importlib.import_module(other)))
        text = re.sub(rf"\b{name}\.(\w+)\(", r"\1(", text)
    return "\n".join([*parts, text])


def _attention(q, k, v, causal=True, sm_scale=None, **options) -> torch.Tensor:
    """The package's, with a chapter's arguments."""
    return api.attention(q, k, v, causal=causal, sm_scale=sm_scale, **options)


# ---------------------------------------------------------------- measuring


def rows(timeline: Timeline, shapes: Sequence[Shape], launches: int = 5) -> list[dict[str, Any]]:
    """Rows for a record, on a GPU: for each shape those of `Timeline.read`, of the last of some launches, and
    one that says what the stamps cost.

    The latter's event is "launch": ms of the kernel and stamped_ms of its copy, medians of interleaved
    calls, and the noise of that run: by how much the kernel under a second name differed from itself, as a
    share. RuntimeError if the copy gives a wrong result.
    """
    return [row for shape in shapes for row in _rows_of(timeline, shape, launches)]


def _rows_of(timeline: Timeline, shape: Shape, launches: int) -> list[dict[str, Any]]:
    q, k, v = make_inputs(shape, device=harness.DEVICE)
    timeline.clocks = None  # a shape before may have had warpgroups that this one has not
    for _ in range(launches):
        timeline.attention(q, k, v, shape.causal)
    found = [{"head_dim": shape.head_dim} | row for row in timeline.read()]
    del q, k, v
    timed = {"kernel": timeline.plain, "stamped": timeline.attention}
    ms = {}
    for row in harness.collect(timed, [shape], control="kernel"):
        if row["status"] != "ok":
            raise RuntimeError(f"timeline: {row['impl']} at D = {shape.head_dim}: {row.get('reason')}")
        ms["again" if "control_of" in row else row["impl"]] = row["ms"]
    noise = abs(ms["again"] / ms["kernel"] - 1)
    mean = statistics.mean((ms["kernel"], ms["again"]))
    cost = {"event": "launch", "ms": mean, "stamped_ms": ms["stamped"], "noise": noise}
    return [*found, {"head_dim": shape.head_dim} | cost]


def method(timeline: Timeline) -> dict[str, str]:
    """How the rows were measured, for a record."""
    tiles = timeline.tiles
    return {
        "clock": "%clock of the SM, 32 bits, at the ends of each span, in a copy of the kernel",
        "launch": "first program along x, middle one along y; "
        f"tiles {tiles.start} to {tiles.stop - 1}; the last of five launches",
    }


# ---------------------------------------------------------------- reading a record


def clocks(table: records.Table, head_dim: int, events: Sequence[str]) -> np.ndarray:
    """[warpgroups, tiles, events, (begin, end)] of a recorded table: the warpgroups that have all of these
    events, and the tiles for which all of those have them. ValueError if there are none."""
    found = {
        (row["warpgroup"], row["tile"], row["event"]): (row["begin"], row["end"])
        for row in table.select(head_dim=head_dim)
        if row["event"] in events
    }
    warpgroups = sorted(
        w for w in {w for w, _, _ in found} if {e for v, _, e in found if v == w} == set(events)
    )
    tiles = sorted(
        tile
        for tile in {tile for _, tile, _ in found}
        if all((w, tile, event) in found for w in warpgroups for event in events)
    )
    if not warpgroups or not tiles:
        raise ValueError(f"events: expected some of the table at D = {head_dim}, got {list(events)}")
    return np.array([[[found[w, tile, event] for event in events] for tile in tiles] for w in warpgroups])


def cost(table: records.Table) -> str:
    """A sentence on what the stamps cost: the copy's time over the kernel's, and the noise of that run."""
    found = []
    for row in table.select(event="launch"):
        more = row["stamped_ms"] / row["ms"] - 1
        level = abs(more) <= row["noise"]
        said = "no difference beyond the noise" if level else f"{more:+.1%}"
        found.append(f"{said} at D = {row['head_dim']} (noise {row['noise']:.1%})")
    if not found:
        raise records.RecordError(f"table {table.name!r} ({table.label}): no row says what the stamps cost")
    return f"What the stamps add to the time of a launch: {'; '.join(found)} ({table.label})."


def under_way(rows: Iterable[Mapping[str, Any]], events: Sequence[str]) -> list[tuple[int, int]]:
    """(begin, end) of the stretches in which at least one of these events is under way, in order."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted((row["begin"], row["end"]) for row in rows if row["event"] in events):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
