"""Rows that lie in order on the ranks change to where a causal mask gives all ranks the same to do, and
back."""

from __future__ import annotations

from functools import partial

import torch

from attnlib.autograd import Computed
from attnlib.distributed.layout import Parts, local_rows
from attnlib.distributed.links import Links
from attnlib.distributed.rotation import packed, unpacked


class Moved(torch.autograd.Function):
    """(B, H, S/n, D) at the positions of `before`, of each rank, -> the same heads at those of `after`. step:
    what this rank is about to do when gradients go back, which ranks compare before they send them."""

    @staticmethod
    def forward(ctx, x, links: Links, before: tuple[Parts, ...], after: tuple[Parts, ...], step: str):
        ctx.links, ctx.before, ctx.after, ctx.step = links, before, after, step
        return _moved(x, links, before, after)

    @staticmethod
    def backward(ctx, gradient):
        ctx.links.agree({"step": ctx.step})
        back = partial(_moved, links=ctx.links, before=ctx.after, after=ctx.before)
        return Computed.within_backward(back, gradient), None, None, None, None


def _moved(x: torch.Tensor, links: Links, before: tuple[Parts, ...], after: tuple[Parts, ...]):
    rows = packed(x)
    found = torch.empty_like(rows)
    sent, received = [], []
    for peer in range(links.ranks):
        for here, there in _common(before[links.rank], after[peer]):
            if peer == links.rank:
                found[there] = rows[here]
            else:
                sent.append((peer, rows[here]))
        if peer != links.rank:
            received += [(peer, found[there]) for _, there in _common(before[peer], after[links.rank])]
    links.start(sent, received).wait()
    return unpacked(found)


def _common(before: Parts, after: Parts) -> list[tuple[slice, slice]]:
    """The positions that one rank has and another one wants: (rows of the first, of the second), piece after
    piece, in the same order on both."""
    found = []
    for here, part in local_rows(before):
        for there, place in local_rows(after):
            first, end = max(part.start, place.start), min(part.stop, place.stop)
            if first < end:
                at, to = here.start + first - part.start, there.start + first - place.start
                found.append((slice(at, at + end - first), slice(to, to + end - first)))
    return found
