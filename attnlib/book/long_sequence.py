"""A rank's part of one long sequence, for the model of `llama`: chapter 42 trains on it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from attnlib import distributed as cp
from attnlib.book.llama import LAST, Rows


def rows_of(tokens: torch.Tensor) -> tuple[torch.Tensor, Rows]:
    """This rank's tokens of (1, S), and what they have to know of the sequence. The losses of all ranks are
    averaged, so this rank's sum counts as often as there are ranks."""
    ranks, length = dist.get_world_size(), tokens.shape[1]
    after = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], LAST)], 1)
    wanted = cp.shard(after, dim=1, causal=True)
    positions = cp.positions(length // ranks, causal=True).to(tokens.device)
    return cp.shard(tokens, dim=1, causal=True), Rows(positions, wanted, (length - 1) / ranks)
