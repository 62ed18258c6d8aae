"""Configurations of the BSFA kernels: frozen dataclasses, chosen by pure functions."""

from dataclasses import dataclass



@dataclass(frozen=True)
class BsfaTile:
    """How the portable kernels are compiled and launched.

    Attributes:
        num_warps: warps of a program.
        num_stages: blocks of keys in flight. Values are loaded where they are needed, and waited for.
        heads_per_section: heads that advance together, at most.
    """

    num_warps: int = 4
    num_stages: int = 2
    heads_per_section: int = 4


# Not compared with others.
_TILES = {64: BsfaTile(num_stages=3), 128: BsfaTile(num_warps=8)}


def bsfa_tile(head_dim: int) -> BsfaTile:
    """For a head dimension of 64 or 128."""
    return _TILES[head_dim]
