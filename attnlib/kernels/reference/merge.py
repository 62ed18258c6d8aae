"""Join attention to two disjoint sets of keys in PyTorch, in fp64."""

import torch

Result = tuple[torch.Tensor, torch.Tensor]


def unsupported(where: torch.device) -> None:
    """Nothing is."""


def merge(first: Result, second: Result, result: Result) -> None:
    """As `attnlib.kernels.merge.merge`."""
    lse = torch.logaddexp(first[1].double(), second[1].double())
    total = torch.zeros(lse.shape + result[0].shape[-1:], dtype=torch.float64, device=lse.device)
    for out, part in (first, second):
        weight = torch.exp(part.double() - lse.masked_fill(lse == -torch.inf, 0))[..., None]
        total += torch.where(weight == 0, 0, weight * out.double())
    result[0].copy_(total)
    result[1].copy_(lse)
