"""Launch configurations of the Hopper backward kernel: a frozen dataclass, chosen by a pure function."""

from dataclasses import dataclass, field, replace

from attnlib.kernels.common import l2_sections
from attnlib.kernels.common.l2_sections import Heads, Sections
from attnlib.kernels.common.tiles import tile_width
from attnlib.kernels.hopper.configs import smallest_split, width_of_parts

WIDTHS = "query_columns", "value_columns"


@dataclass(frozen=True)
class HopperBackwardConfig:
    """How a Hopper backward kernel is compiled: that of `backward_kernel`, beyond 128 columns of
    `backward_wide_kernel`, or (`Keys96BackwardConfig`) of `backward_keys96_kernel`.

    Attributes:
        block_m: queries of one step, 64 or 128.
        block_n: keys of a program; 128, in the wide kernel 64, in `backward_keys96_kernel` 96.
        half_p: dS from P as it was rounded for dV; its registers are free earlier.
        deterministic: the sums of dQ are added up in a fixed order.
        stagger: clocks by which the second consumer begins later, where no diagonal ends the keys of a query.
        masked_stagger: where one does, or a window.
        visited: query heads of a group that a program visits, a divisor of the group; None: chosen by
            `sharing.query_heads`.
        added: programs that share a key head add to one sum of its dK and dV; else each has sums of its own.
        alternate: the two consumers start their products in turns, kept by barriers, instead of later. Not
            beyond 128 columns, where warpgroups do different things.
        bulk: dQ goes to memory through shared memory, see `backward_bulk`.
        persistent: a program stays on its SM and draws one tile after the other, see `backward_persistent`;
            not where sums of varlen sequences have an order.
        early_mask: P is masked before its exponentials, not after.
        pause_every: a warpgroup that adds dQ from its registers pauses after so many additions of each
            thread, see `backward_ring.add_sums`; 0: never. Not with `bulk`.
        tail_apart: without a mask a consumer whose keys all exist has code of its own, in which no step looks
            for keys behind the last one. Up to 128 columns.
        rotated: where every query sees every key, a program that visits one query head begins with the block
            of queries beside its keys, and goes round. Up to 128 columns; not where sums have an order.
        consumer_registers, dq_registers, producer_registers: of a thread, after the program has shared them
            out anew. Only beyond 128 columns is there a warpgroup for dQ.
        max_registers: of a thread when the program starts.
        l2_bytes: what the heads that advance together read and add to should fit in here.
        crowding: the last of these sections has more heads where that ends the launch earlier, see
            `l2_sections.balanced`; None: it is like the others.
        whole_groups: that of all query heads of a group counts, not that of one. Programs visit one after the
            other, but short ones are soon heads ahead of long ones.
    """

    block_m: int
    block_n: int = 128
    half_p: bool = False
    stagger: int = 0
    consumer_registers: int = 240
    dq_registers: int = 0
    producer_registers: int = 24
    max_registers: int = 168
    l2_bytes: int = 16 << 20
    crowding: float | None = None
    whole_groups: bool = False
    deterministic: bool = False
    alternate: bool = False
    bulk: bool = False
    early_mask: bool = False
    pause_every: int = 0
    tail_apart: bool = False
    rotated: bool = False
    masked_stagger: int = 0
    persistent: bool = False
    visited: int | None = None
    added: bool = True

    columns = ()
    """Of each part of a tile, where it has parts."""

    def __post_init__(self) -> None:
        for option in ("alternate", "bulk", "persistent", "tail_apart", "rotated"):
            if getattr(self, option) and self.block_n != 128:
                raise ValueError(f"{option}: expected False with block_n={self.block_n}, got True")
        if self.deterministic and self.visited is not None and self.added:
            raise ValueError(
                f"added: expected False with deterministic=True and visited={self.visited}, got True"
            )
        if self.pause_every and self.bulk:
            raise ValueError(f"pause_every: expected 0 with bulk=True, got {self.pause_every}")

    def width(self, head_dim: int) -> int:
        """Columns of a tile for a head dimension, in all its parts."""
        return tile_width(head_dim)

    def value_width(self, head_dim: int) -> int:
        """The same for values."""
        return self.width(head_dim)

    def widths(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Columns of a tile of queries and of values for a call, which may have fewer of either: copies fill
        the rest with zeros. ValueError if it has more."""
        widest = max(head_dim, value_dim)
        found = self.width(widest), self.value_width(widest)
        for name, wanted, columns in zip(WIDTHS, (head_dim, value_dim), found, strict=True):
            if wanted > columns:
                raise ValueError(f"{name}: expected {wanted} or more, got {columns}")
        return found

    def sums_widths(self, head_dim: int) -> tuple[int, int]:
        """Columns of the sums of dK and of dV in memory, where programs share a key head."""
        return self.width(head_dim), self.value_width(head_dim)

    def sections(self, heads: Heads) -> Sections:
        """The key heads that advance together, but of varlen sequences."""
        if self.crowding is None:
            return Sections(heads.together(self.l2_bytes))
        return l2_sections.balanced(heads, self.l2_bytes, self.crowding)


@dataclass(frozen=True)
class SplitBackwardConfig(HopperBackwardConfig):
    """The same for a head dimension that is no power of two, whose columns are computed in two parts.

    Attributes:
        columns: of the first and of the second part, powers of two.
        held: parts of K and of V that stay in registers, for the products S and dP.
    """

    columns: tuple[int, int] = field(kw_only=True)
    held: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deterministic and self.both_add:
            raise ValueError(f"deterministic: expected False with columns={self.columns}, got True")

    @property
    def both_add(self) -> bool:
        """Both consumers add to the same elements of dQ, in no order: the part has too few columns for
        halves."""
        return self.columns[1] == 16 and self.block_m == 64

    def width(self, head_dim: int) -> int:
        return width_of_parts(self.columns, head_dim)

    def widths(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        self.width(min(head_dim, value_dim))  # the second part begins within all tensors
        return super().widths(head_dim, value_dim)


@dataclass(frozen=True)
class OwnValuesBackwardConfig(HopperBackwardConfig):
    """The same for values with other columns than queries and keys: with 128 keys a program 128 beside 64 or
    64 beside 128, with 64 keys, in the wide kernel, 256 beside 64 or 128.

    Attributes:
        query_columns: of a tile of queries and keys.
        value_columns: of a tile of values.
    """

    query_columns: int = field(kw_only=True)
    value_columns: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        columns, few = (self.query_columns, self.value_columns), self.block_n == 64
        if columns not in (((64, 256), (128, 256)) if few else ((64, 128), (128, 64))):
            both = "64 or 128 and 256" if few else "64 and 128 or 128 and 64"
            raise ValueError(f"query_columns, value_columns: expected {both}, got {columns}")
        if self.block_m != 64:  # no registers
            raise ValueError(
                f"block_m: expected 64 with value_columns={self.value_columns}, got {self.block_m}"
            )
        if self.bulk and self.persistent and self.query_columns == 128:
            raise ValueError("bulk: expected False with persistent=True and query_columns=128, got True")

    def width(self, head_dim: int) -> int:
        return self.query_columns

    def value_width(self, head_dim: int) -> int:
        return self.value_columns


@dataclass(frozen=True)
class Keys96BackwardConfig(HopperBackwardConfig):
    """The same for `backward_keys96_kernel`, 96 keys a program of 129 to 192 columns in parts of 64.

    Attributes:
        query_columns: of a tile of queries and keys, 192 or, where a call's are no more, 160.
        value_columns: of a tile of values, as many or, where a call's are no more, 128.
    """

    block_n: int = 96
    query_columns: int = field(default=192, kw_only=True)
    value_columns: int = field(default=192, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query_columns not in (160, 192):
            raise ValueError(f"query_columns: expected 160 or 192, got {self.query_columns}")
        if self.value_columns not in (128, self.query_columns):
            raise ValueError(f"value_columns: expected 128 or {self.query_columns}, got {self.value_columns}")

    def width(self, head_dim: int) -> int:
        if not 128 < head_dim <= self.query_columns:
            raise ValueError(
                f"head_dim: expected 129 to {self.query_columns} with block_n=96, got {head_dim}"
            )
        return self.query_columns

    def value_width(self, head_dim: int) -> int:
        return self.value_columns

    def sums_widths(self, head_dim: int) -> tuple[int, int]:
        return 192, -(-self.value_columns // 64) * 64  # whole parts


_CHOSEN = {
    64: HopperBackwardConfig(128, half_p=True, stagger=1200),
    128: HopperBackwardConfig(64),
    256: HopperBackwardConfig(
        64, block_n=64, consumer_registers=192, dq_registers=96, max_registers=128, whole_groups=True,
        pause_every=1,
    ),
}
# As many parts of K and V in registers as there is room for (docs/lab/hopper-backward.md has the budget).
SPLIT = {
    80: SplitBackwardConfig(64, columns=(64, 16), held=2),
    96: SplitBackwardConfig(64, columns=(64, 32), held=1),
}
"""Width of a tile in two parts -> its configuration. A head dimension takes the smallest of these widths, and
of `KEYS_96_WIDTHS`, that holds it and is below the next power of two, else that power. So a line here turns a
width on, and nothing else does."""
KEYS_96_WIDTHS = 160, 192
"""Widths of a tile in parts of 64 columns, with 96 keys a program."""


@dataclass(frozen=True)
class BackwardKind:
    """What decides about a configuration beside columns and whether sums have an order.

    Attributes:
        masked: a diagonal or a window hides keys.
        left_bound: it is a window with a left bound.
        varlen: sequences have lengths of their own.
        alone: no query heads share a key head.
        short: sequences of a batch have fewer than `SHORT_KEYS` keys, or `SHORT_SHARED_KEYS` if heads share.
        long: they have `LONG_ROWS` queries or more.
        tail: keys of a batch end within a block of 128.
        float16: numbers are float16, not bfloat16.
    """

    masked: bool = False
    left_bound: bool = False
    varlen: bool = False
    alone: bool = True
    short: bool = False
    long: bool = False
    tail: bool = False
    float16: bool = False


DENSE = BackwardKind()
KEYS_96 = Keys96BackwardConfig(
    64, consumer_registers=160, dq_registers=168, max_registers=128, pause_every=2
)
"""Of 129 to 192 columns, 96 keys a program. Calls get `keys96_config` of it."""
SHORT_KEYS, SHORT_SHARED_KEYS = 2048, 1024
SHORT_BYTES, KEYS_96_BYTES, GROUPS_BYTES, DENSE_BYTES = 8 << 20, 24 << 20, 40 << 20, 8 << 20
"""`l2_bytes` of batches. Under a diagonal beyond 128 columns: of short sequences with 96 keys a program, and
of heads without a group with 64; of other sequences with 96; of groups with 64, four fifths of the L2. The
last: without a mask, but with 64 keys a program; of varlen sequences only with 128."""
CROWDING, GROUPS_CROWDING = 0.0024, 0.0008
"""`crowding` under a mask; the second beyond 128 columns where query heads share key heads. With both the
chosen orders were the fastest of those that were timed, or nearly (docs/lab/hopper-backward.md)."""
ORDER_BYTES, DENSE_ORDER_BYTES = 16 << 20, 40 << 20
"""`l2_bytes` beyond 128 columns where sums have an order: the first under a mask and of varlen sequences, the
second of batches without a mask."""


def _crowding(config: HopperBackwardConfig, kind: BackwardKind) -> float | None:
    """None where the last section is like the others."""
    if not kind.masked or kind.varlen:
        return None
    return CROWDING if kind.alone or config.block_n == 128 else GROUPS_CROWDING


def _l2_bytes(config: HopperBackwardConfig, kind: BackwardKind) -> int:
    """`l2_bytes` where sums have no order."""
    if kind.left_bound or (kind.varlen and (kind.masked or config.block_n != 128)):
        return config.l2_bytes
    if not kind.masked:
        return config.l2_bytes if config.block_n == 64 else DENSE_BYTES
    if config.block_n == 64:
        return SHORT_BYTES if kind.alone else GROUPS_BYTES
    if config.block_n == 96:
        return SHORT_BYTES if kind.short else KEYS_96_BYTES
    return config.l2_bytes


def _in_sections(config: HopperBackwardConfig, kind: BackwardKind) -> HopperBackwardConfig:
    """With the sections of heads where sums have no order."""
    return replace(config, l2_bytes=_l2_bytes(config, kind), crowding=_crowding(config, kind))


def keys96_config(
    kind: BackwardKind = DENSE, columns: int = 192, value_columns: int | None = None
) -> Keys96BackwardConfig:
    """What is fastest on an H200 (docs/lab/hopper-backward.md). columns, value_columns: of a tile, None for
    as many."""
    values = columns if value_columns is None else value_columns
    shared = not kind.alone and not kind.left_bound  # under a window groups take the pauses of other heads
    config = replace(KEYS_96, query_columns=columns, value_columns=values)
    if values < columns or kind.varlen:
        return replace(config, early_mask=kind.masked and values < columns)
    if shared or not kind.masked:
        return replace(config, pause_every=4)
    return replace(config, early_mask=True, pause_every=3) if columns == 192 else config


def _in_order(wide: HopperBackwardConfig, kind: BackwardKind) -> HopperBackwardConfig:
    """A configuration beyond 128 columns for sums in an order (docs/lab/hopper-backward.md). Programs of a
    head wait for each other, so sections of heads have a size of their own. With 96 keys a program pauses
    gain under a mask and lose without one."""
    changes = {"l2_bytes": ORDER_BYTES if kind.masked or kind.varlen else DENSE_ORDER_BYTES}
    if isinstance(wide, Keys96BackwardConfig):
        changes["pause_every"] = 4 if kind.masked else 0
        changes["early_mask"] = kind.masked and wide.value_columns < wide.query_columns
    return replace(wide, deterministic=True, crowding=_crowding_in_order(wide, kind), **changes)


def _crowding_in_order(config: HopperBackwardConfig, kind: BackwardKind) -> float | None:
    return None if kind.left_bound else _crowding(config, kind)


_IN_TURNS = {"alternate": True}
_IN_TURNS_WHOLE = {"alternate": True, "bulk": True, "half_p": False}
_IN_TURNS_64 = _IN_TURNS_WHOLE | {"early_mask": True}
_IN_TURNS_96 = {"alternate": True, "early_mask": True}
_ROTATED = {"rotated": True}
_STAYS = {
    64: ({"bulk": True}, _IN_TURNS_64),
    80: (_IN_TURNS | _ROTATED, _IN_TURNS),
    96: ({}, _IN_TURNS),
    128: (_IN_TURNS | _ROTATED | {"pause_every": 8}, _IN_TURNS | {"pause_every": 4}),
}
"""Width of a tile -> what changes where programs stay on their SM: without a mask, with one. Consumers of
such programs drift apart, and those that alternate stay half a step apart. Found by measurement on an H100
(docs/lab/hopper-backward.md), as all that follows but what says otherwise; the pause without a mask, and what
is rotated, on an H200."""
_STAYS_FLOAT16 = {"alternate": True, "bulk": True}
"""The same of float16 in 64 columns without a mask, whose P takes fewer instructions to unpack."""
_TAILS = {96: _IN_TURNS | _ROTATED | {"tail_apart": True}, 128: {"pause_every": 0}}
"""What changes besides without a mask, where keys end within a block; found on an H200."""
_VARLEN_STAYS = {
    64: (_IN_TURNS_WHOLE | _ROTATED | {"tail_apart": True}, _IN_TURNS_64),
    80: (_ROTATED, _IN_TURNS),
    96: ({}, _IN_TURNS),
    128: (_IN_TURNS | _ROTATED, _IN_TURNS | {"pause_every": 4}),
}
"""Of varlen sequences what `_STAYS` has of batches, found on an H200."""
_IN_ORDER = {64: (_IN_TURNS_WHOLE, _IN_TURNS_64), 96: (_IN_TURNS, _IN_TURNS_96)}
"""The same where sums have an order, in programs of one tile; found on an H200."""
_IN_ORDER_STAYS = {64: (None, _IN_TURNS_64), 96: (None, _IN_TURNS_96), 128: (_IN_TURNS, _STAYS[128][1])}
"""And in programs that stay; None: those of one tile are as fast, but see `_stays_in_order`. At D = 128
without a mask programs stay at all lengths: they take 1.018 times a call without an order at 4096 tokens,
those of one tile 1.046, and at 16384 tokens 1.013 and 1.006."""
LONG_ROWS = 16384
_LONG_ONE_TILE, _LONG_STAYS = {128: _ROTATED | {"stagger": 1200}}, {96: _ROTATED}
"""What changes from so many rows on without a mask, where sums of batches have no order: of these widths
programs have one tile, or stay."""


def _stays_in_order(width: int, kind: BackwardKind) -> dict | None:
    """What changes in programs that stay, whose sums have an order; None where they have one tile. With 64
    columns and no mask they stay in float16 and in short sequences: time over a call without an order 1.03
    for 1.16 at 1024 tokens, and in float16 1.03 for 1.07 at 4096."""
    if width == 64 and not kind.masked and (kind.float16 or kind.short):
        return _STAYS_FLOAT16 if kind.float16 else _STAYS[64][0]
    return _IN_ORDER_STAYS.get(width, (None, None))[kind.masked]


def backward_config(
    head_dim: int,
    value_dim: int,
    deterministic: bool = False,
    kind: BackwardKind = DENSE,
    stays: bool = False,
) -> HopperBackwardConfig:
    """The configuration of a call with values of `value_dim` columns. Where they differ from those of queries
    and no kernel has both widths, it is that of the wider one. Other arguments as of
    `hopper_backward_config`."""
    if 128 < head_dim <= 192 and value_dim <= 128:
        config = keys96_config(kind, value_columns=128)
        return _in_order(config, kind) if deterministic else _in_sections(config, kind)
    widths = tile_width(head_dim), tile_width(value_dim)
    wide = widths == (64, 256) or (widths == (128, 256) and value_dim > 192)
    if not wide and {*widths} != {64, 128}:
        return hopper_backward_config(max(head_dim, value_dim), deterministic, stays, kind)
    # All else as the wider one has it, but for masks: of eight forms of 64/128 none was faster.
    config = hopper_backward_config(max(widths), deterministic, stays, kind)
    if wide and not deterministic and kind.masked and kind.float16 and kind.alone and not kind.varlen:
        # 2 to 6% faster; slower in bfloat16 and of groups (64/256, and causal 128/256).
        config = replace(config, early_mask=True)
    columns = dict(zip(WIDTHS, widths, strict=True))
    return OwnValuesBackwardConfig(**vars(config), **columns)


def hopper_backward_config(
    head_dim: int,
    deterministic: bool = False,
    stays: bool = False,
    kind: BackwardKind = DENSE,
) -> HopperBackwardConfig:
    """The configuration of the Hopper backward kernel for one call.

    Args:
        head_dim: D, 1 to 256.
        deterministic: gradients have the same bits in every run.
        stays: programs may stay on their SM: up to 128 columns, but not where sums of varlen sequences have
            an order. Of grouped heads see `sharing.staying`, and where sums have an order `sharing.in_order`.
        kind: whose keys are hidden or not, and how its sequences lie.

    Raises:
        ValueError: `head_dim` out of range.
    """
    width = tile_width(head_dim)
    if head_dim < 1 or width not in _CHOSEN:
        raise ValueError(f"head_dim: expected 1 to {max(_CHOSEN)}, got {head_dim}")
    splits = [width for width, config in SPLIT.items() if not (deterministic and config.both_add)]
    split = smallest_split((*splits, *KEYS_96_WIDTHS), head_dim)
    if width > 128:
        wide = _CHOSEN[width] if split is None else keys96_config(kind, split)
        return _in_order(wide, kind) if deterministic else _in_sections(wide, kind)
    chosen = _CHOSEN[width] if split is None else SPLIT[split]
    if deterministic:
        changes = _IN_ORDER.get(split or width, ({}, {}))[kind.masked]
        staying = _stays_in_order(split or width, kind)
        if stays and not kind.varlen and staying is not None:
            changes = staying | {"persistent": True}
        return replace(chosen, deterministic=True, crowding=_crowding_in_order(chosen, kind), **changes)
    chosen = _in_sections(chosen, kind)
    if not stays:
        return chosen
    long = kind.long and not kind.masked and not kind.varlen
    if long and (split or width) in _LONG_ONE_TILE:
        return replace(chosen, **_LONG_ONE_TILE[split or width])
    changes = (_VARLEN_STAYS if kind.varlen else _STAYS)[split or width][kind.masked]
    if kind.tail and not kind.masked:
        changes = changes | _TAILS.get(split or width, {})
    if long:
        changes = changes | _LONG_STAYS.get(split or width, {})
    if width == 64 and kind.float16 and not kind.masked:
        changes = _STAYS_FLOAT16
    return replace(chosen, persistent=True, **changes)
