"""The elements of a mask's tiles, from a function of torch or from a tensor."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

from attnlib.block_mask.tiles import Seen


class _IndexedByTensors(TorchFunctionMode):
    """Within it x[i], where all of i are integer tensors, is a lookup that torch.vmap knows. Without it
    Python asks a tensor without dimensions for its number, and under vmap it has many."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if index and all(isinstance(i, torch.Tensor) and not i.is_floating_point() for i in index):
                return torch.ops.aten.index(args[0], list(index))
        return function(*args, **(kwargs or {}))


def seen_by_function(function) -> Seen:
    """By mask(b, h, q, k) of tensors without dimensions."""
    over_keys = torch.vmap(function, in_dims=(None, None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    over_tiles = torch.vmap(over_queries)

    def seen(b, h, queries, keys):
        with torch.no_grad(), _IndexedByTensors():
            found = over_tiles(b, h, queries, keys)
        if not isinstance(found, torch.Tensor) or found.dtype != torch.bool:
            came = f"dtype {found.dtype}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise TypeError(f"function: expected a bool tensor of mask(b, h, q, k), got {came}")
        if found.shape != (*queries.shape, keys.shape[1]):
            own = tuple(found.shape[3:])
            raise ValueError(f"function: expected mask(b, h, q, k) without dimensions, got shape {own}")
        return found

    return seen


def seen_by_tensor(mask: torch.Tensor) -> Seen:
    """By a bool tensor (B, H, S_q, S_k)."""

    def seen(b, h, queries, keys):
        b, h = b[:, None, None], h[:, None, None]
        return mask[b, h, queries[:, :, None], keys[:, None, :]]

    return seen
