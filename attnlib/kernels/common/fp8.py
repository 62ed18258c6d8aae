"""One operand of FP8 attention as its kernel reads it, and where everything in it lies."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Role = Literal["q", "k", "v"]
Scaling = Literal["block", "head", "tensor"]

LARGEST = 448.0
"""Of float8_e4m3fn, which has NaN but no infinity."""
SMALLEST_MAGNITUDE = 2.0**-120 * LARGEST
"""Of a row that has a scale of its own: of smaller ones, and of zeros, the scale is that of this one,
2**-120 / sqrt(width), which is still a normal float32."""
OFFSET = 6
"""Under a new shift a row's largest weight is 2**OFFSET."""
ROWS = {"q": 64, "k": 128}
"""Rows that share a scale with scaling "block"."""
GROUP = 16
"""Keys of V that are permuted among each other; of every sequence their number is padded to a multiple."""
WIDTHS = (64, 128, 256)
"""Head dimensions that the kernels have; others are padded with zeros."""

MOST_IN_REGISTERS = 128
"""Columns of queries that kernels hold in registers."""

CHUNK = 64
"""Columns that one multiplication with a Hadamard matrix takes, where queries and keys are rotated."""

SIGNS = 0x243F6A88, 0x85A308D3
"""Bit i % 32 of word i // 32 says whether column i of each CHUNK is negated: arbitrary, the first digits of
pi behind the point."""


class Recipe(NamedTuple):
    """How a tensor is quantized: what shares a scale, whether queries and keys are rotated, and whether
    values are centered."""

    scaling: Scaling = "block"
    rotate: bool = True
    center: bool = True


@dataclass(frozen=True, eq=False)
class Fp8:
    """Queries, keys or values as float8_e4m3fn with scales: what `attnlib.quantize_fp8` makes of a tensor.

    value = data * scale, of centered values data * scale + mean. Rows past the end of a sequence, and columns
    past the head dimension, are zero.

    Attributes:
        data: float8_e4m3fn. Of queries and keys (B, H, S, width), of varlen sequences (T, H, width); width is
            the head dimension padded to 64, 128 or 256. Of values transposed, so that a tensor core finds
            keys side by side: (B, H, width, S16), S16 being S padded to a multiple of 16; of varlen sequences
            (H, width, T16), in which sequence b begins at position `first_block(start, b, 16) * 16`. In each
            16 keys of a sequence position 4t + 2h + i has key 8h + 2t + i, for i and h in 0, 1 and t in 0..3:
            the order in which the first product leaves P in registers.
        scale: float32, positive. Of queries and keys (B, H, blocks), one for each 64 queries or 128 keys; of
            varlen sequences (H, blocks), in which the first block of sequence b is `first_block(start, b,
            64 or 128)`. Of values (B, H), of varlen sequences (H). A scale that several share is stored once,
            with stride 0.
        role: "q", "k" or "v".
        scaling: what shares a scale: "block", "head" (all of one head of one batch element; of varlen
            sequences all of one head) or "tensor". Values with scaling "block" have one scale per head.
        rotated: whether the rows were multiplied by the orthogonal matrix of `attnlib.quantize_fp8`.
        head_dim: columns before padding.
        dtype: of the tensor that was quantized.
        tokens: S, or of varlen sequences T.
        cu_seqlens: (B + 1) int32, where varlen sequences begin and end; None for a batch.
        mean: float32 (B, H, width), contiguous, its address a multiple of 16 bytes: what was subtracted from
            the values of each head, of varlen sequences of each head of each sequence, before they were
            quantized. None if nothing was.
        fingerprint: tells the values that `cu_seqlens` had from others; None where they were not read.
    """

    data: torch.Tensor
    scale: torch.Tensor
    role: Role
    scaling: Scaling
    rotated: bool
    head_dim: int
    dtype: torch.dtype
    tokens: int
    cu_seqlens: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    fingerprint: int | None = None

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def centered(self) -> bool:
        return self.mean is not None

    @property
    def sequences(self) -> int:
        """B: of a batch, or of varlen sequences."""
        return len(self.cu_seqlens) - 1 if self.varlen else self.data.shape[0]

    @property
    def heads(self) -> int:
        return self.data.shape[0 if self.varlen and self.role == "v" else 1]

    @property
    def width(self) -> int:
        """The head dimension, padded."""
        return self.data.shape[-2 if self.role == "v" else -1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that was quantized: (B, H, S, D), of varlen sequences (T, H, D)."""
        if self.varlen:
            return self.tokens, self.heads, self.head_dim
        return self.data.shape[0], self.heads, self.tokens, self.head_dim

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of data and scale, as the other attributes say."""
        rows = rows_of(self.role, self.scaling)
        return shapes_of(self.role, self.shape, rows, self.sequences if self.varlen else None)

    def __repr__(self) -> str:
        how = f"scaling={self.scaling!r}, rotated={self.rotated}, centered={self.centered}"
        return f"Fp8(role={self.role!r}, shape={self.shape}, {how}, from {self.dtype}, device={self.device})"


def padded_width(head_dim: int) -> int:
    """The head dimension that a kernel works with."""
    return next(width for width in WIDTHS if width >= head_dim)


def rows_of(role: Role, scaling: str) -> int | None:
    """Rows that share a scale: "row" is what kernels give queries that they quantize themselves."""
    return 1 if scaling == "row" else ROWS.get(role)


def scaled_by_row(q, scaling: str) -> bool:
    """Whether attention takes these queries as they are, and quantizes them with a scale for each row: a
    tensor of 16 bits with scaling "block", of which a kernel has all columns in registers."""
    plain = isinstance(q, torch.Tensor) and q.dtype in (torch.float16, torch.bfloat16)
    return plain and scaling == "block" and padded_width(q.shape[-1]) <= MOST_IN_REGISTERS


def num_blocks(tokens: int, rows: int, sequences: int | None = None) -> int:
    """How many blocks of `rows` rows there is room for; of varlen sequences, in `tokens` of all of them."""
    return -(-tokens // rows) if sequences is None else tokens // rows + sequences


def shapes_of(
    role: Role, shape: tuple[int, ...], rows: int | None, sequences: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of data and scale of a tensor (B, H, S, D), of varlen sequences (T, H, D). rows: of queries and
    keys, that share a scale. sequences: how many varlen sequences there are, None for a batch."""
    tokens, heads = (shape[2], shape[:2]) if sequences is None else (shape[0], shape[1:2])
    width = padded_width(shape[-1])
    if role == "v":
        return (*heads, width, num_blocks(tokens, GROUP, sequences) * GROUP), tuple(heads)
    return (*shape[:-1], width), (*heads, num_blocks(tokens, rows, sequences))


def first_block(start, sequence, rows: int):
    """The first block of a varlen sequence that begins at token `start`: far enough from that of the one
    before it whatever the lengths are (`common.varlen_rows.padded_start`)."""
    return start // rows + sequence
