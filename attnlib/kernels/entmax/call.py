"""A call of entmax attention without its addresses: what its launches depend on, and what all of them get."""

from typing import Any, NamedTuple

import torch

from attnlib.kernels.common.descriptors import legal
from attnlib.kernels.common.launcher import LIMIT, Part
from attnlib.kernels.common.signature import VARLEN_ROWS, Lengths
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.entmax.configs import ANY, LIST, THREE_HALVES, TWO, EntmaxTile
from attnlib.params import EntmaxParams, Varlen

ROOM = 4096
"""Elements of a list, at most. A block of rows with more keys that can have weight walks along all keys that
it sees: so the memory of lists grows with S, not with its square."""
WORDS = 4
"""Of flags, that a row of them is padded to: the keys of the largest tile."""


class Call(NamedTuple):
    """q, k: the shapes (B, H, S_q, D) and (B, H_kv, S_k, D), varlen (T_q, H, D) and (T_k, H_kv, D). strides:
    of q, k and v; of the backward pass those of d_out before them, and of out after them. device: a CUDA
    device's index, -1 for a CPU."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: int
    alpha: float
    causal: bool
    sm_scale: float
    columns: bool
    config: Any
    lengths: Lengths | None = None

    @property
    def varlen(self) -> bool:
        return self.lengths is not None

    @property
    def batch(self) -> int:
        """Of varlen sequences 1: their heads are those of one."""
        return 1 if self.varlen else self.q[0]

    @property
    def heads(self) -> int:
        return self.batch * self.q[1]

    @property
    def key_heads(self) -> int:
        return self.batch * self.k[1]

    @property
    def rows(self) -> tuple[int, int]:
        """Queries and keys of a head: of varlen sequences all together."""
        return (self.q[0], self.k[0]) if self.varlen else (self.q[2], self.k[2])

    @property
    def longest(self) -> tuple[int, int]:
        """Queries and keys of the longest sequence."""
        return self.rows if self.lengths is None else self.lengths[1:]

    @property
    def query_blocks(self) -> int:
        return self.blocks(self.rows[0], LIST)

    @property
    def key_blocks(self) -> int:
        return self.blocks(self.rows[1], LIST) if self.varlen else self.key_words // 2

    @property
    def key_words(self) -> int:
        """Words of a block of queries, one bit for each key."""
        return key_words(self.longest[1])

    @property
    def query_words(self) -> int:
        """Words of a block of keys, one bit for each query."""
        return query_words(self.longest[0])

    @property
    def key_flags(self) -> int:
        """Words of all blocks of queries, which come first in the flags of a call."""
        return self.heads * self.query_blocks * self.key_words

    def blocks(self, rows: int, size: int) -> int:
        """Blocks of `size` rows of a head, as `walk.blocks_of` counts them."""
        return (
            varlen_blocks(rows, self.lengths.sequences) * (LIST // size) if self.varlen else -(-rows // size)
        )

    def room(self, length: int) -> int:
        return min(ROOM, -(-length // LIST) * LIST)

    def units(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
        """The strides of a batch element, a head and a row, in units of 16 bytes."""
        found = [stride // self.unit for stride in legal(shape, strides, self.dtype)[:-1]]
        return (0, *reversed(found)) if self.varlen else tuple(found)

    @property
    def unit(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.dtype.itemsize

    def check_size(self) -> None:
        """ValueError if a number is beyond int32."""
        if self.varlen and max(self.rows) > VARLEN_ROWS:
            raise ValueError(
                f"q, k: expected at most 2^30 rows and keys of varlen sequences, got {self.rows[0]} and "
                f"{self.rows[1]}"
            )
        programs = self.heads * self.blocks(max(self.rows), 16)
        if max(programs, *self.rows) >= LIMIT:
            raise ValueError(
                f"q, k: expected fewer than 2^31 rows, keys and blocks of 16 of them over all heads, got "
                f"{self.rows[0]}, {self.rows[1]} and {programs}"
            )

    def offsets(self) -> dict[str, Part]:
        """Where varlen sequences begin."""
        return {"cu_q": Part("cu_q"), "cu_k": Part("cu_k")}

    def sequences(self) -> dict[str, int | None]:
        return {"B": self.lengths.sequences if self.varlen else None}

    def numbers(self) -> dict[str, float]:
        """Scalars that several kernels get."""
        return {
            "scale": (self.alpha - 1.0) * self.sm_scale,
            "exponent": 1.0 / (self.alpha - 1.0),
            "S_q": self.rows[0],
            "S_k": self.rows[1],
            "H": self.q[1],
            "HEADS": self.heads,
        } | self.sequences()

    def constants(self, tile: EntmaxTile) -> dict[str, object]:
        """What all large kernels are compiled with."""
        return {
            "GROUP": self.q[1] // self.k[1],
            "CAUSAL": self.causal,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": block_d(self.q[-1]),
            "SECTION": tile.heads_per_section,
            "NUM_STAGES": tile.num_stages,
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
        }

    @property
    def halley(self) -> bool:
        """Whether the second derivative of F has no pole, as it has above 1.5."""
        return self.alpha <= 1.5

    @property
    def kind(self) -> int:
        """Of alpha, for the kernels."""
        return {1.5: THREE_HALVES, 2.0: TWO}.get(self.alpha, ANY)


def call_of(params: EntmaxParams, q: torch.Tensor, k: torch.Tensor, *strided: torch.Tensor) -> Call:
    strides, varlen = tuple(x.stride() for x in strided), params.varlen
    lengths = None
    if varlen is not None:
        lengths = Lengths(len(varlen.cu_seqlens_q) - 1, varlen.max_seqlen_q, varlen.max_seqlen_k)
    return Call(
        tuple(q.shape), tuple(k.shape), strides, q.dtype, q.get_device(), params.alpha, params.causal,
        params.sm_scale, params.columns, params.config, lengths,
    )  # fmt: skip


def flags_size(q: torch.Size, k: torch.Size, varlen: Varlen | None = None) -> int:
    """int32 words of the flags of a call, with those of the columns; sizes may be symbols."""
    if varlen is None:
        return q[0] * q[1] * ((q[2] + LIST - 1) // LIST) * key_words(k[2]) * 2
    cu_seqlens_q, _, longest_q, longest_k = varlen
    sequences = cu_seqlens_q.shape[0] - 1
    queries = varlen_blocks(q[0], sequences) * key_words(longest_k)
    return q[1] * (queries + varlen_blocks(k[0], sequences) * query_words(longest_q))


def key_words(keys: int) -> int:
    return (keys + 32 * WORDS - 1) // (32 * WORDS) * WORDS


def query_words(queries: int) -> int:
    return (queries + LIST - 1) // LIST * 2


def varlen_blocks(rows: int, sequences: int) -> int:
    """Blocks of LIST rows that varlen sequences have at most, each with blocks of its own."""
    return rows // LIST + sequences
