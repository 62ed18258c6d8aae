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
    return unpacked(moved([packed(x)], links, before, after)[0])


def moved(
    tensors: list[torch.Tensor], links: Links, before: tuple[Parts, ...], after: tuple[Parts, ...]
) -> list[torch.Tensor]:
    """Tensors of rows (S, ...), contiguous, at the positions of `before`, of each rank -> at those of
    `after`, among which several ranks may have the same."""
    count = sum(len(part) for part in after[links.rank])
    found = [x.new_empty(count, *x.shape[1:]) for x in tensors]
    sent, received = [], []
    for peer in range(links.ranks):
        for here, there in common(before[links.rank], after[peer]):
            if peer == links.rank:
                for rows, x in zip(found, tensors, strict=True):
                    rows[there] = x[here]
            else:
                sent += [(peer, x[here]) for x in tensors]
        if peer != links.rank:
            places = [there for _, there in common(before[peer], after[links.rank])]
            received += [(peer, rows[there]) for there in places for rows in found]
    links.start(sent, received).wait()
    return found


def common(before: Parts, after: Parts) -> list[tuple[slice, slice]]:
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
