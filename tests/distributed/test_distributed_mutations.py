"""Bugs planted in the schedule, the merge and the sums, which the tests of one process have to notice."""

from __future__ import annotations

import inspect

import pytest
import torch

from attnlib.distributed import layout, order, pieces, schedule
from attnlib.kernels.reference import merge as reference
from attnlib.kernels.reference.gradients import visible
from attnlib.params import Existing, MaskWindow

ROWS = 6
WINDOWS = [MaskWindow(None, 0), MaskWindow(None, None), MaskWindow(11, 2), MaskWindow(25, None),
           MaskWindow(None, 5)]  # fmt: skip

SCHEDULE = {
    "a key too many": ("start, stop = max(first, part.start), min(end, part.stop)",
                       "start, stop = max(first, part.start), min(end + 1, part.stop)"),
    "a key too few on the left": ("own[0].start - window.left", "own[0].start - window.left + 1"),
    "the window shifted": ("MaskWindow(reach - count, None)",
                           "MaskWindow(max(0, reach - count - 1), None)"),
    "rows too many": ("count = min(len(rows), reach)", "count = len(rows)"),
    "a right bound too far": ("part.stop + window.right - pieces[-1].stop)",
                              "part.stop + window.right - pieces[-1].stop + 1)"),
    "rows skipped": ("pieces[0].start - part.start - window.right)",
                     "pieces[0].start - part.start - window.right + 1)"),
    "calls joined that differ": ("if last.keys == call.keys and",
                                 "if last.keys.start == call.keys.start and"),
    "pieces out of order": ("key=lambda piece: piece.start", "key=lambda piece: -piece.start"),
    "its own keys again": ("list(range(1, ranks))", "list(range(0, ranks))"),
}  # fmt: skip


ORDER = {
    "rows of another part": ("at, to = here.start + first - part.start,", "at, to = first - part.start,"),
    "a place of another part": ("there.start + first - place.start", "first - place.start"),
    "a row too few": ("slice(at, at + end - first), slice(to, to + end - first)",
                      "slice(at, at + end - first - 1), slice(to, to + end - first - 1)"),
    "the end of one alone": ("min(part.stop, place.stop)", "part.stop"),
}  # fmt: skip


def planted(module, old: str, new: str) -> dict:
    """The names of a module whose source has `new` in the place of `old`."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
    names = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), module.__file__, "exec"), names)
    return names


def sound(rounds) -> bool:
    """Whether every visible key is computed once, by four ranks, with each mask and method."""
    for window in WINDOWS:
        whole = visible(4 * ROWS, 4 * ROWS, window).long()
        for rank in range(4):
            parts = layout.parts_of(rank, 4, ROWS, window)
            own = torch.tensor([at for part in parts for at in part])
            for method in ("ring", "all_gather"):
                found = torch.zeros(ROWS, 4 * ROWS, dtype=torch.int64)
                found[:, own] += visible(ROWS, ROWS, window).long()
                for each in rounds(rank, 4, ROWS, window, method):
                    keys = torch.tensor([at for p in each.pieces for at in range(p.start, p.stop)])
                    for call in each.calls:
                        rows, seen = pieces.as_slice(call.rows), pieces.as_slice(call.keys)
                        bounds = MaskWindow(*call.window)
                        if min((bound for bound in bounds if bound is not None), default=0) < 0:
                            return False
                        found[rows, keys[seen]] += visible(len(call.rows), len(call.keys), bounds).long()
                if not torch.equal(found, whole[own]):
                    return False
    return True


def test_the_schedule_is_sound():
    assert sound(schedule.rounds)


@pytest.mark.parametrize("name", SCHEDULE)
def test_a_bug_in_the_schedule_is_noticed(name):
    assert not sound(planted(schedule, *SCHEDULE[name])["rounds"])


MERGE = {
    "weights swapped": ("torch.exp(own - finite)", "torch.exp(finite - own)"),
    "an LSE of one part": ("torch.logaddexp(before, lse)", "torch.maximum(before, lse)"),
    "NaN of a part without keys": ("torch.where(weight == 0, 0, weight * part.double())",
                                   "weight * part.double()"),
    "no LSE": ("into.lse.copy_(total)", "pass"),
    "-inf from -inf": ("total.masked_fill(total == -torch.inf, 0)", "total"),
    "the part of before alone": ("((into.out, before), (out, lse))", "((into.out, before),)"),
}  # fmt: skip


def merges(merge) -> bool:
    """Whether it merges two parts, one of which may be empty, or both in a row."""
    torch.manual_seed(0)
    scores, v = torch.randn(1, 1, 4, 10).double(), torch.randn(1, 1, 10, 8).double()
    scores[..., 3, :] = -torch.inf
    exact = torch.softmax(scores, -1).nan_to_num() @ v
    lse = scores.logsumexp(-1)
    for split in (3, 0, 10):
        parts = []
        for part in (slice(0, split), slice(split, 10)):
            out = torch.softmax(scores[..., part], -1) @ v[:, :, part]
            out = torch.full_like(exact, torch.nan) if part.start == part.stop else out
            parts.append((out, torch.logsumexp(scores[..., part], -1)))
        (out, own), second = parts
        into = Existing(out.float(), own.float())
        merge(into, *second)
        if not (into.out - exact).abs().max() < 1e-6 or not torch.allclose(into.lse, lse.float(), atol=1e-6):
            return False
    return True


def test_the_merge_is_right():
    assert merges(reference.merge_into)


@pytest.mark.parametrize("name", MERGE)
def test_a_bug_in_the_merge_is_noticed(name):
    assert not merges(planted(reference, *MERGE[name])["merge_into"])


def all_there(common) -> bool:
    """Whether each rank has all its rows, and has them once, when rows in order have moved to where a causal
    mask wants them, and back."""
    for ranks, rows in ((1, 3), (2, 2), (2, 6), (3, 4), (4, 6), (5, 2)):
        ways = layout.pieces_of(ranks, rows), tuple(
            layout.parts_of(rank, ranks, rows, MaskWindow(None, 0)) for rank in range(ranks)
        )  # fmt: skip
        for before, after in (ways, ways[::-1]):
            had, wanted = ([torch.tensor([i for part in parts for i in part]) for parts in way]
                           for way in (before, after))  # fmt: skip
            for rank in range(ranks):
                found = torch.full((rows,), -1)
                for peer in range(ranks):
                    for here, there in common(before[peer], after[rank]):
                        if here.stop > rows or there.stop > rows or (found[there] >= 0).any():
                            return False
                        found[there] = had[peer][here]
                if not torch.equal(found, wanted[rank]):
                    return False
    return True


def test_rows_reach_their_places():
    assert all_there(order.common)


@pytest.mark.parametrize("bug", ORDER)
def test_bugs_in_the_order(bug):
    try:
        right = all_there(planted(order, *ORDER[bug])["common"])
    except RuntimeError:  # pieces of other sizes
        right = False
    assert not right, bug
