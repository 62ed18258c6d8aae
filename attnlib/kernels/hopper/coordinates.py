"""Where the operands and results of a tile of the forward kernel lie: coordinates for descriptors, and places
behind pointers.

Of a plain call the coordinates are (batch, head, row, column). A varlen sequence is addressed from its end
(`descriptors.varlen_window`). V in e4m3 lies transposed (chapter 22). With `plan.own_keys` each block of
query rows has keys of its own, which lie like those of so many heads (chapter 36).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels.common.tile_scheduler import VARLEN_ROWS, coordinates, divide, sequence


@gluon.jit
def of_keys(row, i_b, i_h, work, plan: gl.constexpr):
    """Where a descriptor finds the keys of the tile from `row` on of a query head; see `coordinates`."""
    i_kv, _ = divide(i_h, work.GROUP)
    if plan.own_keys:
        i_own, _ = divide(row, work.shared_rows)
        return i_b, i_kv, i_h * work.key_blocks + i_own, 0
    elif plan.varlen:
        seq = sequence(i_b, work, plan)
        at = seq.end_k, i_kv, VARLEN_ROWS - seq.S_k
        if plan.fp8:  # and of V^T, whose sequences begin at multiples of 16
            groups = gl.cdiv(seq.S_k, 16)
            at = at + ((seq.end_k - seq.S_k) // 16 + i_b + groups, VARLEN_ROWS - 16 * groups)
        return at
    else:
        return i_b, i_kv


@gluon.jit
def of_queries(i_b, i_h, seq, plan: gl.constexpr):
    """Where a descriptor finds the rows of a head, or its output."""
    if plan.varlen:
        return seq.end_q, i_h, VARLEN_ROWS - seq.S_q
    else:
        return i_b, i_h


@gluon.jit
def of_key(at, key, plan: gl.constexpr):
    """The coordinates of the keys from `key` on."""
    if plan.own_keys:
        return at[0], at[2], key, 0
    else:
        return coordinates(at, key, 0)


@gluon.jit
def of_values(at, key, plan: gl.constexpr):
    """The coordinates of the values from `key` on: of their row, or of their column where V is transposed."""
    if plan.own_keys:
        return at[0], at[1], key, 0
    elif not plan.fp8:
        return coordinates(at, key, 0)
    elif len(at) == 2:
        return at[0], at[1], 0, key
    else:
        return VARLEN_ROWS // 16, at[3], at[1], 0, at[4] + key


@gluon.jit
def of_lse(at, seq, work, plan: gl.constexpr):
    """How far behind the first LSE of all those of a head or of a varlen sequence begin."""
    if plan.varlen:
        return at[1].to(gl.int64) * work.T_q + (at[0] - seq.S_q)
    else:
        return (at[0] * work.H + at[1]).to(gl.int64) * seq.S_q


@gluon.jit
def of_mean(i_b, i_h, work, plan: gl.constexpr):
    """The head, among those of all batches or varlen sequences, whose mean the output of a tile gets; 0 where
    values have their mean."""
    if plan.centered:
        i_kv, _ = divide(i_h, work.GROUP)
        return i_b * work.scales.mean_b + i_kv
    else:
        return 0


@gluon.jit
def of_scales(row, i_b, i_h, work, plan: gl.constexpr):
    """Where the scales of a tile are: of Q for its first row, of K for the first key, of V."""
    i_kv, _ = divide(i_h, work.GROUP)
    s = work.scales
    if plan.varlen:
        of_q = 0
        if not plan.quantizes:
            of_q = i_h * s.q_h + (gl.load(work.cu_q + i_b) // 64 + i_b + row // 64) * s.q_n
        first_k = (gl.load(work.cu_k + i_b) // 128 + i_b) * s.k_n
        return of_q, i_kv * s.k_h + first_k, i_kv * s.v_h
    else:
        of_q = 0
        if not plan.quantizes:
            of_q = i_b * s.q_b + i_h * s.q_h + (row // 64) * s.q_n
        return of_q, i_b * s.k_b + i_kv * s.k_h, i_b * s.v_b + i_kv * s.v_h
