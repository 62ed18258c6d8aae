"""Scores that mislead a kernel which keeps its shift: they rise from block to block in the order of its
visit, in some keys of each."""

from __future__ import annotations

import torch

BLOCKS, N = 5, 64
"""Blocks of keys, and keys of a block."""


def levels_of(step: float, keys: slice, far: float) -> torch.Tensor:
    """A score for each key, [BLOCKS * N]: of these keys of each block, `step` more in each that a row visits;
    all others are `far`."""
    levels = torch.full((BLOCKS, N), far)
    levels[:, keys] = step * torch.arange(BLOCKS).flip(0)[:, None]
    return levels.flatten()
