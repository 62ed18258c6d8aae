"""Configurations of the entmax kernels: frozen dataclasses, chosen by pure functions."""

from dataclasses import dataclass

from attnlib.kernels.common.tiles import tile_width

LIST = 64
"""Rows that share a list: queries along keys, keys along queries."""
ANY, THREE_HALVES, TWO = range(3)
"""Kinds of alpha: any, by logarithms; and two with closed forms."""


@dataclass(frozen=True)
class EntmaxTile:
    """How one of the kernels is compiled and launched.

    Attributes:
        block_m: query rows of a tile, at most the 64 that share a list.
        block_n: keys of a tile, a multiple of 16; of `entmax_bound` also the number of its groups, of
            `entmax_flags` at most 64.
        num_warps: warps of one program.
        num_stages: tiles in flight.
        heads_per_section: heads that advance together, at most.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    heads_per_section: int = 4


@dataclass(frozen=True)
class EntmaxConfig:
    """Tiles of `entmax_bound`, of `entmax_flags`, and of `attention_entmax_forward`, which walks lists."""

    bound: EntmaxTile
    flags: EntmaxTile
    walk: EntmaxTile


@dataclass(frozen=True)
class EntmaxBackwardConfig:
    """Tiles of `attention_entmax_dq`, and of `attention_entmax_dkdv` for dK and dV, or for dK alone if
    `values` is given, for dV."""

    queries: EntmaxTile
    keys: EntmaxTile
    values: EntmaxTile | None = None


# Chosen by what compiles without spills; `tests/gpu/time_entmax.py --tune` times neighbors.
# A row is gathered by a number that is loaded before it. Of five stages the compiler gives two to each of
# these loads; of three or four one, and a tile waits for rows asked for at the end of the tile before.
_GATHER = 5
_FORWARD = {
    64: EntmaxConfig(EntmaxTile(64, 64, 4, 3), EntmaxTile(64, 64, 4, 3), EntmaxTile(64, 64, 4, _GATHER)),
    128: EntmaxConfig(EntmaxTile(64, 64, 4, 3), EntmaxTile(64, 64, 4, 3), EntmaxTile(64, 32, 4, _GATHER)),
    256: EntmaxConfig(EntmaxTile(64, 64, 4, 2), EntmaxTile(64, 64, 4, 2), EntmaxTile(64, 16, 4, _GATHER)),
}
_BACKWARD = {
    64: EntmaxBackwardConfig(EntmaxTile(64, 64, 4, _GATHER), EntmaxTile(64, 64, 4, _GATHER)),
    128: EntmaxBackwardConfig(EntmaxTile(64, 32, 4, _GATHER), EntmaxTile(32, 64, 4, _GATHER)),
    256: EntmaxBackwardConfig(
        EntmaxTile(64, 16, 8, _GATHER), EntmaxTile(16, 64, 8, 2), EntmaxTile(32, 64, 8, _GATHER)
    ),
}
# Exact products on the CUDA cores: a thread reads whole rows of both operands, so registers bound the tiles.
_FLOAT32 = EntmaxConfig(EntmaxTile(16, 16, 8, 1), EntmaxTile(64, 16, 8, 1), EntmaxTile(16, 16, 8, 1))
_BACKWARD_FLOAT32 = EntmaxBackwardConfig(EntmaxTile(16, 16, 8, 1), EntmaxTile(16, 16, 8, 1))


def entmax_config(head_dim: int, dtype: str) -> EntmaxConfig:
    """For a head dimension, and a dtype such as "float16"."""
    return _FLOAT32 if dtype == "float32" else _FORWARD[tile_width(head_dim)]


def entmax_backward_config(head_dim: int, dtype: str) -> EntmaxBackwardConfig:
    """The same for the backward pass."""
    return _BACKWARD_FLOAT32 if dtype == "float32" else _BACKWARD[tile_width(head_dim)]
