"""The masks of torch's own BlockMask, made once for each of them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from attnlib.arguments.masks import is_torch_mask
from attnlib.block_mask.mask import BlockMask

_made: WeakKeyDictionary[Any, BlockMask] = WeakKeyDictionary()


def of_torch(mask: Any) -> Any:
    """The `attnlib.BlockMask` of a `torch.nn.attention.flex_attention.BlockMask`, kept as long as that lives.
    Anything else as it is; so is torch's where a graph is compiled, which could not make one."""
    if mask is None or type(mask) is BlockMask:  # nearly always
        return mask
    if not is_torch_mask(mask) or torch.compiler.is_dynamo_compiling():
        return mask
    found = _made.get(mask)
    if found is None:
        found = _made[mask] = BlockMask.from_torch(mask)
    return found
