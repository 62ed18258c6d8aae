"""Join two parts of a result in PyTorch: attention to disjoint sets of keys, in fp64, and parts of a
gradient."""

import torch

Result = tuple[torch.Tensor, torch.Tensor]


def unsupported(where: torch.device) -> None:
    """Nothing is."""


def merge(first: Result, second: Result, result: Result, start: int = 0) -> None:
    """As `attnlib.kernels.merge.merge`."""
    second = _in_all_rows(second, result, start)
    lse = torch.logaddexp(first[1].double(), second[1].double())
    total = torch.zeros(lse.shape + result[0].shape[-1:], dtype=torch.float64, device=lse.device)
    for out, part in (first, second):
        weight = torch.exp(part.double() - lse.masked_fill(lse == -torch.inf, 0))[..., None]
        total += torch.where(weight == 0, 0, weight * out.double())
    result[0].copy_(total)
    result[1].copy_(lse)


def add(first: torch.Tensor, second: torch.Tensor, result: torch.Tensor, start: int = 0) -> None:
    """As `attnlib.kernels.merge.add`."""
    rows = slice(start, start + second.shape[2])
    result.copy_(first)
    torch.add(first[:, :, rows], second, out=result[:, :, rows])


def _in_all_rows(part: Result, like: Result, start: int) -> Result:
    """`part`, and rows without a key before and after it."""
    out, lse = torch.zeros_like(like[0]), torch.full_like(like[1], -torch.inf)
    rows = slice(start, start + part[0].shape[2])
    out[:, :, rows], lse[:, :, rows] = part
    return out, lse
