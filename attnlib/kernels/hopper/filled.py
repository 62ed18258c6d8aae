"""The backward pass where values have columns of their own that no kernel is for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from attnlib.params import Params

Tensor = torch.Tensor


def filled_up(backward: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...], lse: Tensor,
              params: Params) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the same call with columns of zeros, as many for queries and keys as for values.

    tensors: d_out, q, k, v, out. Zeros add nothing to scores, and are multiplied by nothing else; their own
    gradients are cut off. backward: of a call whose tensors have equal widths.
    """
    d_out, q, k, v, out = tensors
    columns = max(q.shape[-1], v.shape[-1])
    filled = [F.pad(x, (0, columns - x.shape[-1])) if x.shape[-1] < columns else x for x in tensors]
    gradients = backward(*filled, lse, params)
    return tuple(
        x if x.shape == own.shape else torch.empty_like(own).copy_(x[..., : own.shape[-1]])
        for x, own in zip(gradients, (q, k, v), strict=True)
    )
