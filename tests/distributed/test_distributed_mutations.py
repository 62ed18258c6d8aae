"""Bugs planted in the schedule, the merge and the sums, which the tests of one process have to notice."""

from __future__ import annotations

import inspect
import queue
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from types import SimpleNamespace

import pytest
import torch

from attnlib import attention_varlen
from attnlib.dispatch import Saved
from attnlib.distributed import cut, layout, order, pieces, schedule
from attnlib.kernels.reference import merge as reference
from attnlib.kernels.reference.gradients import visible
from attnlib.params import Existing, MaskWindow, Params, Varlen

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


# ---------------------------------------------------------------- varlen sequences that are cut

ENDS = [(0, 24), (0, 5, 5, 6, 17, 24), (0, 0, 12, 16, 24, 24), (0, 3, 21, 24), (0, 8, 8, 16, 17, 24)]
VARLEN_WINDOWS = [*WINDOWS, MaskWindow(2, 0), MaskWindow(3, 4), MaskWindow(0, 0), MaskWindow(1, 9),
                  MaskWindow(4, None)]  # fmt: skip

CUT = {
    "keys behind causal rows": ("stop = min(stop, rows.stop + window.right)", "pass"),
    "a key behind too many": ("rows.stop + window.right", "rows.stop + window.right + 1"),
    "a key behind too few": ("rows.stop + window.right", "rows.stop + max(0, window.right - 1)"),
    "a key too few on the left": ("rows.start - window.left", "rows.start - window.left + 1"),
    "keys of the sequence before": ("start = max(start, rows.start - window.left)",
                                    "start = max(0, rows.start - window.left)"),
    "places not aligned": ("if not behind or window == DENSE:", "if True:"),
    "the left bound not shifted": ("left + behind", "left"),
    "the right bound not shifted": ("right - behind", "right"),
    "one window for all sequences": ("at = max(rows.start, ends[last - 1])", "at = rows.start"),
    "an empty sequence the first": ("bisect_right(ends, rows.start) - 1",
                                    "max(0, bisect_left(ends, rows.start) - 1)"),
    "a sequence too many": ("bisect_left(ends, rows.stop)",
                            "min(len(ends) - 1, bisect_right(ends, rows.stop))"),
}  # fmt: skip


def cut_soundly(kept, calls) -> bool:
    """Whether each rank computes every visible key of its rows once, and keeps no key that none of its rows
    sees."""
    for ends in ENDS:
        for window in VARLEN_WINDOWS:
            whole = torch.zeros(24, 24, dtype=torch.int64)
            for start, stop in zip(ends, ends[1:], strict=False):
                whole[start:stop, start:stop] = visible(stop - start, stop - start, window)
            for ranks in (1, 2, 3, 4, 6):
                for (rows,) in layout.pieces_of(ranks, 24 // ranks):
                    keys, found = kept(ends, rows, window), torch.zeros(24, 24, dtype=torch.int64)
                    for call in calls(ends, rows, window):
                        if min((bound for bound in call.window if bound is not None), default=0) < 0:
                            return False
                        for first, last in zip(
                            ends[call.first : call.last], ends[call.first + 1 :], strict=False
                        ):
                            own, seen = (
                                slice(*(min(max(at, part.start), part.stop) for at in (first, last)))
                                for part in (call.rows, call.keys)
                            )
                            bounds = MaskWindow(*call.window)
                            found[own, seen] += visible(own.stop - own.start, seen.stop - seen.start, bounds)
                    here = pieces.as_slice(rows)
                    needed = whole[here].any(0).nonzero()[:, 0].tolist()
                    if not torch.equal(found[here], whole[here]) or needed != list(keys):
                        return False
    return True


def test_cuts_are_sound():
    assert cut_soundly(cut.kept, cut.calls)


@pytest.mark.parametrize("bug", CUT)
def test_a_bug_in_the_cuts_is_noticed(bug):
    names = planted(cut, *CUT[bug])
    assert not cut_soundly(names["kept"], names["calls"])


TRANSFERS = {
    "gradients of others left out": ("summed(mine, [(ALL, mine)], more)", "summed(mine, [(ALL, mine)], [])"),
    "its own gradient of other keys": ("gradient[_within(own[0], here[0])]", "gradient[: len(own[0])]"),
    "gradients of k for those of v": ("_as_batch(both[which])", "_as_batch(both[0])"),
    "the LSE of the first rows": ("lse[:, rows].contiguous()", "lse[:, : len(q[rows])].contiguous()"),
    "one window": ("window=call.window, varlen", "varlen"),
    "offsets of rows for keys": ("for part in (call.rows, call.keys)", "for part in (call.rows, call.rows)"),
    "results in the wrong order": ("torch.cat(outs)", "torch.cat(outs[::-1])"),
}  # fmt: skip


def post(ranks: int, turn: Lock) -> list[SimpleNamespace]:
    """The links of ranks that are threads. turn: who computes; Triton's interpreter knows one thread."""
    boxes = {(a, b): queue.SimpleQueue() for a in range(ranks) for b in range(ranks)}

    def receive(rank: int, received) -> None:
        for peer, x in received:
            turn.release()
            try:
                found = boxes[peer, rank].get(timeout=20)
            finally:
                turn.acquire()
            x.copy_(found)

    def start(rank: int, sent, received) -> SimpleNamespace:
        for peer, x in sent:
            boxes[rank, peer].put(x.clone())
        return SimpleNamespace(wait=partial(receive, rank, received))

    return [SimpleNamespace(rank=r, ranks=ranks, start=partial(start, r)) for r in range(ranks)]


def like_one_process(job_of, forward, backward) -> bool:
    """Whether three ranks have the output, the LSE and the gradients of one process."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(24, heads, 8, generator=generator) for heads in (3, 1, 1, 3)]
    for ends, window in ((ENDS[0], (-1, 0)), (ENDS[1], (3, 4)), (ENDS[3], (-1, -1))):
        offsets = torch.tensor(ends, dtype=torch.int32)
        varlen = Varlen(offsets, offsets, 24, 24)
        asked = MaskWindow(*(None if bound == -1 else bound for bound in window))
        params = Params(asked, 0.5, varlen, return_lse=True, impl="triton")
        *given, d_out = (x.clone().requires_grad_() for x in whole)
        out, lse = attention_varlen(*given, *varlen, window=window, sm_scale=0.5, return_lse=True,
                                    impl="reference")  # fmt: skip
        out.backward(d_out)
        expected = [out.detach(), lse.T, *(x.grad for x in given)]

        turn = Lock()

        def rank(links, params=params, ends=ends, turn=turn) -> list[torch.Tensor]:
            rows = slice(8 * links.rank, 8 * links.rank + 8)
            *own, gradient = (x[rows].clone() for x in whole)
            with turn:
                job = job_of(links, 0, 8, ends, params)
                result = forward(*own, job)
                return [result[0], result[1].T, *backward(gradient, Saved(*own, *result), job)]

        with ThreadPoolExecutor(3) as pool:
            parts = list(pool.map(rank, post(3, turn)))
        for x, y in zip(map(torch.cat, zip(*parts, strict=True)), expected, strict=True):
            if not (x - y).abs().max() <= 1e-5:
                return False
    return True


def test_cut_sequences_are_like_whole_ones():
    assert like_one_process(cut.job_of, cut.forward, cut.backward)


@pytest.mark.parametrize("bug", TRANSFERS)
def test_a_bug_in_what_cut_sequences_get_is_noticed(bug):
    names = planted(cut, *TRANSFERS[bug])
    try:
        right = like_one_process(names["job_of"], names["forward"], names["backward"])
    except (RuntimeError, IndexError):  # offsets that the keys do not have
        right = False
    assert not right
