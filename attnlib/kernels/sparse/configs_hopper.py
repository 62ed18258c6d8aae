"""Configurations of the Hopper kernel under a block mask: a frozen dataclass, chosen by a pure function."""

from dataclasses import dataclass, replace

from attnlib.kernels.common import l2_sections
from attnlib.kernels.common.tiles import tile_width
from attnlib.kernels.sparse.configs import BIAS, SparseTile


@dataclass(frozen=True)
class HopperSparseConfig:
    """How `hopper_kernel.attention_sparse_forward_hopper` is compiled and launched. A tile is two consumer
    warpgroups of 64 query rows.

    Attributes:
        block_n: keys of one step, 64 or 128.
        stages: slots of the ring of key and value blocks in shared memory; a power of two.
        o_columns: columns of the buffer through which the output leaves: all, a half or a quarter of them.
        pairs: of warpgroups in a program, 1 or 2, each with tiles of its own.
        q_columns: leading columns of Q that stay in registers.
        late_wait: wait for P V of the block before half way through the exponentials, not before them.
        pin: keep the assembler from moving that wait up.
        joint: one barrier for the keys and the values of a slot, instead of one each.
        named: consumers give a slot back through the hardware's named barriers, not an mbarrier. With one
            pair only: the rings of two would have the same barriers.
        copies_bias: a bias that TMA can read comes through shared memory; with one pair only.
        keep_shift: take the largest scores of a step only where a weight came out large, see `kept_shift`;
            not under ALiBi, a bias or a function.
        q_buffers: places for the queries of a tile, 1 or 2; with 2 those of the next tile are copied beside
            this tile's last steps, consumers start its first product beside the last one of their tile, and
            the output leaves through the place of the tile's queries, whole. With one pair only.
        leaves_out: either consumer leaves out a step that only the other one sees; in steps of 64, and where
            steps carry bits and no score changes, else it says nothing.
        consumer_registers, producer_registers: of a thread, after the program has shared them out anew.
        max_registers: of a thread when the program starts.
        l2_bytes: keys and values of the heads that advance together should fit in here.
    """

    block_n: int
    stages: int
    o_columns: int
    pairs: int = 1
    q_columns: int = 0
    late_wait: bool = False
    pin: bool = False
    joint: bool = False
    named: bool = False
    copies_bias: bool = False
    keep_shift: bool = False
    q_buffers: int = 1
    leaves_out: bool = False
    consumer_registers: int = 240
    producer_registers: int = 24
    max_registers: int = 168
    l2_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if self.q_buffers not in (1, 2):
            raise ValueError(f"q_buffers: expected 1 or 2, got {self.q_buffers}")
        if self.pairs > 1 and (self.named or self.copies_bias or self.q_buffers > 1):
            raise ValueError(f"pairs: expected 1 with named, copies_bias or two q_buffers, got {self.pairs}")
        if self.leaves_out and self.block_n != 64:
            raise ValueError(f"leaves_out: expected False with block_n={self.block_n}, got True")

    def heads_per_section(self, heads: int, group: int, keys: int, width: int) -> int:
        """Query heads that advance together, see `l2_sections.query_heads`."""
        return l2_sections.query_heads(heads, group, keys, width, self.l2_bytes)


# Chosen before they were measured: at D = 128 and 256 those of `kernels.hopper` for the same tile. At D = 64
# that has tiles of four warpgroups, which would have to take the steps of all their rows; here they are two
# pairs. tests/gpu/tune_sparse.py compared them later with others, under random blocks (docs/lab/sparse.md):
# at D = 64 a pair alone (`WIDE`) takes 8 to 11% longer, a late wait and a second place for queries are level;
# at D = 128 an early wait takes 1 to 4% longer, and steps of 64 keys (`_FINE`) win in short rows, where calls
# take them. That of D = 256 was not compared.
SHARED = HopperSparseConfig(
    64, 4, 64, pairs=2, joint=True, consumer_registers=112, producer_registers=32, max_registers=96
)
WIDE = HopperSparseConfig(128, 2, 64, late_wait=True, pin=True, joint=True, named=True)
_CHOSEN = {
    64: SHARED,
    128: HopperSparseConfig(
        128, 2, 128, q_columns=64, late_wait=True, pin=True, named=True, l2_bytes=32 << 20
    ),
    256: HopperSparseConfig(64, 2, 64, q_columns=128, named=True),
}
_FINE = {128: HopperSparseConfig(64, 4, 128, q_columns=64, late_wait=True, pin=True, named=True)}
_KEPT = 64, 128
"""Widths of a tile at which kept shifts were measured, and won: full blocks, bits, soft caps and sinks."""


def hopper_sparse_config(
    head_dim: int,
    coarse: bool = True,
    bias: bool = False,
    copied: bool = False,
    keep: bool = False,
    short: bool = False,
) -> HopperSparseConfig:
    """For a head dimension. coarse: whether steps of 128 keys cover not much more than those of 64. bias:
    whether the score has one, or a function of the caller's own, which two pairs have no registers for.
    copied: whether TMA can read the bias. keep: whether steps can keep their shifts, which those with ALiBi,
    a bias or a function can't. short: whether no score changes, and rows have few steps of 128 keys.

    Raises:
        ValueError: `head_dim` out of range.
    """
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head_dim: expected 1 to 256, got {head_dim}")
    width = tile_width(head_dim)
    chosen = _CHOSEN[width] if coarse and not short else _FINE.get(width, _CHOSEN[width])
    if bias and width == 64:
        chosen = WIDE
    if keep and width in _KEPT:
        chosen = replace(chosen, keep_shift=True, leaves_out=short or not coarse)
        if short and width == 128:  # few steps are over soon: the next tile begins beside their end
            chosen = replace(chosen, q_buffers=2)
        return chosen
    if copied and width <= 128:  # with half an output there is room for the bias of a step
        return replace(chosen, copies_bias=True, o_columns=64)
    return chosen


@dataclass(frozen=True)
class HopperBiasConfig:
    """How `hopper_bias_kernel.attention_sparse_bias_gradient_hopper` is compiled and launched.

    Attributes:
        stages: slots of the ring of pairs of blocks, Q and K or dO and V; at most 8.
        consumer_registers, producer_registers: of a thread, after the program has shared them out anew.
        max_registers: of a thread when the program starts.
    """

    stages: int
    consumer_registers: int = 240
    producer_registers: int = 24
    max_registers: int = 168


_BIAS = {(64, 2): 4, (64, 4): 4, (128, 2): 3, (128, 4): 2}
"""(columns of a tile, bytes of an element of the bias) -> stages: two visits, or what fits beside it."""


def hopper_bias_config(head_dim: int, element_size: int) -> HopperBiasConfig | None:
    """For a head dimension and a bias whose elements have so many bytes. None where shared memory is too
    small."""
    stages = _BIAS.get((tile_width(head_dim), element_size))
    return None if stages is None else HopperBiasConfig(stages)


@dataclass(frozen=True)
class HopperSparseBackwardConfig:
    """How `hopper_backward_kernel.attention_sparse_backward_hopper` is compiled and launched, or with 64 keys
    for a program `hopper_backward_wide_kernel.attention_sparse_backward_hopper_wide`.

    Attributes:
        block_m: queries of one step, 64 or 128; 64 in the wide kernel.
        block_n: keys of a program, 128 or 64.
        half_p: dS from P as it was rounded for dV; its registers are free earlier.
        copies_bias: a bias that TMA can read comes through shared memory.
        gathered: walk along `BlockMask.gathered`, whose programs have two units of 64 keys from any place.
        alternate: the two consumers start their products in turns. Not in the wide kernel.
        persistent: a program stays on its SM and computes one column of tiles after the other, see
            `hopper_backward_columns`; not in the wide kernel, and not under a bias or a function.
        pause_every: a warpgroup that adds dQ pauses after so many additions of each thread, see
            `backward_ring.add_sums`; 0: never.
        bias: how the gradient of a bias is made; a tile: by the kernel in plain Triton.
        consumer_registers, dq_registers, producer_registers: of a thread, after the program has shared them
            out anew. Only the wide kernel has a warpgroup for dQ.
        max_registers: of a thread when the program starts.
        l2_bytes: what the heads that advance together read and add to should fit in here.
    """

    block_m: int
    block_n: int = 128
    half_p: bool = False
    copies_bias: bool = True
    gathered: bool = False
    alternate: bool = False
    persistent: bool = False
    pause_every: int = 0
    bias: SparseTile | HopperBiasConfig = BIAS[128]
    consumer_registers: int = 240
    dq_registers: int = 0
    producer_registers: int = 24
    max_registers: int = 168
    l2_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for option in ("gathered", "alternate", "persistent"):
            if getattr(self, option) and self.block_n != 128:
                raise ValueError(f"{option}: expected False with block_n={self.block_n}, got True")

    @property
    def word_bits(self) -> int:
        """Of a word of bits in shared memory, of which the wide kernel has little left."""
        return 32 if self.block_n == 128 else 16

    def heads_per_section(self, heads: int, blocks: int, rows: int, width: int) -> int:
        """Key/value heads that advance together, see `l2_sections.key_heads`."""
        return l2_sections.key_heads(heads, blocks, rows, width, self.l2_bytes)


# Not compared with others: those of `kernels.hopper`. At D = 256 the warpgroup with the scores gets what is
# left of the registers.
_BACKWARD = {
    64: HopperSparseBackwardConfig(128, half_p=True, bias=BIAS[64]),
    128: HopperSparseBackwardConfig(64),
    256: HopperSparseBackwardConfig(
        64, block_n=64, copies_bias=False, bias=BIAS[256], consumer_registers=200, dq_registers=96,
        max_registers=128, pause_every=1,
    ),
}
_SCORED = {64: HopperSparseBackwardConfig(64, bias=BIAS[64])}
"""Under a soft cap or a function, whose derivative takes registers that steps of 128 queries do not leave;
under a bias, which has no room beside those in shared memory."""


def hopper_sparse_backward_config(
    head_dim: int, capped: bool = False, placed: bool = False
) -> HopperSparseBackwardConfig:
    """For a head dimension. capped: whether there is a soft cap. placed: whether there is a bias or a
    function of the caller's own; their programs do not stay. Consumers of those that stay take turns, but at
    D = 128 under a soft cap, where they lose by it; those of programs that do not stay lose under most masks
    with bits (docs/lab/sparse.md).

    Raises:
        ValueError: `head_dim` out of range.
    """
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head_dim: expected 1 to 256, got {head_dim}")
    width = tile_width(head_dim)
    chosen = _SCORED.get(width, _BACKWARD[width]) if capped or placed else _BACKWARD[width]
    if placed or width > 128:
        return chosen
    return replace(chosen, persistent=True, alternate=not (capped and width == 128))
