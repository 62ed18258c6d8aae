"""The masks of S2-Attention (arXiv 2407.17678): every head keeps the blocks near a query and, of those far
away, one in so many, each head other ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from attnlib.arguments import masks as checks
from attnlib.arguments.common import check_int
from attnlib.block_mask import tiles as tiling
from attnlib.block_mask.mask import BlockMask
from attnlib.block_mask.tiles import FULL, PARTIAL, UNIT, Grid


class KeptPages(NamedTuple):
    """A cache as `attention_decode` takes it, each key head a sequence of its own: keys and values (pages, 1,
    block size, D), and of each sequence and key head the number of keys and the pages."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor


@dataclass(frozen=True)
class S2Pattern:
    """Which blocks of keys the heads of a layer see.

    A query in block i sees the keys up to its own of block j <= i, where its key head h has it:

        i - j < local_blocks   or   (j + h * step) % stride == 0,   step = max(1, stride // kv_heads),

    or where h is among the last `dense_heads`. Three things follow. The heads together see every block; a
    pattern of which that is not true is an error. All query heads of a key head see the same keys. And
    columns are counted from the start, not from the query: a block that a query does not see and that is not
    near it is seen by no later query either, so that a cache can drop it.

        mask = S2Pattern(heads=16).mask(65536, device="cuda")
        out = attnlib.attention(q, k, v, block_mask=mask)

    Attributes:
        heads, kv_heads: of the queries and of the keys, as many by default.
        block_size: tokens of a block, a multiple of 64.
        local_blocks: near blocks, the query's own among them.
        stride: of the far blocks a head keeps one in so many; at most the number of key heads, unless
            `dense_heads` is set.
        dense_heads: how many key heads, the last ones, see all keys up to the query's.

    Raises:
        TypeError: a field is no int.
        ValueError: a field is out of its range, or the heads together would not see every block.
    """

    heads: int
    kv_heads: int | None = None
    block_size: int = 64
    local_blocks: int = 8
    stride: int = 16
    dense_heads: int = 0

    def __post_init__(self) -> None:
        checks.check_s2(self)

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def first(self, head: int) -> int:
        """The first of the blocks `first`, `first` + stride, ... that a key head always keeps."""
        return -head * max(1, self.stride // self.key_heads) % self.stride

    def is_dense(self, head: int) -> bool:
        return head >= self.key_heads - self.dense_heads

    # ------------------------------------------------------------ prefill

    def mask(self, seqlen: int, device: torch.device | str | None = None) -> BlockMask:
        """Of a sequence with itself. It is causal: `attention` needs no `causal` beside it. Memory grows with
        the number of 64 x 64 units of all heads, a few bytes for each, and not with seqlen x seqlen."""
        check_int("seqlen", seqlen, 1)
        grid = Grid(1, self.heads, seqlen, seqlen, checks.check_device(device))
        *_, down, across = grid.units
        row = torch.arange(down, device=grid.device).clamp(max=-(-seqlen // UNIT) - 1)[:, None]
        column = torch.arange(across, device=grid.device)
        size = self.block_size // UNIT
        seen = row // size - column // size < self.local_blocks  # (down, across)
        heads = range(self.key_heads)
        first = torch.tensor([self.first(h) for h in heads], device=grid.device)
        strided = column // size % self.stride == first[:, None]  # (key heads, across)
        strided |= torch.tensor([self.is_dense(h) for h in heads], device=grid.device)[:, None]
        seen = (seen | strided[:, None, :]) & (row >= column)  # (key heads, down, across)
        kinds = seen.to(torch.int8) * FULL
        kinds[:, row == column] = PARTIAL
        # A kernel's tile has two units. Those that all later queries see come first, two of them in a tile.
        order = (~strided).to(torch.int8).sort(dim=1, stable=True).indices
        kinds, order = (x.repeat_interleave(self.heads // self.key_heads, 0) for x in (kinds, order))
        return BlockMask(tiling.build(kinds[None], _causal, grid), grid, order=order)

    def kept(self, seqlen: int) -> int:
        """How many blocks of scores all query heads keep."""
        check_int("seqlen", seqlen, 1)
        blocks, local = -(-seqlen // self.block_size), self.local_blocks
        near = sum(min(i, local) for i in range(1, blocks + 1))
        found = 0
        for head in range(self.key_heads):
            far = range(self.first(head), max(blocks - local, 0), self.stride)
            every = blocks * (blocks + 1) // 2
            found += every if self.is_dense(head) else near + sum(blocks - local - j for j in far)
        return found * (self.heads // self.key_heads)

    def share(self, seqlen: int) -> float:
        """What `kept` is of the blocks of causal attention: its inverse is the speed-up that work alone
        allows."""
        kept, blocks = self.kept(seqlen), -(-seqlen // self.block_size)
        return kept / (self.heads * blocks * (blocks + 1) // 2)

    # ------------------------------------------------------------ decode

    def cached(self, length: int, head: int) -> list[int]:
        """Which blocks the cache of a key head has to have for the token that is number `length` and all
        after it: what is not among them may be dropped."""
        check_int("length", length, 1)
        check_int("head", head, 0, self.key_heads - 1)
        blocks = -(-length // self.block_size)
        near = max(0, blocks - self.local_blocks)
        if self.is_dense(head):
            return list(range(blocks))
        return [*range(self.first(head), near, self.stride), *range(near, blocks)]

    def cache_bytes(self, length: int, head_dim: int, itemsize: int = 2) -> int:
        """Of keys and values that one sequence of so many tokens keeps, in whole blocks."""
        blocks = sum(len(self.cached(length, head)) for head in range(self.key_heads))
        return 2 * blocks * self.block_size * head_dim * itemsize

    def paged(self, k: torch.Tensor, v: torch.Tensor) -> KeptPages:
        """What a cache keeps of the keys and values (B, Hkv, S, D) of S tokens, a page for each block, copied
        out of all of them: `attnlib.S2Cache` takes tokens as they come instead. `attention_decode` reads it,
        for the query (B, H, 1, D) of token S::

            pages = pattern.paged(k, v)
            out = attention_decode(q.view(B * Hkv, H // Hkv, 1, D), pages.k_cache, pages.v_cache,
                                   lengths=pages.lengths, page_table=pages.page_table)
        """
        checks.check_s2_cache(self, k, v)
        B, heads, length, _ = k.shape
        rows, k_pages, v_pages, used = [], [], [], 0
        unfilled = -length % self.block_size
        for head in range(heads):
            blocks = self.cached(length, head)
            for x, pages in ((k, k_pages), (v, v_pages)):
                own = torch.nn.functional.pad(x[:, head], (0, 0, 0, unfilled))
                pages.append(own.unflatten(1, (-1, self.block_size))[:, blocks].flatten(0, 1))
            rows.append(torch.arange(used, used + B * len(blocks), dtype=torch.int32).view(B, -1))
            used += B * len(blocks)
        most = max(row.shape[1] for row in rows)
        table = torch.stack([torch.nn.functional.pad(row, (0, most - row.shape[1])) for row in rows], 1)
        counts = torch.tensor([row.shape[1] for row in rows], dtype=torch.int32)
        lengths = (counts * self.block_size - unfilled).repeat(B)
        pages = (torch.cat(x).unsqueeze(1) for x in (k_pages, v_pages))
        return KeptPages(*pages, lengths.to(k.device), table.flatten(0, 1).to(k.device))


def _causal(b, h, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return queries[:, :, None] >= keys[:, None, :]
