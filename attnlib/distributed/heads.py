"""Ulysses: ranks that hold rows of all heads change to all rows of some heads, and back."""

import torch

from attnlib.distributed.layout import Parts
from attnlib.distributed.links import Links
from attnlib.distributed.rotation import packed, unpacked


def differentiated(tensors: tuple, each: bool = True) -> list[str] | bool:
    """What ranks have to have in common for the backward pass: which of q, k and v get a gradient, if each of
    these is a transfer of its own, else whether any does."""
    names = [name for name, x in zip("qkv", tensors, strict=True) if x.requires_grad]
    names = names if torch.is_grad_enabled() else []
    return names if each else bool(names)


class ToHeads(torch.autograd.Function):
    """(B, H, S/n, D) -> (B, H/n, S, D), positions in order. parts: the positions of each rank. name: of x,
    if ranks have to say whose gradient they send: they may ask for those of different inputs."""

    @staticmethod
    def forward(ctx, x, links: Links, parts: tuple[Parts, ...], name: str | None = None):
        ctx.links, ctx.parts, ctx.name = links, parts, name
        return _to_heads(x, links, parts)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.name is not None:
            ctx.links.agree({"step": f"gradient of {ctx.name}"})
        return ToRows.apply(gradient, ctx.links, ctx.parts), None, None, None


class ToRows(torch.autograd.Function):
    """The way back. call: its number among those of the links, if ranks have to be in the backward pass of
    the same call before they send gradients; without one they go as they come."""

    @staticmethod
    def forward(ctx, x, links: Links, parts: tuple[Parts, ...], call: int | None = None):
        ctx.links, ctx.parts, ctx.call = links, parts, call
        return _to_rows(x, links, parts)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.call is not None:
            ctx.links.agree({"step": f"backward of call {ctx.call}"})
        return ToHeads.apply(gradient, ctx.links, ctx.parts), None, None, None


def _to_heads(x: torch.Tensor, links: Links, parts: tuple[Parts, ...]) -> torch.Tensor:
    B, H, S, D = x.shape
    groups = [packed(group) for group in x.chunk(links.ranks, 1)]
    whole = torch.empty(S * links.ranks, B, H // links.ranks, D, dtype=x.dtype, device=x.device)
    here = groups[links.rank].split([len(part) for part in parts[links.rank]])
    for part, rows in zip(parts[links.rank], here, strict=True):
        whole[part.start : part.stop] = rows
    others = [rank for rank in range(links.ranks) if rank != links.rank]
    sent = [
        (peer, rows) for peer in others for rows in groups[peer].split([len(p) for p in parts[links.rank]])
    ]
    received = [(peer, whole[part.start : part.stop]) for peer in others for part in parts[peer]]
    links.start(sent, received).wait()
    return unpacked(whole)


def _to_rows(x: torch.Tensor, links: Links, parts: tuple[Parts, ...]) -> torch.Tensor:
    B, H, _, D = x.shape
    whole, own = packed(x), parts[links.rank]
    counts = [len(part) for part in own]
    groups = torch.empty(links.ranks, sum(counts), B, H, D, dtype=x.dtype, device=x.device)
    others = [rank for rank in range(links.ranks) if rank != links.rank]
    sent = [(peer, whole[part.start : part.stop]) for peer in others for part in parts[peer]]
    received = [(peer, rows) for peer in others for rows in groups[peer].split(counts)]
    for part, rows in zip(own, groups[links.rank].split(counts), strict=True):
        rows.copy_(whole[part.start : part.stop])
    links.start(sent, received).wait()
    return groups.permute(2, 0, 3, 1, 4).flatten(1, 2)  # (B, ranks, H, S, D) -> (B, ranks * H, S, D)
