"""Varlen sequences that are cut between ranks, each of which computes its own rows, of all heads: which keys
it needs, and attention to them, forward and backward.

A rank has one piece of the tokens, so only its first and its last sequence can be cut, and the keys that its
rows see are one piece too: its own, and some before and behind them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import torch

from attnlib import dispatch
from attnlib.distributed.layout import Parts, pieces_of
from attnlib.distributed.links import Links
from attnlib.distributed.order import common, moved
from attnlib.distributed.pieces import summed
from attnlib.distributed.rotation import ALL, unpacked
from attnlib.distributed.schedule import DENSE
from attnlib.params import MaskWindow, Params

Ends = tuple[int, ...]
"""The values of `cu_seqlens`: where each sequence begins and the one before it ends."""


class Call(NamedTuple):
    """One call of a kernel: ends[first] .. ends[last] are its sequences, `rows` and `keys` the positions of
    what is left of them here. In `window` the last row of a sequence stands at its last key."""

    first: int
    last: int
    rows: range
    keys: range
    window: MaskWindow


def kept(ends: Ends, rows: range, window: MaskWindow) -> range:
    """The positions of the keys that some of these rows see."""
    first, last = _sequences(ends, rows)
    start, stop = ends[first], ends[last]
    if window.left is not None:
        start = max(start, rows.start - window.left)
    if window.right is not None:
        stop = min(stop, rows.stop + window.right)
    return range(start, stop)


def calls(ends: Ends, rows: range, window: MaskWindow) -> tuple[Call, ...]:
    """What is computed with the keys of `kept`."""
    first, last = _sequences(ends, rows)
    keys = kept(ends, rows, window)
    behind = keys.stop - rows.stop
    if not behind or window == DENSE:
        return (Call(first, last, rows, keys, window),)
    # Rows of the last sequence stand so many keys before where a kernel takes them to be. No other sequence
    # has keys behind its rows, so these two windows are all that there are. The right one stays 0 or more,
    # as there are no more keys behind than it reaches.
    left, right = window
    shifted = MaskWindow(None if left is None else left + behind, None if right is None else right - behind)
    at = max(rows.start, ends[last - 1])
    cut = Call(
        last - 1, last, range(at, rows.stop), range(max(keys.start, ends[last - 1]), keys.stop), shifted
    )
    if at == rows.start:
        return (cut,)
    return Call(first, last - 1, range(rows.start, at), range(keys.start, at), window), cut


def _sequences(ends: Ends, rows: range) -> tuple[int, int]:
    """(first, last): the sequences between ends[first] and ends[last] have these rows."""
    if not rows:  # of no token at all
        return 0, len(ends) - 1
    return bisect_right(ends, rows.start) - 1, bisect_left(ends, rows.stop)


class Job(NamedTuple):
    """A call besides its tensors. number: among the calls of the links. pieces, kept: positions of the tokens
    and of the keys of each rank. calls: (own rows, kept keys, what is asked of a kernel) of this rank."""

    links: Links
    number: int
    pieces: tuple[Parts, ...]
    kept: tuple[Parts, ...]
    calls: tuple[tuple[slice, slice, Params], ...]


def job_of(links: Links, number: int, rows: int, ends: Ends, params: Params) -> Job:
    """rows: of each rank. params: of the whole call, with its offsets, whose values are `ends`."""
    pieces = pieces_of(links.ranks, rows)
    keys = tuple((kept(ends, piece, params.window),) for (piece,) in pieces)
    (own,), (here,) = pieces[links.rank], keys[links.rank]
    found = tuple(
        (_within(call.rows, own), _within(call.keys, here), _asked(call, params))
        for call in calls(ends, own, params.window)
    )
    return Job(links, number, pieces, keys, found)


def _within(part: range, whole: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


def _asked(call: Call, params: Params) -> Params:
    """What a call asks for. Its offsets are made here, once, as those that were given may have changed when
    the backward pass comes."""
    given = params.varlen
    rows, keys = (
        given.cu_seqlens_q[call.first : call.last + 1].clamp(part.start, part.stop) - part.start
        for part in (call.rows, call.keys)
    )
    return params._replace(window=call.window, varlen=given._replace(cu_seqlens_q=rows, cu_seqlens_k=keys))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE) of a rank's rows. q (T, H, D); k, v (T, Hkv, D)."""
    k, v = _gathered(k, v, job)
    found = [dispatch.forward(q[rows], k[keys], v[keys], params) for rows, keys, params in job.calls]
    if len(found) == 1:
        return found[0]
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(lses, 1)


def backward(
    d_out: torch.Tensor, saved: dispatch.Saved, job: Job
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of a rank's rows. Keys and values come again: the forward pass has not kept them."""
    q, k, v, out, lse = saved
    k, v = _gathered(k, v, job)
    found = []
    for rows, keys, params in job.calls:
        part = dispatch.Saved(q[rows], k[keys], v[keys], out[rows], lse[:, rows].contiguous())
        found.append(dispatch.backward(d_out[rows], part, params))
    dq, dk, dv = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True))
    return dq, *_given_back((dk, dv), job)


def _gathered(k: torch.Tensor, v: torch.Tensor, job: Job) -> list[torch.Tensor]:
    own = [x.resolve_neg().contiguous() for x in (k, v)]
    return moved(own, job.links, job.pieces, job.kept)


def _given_back(gradients: tuple[torch.Tensor, ...], job: Job) -> list[torch.Tensor]:
    """The gradients of this rank's keys from those of the keys that each rank has kept."""
    links, pieces, keys = job.links, job.pieces, job.kept
    own, here = pieces[links.rank], keys[links.rank]
    gradients = [x.contiguous() for x in gradients]
    others = [rank for rank in range(links.ranks) if rank != links.rank]
    sent = [(peer, x[there]) for peer in others for _, there in common(pieces[peer], here) for x in gradients]
    parts = [
        (peer, rows, [x.new_empty(rows.stop - rows.start, *x.shape[1:]) for x in gradients])
        for peer in others
        for rows, _ in common(own, keys[peer])
    ]
    links.start(sent, [(peer, x) for peer, _, both in parts for x in both]).wait()
    found = []
    for which, gradient in enumerate(gradients):
        mine = _as_batch(gradient[_within(own[0], here[0])])
        more = [(range(rows.start, rows.stop), _as_batch(both[which])) for _, rows, both in parts]
        found.append(summed(mine, [(ALL, mine)], more)[0].transpose(0, 1))
    return found


def _as_batch(x: torch.Tensor) -> torch.Tensor:
    """(S, H, D) as (1, H, S, D)."""
    return unpacked(x[:, None])
