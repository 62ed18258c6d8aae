"""The masks of torch's own BlockMask, made once for each of them."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from attnlib.arguments.masks import is_torch_mask
from attnlib.block_mask.mask import BlockMask

PARTS = "mask_mod", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"


class _Made(NamedTuple):
    """What was made of a mask, and of what."""

    parts: tuple[Any, ...]
    own: BlockMask
    masks: dict[tuple[int | None, ...], BlockMask]  # for so many batch elements and heads, if `own` is alone


_made: WeakKeyDictionary[Any, _Made] = WeakKeyDictionary()


def of_torch(mask: Any, q: torch.Tensor) -> Any:
    """The `attnlib.BlockMask` of a `torch.nn.attention.flex_attention.BlockMask` for a call with queries q
    (B, H, S_q, D), kept as long as that lives and has the same lists and the same function. A tensor that its
    function reads must not change: make another mask then. Anything else as it is, and so is torch's in a
    graph that is exported, which is refused. One that is compiled breaks here, or with fullgraph=True fails:
    to make a mask takes numbers that no graph has."""
    if mask is None or type(mask) is BlockMask:  # nearly always
        return mask
    if not is_torch_mask(mask):
        return mask
    if torch.compiler.is_dynamo_compiling():
        from attnlib.kernels.common import outside_graphs

        return outside_graphs.make_mask(_own, mask, q)
    return mask if torch.compiler.is_exporting() else _own(mask, q)


def _own(mask: Any, q: torch.Tensor) -> BlockMask | None:
    if not isinstance(q, torch.Tensor) or q.dim() != 4:
        return None  # the call is refused for that
    parts = tuple(getattr(mask, name) for name in PARTS)
    found = _made.get(mask)
    if found is None or any(x is not y for x, y in zip(found.parts, parts, strict=True)):
        found = _made[mask] = _Made(parts, BlockMask.from_torch(mask), {})
    alone = zip(q.shape[:2], found.own.alone, strict=True)
    batch, heads = size = tuple(max(n, 1) if one and n != 1 else None for n, one in alone)
    if size == (None, None):
        return found.own
    if size not in found.masks:
        found.masks[size] = BlockMask.from_torch(mask, batch=batch, heads=heads)
    return found.masks[size]
