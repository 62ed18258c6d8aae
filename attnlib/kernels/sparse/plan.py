"""What the Hopper kernels under a block mask are compiled for: all constants of a kernel in one object."""

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from attnlib.kernels.common.constants import Constants
from attnlib.kernels.common.layouts import accumulator, first_operand
from attnlib.kernels.common.pipeline import Pipeline, Registers


@dataclass(frozen=True)
class SparsePlan(Constants):
    """What a call asks for, and how it is computed.

    Attributes:
        d: columns of a tile, the head dimension or more: 64, 128 or 256.
        block_n: keys of a step of the lists, 64 or 128.
        q_columns, o_columns, q_buffers, leaves_out: as in `HopperSparseConfig`; leaves_out: not with a score,
            nor without bits.
        flip: sm_scale is negative: the maximum of the flipped scores is the one to track.
        store_lse: write the LSE.
        partial: some steps carry bits.
        pairs: of consumer warpgroups in a program, 1 or 2.
        soft_cap, alibi, sinks, function: what the score has.
        bias: it has a bias; bias_n: its stride along keys, 0 or 1; bias_edge: steps go beyond its last key.
        copies_bias: it comes through shared memory; bias_batches, bias_heads: each has one of its own.
    """

    d: int
    block_n: int
    q_columns: int
    o_columns: int
    flip: bool
    store_lse: bool
    partial: bool
    pairs: int
    pipeline: Pipeline
    registers: Registers
    q_buffers: int = 1
    soft_cap: bool = False
    alibi: bool = False
    sinks: bool = False
    bias: bool = False
    bias_n: int = 0
    bias_edge: bool = False
    copies_bias: bool = False
    bias_batches: bool = False
    bias_heads: bool = False
    function: bool = False
    leaves_out: bool = False

    loads_bias = property(lambda self: gl.constexpr(self.bias.value and not self.copies_bias.value))
    # Told of a tile; a score needs its head, a bias that is loaded and a function its batch element, too.
    words = property(
        lambda self: gl.constexpr(
            7 if self.loads_bias.value or self.function.value
            else 6 if self.alibi.value or self.sinks.value or self.leaves_out.value else 5
        )
    )  # fmt: skip
    tells_steps = property(
        lambda self: gl.constexpr(self.alibi.value or self.loads_bias.value or self.function.value)
    )
    # Whether a score may be -inf.
    hides = property(lambda self: gl.constexpr(self.partial.value or self.bias.value or self.function.value))

    @property
    def keep_shift(self):
        """Where scores are compared as they leave the product or a soft cap. What ALiBi leaves to the
        exponent, a step that keeps its shift does not know; a bias and a function take its registers."""
        more = self.alibi.value or self.bias.value or self.function.value
        return gl.constexpr(self.pipeline.keep_shift.value and not more)

    # Whether the first product of a tile starts beside the last one of the tile before.
    ahead = property(lambda self: gl.constexpr(self.q_buffers.value > 1))

    units = gl.constexpr(0)  # as in `hopper.plan.ForwardPlan`

    # Accumulators: of Q K^T [64, block_n], of P V [64, d].
    s_layout = property(lambda self: accumulator(self.block_n.value))
    o_layout = property(lambda self: accumulator(self.d.value))
    # P and part of Q as first operands of a product, in registers.
    p_layout = property(lambda self: first_operand(self.o_layout))
    q_layout = property(lambda self: first_operand(self.s_layout))
    # A value per row [64].
    row_layout = property(lambda self: gl.constexpr(gl.SliceLayout(1, self.s_layout.value)))


@dataclass(frozen=True)
class SparseBackwardPlan(Constants):
    """The same for the backward kernel.

    Attributes:
        d: columns of a tile, the head dimension or more: 64 or 128.
        block_m, half_p, gathered, alternate, persistent, pause_every: as in `HopperSparseBackwardConfig`;
            half_p never under a soft cap or a function, where dS is not made of P, persistent never under a
            bias or a function.
        partial: some steps carry bits.
        soft_cap, alibi, function: what the score has.
        bias, bias_n, copies_bias, bias_batches, bias_heads: as in `SparsePlan`.
        diagonal: the bias is of diagonals.
    """

    d: int
    block_m: int
    half_p: bool
    partial: bool
    registers: Registers
    soft_cap: bool = False
    alibi: bool = False
    bias: bool = False
    bias_n: int = 0
    diagonal: bool = False
    copies_bias: bool = False
    bias_batches: bool = False
    bias_heads: bool = False
    function: bool = False
    gathered: bool = False
    alternate: bool = False
    persistent: bool = False
    pause_every: int = 0

    loads_bias = property(lambda self: gl.constexpr(self.bias.value and not self.copies_bias.value))
    # The producer tells consumers the head of a step, and its first query.
    tells_heads = property(lambda self: gl.constexpr(self.loads_bias.value or self.function.value))
    # Scores have a derivative by Q K^T that is not constant.
    curved = property(lambda self: gl.constexpr(self.soft_cap.value or self.function.value))

    parts = gl.constexpr(2)  # of 64 keys, in a buffer each
    # Slots of Q, and the first of as many named barriers that give them back.
    q_stages = property(lambda self: gl.constexpr(3 if self.persistent.value else 2))
    q_free = property(lambda self: gl.constexpr(6 if self.persistent.value else 8))
    block_n = property(lambda self: gl.constexpr(64 * self.parts.value))  # keys of a program
    # Halves of dQ that the two consumers form: of the queries, or of the columns.
    by_rows = property(lambda self: gl.constexpr(self.block_m.value == 128))
    dq_columns = property(lambda self: gl.constexpr(self.d.value // (1 if self.by_rows.value else 2)))
    width = property(lambda self: self.d)

    # Accumulators: of S^T and dP^T [64, block_m], of dK and dV [64, d].
    s_layout = property(lambda self: accumulator(self.block_m.value))
    d_layout = property(lambda self: accumulator(self.d.value))
    # P^T and dS^T as first operands of a product, in registers.
    p_layout = property(lambda self: first_operand(self.d_layout))


@dataclass(frozen=True)
class WideSparseBackwardPlan(SparseBackwardPlan):
    """The same for the wide backward kernel; d: 128 or 256."""

    parts = gl.constexpr(1)
    # dK, dV and dQ are formed in two halves of their columns.
    half = property(lambda self: gl.constexpr(self.d.value // 2))
    d_layout = property(lambda self: accumulator(self.half.value))


@dataclass(frozen=True)
class HopperBiasPlan(Constants):
    """What the kernel of a bias' gradient is compiled for.

    Attributes:
        partial: some tiles have words.
        diagonal: the bias is of diagonals.
        batches, heads: each batch element, or head, has a bias of its own.
        aligned: rows of the gradient begin at multiples of four elements.
        bias_type: of the bias' elements.
    """

    partial: bool
    diagonal: bool
    batches: bool
    heads: bool
    aligned: bool
    bias_type: gl.dtype
    pipeline: Pipeline
    registers: Registers

    s_layout = accumulator(128)  # of S and dP [64, 128], and of their sum
