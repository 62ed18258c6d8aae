"""Launch configurations of the portable backward kernels: frozen dataclasses, chosen by a pure function."""

from dataclasses import dataclass

from attnlib.kernels.portable.configs import checked_width


@dataclass(frozen=True)
class Tile:
    """How one of the two large kernels is compiled and launched.

    Attributes:
        block_m: query rows of a tile; a multiple of 32, because TMA writes vectors of that many float32 to
            addresses in shared memory that are multiples of 128 bytes.
        block_n: keys of a tile.
        num_warps: warps of one program; four make a warpgroup.
        num_stages: tiles in flight.
        heads_per_section: heads whose blocks are launched together, at most; it has to divide all heads.
        max_registers: bound on the registers of a thread, None for no bound.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    heads_per_section: int = 4
    max_registers: int | None = None

    def __post_init__(self) -> None:
        if self.block_m % 32:
            raise ValueError(f"block_m: expected a multiple of 32, got {self.block_m}")


@dataclass(frozen=True)
class BackwardConfig:
    """Tiles of the two large kernels.

    Attributes:
        keys: of `attention_backward_dkdv`, whose programs own `block_n` keys; for dK alone if `values` is
            given.
        queries: of `attention_backward_dq`, whose programs own `block_m` queries.
        values: of a second run of `attention_backward_dkdv`, for dV; None: dK and dV in one run.
    """

    keys: Tile
    queries: Tile
    values: Tile | None = None


# Found by measurement on an H200, causal fp16 at 16384 tokens (docs/lab/backward.md).
_HOPPER = {
    64: BackwardConfig(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    128: BackwardConfig(Tile(32, 64, 4, 3), Tile(64, 64, 4, 2)),
    256: BackwardConfig(Tile(32, 128, 8, 3), Tile(128, 32, 8, 2), Tile(64, 128, 8, 2)),
}
# Not measured: chosen so that the tiles fit 99 KB of shared memory, which every GPU since Ampere has.
_PORTABLE = {
    64: BackwardConfig(Tile(32, 64, 4, 2), Tile(64, 32, 4, 2)),
    128: BackwardConfig(Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)),
    256: BackwardConfig(Tile(32, 32, 8, 1), Tile(32, 16, 8, 1)),
}
_FLOAT32 = {
    64: BackwardConfig(Tile(32, 16, 8, 1), Tile(32, 16, 8, 1)),
    128: BackwardConfig(Tile(32, 16, 8, 1), Tile(32, 16, 8, 1)),
    256: BackwardConfig(Tile(32, 16, 8, 1), Tile(32, 16, 8, 1)),
}


def backward_config(
    head_dim: int, dtype: str = "float16", arch: tuple[int, int] | None = (9, 0)
) -> BackwardConfig:
    """The configuration for one call.

    Args:
        head_dim: D, 1 to 256.
        dtype: "float16", "bfloat16" or "float32".
        arch: CUDA compute capability, such as (9, 0) for H100 and H200; None for the interpreter.

    Raises:
        ValueError: `head_dim` or `dtype` out of range.
    """
    width = checked_width(head_dim, dtype)
    if dtype == "float32":
        return _FLOAT32[width]
    return (_HOPPER if arch is None or arch[0] == 9 else _PORTABLE)[width]
