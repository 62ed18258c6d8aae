"""The schedule of any number of ranks: every key that a row sees is computed once, what is sent is what is
awaited, and all ranks have the same to do."""

from __future__ import annotations

import pytest
import torch

from attnlib import dispatch
from attnlib.distributed.layout import divisor, local_rows, parts_of
from attnlib.distributed.pieces import nothing_seen, part_of, summed
from attnlib.distributed.schedule import rounds
from attnlib.kernels import ADDERS
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.kernels.reference.gradients import visible
from attnlib.params import MaskWindow, Params

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


@pytest.mark.parametrize("impl", [None, "reference"])
@pytest.mark.parametrize("several", [False, True])
def test_merging_is_attention_to_all_keys(several, impl, device):
    """Keys in parts: some rows have seen none before, some see none of the second part."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 20, 8, device=device) for _ in range(3))
    params = Params(MaskWindow(None, None), 0.3, impl=impl)
    whole = nothing_seen(q, several)
    for heads, rows, keys in (
        (slice(0, 2), slice(0, 20), slice(0, 5)), (slice(0, 4), slice(8, 20), slice(5, 20)),
        (slice(2, 4), slice(0, 20), slice(0, 5)),
    ):  # fmt: skip
        seen = (x[:, heads, keys] for x in (k, v))
        dispatch.accumulate(q[:, heads, rows], *seen, part_of(whole, heads, rows), params)
    for rows, keys in ((slice(0, 8), slice(0, 5)), (slice(8, 20), slice(0, 20))):
        out, lse = attention_fp64(q[:, :, rows], k[:, :, keys], v[:, :, keys], sm_scale=0.3)
        assert (whole.out[:, :, rows] - out).abs().max() < 1e-6
        assert (whole.lse[:, :, rows] - lse).abs().max() < 1e-6


def test_a_result_lies_like_q():
    q = torch.empty(2, 20, 4, 8, dtype=torch.float16).transpose(1, 2)
    assert nothing_seen(q, False).out.stride() == nothing_seen(q, True).out.stride() == q.stride()
    assert [nothing_seen(q, several).out.dtype for several in (False, True)] == [q.dtype, torch.float32]
    assert nothing_seen(torch.empty(2, 4, 8, 20).transpose(2, 3), False).out.stride() == (640, 160, 8, 1)


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


@pytest.mark.parametrize("family", ADDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_some_rows(family, dtype, device):
    sizes = [(2, rows, 3, 24) for rows in (20, 7, 20)]
    first, second, result = (torch.randn(n, device=device).to(dtype).transpose(1, 2) for n in sizes)
    ADDERS[family].add(first, second, result, 9)
    expected = first.clone()
    expected[:, :, 9:16] += second
    assert torch.equal(result, expected)
