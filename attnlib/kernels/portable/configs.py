"""Configurations of the portable forward kernel: a frozen dataclass, chosen by a pure function."""

from dataclasses import dataclass, replace
from typing import Literal

from attnlib.kernels.common.tiles import tile_width

Order = Literal["two loops", "one loop", "late"]


@dataclass(frozen=True)
class ForwardConfig:
    """How `portable.forward_kernel.attention_forward` is compiled and launched.

    Attributes:
        block_m: query rows of one program.
        block_n: keys of one step of its loop; at most `block_m`.
        num_warps: warps of one program; four make a warpgroup.
        num_stages: key/value tiles in flight; more stages hide more latency and take more shared memory.
        order: in which a program visits its keys, and where the mask is; see the kernel's module. "late" has
            no form with a left edge.
        q_in_registers: keep Q in registers instead of shared memory.
        heads_per_section: heads whose row blocks are launched together, at most; it has to divide all heads.
        max_registers: bound on the registers of a thread that the compiler must keep, None for no bound.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    order: Order = "late"
    q_in_registers: bool = False
    heads_per_section: int = 1
    max_registers: int | None = None


# Found by measurement on an H200, causal fp16 at 16384 tokens (chapter 08 shows neighbors of each,
# docs/lab/plain-triton-forward.md what lost).
_HOPPER = {
    # 128 registers let four programs share an SM; a few more, and there are three.
    64: ForwardConfig(64, 64, 4, 2, order="late", heads_per_section=4, max_registers=128),
    128: ForwardConfig(64, 64, 4, 3, order="two loops", q_in_registers=True, heads_per_section=4),
    256: ForwardConfig(64, 32, 4, 3, order="late", q_in_registers=True, heads_per_section=2),
}
SHORT = 512
"""Keys that a query sees on average, half the sequence when causal, up to which `_HOPPER_SHORT` is faster: at
D = 128 and 256 the two change places between S = 1024 and 2048, causal."""
_HOPPER_SHORT = {
    64: _HOPPER[64],
    128: ForwardConfig(64, 64, 4, 3, order="one loop", heads_per_section=4),
    256: replace(_HOPPER[256], order="two loops"),
}
# Not measured: chosen so that Q, K and V fit 99 KB of shared memory, which every GPU since Ampere has.
_PORTABLE = {
    64: ForwardConfig(64, 64, num_warps=4, num_stages=2),
    128: ForwardConfig(64, 32, num_warps=4, num_stages=2),
    256: ForwardConfig(64, 16, num_warps=4, num_stages=2),
}
# float32 runs exact products on the CUDA cores. A thread reads whole rows of both operands, so registers
# bound the tiles: these compile without spills up to D = 128, and at D = 256 with the fewest that were found.
_FLOAT32 = {
    64: ForwardConfig(32, 16, num_warps=4, num_stages=1),
    128: ForwardConfig(16, 16, num_warps=8, num_stages=1),
    256: ForwardConfig(16, 16, num_warps=8, num_stages=1),
}


def checked_width(head_dim: int, dtype: str) -> int:
    """The tiles' width for a head dimension; ValueError unless the kernels know both."""
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head_dim: expected 1 to 256, got {head_dim}")
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"dtype: expected 'float16', 'bfloat16' or 'float32', got {dtype!r}")
    return tile_width(head_dim)


def forward_config(
    head_dim: int, dtype: str = "float16", arch: tuple[int, int] | None = (9, 0), keys: int = 1 << 30
) -> ForwardConfig:
    """The configuration for one call.

    Args:
        head_dim: D, 1 to 256.
        dtype: "float16", "bfloat16" or "float32".
        arch: CUDA compute capability, such as (9, 0) for H100 and H200; None for the interpreter.
        keys: that a query sees on average; many, unless given.

    Raises:
        ValueError: `head_dim` or `dtype` out of range.
    """
    width = checked_width(head_dim, dtype)
    if dtype == "float32":
        return _FLOAT32[width]
    if arch is None or arch[0] == 9:
        return (_HOPPER_SHORT if keys <= SHORT else _HOPPER)[width]
    return _PORTABLE[width]


def upwards(config: ForwardConfig) -> ForwardConfig:
    """The same in an order that can have a left edge."""
    return replace(config, order="two loops") if config.order == "late" else config
