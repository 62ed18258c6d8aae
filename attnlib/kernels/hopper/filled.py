"""Columns of zeros for the backward pass where values have columns of their own that no kernel is for. They
add nothing to scores, and are multiplied by nothing else."""

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def filled_up(*tensors: Tensor) -> list[Tensor]:
    """All with as many columns as the widest has."""
    columns = max(x.shape[-1] for x in tensors)
    return [F.pad(x, (0, columns - x.shape[-1])) if x.shape[-1] < columns else x for x in tensors]


def cut_off(gradients: tuple[Tensor, ...], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of filled tensors without those of the zeros, laid out like `tensors`."""
    return tuple(
        x if x.shape == own.shape else torch.empty_like(own).copy_(x[..., : own.shape[-1]])
        for x, own in zip(gradients, tensors, strict=True)
    )
