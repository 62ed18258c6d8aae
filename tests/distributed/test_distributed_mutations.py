"""Bugs planted in the schedule, the merge and the sums, which the tests of one process have to notice."""

from __future__ import annotations

import inspect

import pytest
import torch

from attnlib.distributed import layout, pieces, schedule
from attnlib.kernels.reference import merge as reference
from attnlib.kernels.reference.gradients import visible
from attnlib.params import MaskWindow

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
    "weights swapped": ("part.double() - lse", "lse - part.double()"),
    "an LSE of one part": ("torch.logaddexp(first[1].double(), second[1].double())",
                           "torch.maximum(first[1].double(), second[1].double())"),
    "NaN of a part without keys": ("torch.where(weight == 0, 0, weight * out.double())",
                                   "weight * out.double()"),
    "no LSE": ("result[1].copy_(lse)", "pass"),
    "rows of the second part from 0 on": ("second = _in_all_rows(second, result, start)",
                                          "second = _in_all_rows(second, result, 0)"),
    "a key in rows that it does not have": ("torch.full_like(like[1], -torch.inf)",
                                            "torch.zeros_like(like[1])"),
}  # fmt: skip


def merges(merge) -> bool:
    """Whether it merges two parts, one of which may be empty."""
    torch.manual_seed(0)
    scores, v = torch.randn(1, 1, 4, 10).double(), torch.randn(1, 1, 10, 8).double()
    exact = torch.softmax(scores, -1) @ v
    for split in (3, 0):
        both = []
        for part in (slice(0, split), slice(split, 10)):
            out = torch.softmax(scores[..., part], -1) @ v[:, :, part]
            out = torch.full_like(exact, torch.nan) if part == slice(0, 0) else out
            both.append((out.float(), torch.logsumexp(scores[..., part], -1).float()))
        result = torch.empty(1, 1, 4, 8), torch.full((1, 1, 4), 7.0)
        merge(*both, result)
        right = (result[0] - exact).abs().max() < 1e-6
        if not right or not (result[1] - scores.logsumexp(-1)).abs().max() < 1e-6:
            return False
    return True


def merges_some_rows(merge) -> bool:
    """Whether rows that the second part does not have stay as the first has them."""
    torch.manual_seed(0)
    scores, v = torch.randn(1, 1, 4, 10), torch.randn(1, 1, 10, 8)

    def part(first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        some = scores[..., first:end]
        return torch.softmax(some, -1) @ v[:, :, first:end], some.logsumexp(-1)

    first, second, whole = part(0, 3), part(3, 10), part(0, 10)
    result = tuple(torch.full_like(x, 7.0) for x in first)
    merge(first, tuple(x[:, :, 1:3] for x in second), result, 1)
    for x, y, z in zip(first, whole, result, strict=True):
        if not torch.allclose(z, torch.cat([x[:, :, :1], y[:, :, 1:3], x[:, :, 3:]], 2), atol=1e-6):
            return False
    return True


def test_the_merge_is_right():
    assert merges(reference.merge) and merges_some_rows(reference.merge)


@pytest.mark.parametrize("name", MERGE)
def test_a_bug_in_the_merge_is_noticed(name):
    merge = planted(reference, *MERGE[name])["merge"]
    assert not (merges(merge) and merges_some_rows(merge))
