"""Configurations of the Hopper forward kernel: a frozen dataclass, chosen by a pure function."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from attnlib.kernels.common import l2_sections
from attnlib.kernels.common.tiles import tile_width

NAMED = 8
"""Of the hardware's sixteen barriers, those that the ring's slots may have."""


@dataclass(frozen=True)
class HopperConfig:
    """How `forward_kernel.attention_forward_hopper` is compiled and launched.

    Attributes:
        block_n: keys of one step.
        warpgroups: consumer warpgroups, 2 to 4; each computes 64 query rows.
        stages: slots of the ring of key and value blocks in shared memory; a power of two.
        o_columns: columns of the buffer through which the output leaves: all, or half of them in two goes.
        q_columns: leading columns of Q that stay in registers; the others, some always, are read from shared
            memory.
        late_wait: wait for P V of the block before half way through the exponentials, not before them.
        pin: keep the assembler from moving that wait up.
        joint: one barrier for the keys and the values of a slot, instead of one each.
        named: consumers give a slot back through the hardware's named barriers, not an mbarrier.
        keep_shift: take the largest scores of a block only where a weight came out large, see `kept_shift`.
        consumer_registers, producer_registers: of a thread, after the program has shared them out anew.
        max_registers: of a thread when the program starts.
        l2_bytes: keys and values of the heads that advance together should fit in here.
        diagonal_bytes: the same under a diagonal, of heads that share no keys; None: as many.
        last_waves: under a diagonal, tiles for each SM that the last of these sections has at least, see
            `l2_sections.last_section`; 0: it is like the others.
    """

    block_n: int
    warpgroups: int
    stages: int
    o_columns: int
    q_columns: int = 0
    late_wait: bool = False
    pin: bool = False
    joint: bool = False
    named: bool = False
    keep_shift: bool = False
    consumer_registers: int = 240
    producer_registers: int = 24
    max_registers: int = 168
    l2_bytes: int = 16 << 20
    diagonal_bytes: int | None = None
    last_waves: float = 0.0

    columns = ()
    """Of each part of a tile, where it has parts."""
    query_columns = ()
    """Of each part of a tile of queries or keys, where those of values are others."""

    def __post_init__(self) -> None:
        if self.named and self.stages > NAMED:
            raise ValueError(f"stages: expected at most {NAMED} with named barriers, got {self.stages}")

    def width(self, head_dim: int) -> int:
        """Columns of a tile for a head dimension, in all its parts."""
        return tile_width(head_dim)

    def heads_per_section(
        self, heads: int, group: int, keys: int, width: int, diagonal: bool = False
    ) -> int:
        """Query heads that advance together, see `l2_sections.query_heads`."""
        own = diagonal and group == 1 and self.diagonal_bytes
        return l2_sections.query_heads(heads, group, keys, width, own or self.l2_bytes)

    def last_section(self, heads: int, blocks: int, section: int) -> int | None:
        """The head that the last section under a diagonal begins with; None where it is like the others.
        blocks: tiles of each head."""
        return l2_sections.last_section(heads, blocks, section, self.last_waves) if self.last_waves else None


@dataclass(frozen=True)
class SplitConfig(HopperConfig):
    """The same for a head dimension that is no power of two, whose columns are computed in two parts.

    Attributes:
        columns: of the first and of the second part, powers of two. o_columns and q_columns are of the first;
            of the second all leave at once, and none stay in registers.
    """

    columns: tuple[int, int] = field(kw_only=True)

    def width(self, head_dim: int) -> int:
        return width_of_parts(self.columns, head_dim)


@dataclass(frozen=True)
class ValuesConfig(HopperConfig):
    """The same for values with a head dimension of their own.

    Attributes:
        query_columns: columns of a tile of queries or keys, in one part or two, powers of two. q_columns are
            of the first.
        value_columns: those of values and of the output.
    """

    query_columns: tuple[int, ...] = field(kw_only=True)
    value_columns: int = field(kw_only=True)

    def width(self, head_dim: int) -> int:
        """Of values. ValueError unless queries with so many columns fit."""
        if not head_dim <= sum(self.query_columns):
            raise ValueError(
                f"config: expected query_columns for head dimension {head_dim}, got {self.query_columns}"
            )
        return self.value_columns

    def heads_per_section(
        self, heads: int, group: int, keys: int, width: int, diagonal: bool = False
    ) -> int:
        columns = (sum(self.query_columns) + width) // 2
        return super().heads_per_section(heads, group, keys, columns, diagonal)


def width_of_parts(columns: tuple[int, int], head_dim: int) -> int:
    """Of both together. ValueError unless the head dimension needs the second part, and fits."""
    left, right = columns
    if not left < head_dim <= left + right:
        raise ValueError(
            f"config: expected columns in two parts for head dimension {head_dim}, got {columns}"
        )
    return left + right


def smallest_split(widths: Iterable[int], head_dim: int) -> int | None:
    """The smallest of these widths that holds a head dimension and is below the next power of two."""
    return min((w for w in widths if head_dim <= w < tile_width(head_dim)), default=None)


# Found by measurement on an H200, causal and dense fp16 at 16384 tokens (docs/lab/hopper.md has the losers).
# At D = 64 there are three tiles: four warpgroups hide each other's waits and share the registers that two
# have elsewhere, three have registers for blocks of 128 keys, and two make the smallest tile.
# The first two have in common:
_MANY = {"joint": True, "keep_shift": True, "producer_registers": 32}
M256N64 = HopperConfig(64, 4, 8, 64, consumer_registers=112, max_registers=96, **_MANY)
M192N128 = HopperConfig(128, 3, 4, 64, late_wait=True, consumer_registers=160, max_registers=128, **_MANY)
M128N128 = HopperConfig(128, 2, 2, 64, late_wait=True, pin=True, joint=True, named=True, keep_shift=True)
# Beyond 64 columns, under a diagonal: 1 to 5% up to 3000 tokens, level in longer calls.
_UNEVEN = {"diagonal_bytes": 8 << 20, "last_waves": 2.5}
_WARP_SPECIALIZED = {
    64: M256N64,
    128: HopperConfig(
        128, 2, 2, 128, q_columns=64, late_wait=True, pin=True, named=True, keep_shift=True,
        l2_bytes=32 << 20, **_UNEVEN,
    ),
    256: HopperConfig(64, 2, 2, 128, q_columns=128, named=True, keep_shift=True, **_UNEVEN),
}
_FEW_KEYS = {128: replace(_WARP_SPECIALIZED[128], l2_bytes=8 << 20)}
FEW_KEYS = 2048
"""Keys up to which sections of 8 MB are faster at D = 128, by 12% with 512 keys, 8% with 1024, 2% with 2048;
with 8192 there is no difference."""
_PACE = {M256N64: (559, 80), M192N128: (583, 205), M128N128: (512, 175)}
"""TFLOP/s with many long rows, and the additional cost of the block on the diagonal, in keys. With any
numbers from a range around these `busiest` finds the fastest tile for all 46 shapes that were measured."""


_M192N64 = {
    "block_n": 64, "warpgroups": 3, "stages": 4, "o_columns": 64, "late_wait": True, "pin": True,
    "joint": True, "keep_shift": True, "consumer_registers": 160, "producer_registers": 32,
    "max_registers": 128, "diagonal_bytes": 8 << 20, "last_waves": 4.0,
}  # fmt: skip
# Faster than tiles padded to the next power of two at every shape of figures/data/nvidia-h200/head_dims.json.
SPLIT = {
    80: SplitConfig(**_M192N64, columns=(64, 16)),
    96: SplitConfig(**_M192N64, columns=(64, 32)),
    192: SplitConfig(64, 2, 2, 128, 128, named=True, keep_shift=True, **_UNEVEN, columns=(128, 64)),
}
"""Width of a tile in two parts -> its configuration. A head dimension takes the smallest of these widths that
holds it and is below the next power of two, else that power. So a line here turns a width on, and nothing
else does. 112 columns are not worth a line: a third part of 16 would cost a product as much as 64 do."""


def _own(columns: int | tuple[int, int], value_columns: int, config: HopperConfig) -> ValuesConfig:
    parts = columns if isinstance(columns, tuple) else (columns,)
    of = {f.name: getattr(config, f.name) for f in fields(HopperConfig)}
    of |= {"q_columns": min(config.q_columns, parts[0]), "o_columns": min(config.o_columns, value_columns)}
    return ValuesConfig(**of, query_columns=parts, value_columns=value_columns)


# All but 64/64, 128/128 and 256/256 were measured beside others (docs/lab/hopper.md).
_FEW_SLOTS = HopperConfig(**_M192N64 | {"stages": 2})
_ALL_LOADED = replace(_WARP_SPECIALIZED[256], q_columns=0)
OWN_VALUES = {
    (64, 64): _own(64, 64, M192N128),
    (128, 64): _own(128, 64, _FEW_SLOTS),
    (192, 64): _own((128, 64), 64, _FEW_SLOTS),
    (256, 64): _own(256, 64, _ALL_LOADED),
    (64, 128): _own(64, 128, HopperConfig(**_M192N64)),
    (128, 128): _own(128, 128, _WARP_SPECIALIZED[128]),
    (192, 128): _own((128, 64), 128, replace(_WARP_SPECIALIZED[128], q_columns=0, o_columns=64)),
    (256, 128): _own(256, 128, _WARP_SPECIALIZED[256]),
    (64, 256): _own(64, 256, replace(_ALL_LOADED, stages=4)),
    (128, 256): _own(128, 256, _ALL_LOADED),
    (192, 256): _own((128, 64), 256, _ALL_LOADED),
    (256, 256): _own(256, 256, _ALL_LOADED),
}
"""Widths of a tile of queries and of values, where a call has another head dimension for these."""


def own_values_config(head_dim: int, value_dim: int) -> ValuesConfig:
    """The configuration of a call with values of a head dimension of their own. ValueError if one of both is
    out of range."""
    for name, columns in (("head_dim", head_dim), ("value_dim", value_dim)):
        if not 1 <= columns <= 256:
            raise ValueError(f"{name}: expected 1 to 256, got {columns}")
    width = min(w for w in (64, 128, 192, 256) if head_dim <= w)
    return OWN_VALUES[width, tile_width(value_dim)]


def busiest(config: HopperConfig, rows: int, keys: int, seen: float, heads: int, sms: int) -> float:
    """Time of the SM with most to do, at D = 64, to compare configurations; no unit.

    The arguments are those of `hopper_config`. Tiles that all see the same keys come in waves, the last of
    which may leave SMs idle. Under a diagonal, tiles of all lengths even that out, unless there are so few
    that all wait for the longest.
    """
    speed, diagonal = _PACE[config]
    block_m = 64 * config.warpgroups
    tiles = -(-rows // block_m) * heads
    if seen == keys:
        steps = -(-tiles // sms) * keys
    else:
        steps = max(tiles / sms * (seen + block_m / 2 + diagonal), keys + diagonal)
    return steps * block_m / speed


def hopper_config(
    head_dim: int,
    rows: int | None = None,
    heads: int = 1,
    sms: int = 132,
    keys: int | None = None,
    seen: float | None = None,
) -> HopperConfig:
    """The configuration of the Hopper kernel for one call.

    Args:
        head_dim: D, 1 to 256.
        rows: query rows S_q of a head; None: more than enough for every SM.
        heads: B * H, over all batches.
        sms: streaming multiprocessors of the GPU.
        keys: S_k; None for windows, which M256N64 computes fastest unless they are thousands of keys wide.
        seen: keys that a row sees on average; None: all.

    Raises:
        ValueError: `head_dim` out of range.
    """
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head_dim: expected 1 to 256, got {head_dim}")
    width = tile_width(head_dim)
    split = smallest_split(SPLIT, head_dim)
    if split is not None:
        return SPLIT[split]
    if head_dim > 64 and keys is not None and keys <= FEW_KEYS:
        return _FEW_KEYS.get(width, _WARP_SPECIALIZED[width])
    if head_dim > 64 or rows is None:
        return _WARP_SPECIALIZED[width]
    if keys is None:
        tiles = -(-rows // (64 * M256N64.warpgroups)) * heads
        return M128N128 if tiles <= sms or rows <= 64 * M128N128.warpgroups else M256N64
    seen = keys if seen is None else seen
    return min(_PACE, key=lambda tile: busiest(tile, rows, keys, seen, heads, sms))
