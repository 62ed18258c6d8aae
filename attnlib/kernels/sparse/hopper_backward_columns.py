"""A backward program under a block mask that stays on its SM: it computes column after column. Chapter 33 has
what a program costs beyond its steps, `kernels.hopper.backward_persistent` the same for a dense call.

A `persistent` plan has a program for each SM. i counts the steps of all its columns, t the columns. V of
column t is in set t & 1 of two, from where its dV and dK leave, too. There is one set of K: two do not fit
beside two of V at D = 128. So the products of a column end before those of the next one begin. But its
gradients leave while K and V of the next one arrive, and by then Q and dO of its first steps are there.

    Who tells whom

The producer draws the number of the next column from a counter in global memory when it has come to the last
step of this one. It looks up the lists of that column meanwhile, and leaves words behind those of steps, in
`told`: how many steps there are, which keys, batch element and head; no steps after the last column.

    q_full[slot]      Q and LSE2 of step i are there, in a column's first step its words, too
    k_full, v_full    K and V of column t are there (parity t & 1)
    K_FREE + (t & 1)  both consumers have formed the last dQ of column t, and its K may be overwritten

The producer copies V of column t + 1 behind K, so once K_FREE has been told for column t. Before that a
consumer has waited until the gradients of column t - 1, which left from the same buffers, have been read.
Words of four columns are kept. Those of column t + 4 come to where those of column t were. Before that the
producer has waited until the step before the one before has released Q. Each column has a step or more, so
that is a step of column t + 2 or of a later one, and consumers are done with column t.

In the first step of a column there is no dQ of a step before: the product is made all the same, of what is in
the buffers, and added nowhere. In the last step there is no S of a step after: S of the same step is formed
again, and Q is released behind it.

`mem` is the `Memory` of `hopper_backward_steps`, `plan` its plan.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.kernels.common.backward_ring import DO_FREE, Q_FREE, acquire, slot_of
from attnlib.kernels.common.tile_scheduler import draw, drawn, lanes
from attnlib.kernels.common.words import put_word, word_in
from attnlib.kernels.sparse.hopper_backward_steps import (
    BATCH,
    COUNT,
    HEAD,
    KEYS,
    copy_do,
    copy_keys,
    copy_q,
    list_of,
    locate,
    place_of_keys,
    word_of_column,
)

K_FREE = gl.constexpr(6)  # of the named barriers, and 7; START has 4 and 5, Q_FREE is 8


# ---------------------------------------------------------------- words of columns


@gluon.jit
def count_of(mem, t):
    """Steps of column t, 0 if there is none; for a consumer that knows that Q of its first step is there."""
    return word_in(word_of_column(mem, t, COUNT))


@gluon.jit
def head_of(mem, t):
    """(batch element, key/value head) of column t."""
    return word_in(word_of_column(mem, t, BATCH)), word_in(word_of_column(mem, t, HEAD))


# ---------------------------------------------------------------- sets of V


@gluon.jit
def set_of(t):
    """The first buffer of V of a column."""
    return 2 * (t & 1)


# ---------------------------------------------------------------- producer


@gluon.jit
def produce_columns(
    desc_q, desc_k, desc_v, desc_do, desc_rows, desc_words, desc_bias, mem, work, plan: gl.constexpr
):  # fmt: skip
    number = gl.program_id(0)
    t = 0  # of the columns of this program
    i = 0  # of its steps
    asked = 0 * lanes()
    while number < work.columns:
        column = locate(number, work)
        keys = place_of_keys(column, work, plan)
        j = 0
        for g in range(work.GROUP):
            head, first, end = list_of(column, g, work)
            for e in range(first, end):
                if j == column.count - 1:  # earlier, and an idle program could have computed the column
                    asked = draw(work.counter)
                m = gl.load(work.steps + e)
                acquire(Q_FREE, i)
                if j == 0:
                    put_word(word_of_column(mem, t, KEYS), keys)
                    put_word(word_of_column(mem, t, COUNT), column.count)
                    put_word(word_of_column(mem, t, BATCH), column.i_b)
                    put_word(word_of_column(mem, t, HEAD), column.i_kv)
                copy_q(desc_q, desc_rows, desc_words, desc_bias, mem, i, e, head, m, column, work, plan)
                acquire(DO_FREE, i)
                copy_do(desc_do, desc_rows, mem, i, head, m, column, work, plan)
                if j == 0:
                    acquire(K_FREE, t + 1)  # from column t - 1
                    copy_keys(desc_k, mem.k_full, mem.k, keys, column, plan)
                    copy_keys(desc_v, mem.v_full, mem.v, keys, column, plan, set_of(t))
                i += 1
                j += 1
        number = drawn(asked, work.counter, work.columns, 1)
        t += 1
    acquire(Q_FREE, i)
    put_word(word_of_column(mem, t, COUNT), 0)
    mbarrier.arrive(mem.q_full.index(slot_of(i)), count=1)
