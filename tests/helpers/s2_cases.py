"""Patterns of S2-Attention, and which keys a query sees by their definition."""

from __future__ import annotations

import torch

from attnlib import S2Pattern

SMALL = S2Pattern(heads=4, local_blocks=2, stride=4)
GROUPED = S2Pattern(heads=6, kv_heads=3, local_blocks=1, stride=3)
HYBRID = S2Pattern(heads=3, local_blocks=2, stride=5, dense_heads=1)
WIDE = S2Pattern(heads=2, block_size=192, local_blocks=1, stride=2)
PATTERNS = {"heads differ": SMALL, "heads share keys": GROUPED, "a dense head": HYBRID, "wide blocks": WIDE}


def defined(pattern: S2Pattern, seqlen: int) -> torch.Tensor:
    """Bool (heads, S, S), from the definition, an element at a time."""
    size, group = pattern.block_size, pattern.heads // pattern.key_heads
    step = max(1, pattern.stride // pattern.key_heads)
    token = torch.arange(seqlen)
    seen = torch.zeros(pattern.heads, seqlen, seqlen, dtype=torch.bool)
    for head in range(pattern.heads):
        key_head = head // group
        i, j = token[:, None] // size, token[None, :] // size
        keeps = (i - j < pattern.local_blocks) | ((j + key_head * step) % pattern.stride == 0)
        if key_head >= pattern.key_heads - pattern.dense_heads:
            keeps = torch.ones_like(keeps)
        seen[head] = keeps & (token[:, None] >= token)
    return seen
