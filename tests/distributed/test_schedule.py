"""The schedule of any number of ranks: every key that a row sees is computed once, what is sent is what is
awaited, and all ranks have the same to do."""

from __future__ import annotations

import pytest
import torch

from attnlib.distributed.layout import divisor, local_rows, parts_of
from attnlib.distributed.pieces import Remote, Result, joined, summed
from attnlib.distributed.schedule import rounds
from attnlib.kernels import MERGERS
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.kernels.reference.gradients import visible
from attnlib.params import MaskWindow

WINDOWS = [MaskWindow(None, 0), MaskWindow(None, None), MaskWindow(3, 0), MaskWindow(11, 2),
           MaskWindow(25, None), MaskWindow(None, 5), MaskWindow(0, 0), MaskWindow(100, 100)]  # fmt: skip
RANKS = [1, 2, 3, 4, 8]
ROWS = 6


def positions(rank: int, ranks: int, window: MaskWindow) -> torch.Tensor:
    return torch.tensor([at for part in parts_of(rank, ranks, ROWS, window) for at in part])


def counted(rank: int, ranks: int, window: MaskWindow, method: str) -> torch.Tensor:
    """How often a rank computes each key for each row, (ROWS, S)."""
    own = positions(rank, ranks, window)
    found = torch.zeros(ROWS, ranks * ROWS, dtype=torch.int64)
    found[:, own] += visible(ROWS, ROWS, window).long()
    for each in rounds(rank, ranks, ROWS, window, method):
        keys = torch.tensor([at for piece in each.pieces for at in range(piece.start, piece.stop)])
        for call in each.calls:
            seen = visible(len(call.rows), len(call.keys), call.window).long()
            found[call.rows.start : call.rows.stop, keys[call.keys.start : call.keys.stop]] += seen
    return found


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_visible_key_once(ranks, window, method):
    whole = visible(ranks * ROWS, ranks * ROWS, window).long()
    for rank in range(ranks):
        own = positions(rank, ranks, window)
        assert torch.equal(counted(rank, ranks, window, method), whole[own])


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_sent_is_awaited(ranks, window, method):
    every = [rounds(rank, ranks, ROWS, window, method) for rank in range(ranks)]
    for i in range(len(every[0])):
        for source in range(ranks):
            for target in range(ranks):
                sent = [rows for peer, rows in every[source][i].sent if peer == target]
                assert sent == [p.rows for p in every[target][i].pieces if p.source == source]
    for rank in range(ranks):
        own = local_rows(parts_of(rank, ranks, ROWS, window))
        assert sum(len(rows) for rows, _ in own) == ROWS
    assert ROWS * ranks % divisor(ranks, window) == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_have_the_same_to_do(ranks):
    causal = MaskWindow(None, 0)
    work = {int(counted(rank, ranks, causal, "ring").sum()) for rank in range(ranks)}
    assert len(work) == 1
    sizes = {each.keys for rank in range(ranks) for each in rounds(rank, ranks, ROWS, causal, "ring")}
    assert sizes <= {ROWS // 2, ROWS}, "more than half a rank's keys that nobody needs"


@pytest.mark.parametrize("several", [False, True])
def test_merging_is_attention_to_all_keys(several, device):
    """Keys in parts, one of them seen by nobody and one by some rows."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 20, 8, device=device) for _ in range(3))

    def part(rows: range, keys: range, window=(-1, -1)) -> Result:
        seen = [x[:, :, keys.start : keys.stop] for x in (k, v)]
        out, lse = attention_fp64(q[:, :, rows.start : rows.stop], *seen, window=window)
        return Result(out.float(), lse.float())

    own = [(slice(0, 2), part(range(20), range(0, 5)).part(slice(0, 2), slice(None))),
           (slice(2, 4), part(range(20), range(0, 5)).part(slice(2, 4), slice(None)))]  # fmt: skip
    remote = Remote(q, several)
    remote.add(range(8, 20), part(range(8, 20), range(5, 20)))
    found = joined(q, own, remote)
    for rows, keys in ((range(0, 8), range(0, 5)), (range(8, 20), range(0, 20))):
        out, lse = part(rows, keys)
        assert (found.out[:, :, rows.start : rows.stop] - out).abs().max() < 1e-6
        assert (found.lse[:, :, rows.start : rows.stop] - lse).abs().max() < 1e-6


def test_a_row_without_keys_stays_empty(device):
    q = torch.randn(1, 2, 3, 8, device=device)
    none = Result(torch.full_like(q, float("nan")), torch.full(q.shape[:3], -torch.inf, device=device))
    some = Result(torch.ones_like(q), torch.zeros(q.shape[:3], device=device))
    for first, second, out, lse in ((none, none, 0, -torch.inf), (none, some, 1, 0), (some, none, 1, 0)):
        remote = Remote(q, False)
        remote.add(range(3), second)
        found = joined(q, [(slice(None), first)], remote)
        assert bool((found.out == out).all()) and bool((found.lse == lse).all())


def test_sums_of_gradients(device):
    own, other = torch.randn(2, 1, 2, 6, 8, device=device).bfloat16()
    third = torch.randn(1, 2, 6, 8, device=device).bfloat16()
    parts = [(slice(0, 1), own[:, :1]), (slice(1, 2), own[:, 1:])]
    found = summed(own, parts, [(range(2, 6), other[:, :, 2:])])
    assert torch.equal(found[:, :, :2], own[:, :, :2])
    assert torch.equal(found[:, :, 2:], own[:, :, 2:] + other[:, :, 2:])
    found = summed(own, parts, [(range(0, 6), other), (range(1, 3), third[:, :, 1:3])])
    exact = own.double() + other.double()
    exact[:, :, 1:3] += third[:, :, 1:3].double()
    assert torch.equal(found, exact.bfloat16()) and found.dtype == torch.bfloat16


@pytest.mark.parametrize("family", MERGERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_some_rows(family, dtype, device):
    sizes = [(2, rows, 3, 24) for rows in (20, 7, 20)]
    first, second, result = (torch.randn(n, device=device).to(dtype).transpose(1, 2) for n in sizes)
    MERGERS[family].add(first, second, result, 9)
    expected = first.clone()
    expected[:, :, 9:16] += second
    assert torch.equal(result, expected)
