"""Scores that mislead a kernel which keeps its shift: they rise from block to block in the order of its
visit, in some keys of each."""

from __future__ import annotations

import torch

BLOCKS, N = 5, 64
"""Blocks of keys, and keys of a block."""
SCALE = 0.6931471805599453
"""With it a score is the exponent of a weight, a power of two."""


def levels_of(step: float, keys: slice, far: float) -> torch.Tensor:
    """A score for each key, [BLOCKS * N]: of these keys of each block, `step` more in each that a row visits;
    all others are `far`."""
    levels = torch.full((BLOCKS, N), far)
    levels[:, keys] = step * torch.arange(BLOCKS).flip(0)[:, None]
    return levels.flatten()


def tensors(levels: torch.Tensor, rows: int = 128) -> tuple[torch.Tensor, ...]:
    """q, k, v of one head whose scores are `levels`, one for each key: exactly, as three terms make each."""
    q, k = torch.zeros(1, 1, rows, 64), torch.zeros(1, 1, len(levels), 64)
    rest = levels.double()
    for d in range(3):
        k[0, 0, :, d] = rest.half()
        rest = rest - k[0, 0, :, d].double()
    assert rest.abs().max() < 1e-5
    q[..., :3] = 1
    v = torch.randn(1, 1, len(levels), 64, generator=torch.Generator().manual_seed(0))
    return q.half(), k.half(), v.half()
