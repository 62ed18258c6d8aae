"""The elements of a mask's tiles, from a function of torch or from a tensor."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

from attnlib.arguments.common import type_name
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


_EXPECTED = "function: expected a bool tensor of mask(b, h, q, k)"


def seen_by_function(function) -> Seen:
    """By mask(b, h, q, k) of tensors without dimensions."""

    def tensor_of(*places):
        found = function(*places)
        if not isinstance(found, torch.Tensor):  # before vmap says so of a function that nobody knows
            raise TypeError(f"{_EXPECTED}, got {type_name(found)}")
        return found

    over_keys = torch.vmap(tensor_of, in_dims=(None, None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    over_tiles = torch.vmap(over_queries)

    def seen(b, h, queries, keys):
        with torch.no_grad(), _IndexedByTensors():
            found = over_tiles(b, h, queries, keys)
        if found.dtype != torch.bool:
            raise TypeError(f"{_EXPECTED}, got dtype {found.dtype}")
        if found.shape != (*queries.shape, keys.shape[1]):
            own = tuple(found.shape[3:])
            raise ValueError(f"function: expected mask(b, h, q, k) without dimensions, got shape {own}")
        return found

    return seen


def tells_apart(function, device: torch.device) -> tuple[bool, bool]:
    """Whether mask(b, h, q, k) depends on b, and on h: by its graph. Both, where it has none."""
    from torch.fx.experimental.proxy_tensor import make_fx

    places = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
    try:
        with torch.no_grad(), _IndexedByTensors():
            graph = make_fx(function)(*places).graph
    except Exception:  # whatever is wrong with it, who calls it says
        return True, True
    graph.eliminate_dead_code()
    batch, head = [bool(node.users) for node in graph.nodes if node.op == "placeholder"][:2]
    return batch, head


def seen_by_tensor(mask: torch.Tensor) -> Seen:
    """By a bool tensor (B, H, S_q, S_k)."""

    def seen(b, h, queries, keys):
        b, h = b[:, None, None], h[:, None, None]
        return mask[b, h, queries[:, :, None], keys[:, None, :]]

    return seen
