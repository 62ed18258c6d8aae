"""Configurations of the portable kernels under a block mask: frozen dataclasses, chosen by pure functions."""

from dataclasses import dataclass

from attnlib.kernels.common.tiles import tile_width


@dataclass(frozen=True)
class SparseTile:
    """How one of the kernels is compiled and launched.

    Attributes:
        block_m: query rows of a tile; 16, 32, 64 or 128, of a program that owns keys 32 or 64.
        block_n: keys of a tile; 16, 32 or 64, of a program that owns keys up to 128.
        num_warps: warps of one program.
        num_stages: tiles in flight.
        heads_per_section: heads that advance together, at most.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    heads_per_section: int = 4


BIAS = {64: SparseTile(64, 64, 4, 2), 128: SparseTile(128, 64, 8, 2), 256: SparseTile(64, 32, 4, 2)}
"""Of the kernel for the gradient of a bias, in half precision on Hopper: the fastest of four at D = 64, of
two at 128 (docs/lab/sparse.md)."""


@dataclass(frozen=True)
class SparseBackwardConfig:
    """Tiles of the kernel that owns keys, for dK and dV, or for dK alone if `values` is given, for dV; of
    the one that owns queries; and of the one that owns the gradient of a bias."""

    keys: SparseTile
    queries: SparseTile
    bias: SparseTile
    values: SparseTile | None = None


# Those of `kernels.portable` for the same work without a mask; not measured with one.
_FORWARD = {64: SparseTile(64, 64, 4, 2), 128: SparseTile(64, 64, 4, 3), 256: SparseTile(64, 32, 4, 3)}
_FORWARD_SMALL = {64: SparseTile(64, 64, 4, 2), 128: SparseTile(64, 32, 4, 2), 256: SparseTile(64, 16, 4, 2)}
_FORWARD_FLOAT32 = {64: SparseTile(32, 16, 4, 1), 128: SparseTile(16, 16, 8, 1)}
_FORWARD_FLOAT32[256] = _FORWARD_FLOAT32[128]
_BACKWARD = {
    64: SparseBackwardConfig(SparseTile(64, 64, 4, 3), SparseTile(64, 64, 4, 2), BIAS[64]),
    128: SparseBackwardConfig(SparseTile(32, 64, 4, 3), SparseTile(64, 64, 4, 2), BIAS[128]),
    256: SparseBackwardConfig(
        SparseTile(32, 64, 8, 2), SparseTile(64, 32, 8, 2), BIAS[256], SparseTile(32, 64, 8, 2)
    ),
}
_BACKWARD_SMALL = {
    64: SparseBackwardConfig(SparseTile(32, 64, 4, 2), SparseTile(64, 32, 4, 2), SparseTile(64, 64, 4, 1)),
    128: SparseBackwardConfig(SparseTile(32, 64, 8, 1), SparseTile(64, 32, 8, 1), SparseTile(64, 64, 4, 1)),
    256: SparseBackwardConfig(SparseTile(32, 32, 8, 1), SparseTile(32, 16, 8, 1), SparseTile(32, 32, 4, 1)),
}
_FLOAT32 = SparseBackwardConfig(*[SparseTile(32, 16, 8, 1)] * 3)


def sparse_forward_config(head_dim: int, dtype: str, arch: tuple[int, int] | None) -> SparseTile:
    """For a head dimension, a dtype such as "float16", and a compute capability; None for the interpreter."""
    width = tile_width(head_dim)
    if dtype == "float32":
        return _FORWARD_FLOAT32[width]
    return (_FORWARD if arch is None or arch[0] == 9 else _FORWARD_SMALL)[width]


def sparse_backward_config(
    head_dim: int, dtype: str, arch: tuple[int, int] | None
) -> SparseBackwardConfig:
    """The same for the backward pass."""
    if dtype == "float32":
        return _FLOAT32
    return (_BACKWARD if arch is None or arch[0] == 9 else _BACKWARD_SMALL)[tile_width(head_dim)]
