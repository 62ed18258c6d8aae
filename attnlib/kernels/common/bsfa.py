"""What all implementations of Block-Sparse FlashAttention agree on: its blocks, and which of them are always
kept."""

import torch

ROWS, KEYS = 64, 128
"""Of a block of scores, which is kept or skipped as a whole."""


def grid_of(S_q: int, S_k: int) -> tuple[int, int]:
    """Blocks along the queries and along the keys."""
    return -(-S_q // ROWS), -(-S_k // KEYS)


def always_kept(S_q: int, S_k: int, causal: bool, device=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(first, end), int64: the blocks first .. end - 1 of keys are kept for each block of queries, whatever
    the threshold is, those before them are decided on, and those from `end` on are out of sight.

    Kept are the blocks that hold the last key of one of the rows. So a row always has a key, if it sees one.
    """
    start = torch.arange(0, S_q, ROWS, device=device)
    shift = S_k - S_q if causal else S_k  # the key at which row 0 stands
    of_first = (start + shift).clamp(max=S_k - 1)
    of_last = ((start + ROWS).clamp(max=S_q) - 1 + shift).clamp(max=S_k - 1)
    return of_first.clamp(min=0) // KEYS, (of_last + KEYS) // KEYS


def element_mask(kept: torch.Tensor, S_q: int, S_k: int, causal: bool) -> torch.Tensor:
    """Which keys each query sees, bool (B, H, S_q, S_k), where blocks (B, H, ...) are kept."""
    seen = kept.repeat_interleave(ROWS, 2)[:, :, :S_q].repeat_interleave(KEYS, 3)[..., :S_k]
    if not causal:
        return seen
    places = torch.arange(S_q, device=kept.device)[:, None] + S_k - S_q
    return seen & (torch.arange(S_k, device=kept.device) <= places)
