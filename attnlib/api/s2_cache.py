"""`S2Cache`: keys and values of S2-Attention while a model generates, in pages that are used again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from attnlib.api.decode import attention_decode
from attnlib.arguments import s2_cache as checks
from attnlib.arguments.masks import check_device
from attnlib.block_mask.s2 import KeptPages, S2Pattern
from attnlib.kernels.common.between_graphs import between_graphs

__all__ = ["S2Cache"]


class Piece(NamedTuple):
    """New tokens of one block: of which sequence and key head, the first one's number among the new tokens,
    its place among all keys of all pages, and how many."""

    row: int
    token: int
    place: int
    count: int


class S2Cache:
    """Keys and values of one layer with S2-Attention, which forgets what no later query sees.

    A block of the pattern is a page, and each key head of each sequence has pages of its own. When the first
    token of a block comes, the block that is no longer near gives its page back, unless its head keeps it for
    good; the next block that begins, of whichever head, takes the page. So as many pages are in use as
    `S2Pattern.cached` lists blocks, at every length. The memory is allocated once, for sequences of `room`
    tokens, and no key or value is moved once it is there. After the prompt, where all sequences get a token
    at a time, the host sends a few numbers to the device at the first token of a block, none at other tokens.
    It never waits for it.

        pattern = S2Pattern(heads=16)
        cache = S2Cache(pattern, batch=4, head_dim=128, room=65536, dtype=torch.bfloat16, device="cuda")
        out = attnlib.attention(q, k, v, block_mask=pattern.mask(q.shape[2], "cuda"))  # the prompt
        cache.append(k, v)
        out = cache.decode(q_new, k_new, v_new)  # (B, H, 1, D), and so on for each token

    Inference only: nothing has a gradient. What was forgotten does not come back, so tokens cannot be taken
    out again, as speculative decoding would ask for.

    The host counts tokens. So under `torch.compile` a graph breaks at `append`, `attend` and `decode`: what
    is before and after them is compiled. A CUDA graph can't capture `append` and `decode`: they refuse it.

    Args:
        pattern: which blocks the heads see; its block size is that of a page.
        batch: how many sequences there are.
        head_dim: D of keys and values, a multiple of 8 up to 256.
        room: how many tokens a sequence may have. What a key head keeps of so many is allocated.
        dtype: of queries, keys and values: float16, bfloat16 or float32.
        device: PyTorch's default device where it is None.

    Attributes:
        tokens: how many each sequence has so far, those among them that are forgotten; ints on the host.
        whole: that all of them are there: no call failed half way, for want of memory, say. Else every call
            is an error.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value is out of its range.
    """

    def __init__(
        self, pattern: S2Pattern, batch: int, head_dim: int, room: int, dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        checks.check_new(pattern, batch, head_dim, room, dtype)
        self.pattern, self.batch, self.head_dim, self.room = pattern, batch, head_dim, room
        self.dtype, self.device = dtype, check_device(device)
        self.tokens, self.whole = [0] * batch, True
        heads = range(pattern.key_heads)
        most = [len(pattern.cached(room, head)) for head in heads]
        shape, rows = (batch * sum(most), 1, pattern.block_size, head_dim), batch * len(heads)
        with torch.inference_mode(False):  # or nothing could be written outside of the mode it is made in
            self._k, self._v = (torch.empty(shape, dtype=dtype, device=self.device) for _ in range(2))
            self._table = torch.zeros(rows, max(most), dtype=torch.int32, device=self.device)
            self._lengths = torch.zeros(rows, dtype=torch.int32, device=self.device)
            self._next = torch.zeros(rows, dtype=torch.int64, device=self.device)
            """Where the next token goes, as a row of all pages one after another. On the device, so that a
            token inside of a block needs nothing from the host."""
        self._free = list(range(shape[0]))[::-1]
        self._pages: list[list[int]] = [[] for _ in range(rows)]
        """Of each sequence and key head, in the order of its blocks."""

    def __repr__(self) -> str:
        return (
            f"S2Cache(tokens={self.tokens}, room={self.room}, pages={self.used} of {len(self._k)} in use, "
            f"bytes={self.bytes})"
        )

    # ------------------------------------------------------------ what is there

    @property
    def used(self) -> int:
        """Pages in use, of all sequences and key heads."""
        return len(self._k) - len(self._free)

    @property
    def bytes(self) -> int:
        """Of the pages in use, keys and values: `pattern.cache_bytes` of each sequence's tokens."""
        return self.used * self._page_bytes

    @property
    def full_bytes(self) -> int:
        """Of a cache that keeps all keys and values, in pages of the same size."""
        blocks = sum(-(-tokens // self.pattern.block_size) for tokens in self.tokens)
        return blocks * self.pattern.key_heads * self._page_bytes

    @property
    def allocated_bytes(self) -> int:
        """Of all pages. It never changes."""
        return len(self._k) * self._page_bytes

    @property
    def _page_bytes(self) -> int:
        return 2 * self.pattern.block_size * self.head_dim * self.dtype.itemsize

    @property
    def pages(self) -> KeptPages:
        """The cache as `attention_decode` takes it, each key head a sequence of its own: the tensors
        themselves, which the next `append` changes."""
        return KeptPages(self._k, self._v, self._lengths, self._table)

    # ------------------------------------------------------------ new tokens

    @between_graphs
    def append(self, k: torch.Tensor, v: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        """Take in the next tokens of all sequences: a prompt, or one token and more.

        Args:
            k, v: (batch, Hkv, n, D), n at least 1.
            counts: how many of the n tokens each sequence has, the first ones; ints on the host. All n where
                it is None. So prompts of different lengths are padded on the right.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: a shape, a device or a count does not fit, or there is no room.
            RuntimeError: a tensor requires grad, a CUDA graph is being captured, or an earlier call failed
                half way.
            NotImplementedError: it is called under `torch.jit.trace` or a transformation of torch.func.
        """
        self._take(k, v, checks.check_append(self, k, v, counts))

    def _take(self, k: torch.Tensor, v: torch.Tensor, counts: list[int]) -> None:
        self.whole = False  # memory may run out when tokens are counted and not yet there
        self._take_in(k, v, counts)
        self.whole = True

    @torch.no_grad()
    def _take_in(self, k: torch.Tensor, v: torch.Tensor, counts: list[int]) -> None:
        size, n = self.pattern.block_size, k.shape[2]
        used = [tokens % size for tokens in self.tokens]  # of the newest block; 0: the next token begins one
        if all(count == n <= size - there for count, there in zip(counts, used, strict=True)):
            self._next += n
            self._lengths += n
            if 0 in used:
                self._advance(counts, [there == 0 for there in used])  # overwrites those two where one begins
            else:
                self.tokens = [tokens + n for tokens in self.tokens]
            to = self._next - n if n == 1 else self._next[:, None] + torch.arange(-n, 0, device=self.device)
            new = k.flatten(0, 2), v.flatten(0, 2)
        elif any(counts):
            to, new = self._gathered(self._advance(counts, [count > 0 for count in counts]), k, v)
        else:
            return
        for cache, x in zip((self._k, self._v), new, strict=True):
            cache.view(-1, self.head_dim).index_copy_(0, to.flatten(), x)

    def _advance(self, counts: list[int], changed: list[bool]) -> list[Piece]:
        """Count the new tokens, and tell the device of the sequences that are `changed`: their pages, how
        many keys they have, where the next token goes. Returns the new tokens that are kept."""
        size, heads, width = self.pattern.block_size, self.pattern.key_heads, self._table.shape[1]
        places, entries, rows, lengths, ends, kept = [], [], [], [], [], []
        for sequence in range(self.batch):
            have, end = self.tokens[sequence], self.tokens[sequence] + counts[sequence]
            self.tokens[sequence] = end
            for row in range(sequence * heads, sequence * heads + heads) if changed[sequence] else ():
                first = self._turn(row, have, end, kept)
                pages = self._pages[row]
                places += range(row * width + first, row * width + len(pages))
                entries += pages[first:]
                rows.append(row)
                lengths.append(len(pages) * size - -end % size)
                ends.append(pages[-1] * size + (end - 1) % size + 1)
        places, entries, rows, lengths, ends = self._sent(places, entries, rows, lengths, ends)
        self._table.view(-1).index_copy_(0, places, entries.int())
        self._lengths.index_copy_(0, rows, lengths.int())
        self._next.index_copy_(0, rows, ends)
        return kept

    def _turn(self, row: int, have: int, end: int, kept: list[Piece]) -> int:
        """Give back the pages of one sequence and key head that are out of sight once there are `end` tokens,
        and take those of new blocks. Adds the new tokens that are kept to `kept`; returns from which page on
        the table has other ones now."""
        size, local, stride = self.pattern.block_size, self.pattern.local_blocks, self.pattern.stride
        head = row % self.pattern.key_heads
        dense, first = self.pattern.is_dense(head), self.pattern.first(head)
        before, after, pages = -(-have // size), -(-end // size), self._pages[row]
        oldest = max(0, before - local)  # of the near blocks, whose pages are the last ones
        settled = len(pages) - (before - oldest)
        near = pages[settled:]
        del pages[settled:]
        for block in range(oldest, after):
            page = near[block - oldest] if block < before else None
            if not (dense or block >= after - local or block % stride == first):
                if page is not None:
                    self._free.append(page)
                continue
            page = self._free.pop() if page is None else page
            pages.append(page)
            begin, until = max(have, block * size), min(end, block * size + size)
            if begin < until:
                kept.append(Piece(row, begin - have, page * size + begin % size, until - begin))
        return settled

    def _gathered(
        self, kept: list[Piece], k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Tokens of several blocks that are kept: where they go, and their keys and values."""
        row, begin, to, count = self._sent(*zip(*kept, strict=True))
        heads = self.pattern.key_heads
        token = torch.arange(self.pattern.block_size, device=self.device)
        token = torch.minimum(token, count[:, None] - 1)  # of a part of a block the last one is written again
        at = (row // heads)[:, None], (row % heads)[:, None], begin[:, None] + token
        return to[:, None] + token, (k[at].flatten(0, 1), v[at].flatten(0, 1))

    def _sent(self, *columns: Iterable[int]) -> Iterable[torch.Tensor]:
        """int64 tensors on the device, by one copy that nobody waits for: from pinned memory."""
        lists = [list(column) for column in columns]
        numbers = [number for column in lists for number in column]
        host = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True).split([len(column) for column in lists])

    # ------------------------------------------------------------ attention

    @between_graphs
    def attend(
        self, q: torch.Tensor, *, sm_scale: float | None = None, return_lse: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the newest tokens, which are in the cache already, as `attention_decode` computes it.

        Args:
            q: (batch, H, n, D), n from 1 to 16: the last n tokens of each sequence, all of its newest block.
            sm_scale, return_lse: as in `attention_decode`.

        Returns:
            out (batch, H, n, D), or (out, lse) with lse (batch, H, n) in float32.

        Raises:
            TypeError, ValueError, RuntimeError: as `append`; or queries of an older block.
        """
        checks.check_attend(self, q)
        return self._attend(q, sm_scale, return_lse)

    def _attend(self, q: torch.Tensor, sm_scale: float | None, return_lse: bool):
        B, H, n, D = q.shape
        rows = self.batch * self.pattern.key_heads
        found = attention_decode(
            q.reshape(rows, B * H // rows, n, D), self._k, self._v, lengths=self._lengths,
            page_table=self._table, sm_scale=sm_scale, return_lse=return_lse,
        )  # fmt: skip
        if return_lse:
            return found[0].reshape(q.shape), found[1].reshape(B, H, n)
        return found.reshape(q.shape)

    @between_graphs
    def decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sm_scale: float | None = None
    ) -> torch.Tensor:
        """Take in one new token of each sequence, or more, and return their attention, each under the
        pattern: `append` and `attend` by turns, so that a block is there until its last query has seen it.

        Args:
            q: (batch, H, n, D).
            k, v: (batch, Hkv, n, D), of the same tokens.
            sm_scale: as in `attention_decode`.

        Returns:
            (batch, H, n, D) in the dtype of the cache. Each block that begins, and each 16 tokens, are a call
            of `attention_decode`; for a prompt `attention` under `pattern.mask` is faster.

        Raises:
            TypeError, ValueError, RuntimeError: as `append`.
        """
        checks.check_decode(self, q, k, v, sm_scale)
        size, n, at, found = self.pattern.block_size, q.shape[2], 0, []
        while at < n:
            rest = min(size - tokens % size for tokens in self.tokens)
            now = slice(at, at + min(rest, n - at, checks.MOST_QUERIES))
            self._take(k[:, :, now], v[:, :, now], [now.stop - at] * self.batch)
            found.append(self._attend(q[:, :, now], sm_scale, False))
            at = now.stop
        return found[0] if len(found) == 1 else torch.cat(found, 2)
