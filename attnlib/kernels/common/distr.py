"""What DistrAttention passes from its grouping kernels to the product: queries and keys with fewer columns.

The columns of Q and K are taken in groups. A product of a query and a key sums over all columns c of a group

    sum_c q_c k_c  ~  (sum_c q_c) k_r

with one column r of the group for all. So Q keeps a sum, K one column of each group.
"""

from typing import Literal, NamedTuple

import torch

from attnlib.kernels.common.signature import Signature
from attnlib.kernels.common.tiles import block_d
from attnlib.params import Params

Hashed = Literal["q", "k"]
PROJECTIONS = 16
"""Random projections of a column; the sign of each is a bit of its hash."""


class Grouping(NamedTuple):
    """How columns are grouped.

    Attributes:
        group: columns of a group; it divides the head dimension.
        hashed: whose columns are hashed, those of the queries or those of the keys of a head.
        rows: queries that share their groups, a multiple of 128; None for all of a head.
        seed: of the random signs of the projections.
    """

    group: int
    hashed: Hashed = "k"
    rows: int | None = None
    seed: int = 0

    def columns(self, head_dim: int) -> int:
        """Columns of a tile of grouped queries or keys: those beyond head_dim / group are 0."""
        return block_d(head_dim // self.group)

    def blocks(self, queries: int) -> int:
        """How many parts of the queries have groups of their own."""
        return 1 if self.rows is None else -(-queries // self.rows)


class Grouped(NamedTuple):
    """Queries and keys after the grouping.

    Attributes:
        q: (B, H, Sq, columns), sums of the queries' columns.
        k: (B, Hkv, Sk, columns), one column of each group; or (B, H * blocks, Sk, columns) where queries are
            hashed: block i of head h has those of head h * blocks + i.
        rows: queries that share keys, where each block of them or each query head has its own; else None.
        places: (B, Hkv, 1, D) or (B, H, blocks, D) int32, the place of each column in the order by hashes;
            group g has those of places g * group and after.
    """

    q: torch.Tensor
    k: torch.Tensor
    rows: int | None
    places: torch.Tensor


class Narrow(NamedTuple):
    """What a launch of the product depends on besides the signature of a call with as many columns in Q and K
    as in V: columns of a tile of Q and K, heads of K, and rows as in `Grouped`."""

    columns: int
    heads: int
    rows: int | None


def narrow_shapes(call: Signature, narrow: Narrow | None) -> tuple[tuple[int, ...], ...]:
    """The shapes of the q, k and v that a launch reads; the call's own without `narrow`."""
    if narrow is None:
        return call.q, call.k, call.v
    B, H, S_q, _ = call.q
    return (B, H, S_q, narrow.columns), (B, narrow.heads, call.k[2], narrow.columns), call.k


def narrow_call(grouped: Grouped, v: torch.Tensor, params: Params) -> tuple[Signature, Narrow]:
    """The signature of a call in which q and k had the columns of v, with the strides that they have, and
    what is narrow in it."""
    B, H, S_q, columns = grouped.q.shape
    strides = tuple(x.stride() for x in (grouped.q, grouped.k, v))
    call = Signature(
        (B, H, S_q, v.shape[-1]), tuple(v.shape), strides, v.dtype, v.get_device(), params.window,
        params.sm_scale, None, False, params.config,
    )  # fmt: skip
    return call, Narrow(columns, grouped.k.shape[1], grouped.rows)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()
