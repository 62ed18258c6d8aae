"""The end of a tile whose rows have seen other keys before: its output and LSE are merged into existing ones.

    m = max(l_old, l_new)      w = 2**(l - m)      O = (w_old O_old + w_new O_new) / (w_old + w_new)

With both l = -inf, of a row that has seen no key at all, m is 0 instead, and O is 0. Chapter 42 derives it.

The existing output is read and written in the layout of the accumulator, without shared memory, of which
there is none left: four threads have 8 columns of a row, so 32 bytes of float32 are one access. Existing LSEs
are loaded beside the last product, and everything that depends on them alone is computed there. A row whose
old weight is 0 is not read, whatever lies there: so a result may begin as uninitialized memory, with an LSE
of -inf.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common import softmax
from attnlib.kernels.common.logarithms import LN2, LOG2_E
from attnlib.kernels.hopper.column_parts import scaled

MOST_COLUMNS = gl.constexpr(128)  # of the existing output that a warpgroup holds beside its own


class Existing(NamedTuple):
    """Pointers, and strides of a batch, a head and a row: those of the output in units of 8 elements, so that
    the compiler knows that it may read two at once. The rows of an LSE are contiguous."""

    out: gl.tensor
    lse: gl.tensor
    out_b: gl.tensor
    out_h: gl.tensor
    out_m: gl.tensor
    lse_b: gl.tensor
    lse_h: gl.tensor


class Weights(NamedTuple):
    """Of the rows `o_m`: those of the existing output and of this one, and the LSE over both. [64] each."""

    o_m: gl.tensor
    old: gl.tensor
    new: gl.tensor
    lse: gl.tensor


@gluon.jit
def weigh(into, at, row, shift, row_sums, S_q, plan: gl.constexpr):
    """`Weights` of the 64 rows from `row` on; `at` is (batch, head). Beside the last product."""
    if plan.accumulate:
        o_m = row + gl.arange(0, 64, layout=plan.row_layout)  # [64]
        here = shift + gl.log2(row_sums)  # -inf in a row with nothing to attend to
        # In units of log2.
        before = gl.load(_lse(into, at) + o_m, mask=o_m < S_q, other=float("-inf")) * LOG2_E
        old, new, lse = _weights(before, here)
        return Weights(o_m, old, new, lse)
    else:
        return 0


@gluon.jit
def merge(into, acc, weights, row_sums, at, row, S_q, plan: gl.constexpr):
    """The output of 64 rows, of which `acc` is not yet divided, and their LSE into the existing ones."""
    empty = row_sums == 0.0
    # After a wait of the warpgroup: the four threads that share a row have all loaded what was there.
    gl.store(_lse(into, at) + weights.o_m, weights.lse, mask=weights.o_m < S_q)
    if row < S_q:
        factor = 1.0 / gl.where(empty, 1.0, row_sums)
        factor *= weights.new
        _merge_output(into, scaled(acc, factor), weights.old, at, row, S_q, plan)


@gluon.jit
def _weights(before, here):
    """(weight of the existing output, that of this one, LSE over both), from LSEs in units of log2. The
    weights add up to 1, or are 0 where there is no key. [64]"""
    top = gl.maximum(before, here)
    top = gl.where(top == float("-inf"), 0.0, top)
    old, new = gl.exp2(before - top), gl.exp2(here - top)
    total = old + new
    inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
    return old * inverse, new * inverse, (top + gl.log2(total)) * LN2


@gluon.jit
def _lse(into, at):
    return into.lse + (at[0].to(gl.int64) * into.lse_b + at[1].to(gl.int64) * into.lse_h)


@gluon.jit
def _merge_output(into, o, old, at, row, S_q, plan: gl.constexpr):
    """Add old times the existing output to each part of o [64, columns], which is weighted, and store it."""
    out = into.out + (at[0].to(gl.int64) * into.out_b + at[1].to(gl.int64) * into.out_h) * 8
    _merge_columns(into, out, o[0], old, row, S_q, 0, plan)
    for i in gl.static_range(1, len(o)):
        _merge_columns(into, out, o[i], old, row, S_q, plan.d, plan)


@gluon.jit
def _merge_columns(into, out, o, old, row, S_q, START: gl.constexpr, plan: gl.constexpr):
    N: gl.constexpr = o.shape[1]
    if N > MOST_COLUMNS:
        left, right = softmax.halves(o)
        _merge_columns(into, out, left, old, row, S_q, START, plan)
        _merge_columns(into, out, right, old, row, S_q, START + N // 2, plan)
    else:
        layout: gl.constexpr = o.type.layout
        o_m = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))  # [64]
        o_d = START + gl.arange(0, N, layout=gl.SliceLayout(0, layout))  # [N]
        rows = o_m.to(gl.int64) * into.out_m * 8  # [64]
        old = gl.convert_layout(old, gl.SliceLayout(1, layout))
        # The compiler reads two columns at once only where it knows a mask to be equal for both: so no
        # comparison in two dimensions.
        in_d = (o_d < plan.accumulate)[None, :]  # [1, N]
        pointers = out + (rows[:, None] + o_d[None, :])  # [64, N]
        before = gl.load(pointers, mask=((o_m < S_q) & (old > 0.0))[:, None] & in_d, other=0.0)
        gl.store(pointers, o + old[:, None] * before.to(gl.float32), mask=(o_m < S_q)[:, None] & in_d)
