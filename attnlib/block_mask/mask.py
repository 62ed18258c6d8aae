"""`BlockMask`: which queries see which keys, for `attention(..., block_mask=)`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import torch

from attnlib.arguments import masks as checks
from attnlib.arguments.common import check_int
from attnlib.block_mask import tiles as tiling
from attnlib.block_mask.chosen import SLOTS, Chosen
from attnlib.block_mask.functions import seen_by_function, seen_by_tensor, tells_apart
from attnlib.block_mask.gathered import MOST_KEYS, gathered_tiles, units_of_tiles
from attnlib.block_mask.lists import Lists, last_first, leading, lists_of, marked
from attnlib.block_mask.tiles import ABSENT, FULL, PARTIAL, TILE, UNIT, Grid, Tiles
from attnlib.block_mask.transforms import outside_transforms, unwrapped
from attnlib.params import MaskWindow

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""mask(b, h, q, k), integers as tensors without dimensions -> a bool tensor without dimensions: whether query
q sees key k. What `torch.nn.attention.flex_attention.create_block_mask` takes."""

_handles = count()
_living: weakref.WeakValueDictionary[int, BlockMask] = weakref.WeakValueDictionary()


def is_short(steps: float, fine: float, bits: bool) -> bool:
    """Whether rows have so few steps that at D = 128 steps of 64 keys, with two buffers for queries, are
    faster than steps of 128. A step of 64 costs more than half of one of 128; but a tile begins and ends
    sooner with it, and less may be hidden in it. Where one overtakes the other was measured
    (docs/lab/sparse.md).

    steps, fine: of 128 keys, and of 64 as halves of such a step, that a block of 128 queries has on average.
    bits: whether some step carries bits.
    """
    if not bits:
        return steps <= 12
    return steps <= 5.5 or 1.025 * fine < steps <= 10


class _kept(cached_property):
    """A cached_property of tensors, without those that are made under capture."""

    def _keeps(self, device: torch.device) -> bool:
        return not tiling.under_capture(device)

    def __get__(self, instance, owner=None):
        found = super().__get__(instance, owner)
        if instance is not None and not self._keeps(instance.device):
            del instance.__dict__[self.attrname]
        return found


class _settled(_kept):
    """The same, whose tensors are there for all streams."""

    def _keeps(self, device: torch.device) -> bool:
        return tiling.settled(device)


class Form(NamedTuple):
    """What launches depend on of a mask: B and H, 1 where all share one, its slots of words, whether any step
    of any list needs bits, or of a list of rows; whether steps of 128 keys cover not much more than those of
    64, for 128 queries; whether rows have few steps, see `is_short`; the form of `BlockMask.gathered`, None
    where there is none; and how many tiles of 128 keys of a head are long, see `lists.leading`."""

    B: int
    H: int
    slots: int
    partial: bool
    partial_rows: bool
    coarse: bool
    short: bool = False
    gathered: Form | None = None
    leading: int = 0


class BlockMask:
    """Which queries see which keys, as blocks that are full, absent or partial.

    A block that is absent costs nothing, a full one needs no mask, and a partial one carries a bit for each
    element. Made once, on the device of the mask, and kept for all layers and steps that use it: making one
    waits for the GPU, but for `from_chosen`. Positions are as they are: query i and key j are element (i, j),
    whatever the lengths.

        mask = BlockMask.from_function(lambda b, h, q, k: q >= k, 4096, 4096, device="cuda")
        out = attnlib.attention(q, k, v, block_mask=mask)

    `from_blocks`, `from_chosen`, `from_csr`, `from_function`, `from_mask` and `from_torch` make one. A mask
    does not change after that.

    Attributes:
        shape: (B, H, S_q, S_k); B and H are 1 where all batch elements, or heads, share one mask. H counts
            query heads.
        device: of its tensors, which has to be that of the queries.
    """

    def __init__(
        self, tiles: Tiles | None, grid: Grid, chosen: Chosen | None = None, order: torch.Tensor | None = None
    ) -> None:
        """For the functions that make one, and `within`. The tiles, or the choice that they follow from.
        order: int64 (H, units across), in which kernels may take units of 64 keys, see `gathered`."""
        self._grid, self._chosen, self._order = grid, chosen, order
        if tiles is not None:
            self._tiles = Tiles(*map(unwrapped, tiles))
            tiling.settled(grid.device)
        self._lists: dict[tuple[int, bool, int], Lists] = {}
        self._within: dict[MaskWindow, BlockMask] = {}
        self.shape, self.device = tuple(grid[:4]), grid.device
        self.alone = False, False
        """Whether the batch element, or the head, is one that others can't share, see `from_torch`."""
        self._register()

    def _register(self) -> None:
        """A number by which the operators of PyTorch find this very mask, in this process."""
        self.handle = next(_handles)
        _living[self.handle] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or one from another process, has a number of its own."""
        self.__dict__.update(state)
        self._register()

    # ------------------------------------------------------------ making one

    @classmethod
    def from_blocks(
        cls, blocks: torch.Tensor, seqlen_q: int, seqlen_k: int, *, block_size: int | tuple[int, int] = 128
    ) -> BlockMask:
        """From a bool tensor (B, H, blocks of queries, blocks of keys), without B and H for one mask for all.

        blocks: True where a block is seen. block_size: rows and columns of a block, multiples of 64.

        Raises:
            TypeError, ValueError: an argument has the wrong type, dtype or shape, or is out of its range.
        """
        size = checks.check_block_size(block_size)
        blocks = checks.check_blocks(blocks, seqlen_q, seqlen_k, size)
        kinds = blocks.to(torch.int8) * FULL
        return cls._of_kinds(kinds, None, size, _grid_of(blocks, seqlen_q, seqlen_k))

    @classmethod
    def from_chosen(
        cls, blocks: torch.Tensor, seqlen: int, *, block_size: int = 128, density: float | None = None
    ) -> BlockMask:
        """The causal mask of a sequence with itself that sees the chosen blocks, bool (B, H, n, n) or (n, n):
        always those on the diagonal, never those above it.

        Nothing waits for the GPU, so use the mask on the stream that made it, or let that stream wait. CUDA
        graphs can capture all of it; so a choice may be made anew for each call,
        as by a gate. `blocks` must not change afterwards. block_size: 64 or 128. A kernel's tile has 128
        rows, and with blocks of 64 computes what either half of them sees. density: of the blocks on and
        below the diagonal the part that is chosen, about, if the caller knows it. Kernels for few blocks a
        row are configured by it; no result depends on it.

        Raises:
            TypeError, ValueError: as `from_blocks`.
        """
        checks.check_chosen_size(block_size)
        check_int("seqlen", seqlen, 1)
        if density is not None:
            checks.check_density(density)
        blocks = checks.check_blocks(blocks, seqlen, seqlen, (block_size, block_size))
        return cls(None, _grid_of(blocks, seqlen, seqlen), Chosen(blocks, seqlen, block_size, density))

    @classmethod
    def from_csr(
        cls,
        starts: torch.Tensor,
        indices: torch.Tensor,
        seqlen_q: int,
        seqlen_k: int,
        *,
        block_size: int | tuple[int, int] = 128,
    ) -> BlockMask:
        """From lists of blocks: row i of blocks sees those of indices[starts[i]] .. indices[starts[i+1] - 1].

        starts: int32 or int64 (B, H, blocks of queries + 1), or without B and H. indices: (n), the lists of
        all rows of all heads, each in ascending order.

        Raises:
            TypeError, ValueError: as `from_blocks`; and ValueError for tensors on two devices, and for a list
                that is not in order, or names a block twice or one that is not there.
        """
        size = checks.check_block_size(block_size)
        blocks = checks.check_csr(starts, indices, seqlen_q, seqlen_k, size)
        kinds = blocks.to(torch.int8) * FULL
        return cls._of_kinds(kinds, None, size, _grid_of(blocks, seqlen_q, seqlen_k))

    @classmethod
    def from_function(
        cls,
        function: MaskFunction,
        seqlen_q: int,
        seqlen_k: int,
        *,
        B: int | None = None,
        H: int | None = None,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """From a function of torch, mask(b, h, q, k) -> bool, as FlexAttention takes it.

        It is vmapped, and called for pieces of the mask: no memory grows with seqlen_q * seqlen_k but that of
        the bits of partial blocks, an eighth of a byte for each of their elements. B, H: None where the mask
        is the same for all batch elements or heads.

        Raises:
            TypeError: an argument has the wrong type, or the function gives no bool tensor.
            ValueError: a number is below 1, or the function gives a tensor with dimensions.
            RuntimeError: PyTorch knows no such device.
        """
        checks.check_function(function)
        shape = checks.check_lengths(seqlen_q, seqlen_k), checks.check_shared(B, H)
        grid = Grid(*shape[1], *shape[0], checks.check_device(device))
        kinds = torch.full(grid.units, PARTIAL, dtype=torch.int8, device=grid.device)
        return cls(tiling.build(kinds, seen_by_function(function), grid), grid)

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> BlockMask:
        """From a bool tensor (B, H, S_q, S_k), or (S_q, S_k), True where a query sees a key. B and H of 1 are
        for all.

        Raises:
            TypeError, ValueError: it is no bool tensor, or not of these shapes, or empty.
        """
        mask = checks.check_mask(mask)
        grid = Grid(*mask.shape, mask.device)
        kinds = torch.full(grid.units, PARTIAL, dtype=torch.int8, device=grid.device)
        return cls(tiling.build(kinds, seen_by_tensor(mask), grid), grid)

    @classmethod
    def from_torch(
        cls,
        mask: torch.nn.attention.flex_attention.BlockMask,
        *,
        batch: int | None = None,
        heads: int | None = None,
    ) -> BlockMask:
        """From what `torch.nn.attention.flex_attention.create_block_mask` gives: its full blocks as they are,
        the others by its function. Its lists may have any order.

        batch, heads: of the calls it is for, where all batch elements, or all heads, share the lists of
        blocks and the function tells them apart; elsewhere they change nothing. Without them such a mask is
        for calls of one batch element, or of one head.

        Raises:
            TypeError: it is another object, or its function gives no bool tensor.
            ValueError: its blocks are no multiples of 64, or its lists name a block twice or one that is not
                there.
        """
        kinds, size = checks.check_torch_mask(mask)
        for name, given in (("batch", batch), ("heads", heads)):
            if given is not None:
                check_int(name, given, 1)
        apart = tells_apart(mask.mask_mod, kinds.device)
        own = [told and n == 1 for told, n in zip(apart, kinds.shape, strict=False)]
        sizes = [given or 1 if one else -1 for one, given in zip(own, (batch, heads), strict=True)]
        kinds = kinds.expand(*sizes, -1, -1)
        grid = _grid_of(kinds, *mask.seq_lengths)
        made = cls._of_kinds(kinds, seen_by_function(mask.mask_mod), size, grid)
        made.alone = own[0] and batch is None, own[1] and heads is None
        return made

    @classmethod
    def _of_kinds(cls, kinds: torch.Tensor, seen, size: tuple[int, int], grid: Grid) -> BlockMask:
        """From the kinds of blocks of any size that units divide."""
        kinds = kinds.repeat_interleave(size[0] // UNIT, 2).repeat_interleave(size[1] // UNIT, 3)
        _, _, down, across = grid.units
        rows = torch.arange(down, device=grid.device).clamp(max=-(-grid.S_q // UNIT) - 1)
        units = torch.zeros(grid.units, dtype=torch.int8, device=grid.device)
        present = -(-grid.S_k // UNIT)
        units[..., :present] = kinds[:, :, rows, :present]
        return cls(tiling.build(units, seen, grid), grid)

    def within(self, window: MaskWindow) -> BlockMask:
        """The part of it in a window of the keys, positions as in `attention(window=)`: at the bottom right.
        Kept with the mask, so that it is made once."""
        window = window.tightened(*self.shape[2:])
        if window == MaskWindow(None, None):
            return self
        if window not in self._within:
            self._within[window] = self._cut(window)
        return self._within[window]

    @outside_transforms
    def _cut(self, window: MaskWindow) -> BlockMask:
        grid = self._grid
        first_q, last_q = _ends(grid.units[2], grid.S_q, grid.device)
        first_k, last_k = _ends(grid.units[3], grid.S_k, grid.device)
        shift = grid.S_k - grid.S_q
        right = grid.S_k + grid.S_q if window.right is None else window.right
        left = grid.S_k + grid.S_q if window.left is None else window.left
        low, high = (x[:, None] + shift for x in (first_q, last_q))
        whole = (last_k <= low + right) & (first_k >= high - left)
        none = (first_k > high + right) | (last_k < low - left)
        kinds = self._tiles.kinds
        kinds = torch.where(none, ABSENT, torch.where(whole, kinds, kinds.clamp(max=PARTIAL)))

        def seen(b, h, queries, keys):
            offset = keys[:, None, :] - queries[:, :, None] - shift
            inside = (offset <= right) & (offset >= -left)
            return inside & self._elements(b, h, queries[:, 0] // TILE, keys[:, 0] // TILE)

        return BlockMask(tiling.build(kinds.to(torch.int8), seen, grid), grid, order=self._order)

    # ------------------------------------------------------------ what it holds

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, device={str(self.device)!r}, density={self.density():.3f})"

    def density(self, step: int = UNIT) -> float:
        """Which part of all 128 x `step` blocks up to the last key is not absent."""
        checks.check_chosen_size(step, "step")
        return self._part(step, -(-self.shape[3] // step))

    def _part(self, step: int, count: int | None = None) -> float:
        """The same of the first `count` blocks side by side, or of all that fill whole tiles."""
        some = self._tiles.kinds != ABSENT
        some = some.unflatten(3, (-1, step // UNIT)).unflatten(2, (-1, TILE // UNIT)).any(5).any(3)
        some = some[..., :count]
        return some.float().mean().item() if some.numel() else 0.0

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on another device."""
        device = torch.empty(0, device=device).device  # with its index
        if device == self.device:
            return self
        tiles = Tiles(*(x.to(device) for x in self._tiles))
        order = None if self._order is None else self._order.to(device)
        moved = BlockMask(tiles, self._grid._replace(device=device), order=order)
        moved.alone = self.alone
        return moved

    def to_dense(self) -> torch.Tensor:
        """Bool (B, H, S_q, S_k), for small masks."""
        B, H, S_q, S_k = self.shape
        down, across = self._grid.tiles
        numbers = (torch.arange(n, device=self.device) for n in (B, H, down, across))
        b, h, i, j = torch.cartesian_prod(*numbers).T
        dense = self._elements(b, h, i, j).view(B, H, down, across, TILE, TILE).transpose(3, 4)
        return dense.reshape(B, H, down * TILE, across * TILE)[:, :, :S_q, :S_k]

    def _elements(self, b, h, down, across) -> torch.Tensor:
        """Bool (n, 128, 128) of tiles."""
        slots = self._tiles.slots[b, h, down, across]
        found = tiling.unpack(self._tiles.words[slots.clamp(min=0)])
        full = self._tiles.kinds[b, h, 2 * down, 2 * across] == FULL
        return torch.where((slots < 0)[:, None, None], full[:, None, None], found)

    @_kept
    def _tiles(self) -> Tiles:
        return self._chosen.tiles()

    # ------------------------------------------------------------ for kernels

    @cached_property
    def form(self) -> Form:
        """What launches depend on."""
        if self._chosen is not None:
            coarse, steps = self._chosen.coarse, self._chosen.steps
            short = is_short(steps, steps if coarse else steps / 2, True)
            return Form(*self.shape[:2], SLOTS, True, True, coarse, short)
        absent = tiling.by_tile(self._tiles.kinds == ABSENT).all(5).all(4)  # (B, H, tiles down, across)
        # A row, or a column, takes a step in any case, and may see nothing of it.
        empty = torch.stack([absent.all(3).any(), absent.all(2).any()]).tolist()
        bits = len(self._tiles.words) > 1
        partial = bits or any(empty), bits or empty[0]
        steps, fine = (self._part(size) * self._grid.tiles[1] for size in (TILE, UNIT))
        coarse, short = steps <= 1.1 * fine, is_short(steps, fine, partial[1])
        ahead = leading(self._tiles)
        gathered = None if self.gathered is None else self.gathered.form
        return Form(*self.shape[:2], len(self._tiles.words), *partial, coarse, short, gathered, ahead)

    @cached_property
    def gathered(self) -> GatheredMask | None:
        """The same with the keys in another order, if the mask knows one that leaves fewer tiles."""
        if self._order is None or self.shape[3] > MOST_KEYS:
            return None
        found = GatheredMask(gathered_tiles(self._tiles, self._order), self._grid, self._order)
        return found if found.density(TILE) < self.density(TILE) else None

    def lists(self, step: int, columns: bool = False, rows: int = TILE) -> Lists:
        """Of 128 queries, or 64, along keys in steps of 64 or 128, or with `columns` of keys along
        queries."""
        key = step, columns, rows
        found = self._lists.get(key)
        if found is None:
            found = self._made_lists(*key)
            waits = self._chosen is None
            if tiling.settled(self.device) if waits else not tiling.under_capture(self.device):
                self._lists[key] = found
        return found

    @property
    def marked_lists(self) -> Lists:
        """Of 128 queries along keys in steps of 64, see `lists.marked`; those of chosen blocks have no
        marks."""
        return self._marked if self._chosen is None else self.lists(UNIT)

    @_settled
    def _marked(self) -> Lists:
        return marked(self.lists(UNIT), self._tiles.kinds)

    def _made_lists(self, step: int, columns: bool, rows: int) -> Lists:
        found = None
        if self._chosen is not None and not columns and rows == TILE:
            found = self._chosen.lists(step)
        return lists_of(self._tiles, step, columns, rows) if found is None else found

    @property
    def tiles(self) -> Tiles:
        """The kinds of units, and where the words of a tile are."""
        return self._tiles

    @property
    def words(self) -> torch.Tensor:
        """int32 (slots, 128, 4); see `tiles`."""
        return self._tiles.words if self._chosen is None else self._chosen.words

    @_settled
    def words_of_columns(self) -> torch.Tensor:
        """The same of the transposed tiles."""
        return tiling.transposed(self._tiles.words)

    def words_of(self, step: int, columns: bool = False) -> torch.Tensor:
        """The words of steps of 64 or 128: those of tiles, or of each its left and its right half."""
        if step == TILE:
            return self.words_of_columns if columns else self.words
        if columns:
            return self._halves_of_columns
        return self._halves if self._chosen is None else self._chosen.halves

    @_settled
    def _halves(self) -> torch.Tensor:
        return tiling.halves(self.words)

    @_settled
    def _halves_of_columns(self) -> torch.Tensor:
        return tiling.halves(self.words_of_columns)

    @_settled
    def short_words_of_columns(self) -> torch.Tensor:
        """`words_of` steps of 64 queries as int16, for a kernel that has no room for more."""
        return self._halves_of_columns.to(torch.int16)


class GatheredMask(BlockMask):
    """See `block_mask.gathered`. For a kernel alone that walks along columns, which are not in the order of
    the keys.

    Attributes:
        units: int32 (B, H, tiles across), of a tile's keys, as `units_of_tiles` packs them.
    """

    def __init__(self, tiles: Tiles, grid: Grid, order: torch.Tensor) -> None:
        super().__init__(tiles, grid)
        self.units = units_of_tiles(order).expand(grid.B, -1, -1).contiguous()

    def _made_lists(self, step: int, columns: bool, rows: int) -> Lists:
        """Of keys along queries, the last queries first."""
        return last_first(super()._made_lists(step, columns, rows))


def by_handle(handle: int) -> BlockMask:
    """The living mask with this `handle`: operators of PyTorch take numbers and tensors only. ValueError if
    there is none."""
    found = _living.get(handle)
    if found is None:
        raise ValueError(
            f"block_mask: expected a mask that is alive, got number {handle}, which is not; keep it until "
            "the backward pass has run"
        )
    return found


def _ends(units: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last element of each unit."""
    first = torch.arange(units, device=device) * UNIT
    return first.clamp(max=length - 1), (first + UNIT - 1).clamp(max=length - 1)


def _grid_of(kinds: torch.Tensor, seqlen_q: int, seqlen_k: int) -> Grid:
    return Grid(kinds.shape[0], kinds.shape[1], seqlen_q, seqlen_k, kinds.device)
