"""Merge attention to some keys into that to others, in PyTorch."""

import torch

from attnlib.params import Existing


def merge_into(into: Existing, out: torch.Tensor, lse: torch.Tensor) -> Existing:
    """Write to `into` attention to its keys and to those of (out, LSE), both in fp64. What a part has where
    its LSE is -inf does not count. Returns `into`."""
    before = into.lse.double()
    total = torch.logaddexp(before, lse)
    finite = total.masked_fill(total == -torch.inf, 0)
    merged = torch.zeros_like(out)
    for part, own in ((into.out, before), (out, lse)):
        weight = torch.exp(own - finite)[..., None]
        merged += torch.where(weight == 0, 0, weight * part.double())
    into.out.copy_(merged)
    into.lse.copy_(total)
    return into
