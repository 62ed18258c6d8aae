"""Who needs which keys of whom, and what is computed with them: pure functions of the ranks, the rows of each
and the mask, so that the two ends of a transfer agree without asking."""

from functools import lru_cache
from typing import Literal, NamedTuple

from attnlib.distributed.layout import is_zigzag, local_rows, parts_of
from attnlib.params import MaskWindow

DENSE = MaskWindow(None, None)
Method = Literal["ring", "all_gather"]


class Piece(NamedTuple):
    """Keys that a rank needs of another: of its rows, and the position where they begin."""

    source: int
    rows: range
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)


class Call(NamedTuple):
    """One call of a kernel: rows of the rank, keys among those that came, and the window between the two, in
    which the last row stands at the last key."""

    rows: range
    keys: range
    window: MaskWindow


class Round(NamedTuple):
    """What comes at a time, by position, what goes meanwhile, as (destination, own rows), and the calls."""

    pieces: tuple[Piece, ...]
    sent: tuple[tuple[int, range], ...]
    calls: tuple[Call, ...]

    @property
    def keys(self) -> int:
        return sum(len(piece.rows) for piece in self.pieces)


@lru_cache(256)
def rounds(rank: int, ranks: int, rows: int, window: MaskWindow, method: Method) -> tuple[Round, ...]:
    """The rounds of a rank after its own keys. In round s of a ring, keys of the rank s places before it come
    and its own go to the rank s places after it; "all_gather" is all of that in one round."""
    shifts = list(range(1, ranks))
    together = [shifts] if method == "all_gather" else [[shift] for shift in shifts]
    found = []
    for group in together:
        pieces = _pieces(rank, [(rank - s) % ranks for s in group], ranks, rows, window)
        sent = []
        for shift in group:
            other = (rank + shift) % ranks
            sent += [(other, piece.rows) for piece in _pieces(other, [rank], ranks, rows, window)]
        found.append(Round(pieces, tuple(sent), _calls(pieces, parts_of(rank, ranks, rows, window), window)))
    return tuple(found)


def _pieces(
    rank: int, sources: list[int], ranks: int, rows: int, window: MaskWindow
) -> tuple[Piece, ...]:
    own = parts_of(rank, ranks, rows, window)
    first = 0 if window.left is None else own[0].start - window.left
    end = ranks * rows if window.right is None else own[-1].stop + window.right
    found = []
    for source in sources:
        for here, part in local_rows(parts_of(source, ranks, rows, window)):
            start, stop = max(first, part.start), min(end, part.stop)
            if start < stop:
                skipped = start - part.start
                found.append(Piece(source, here[skipped : skipped + stop - start], start))
    return tuple(sorted(found, key=lambda piece: piece.start))


def _calls(pieces: tuple[Piece, ...], own: tuple[range, ...], window: MaskWindow) -> tuple[Call, ...]:
    found: list[Call] = []
    for here, part in local_rows(own):
        before = [piece for piece in pieces if piece.start < part.start]
        after = [] if is_zigzag(window) else pieces[len(before) :]
        split = sum(len(piece.rows) for piece in before)
        if before:
            found.append(_seen_before(here, part, range(split), before, window))
        if after:
            keys = range(split, split + sum(len(piece.rows) for piece in after))
            found.append(_seen_after(here, part, keys, after, window))
    return tuple(_joined(found))


def _seen_before(rows: range, part: range, keys: range, pieces, window: MaskWindow) -> Call:
    """Keys in front of the rows: only a left bound hides some, from the later rows."""
    if window.left is None:
        return Call(rows, keys, DENSE)
    reach = pieces[-1].stop - part.start + window.left  # the last row that sees the last key, and one more
    count = min(len(rows), reach)
    return Call(rows[:count], keys, MaskWindow(reach - count, None))


def _seen_after(rows: range, part: range, keys: range, pieces, window: MaskWindow) -> Call:
    """Keys behind the rows: only a right bound hides some, from the earlier rows."""
    if window.right is None:
        return Call(rows, keys, DENSE)
    skipped = max(0, pieces[0].start - part.start - window.right)
    return Call(rows[skipped:], keys, MaskWindow(None, part.stop + window.right - pieces[-1].stop))


def _joined(calls: list[Call]) -> list[Call]:
    """The same in fewer calls: dense ones of neighboring rows and equal keys, or the other way round."""
    found: list[Call] = []
    for call in calls:
        last = found[-1] if found else None
        if last and last.window == call.window == DENSE:
            if last.keys == call.keys and last.rows.stop == call.rows.start:
                found[-1] = Call(range(last.rows.start, call.rows.stop), call.keys, DENSE)
                continue
            if last.rows == call.rows and last.keys.stop == call.keys.start:
                found[-1] = Call(call.rows, range(last.keys.start, call.keys.stop), DENSE)
                continue
        found.append(call)
    return found
