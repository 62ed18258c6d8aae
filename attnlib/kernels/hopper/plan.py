"""What the Hopper kernels are compiled for: all constants of a kernel in one object, its plan."""

from dataclasses import dataclass, field

from triton.experimental.gluon import language as gl

from attnlib.kernels.common.constants import Constants
from attnlib.kernels.common.layouts import accumulator, first_operand
from attnlib.kernels.common.pipeline import Pipeline, Registers, WideRegisters

# ---------------------------------------------------------------- both passes


@dataclass(frozen=True)
class Mask(Constants):
    """Which bounds the mask window has.

    Attributes:
        causal: the keys of a query end on a diagonal: query i sees none after i + S_k - S_q, or `right` more.
        shifted: there is a `right` that is not 0.
        left: query i sees no key before i + S_k - S_q - `left`.
    """

    causal: bool
    shifted: bool
    left: bool


# ---------------------------------------------------------------- forward


@dataclass(frozen=True)
class ForwardMask(Mask):
    """And where the forward kernel needs a mask.

    Attributes:
        blocks: blocks at the end of a row that need one: 0, 1 or 2.
        skip: the warpgroups of one tile may visit different numbers of blocks.
    """

    blocks: int
    skip: bool


@dataclass(frozen=True)
class ForwardPlan(Constants):
    """Everything that the forward kernel is compiled for: what the call asks for, and how it is computed.

    Attributes:
        d: columns of a tile, the head dimension or more: 64, 128 or 256.
        flip: sm_scale is negative: the maximum of the flipped scores is the one to track.
        store_lse: write the LSE.
        varlen: sequences of different lengths lie one after the other.
        block_n, q_columns, o_columns: as in `HopperConfig`.
        accumulate: columns of an existing output that the call is merged into; 0 for an output of its own.
    """

    d: int
    block_n: int
    q_columns: int
    o_columns: int
    flip: bool
    store_lse: bool
    varlen: bool
    mask: ForwardMask
    pipeline: Pipeline
    registers: Registers
    accumulate: int = field(default=0, kw_only=True)

    fp8 = quantizes = gl.constexpr(False)
    centered = early_mean = late_mean = gl.constexpr(False)  # V is without its mean
    element_bits = gl.constexpr(16)
    own_keys = gl.constexpr(False)  # of each block of query rows
    pooled = gl.constexpr(False)
    units = gl.constexpr(0)  # of 64 keys, whose largest weights a step hands on to the next one

    @property
    def keep_shift(self):
        """Where each row sees a key of its first block, and no block after it needs a mask."""
        plain = self.mask.blocks.value < 2 and not self.mask.left.value
        return gl.constexpr(self.pipeline.keep_shift.value and plain)

    right = gl.constexpr(0)  # columns of a second part

    block_m = property(lambda self: gl.constexpr(64 * self.pipeline.warpgroups.value))
    words = property(lambda self: gl.constexpr(6 if self.varlen.value else 4))  # told of a tile

    # Accumulators: of Q K^T [64, block_n], of P V [64, d].
    s_layout = property(lambda self: accumulator(self.block_n.value, self.element_bits.value))
    o_layout = property(lambda self: accumulator(self.d.value, self.element_bits.value))
    # P and part of Q as first operands of a product, in registers.
    p_layout = property(lambda self: first_operand(self.o_layout, self.element_bits.value))
    q_layout = property(lambda self: first_operand(self.s_layout, self.element_bits.value))
    # A value per row [64].
    row_layout = property(lambda self: gl.constexpr(gl.SliceLayout(1, self.s_layout.value)))


@dataclass(frozen=True)
class Fp8Plan(ForwardPlan):
    """The same for operands in e4m3 with scales, whose V lies transposed; see `e4m3`.

    Attributes:
        center: V is without its mean, which is added to the output.
        quantizes: queries come in 16 bits; see `queries`.
        rotates: these are rotated first.
    """

    center: bool
    quantizes: bool = False
    rotates: bool = False

    centered = property(lambda self: self.center)
    # When a mean is loaded: beside the last product, or after it, where registers are needed for that.
    early_mean = property(lambda self: gl.constexpr(self.center.value and self.d.value < 256))
    late_mean = property(lambda self: gl.constexpr(self.center.value and self.d.value == 256))
    words = property(
        lambda self: gl.constexpr(ForwardPlan.words.fget(self).value + (4 if self.center.value else 3))
    )
    norm = property(lambda self: gl.constexpr(self.d.value**-0.5 if self.rotates.value else 1.0))
    # Accumulator of the rotation of 64 columns of queries.
    chunk_layout = accumulator(64)
    # Four elements of P as one of 32 bits.
    word_layout = property(lambda self: first_operand(accumulator(self.d.value, 32), 32))

    fp8 = gl.constexpr(True)
    element_bits = gl.constexpr(8)


@dataclass(frozen=True)
class NarrowPlan(ForwardPlan):
    """The same for queries and keys with other columns than values.

    Attributes:
        columns: of a tile of queries or keys, or of its first part: 16 or more.
        keys_by_rows: each block of query rows has keys of its own.
    """

    columns: int
    keys_by_rows: bool

    own_keys = property(lambda self: self.keys_by_rows)


@dataclass(frozen=True)
class PooledPlan(ForwardPlan):
    """The same for a pass that keeps the largest score of each row and 64 keys; see `maxima`."""

    pooled = gl.constexpr(True)
    units = property(lambda self: gl.constexpr(self.block_n.value // 64 if self.keep_shift.value else 0))
    words = property(lambda self: gl.constexpr(ForwardPlan.words.fget(self).value + 1))


@dataclass(frozen=True)
class SplitPlan(ForwardPlan):
    """The same for a head dimension in two parts; `d` are the columns of the first. See `column_parts`.

    Attributes:
        right: columns of the second.
    """

    right: int = field(kw_only=True)

    # Accumulator of its P V [64, right].
    right_layout = property(lambda self: accumulator(self.right.value))


# ---------------------------------------------------------------- backward


@dataclass(frozen=True)
class BackwardMask(Mask):
    """And whether the backward kernels need a mask for the last keys.

    Attributes:
        tail: S_k may be no multiple of `block_n`, and no diagonal cuts the keys beyond it off.
    """

    tail: bool


@dataclass(frozen=True)
class BackwardPlan(Constants):
    """Everything that the backward kernel is compiled for: what the call asks for, and how it is computed.

    Attributes:
        d: columns of a tile, the head dimension or more: 64 or 128.
        varlen: sequences of different lengths lie one after the other.
        block_m, half_p, stagger, deterministic, alternate, bulk, early_mask, masked_stagger, persistent,
            pause_every: as in `HopperBackwardConfig`.
        shared: other programs compute a part of the same dK and dV; all leave float32 sums in memory.
        added: where they do, in one place, else each in its own.
        tail_apart: no keys are hidden but those behind the last one, and a consumer without any of these has
            code of its own.
        rotated: every query sees every key, programs visit one query head, and each begins with another block
            of its queries.
    """

    d: int
    block_m: int
    half_p: bool
    stagger: int
    varlen: bool
    mask: BackwardMask
    registers: Registers
    deterministic: bool = False
    alternate: bool = False
    bulk: bool = False
    early_mask: bool = False
    masked_stagger: int = 0
    persistent: bool = False
    shared: bool = False
    added: bool = False
    pause_every: int = 0
    tail_apart: bool = False
    rotated: bool = False

    block_n = gl.constexpr(128)  # keys of a program, 64 in a buffer
    # Keys may be seen by no query.
    sparse = property(lambda self: gl.constexpr(self.mask.left.value or self.varlen.value))
    # The last keys come first.
    backwards = property(lambda self: gl.constexpr(self.deterministic.value and self.mask.causal.value))

    # Consumers add dQ themselves, each when it is granted its turn.
    granted = property(lambda self: gl.constexpr(self.deterministic.value and not self.bulk.value))

    # Clocks by which the second consumer begins later.
    delay = property(
        lambda self: gl.constexpr(
            0 if self.alternate.value
            else self.masked_stagger.value if self.mask.causal.value or self.mask.left.value
            else self.stagger.value
        )
    )  # fmt: skip

    # That tell of a tile, of a persistent plan, see `backward_persistent`.
    words = property(lambda self: gl.constexpr(6 if self.varlen.value else 1))

    # Halves of dQ that the two consumers form: of the queries, or of the columns.
    by_rows = property(lambda self: gl.constexpr(self.block_m.value == 128))

    right = gl.constexpr(0)  # columns of a second part
    width = property(lambda self: gl.constexpr(self.d.value + self.right.value))  # of all
    own_values = gl.constexpr(0)  # columns of values, where queries and keys have others
    sums_width = property(lambda self: gl.constexpr(2 * self.width.value))  # of sums of dK and dV
    held = gl.constexpr(0)
    few = gl.constexpr(False)  # keys beyond the blocks of 64
    step = gl.constexpr(0)  # columns from one part to the next, where they have one descriptor
    consumers = gl.constexpr(2)  # warpgroups that read Q and dO
    own_right = gl.constexpr(False)
    dq_products = gl.constexpr(2)  # that a consumer starts in a step
    writers = gl.constexpr(2)  # warpgroups that have a part of dQ

    # Accumulators: of S^T and dP^T [64, block_m], of dK and dV [64, d].
    s_layout = property(lambda self: accumulator(self.block_m.value))
    d_layout = property(lambda self: accumulator(self.d.value))
    # P^T and dS^T as first operands of a product, in registers.
    p_layout = property(lambda self: first_operand(self.d_layout))


@dataclass(frozen=True)
class SplitBackwardPlan(BackwardPlan):
    """The same for a head dimension in two parts; `d` are the columns of the first. See `column_parts`.

    Attributes:
        right: columns of the second.
        held: parts of K and V that stay in registers, as first operands of a product.
    """

    right: int = field(kw_only=True)
    held: int = field(kw_only=True)

    # Each consumer forms the second part of dQ from its own keys.
    own_right = property(lambda self: gl.constexpr(self.right.value == 16 and not self.by_rows.value))
    dq_products = property(lambda self: gl.constexpr(3 if self.own_right.value else 4))

    # Accumulator of its dK and dV [64, right].
    right_layout = property(lambda self: accumulator(self.right.value))
    held_layout = property(lambda self: first_operand(self.s_layout))


@dataclass(frozen=True)
class OwnValuesBackwardPlan(BackwardPlan):
    """The same for values with other columns than queries and keys, which have `d`.

    Attributes:
        own_values: columns of a tile of values: 128 or 64.
    """

    own_values: int = field(kw_only=True)

    sums_width = property(lambda self: gl.constexpr(self.d.value + self.own_values.value))

    # Accumulator of its dV [64, own_values].
    values_layout = property(lambda self: accumulator(self.own_values.value))


@dataclass(frozen=True)
class WideBackwardPlan(Constants):
    """The same for the wide backward kernel.

    Attributes:
        d: columns of a tile of queries and keys, the head dimension or more: 256.
        varlen, block_m, deterministic, early_mask, shared, added, pause_every: as in `BackwardPlan`.
    """

    d: int
    block_m: int
    varlen: bool
    mask: BackwardMask
    registers: WideRegisters
    deterministic: bool = False
    early_mask: bool = False
    shared: bool = False
    added: bool = False
    pause_every: int = 0

    block_n = gl.constexpr(64)  # keys of a program
    persistent = rotated = gl.constexpr(False)
    # They may be seen by no query.
    sparse = property(lambda self: gl.constexpr(self.mask.left.value or self.varlen.value))
    backwards = property(lambda self: gl.constexpr(self.deterministic.value and self.mask.causal.value))

    # dK, dV and dQ are formed in parts of at most 128 columns. ptxas refuses a product of 256 columns: it
    # wants its registers to be there before they are shared out anew (C7602).
    part = property(lambda self: gl.constexpr(min(self.d.value, 128)))  # of dK and dQ
    values_part = property(lambda self: gl.constexpr(min(self.values.value, 128)))
    width = values = property(lambda self: self.d)
    own_values = gl.constexpr(0)  # columns of values, where queries and keys have others
    sums_width = property(lambda self: gl.constexpr(self.d.value + self.values.value))  # of dK and dV
    held = gl.constexpr(0)
    few, step, consumers = gl.constexpr(False), gl.constexpr(0), gl.constexpr(2)  # as in `BackwardPlan`

    # Accumulators: of S^T and dP^T [64, block_m], of the parts of dK and dQ, and of dV.
    s_layout = property(lambda self: accumulator(self.block_m.value))
    part_layout = property(lambda self: accumulator(self.part.value))
    values_layout = property(lambda self: accumulator(self.values_part.value))
    # P^T and dS^T as first operands of a product, in registers.
    p_layout = property(lambda self: first_operand(self.values_layout))


@dataclass(frozen=True)
class OwnValuesWidePlan(WideBackwardPlan):
    """The same for values with more columns than queries and keys, which have `d`: 64 or 128.

    Attributes:
        own_values: columns of a tile of values: 256.
    """

    own_values: int = field(kw_only=True)

    values = property(lambda self: self.own_values)


@dataclass(frozen=True)
class Keys96BackwardPlan(Constants):
    """The same for `backward_keys96_kernel`: 192 or 160 columns in parts of 64, 96 keys.

    Attributes:
        varlen, block_m, deterministic, early_mask, shared, added, pause_every: as in `BackwardPlan`.
        value_parts: parts of 64 columns of values, 2 or 3.
        width: columns of a tile of queries, 192 or 160.
    """

    block_m: int
    varlen: bool
    mask: BackwardMask
    registers: WideRegisters
    early_mask: bool
    value_parts: int
    shared: bool = False
    added: bool = False
    width: int = 192
    pause_every: int = 0
    deterministic: bool = False

    block_n = gl.constexpr(96)  # keys of a program
    last = property(lambda self: gl.constexpr(self.width.value - 128))  # columns of part 2 that are used
    sums_width = property(lambda self: gl.constexpr(192 + 64 * self.value_parts.value))  # of dK and dV
    few, step, consumers = gl.constexpr(True), gl.constexpr(64), gl.constexpr(3)  # as in `BackwardPlan`
    persistent = rotated = gl.constexpr(False)
    backwards = property(lambda self: gl.constexpr(self.deterministic.value and self.mask.causal.value))
    # They may be seen by no query.
    sparse = property(lambda self: gl.constexpr(self.mask.left.value or self.varlen.value))

    # Of whatever has 64 and 32 columns: S and dP [block_m, 64], a part of dK^T and dV^T [64, 64].
    most_layout = accumulator(64)
    few_layout = accumulator(32)
    loaded_layout = first_operand(most_layout)
    loaded_few_layout = first_operand(few_layout)
    row_layout = gl.constexpr(gl.SliceLayout(1, most_layout.value))  # a value per query
