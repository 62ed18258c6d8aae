"""Tiles through TMA descriptors in plain Triton: of a batch, or of varlen sequences, whose descriptors check
bounds at the end of each sequence (`descriptors.varlen_window`)."""

import triton
import triton.language as tl

from attnlib.kernels.common import signature

VARLEN_ROWS = tl.constexpr(signature.VARLEN_ROWS)
"""A length is subtracted from it by `tl.sub`: the interpreter makes a constant of a constant minus a tensor,
and that of triton 3.9 takes no such constant for a coordinate."""


@triton.jit
def load_tile(desc, at, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """`at`: (batch element, head), or of varlen sequences (end of this one, head, VARLEN_ROWS - its
    length)."""
    # Rows past the end of the sequence and columns past the head dimension arrive as zeros.
    if len(at) == 2:
        tile = desc.load([at[0], at[1], row, 0])
    else:
        tile = desc.load([VARLEN_ROWS, at[0], at[1], at[2] + row, 0])
    return tile.reshape([ROWS, BLOCK_D])  # [ROWS, BLOCK_D]


@triton.jit
def store_tile(desc, b_x, at, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """`at` as in `load_tile`."""
    store_columns(desc, b_x.reshape([ROWS, BLOCK_D]), at, row, 0)


@triton.jit
def store_columns(desc, b_x, at, row, column):
    """A tile from this row and column on; `at` as in `load_tile`."""
    ROWS: tl.constexpr = b_x.shape[0]
    COLUMNS: tl.constexpr = b_x.shape[1]
    b_x = b_x.to(desc.dtype)
    if len(at) == 2:
        desc.store([at[0], at[1], row, column], b_x.reshape([1, 1, ROWS, COLUMNS]))
    else:
        desc.store([VARLEN_ROWS, at[0], at[1], at[2] + row, column], b_x.reshape([1, 1, 1, ROWS, COLUMNS]))
