"""A pooled attention map at a larger block."""

import torch


def coarser(found: torch.Tensor, times: int) -> torch.Tensor:
    """The same map for blocks `times` as large: the largest weight of each."""
    if times == 1:
        return found
    down, across = (-(-size // times) for size in found.shape[2:])
    size = found.shape[3], found.shape[2]
    found = torch.nn.functional.pad(found, (0, across * times - size[0], 0, down * times - size[1]))
    return found.unflatten(3, (across, times)).unflatten(2, (down, times)).amax((3, 5))
