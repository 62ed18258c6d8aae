"""A call of entmax attention without its addresses: what its launches depend on, and what all of them get."""

from typing import Any, NamedTuple

import torch

from attnlib.kernels.common.descriptors import legal
from attnlib.kernels.common.launcher import LIMIT
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.entmax.configs import ANY, LIST, THREE_HALVES, TWO, EntmaxTile
from attnlib.params import EntmaxParams

ROOM = 4096
"""Elements of a list, at most. A block of rows with more keys that can have weight walks along all keys that
it sees: so the memory of lists grows with S, not with its square."""
WORDS = 4
"""Of flags, that a row of them is padded to: the keys of the largest tile."""


class Call(NamedTuple):
    """q, k: the shapes (B, H, S_q, D) and (B, H_kv, S_k, D). strides: of q, k and v; of the backward pass
    those of d_out before them, and of out after them. device: a CUDA device's index, -1 for a CPU."""

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
    varlen: bool = False

    @property
    def heads(self) -> int:
        return self.q[0] * self.q[1]

    @property
    def query_blocks(self) -> int:
        return -(-self.q[2] // LIST)

    @property
    def key_blocks(self) -> int:
        return self.key_words // 2

    @property
    def key_words(self) -> int:
        """Words of a block of queries, one bit for each key."""
        return -(-self.k[2] // (32 * WORDS)) * WORDS

    @property
    def query_words(self) -> int:
        """Words of a block of keys, one bit for each query."""
        return 2 * self.query_blocks

    @property
    def key_flags(self) -> int:
        """Words of all blocks of queries, which come first in the flags of a call."""
        return self.heads * self.query_blocks * self.key_words

    def room(self, length: int) -> int:
        return min(ROOM, -(-length // LIST) * LIST)

    def units(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
        """The strides of a tensor but the last one, 1, in units of 16 bytes."""
        return tuple(stride // self.unit for stride in legal(shape, strides, self.dtype)[:3])

    @property
    def unit(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.dtype.itemsize

    def check_size(self) -> None:
        """ValueError if a number is beyond int32."""
        programs = self.heads * -(-max(self.q[2], self.k[2]) // 16)
        if max(programs, self.q[2], self.k[2]) >= LIMIT:
            raise ValueError(
                f"q, k: expected fewer than 2^31 rows, keys and blocks of 16 of them over all heads, got "
                f"{self.q[2]}, {self.k[2]} and {programs}"
            )

    def numbers(self) -> dict[str, float]:
        """Scalars that several kernels get."""
        return {
            "scale": (self.alpha - 1.0) * self.sm_scale,
            "exponent": 1.0 / (self.alpha - 1.0),
            "S_q": self.q[2],
            "S_k": self.k[2],
            "H": self.q[1],
            "HEADS": self.heads,
        }

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
        """Whether the second derivative of F has no pole, as it has from 1.5 on."""
        return self.alpha <= 1.5

    @property
    def kind(self) -> int:
        """Of alpha, for the kernels."""
        return {1.5: THREE_HALVES, 2.0: TWO}.get(self.alpha, ANY)


def call_of(params: EntmaxParams, q: torch.Tensor, k: torch.Tensor, *strided: torch.Tensor) -> Call:
    strides = tuple(x.stride() for x in strided)
    return Call(
        tuple(q.shape), tuple(k.shape), strides, q.dtype, q.get_device(), params.alpha, params.causal,
        params.sm_scale, params.columns, params.config,
    )  # fmt: skip


def flags_size(q: torch.Size, k: torch.Size) -> int:
    """int32 words of the flags of a call, with those of the columns; sizes may be symbols."""
    blocks = (q[2] + LIST - 1) // LIST
    words = (k[2] + 32 * WORDS - 1) // (32 * WORDS) * WORDS
    return q[0] * q[1] * blocks * words * 2
