"""What the entmax kernels have in common: the block of a program, its list, rows gathered, and powers.

Varlen sequences (cu is not None) lie one after the other in (T, H, D). Their blocks are numbered as if each
began at a multiple of ROWS, see `varlen_rows.padded_start`: so a block has rows of one sequence, and some
blocks have none. Numbers of rows, tau among them, are not padded: they are (H, T_q).
"""

import triton
import triton.language as tl

from attnlib.kernels.common.tile_access import VARLEN_ROWS
from attnlib.kernels.common.varlen_rows import padded_start, sequence, sequence_of
from attnlib.kernels.entmax import configs

ROWS = tl.constexpr(configs.LIST)
ANY = tl.constexpr(configs.ANY)
THREE_HALVES = tl.constexpr(configs.THREE_HALVES)
TWO = tl.constexpr(configs.TWO)
LARGE = tl.constexpr(2.0**126)  # a normal positive float times this is at least 1


@triton.jit
def blocks_of(rows, cu, B, BLOCK: tl.constexpr):
    """Blocks of a head: of the `rows` of a sequence, or of the B varlen ones, `rows` together."""
    if cu is None:
        return tl.cdiv(rows, BLOCK)
    else:
        return (rows // ROWS + B) * (ROWS // BLOCK)


@triton.jit
def varlen_block(row, cu, other, B):
    """Of the block that begins at padded row `row`: (its sequence, its first row there, end and length of
    that, end and length of the sequence's other side, keys of queries and queries of keys)."""
    i_b = sequence_of(row, cu, B, ROWS)
    end, length = sequence(cu, i_b)
    end_other, length_other = sequence(other, i_b)
    return i_b, row - padded_start(end - length, i_b, ROWS), end, length, end_other, length_other


@triton.jit
def query_block(row, head, S_q, S_k, H, cu_q, cu_k, B, GROUP: tl.constexpr):
    """(first row in its sequence, S_q, S_k, where `load_tile` finds queries, and keys, the sequence) of the
    block of queries that begins at row `row` of `head`."""
    if cu_q is None:
        i_b, i_h = head // H, head % H
        return row, S_q, S_k, (i_b, i_h), (i_b, i_h // GROUP), i_b
    else:
        i_b, start, end_q, S_q, end_k, S_k = varlen_block(row, cu_q, cu_k, B)
        at_q = end_q, head, tl.sub(VARLEN_ROWS, S_q)
        return start, S_q, S_k, at_q, (end_k, head // GROUP, tl.sub(VARLEN_ROWS, S_k)), i_b


@triton.jit
def head_of(x_ptr, at, S, x_b, x_h, x_s, UNIT: tl.constexpr):
    """Where the rows of a sequence and head begin; `at` as in `load_tile`. Strides in units of UNIT."""
    if len(at) == 2:
        return x_ptr + (at[0].to(tl.int64) * x_b + at[1].to(tl.int64) * x_h) * UNIT
    else:
        return x_ptr + ((at[0] - S).to(tl.int64) * x_s + at[1].to(tl.int64) * x_h) * UNIT


@triton.jit
def rows_of(at, head, S_q, T_q):
    """The number of a sequence's first row among the T_q rows of each head; `at` as in `load_tile`."""
    if len(at) == 2:
        return head.to(tl.int64) * T_q
    else:
        return head.to(tl.int64) * T_q + (at[0] - S_q)


@triton.jit
def last_visible(o_m, S_q, S_k, CAUSAL: tl.constexpr):
    """The last key that each row sees, -1 for none: of causal rows the last one stands at the last key."""
    last = tl.full(o_m.shape, 0, tl.int32) + (S_k - 1)
    if CAUSAL:
        last = tl.minimum(tl.maximum(o_m + (S_k - S_q), -1), S_k - 1)
    return last


@triton.jit
def positive(b_x):
    """1 where a number is positive, else 0: by a product that ends at 1. The GPU does twice as many of these
    a clock as comparisons or selections."""
    return tl.minimum(tl.maximum(b_x * LARGE, 0.0), 1.0)


@triton.jit
def powers(b_x, exponent, KIND: tl.constexpr):
    """x^p and x^(p - 1) of x >= 0, where p = 1 / (alpha - 1); 0 where x is 0."""
    if KIND == THREE_HALVES:
        return b_x * b_x, b_x
    elif KIND == TWO:
        return b_x, tl.where(b_x > 0.0, 1.0, 0.0)
    else:
        b_log = tl.math.log2(b_x)  # -inf where x is 0, and so is the product
        return tl.math.exp2(b_log * exponent), tl.math.exp2(b_log * (exponent - 1.0))


@triton.jit
def list_of(lists_ptr, records_ptr, number, room, identity):
    """(a list, how many it names, how many before its middle): see `entmax_lists`."""
    records_ptr += number * 4
    count, middle, first = tl.load(records_ptr), tl.load(records_ptr + 1), tl.load(records_ptr + 2)
    at = number * room
    if first >= 0:  # no room: all from the first one on
        at = tl.full([], identity, tl.int64) + first
    return lists_ptr + at, count, middle


@triton.jit
def gather(x_ptr, b_index, stride, UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a tensor by number [BLOCK, BLOCK_D]. stride: of a row, in units of UNIT elements, from which
    the compiler knows that 16 bytes may be read at a time."""
    o_d = tl.arange(0, BLOCK_D)
    # Neither is negative, and of unsigned numbers the product of 32 with 32 bits is one instruction.
    at = b_index.to(tl.uint32).to(tl.uint64) * stride.to(tl.uint32).to(tl.uint64) * UNIT  # [BLOCK]
    if HEAD_DIM == BLOCK_D:
        return tl.load(x_ptr + at[:, None] + o_d[None, :])
    else:
        return tl.load(x_ptr + at[:, None] + o_d[None, :], mask=(o_d < HEAD_DIM)[None, :], other=0.0)
