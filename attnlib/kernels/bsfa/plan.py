"""What the Hopper kernel of BSFA is compiled for: all its constants in one object."""

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from attnlib.kernels.common import bsfa
from attnlib.kernels.common.constants import Constants
from attnlib.kernels.common.layouts import accumulator, first_operand
from attnlib.kernels.common.pipeline import Pipeline, Registers


@dataclass(frozen=True)
class BsfaPlan(Constants):
    """What a call asks for, and how it is computed.

    Attributes:
        d: head dimension, 64 or 128.
        q_columns: as in `HopperBsfaConfig`.
        flip: sm_scale is negative: the maximum of the flipped scores is the one to track.
        causal: the keys of a query end on a diagonal.
        crosses: 64 rows may cross it in two blocks.
        tail: the last block may have keys that are not there.
        store_lse, store_kept: write the LSE, and which blocks were kept.
    """

    d: int
    q_columns: int
    flip: bool
    causal: bool
    crosses: bool
    tail: bool
    store_lse: bool
    store_kept: bool
    pipeline: Pipeline
    registers: Registers

    block_n = gl.constexpr(bsfa.KEYS)

    # Accumulators: of Q K^T [64, block_n], of P V [64, d].
    s_layout = property(lambda self: accumulator(self.block_n.value))
    o_layout = property(lambda self: accumulator(self.d.value))
    # P and part of Q as first operands of a product, in registers.
    p_layout = property(lambda self: first_operand(self.o_layout))
    q_layout = property(lambda self: first_operand(self.s_layout))
    # A value per row [64].
    row_layout = property(lambda self: gl.constexpr(gl.SliceLayout(1, self.s_layout.value)))
