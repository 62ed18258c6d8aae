"""Mask functions that are none of those that attnlib knows: evaluated, as block masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from attnlib import BlockMask
from attnlib.hf.mask import Mask


class Asked(NamedTuple):
    """A mask function of transformers, (batch, head, query, key) -> bool, and what it is evaluated for.

    Attributes:
        function: the function of indices, which are counted from the first token on.
        padding: (B, tokens), 0 for hidden tokens; None if there are none.
        q_offset, kv_offset: the places of the first query and of the first key.
        batch_size: B; None where it is the same for all.
    """

    function: Callable
    padding: torch.Tensor | None
    q_offset: int | torch.Tensor
    kv_offset: int
    batch_size: int | None
    device: torch.device | str


def evaluated(asked: Asked, mask: Mask) -> BlockMask:
    """For the lengths of `mask`. ValueError if the function can't be evaluated."""
    function, padding, q_offset, kv_offset, batch_size, device = asked

    def seen(b, h, q, k):
        found = function(b, h, q + q_offset, k + kv_offset)
        return found if padding is None else found & padding[b, k + kv_offset].bool()

    try:
        return BlockMask.from_function(seen, mask.q_length, mask.kv_length, B=batch_size, device=device)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        got = getattr(function, "__qualname__", type(function).__name__)
        raise ValueError(
            "mask_function: expected a function of (batch, head, query, key) that torch.vmap can map, got "
            f"{got} from a model with a {mask.config}: {error}"
        ) from error
