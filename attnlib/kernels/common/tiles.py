"""Sizes of tiles: how many columns a kernel gives a head dimension, and what a pooled map is made of."""

UNIT = 64
"""Queries, and keys, whose scores have one number in a pooled map of weights."""


def block_d(head_dim: int) -> int:
    """The tile width that holds `head_dim` columns: the next power of two, at least 16 (the smallest dot)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile_width(head_dim: int) -> int:
    """The same where a tile has at least 64 columns, which is also what configurations are chosen by."""
    return max(64, block_d(head_dim))
