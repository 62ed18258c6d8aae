"""A backward program under a block mask that stays on its SM: it computes column after column. Chapter 33 has
what a program costs beyond its steps, `kernels.hopper.backward_persistent` the same for a dense call.

A `persistent` plan has a program for each SM. i counts the steps of all its columns, t the columns. K of
column t is in set t & 1 of two; V has one set, since two of both do not fit at D = 128. The last step of a
column starts S of the next one. Then the last dQ of the column is formed, with its K, which nobody needs
behind that: dV and dK leave from there, while V of the next column arrives.

    Who tells whom

The producer draws the number of the next column from a counter in global memory when it has come to the last
step of this one. It looks up the lists of that column meanwhile, and leaves words behind those of steps, in
`told`: how many steps there are, which keys, batch element and head; no steps after the last column.

    q_full[slot]    Q, LSE2 and delta of step i are there, in a column's first step its words, too; behind the
                    last column, that there is none
    k_full[t & 1]   K of column t is there; behind the last column, that there is none
    v_full          V of column t is there (parity t & 1)
    V_FREE          both consumers have formed the last dP of column t
    K_FREE          the gradients of column t have left; told in the first step of column t + 1

Of each there is one at a time: K_FREE is told again in the first step of column t + 2, whose K the producer
has copied behind the first K_FREE, and V_FREE in the last step of column t + 1, which has its V. A consumer
tells K_FREE before it waits for its turn and for Q of the step after: a column may have one step.

Q has three slots: consumers take turns, so one releases Q of a step when the other is half way through the
next one, and with two slots Q of the step after would come too late. Where both consumers have formed their
half of the last dQ, and gradients may be written over K, they meet at a barrier of dS that nobody uses then.

Words of four columns are kept. Those of column t + 4 come to where those of column t were. Before that the
producer has waited until Q of three steps before is released. Each column has a step or more, so that is a
step of column t + 1 or of a later one, and consumers are done with column t.

In the first step of a column there is no dQ of a step before: the product is made all the same, of what is in
the buffers, and added nowhere. Behind the last column S is formed of what is in the buffers.

`mem` is the `Memory` of `hopper_backward_steps`, `plan` its plan.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.kernels.common import tma
from attnlib.kernels.common.backward_pair import DS_FULL
from attnlib.kernels.common.backward_ring import DO_FREE, acquire
from attnlib.kernels.common.named_barrier import named_barrier
from attnlib.kernels.common.tile_scheduler import draw, drawn, lanes
from attnlib.kernels.common.words import put_word, word_in
from attnlib.kernels.sparse.hopper_backward_steps import (
    BATCH,
    COUNT,
    HEAD,
    KEYS,
    acquire_q,
    copy_do,
    copy_keys,
    copy_q,
    list_of,
    locate,
    place_of_keys,
    q_slot,
    word_of_column,
)

# Of the named barriers. Triton uses those below 3, START has 4 and 5, Q 6 to 8, dO 10 and 11, dS 12 to 15.
V_FREE, K_FREE = gl.constexpr(3), gl.constexpr(9)


# ---------------------------------------------------------------- words of columns


@gluon.jit
def count_of(mem, t):
    """Steps of column t, 0 if there is none; for a consumer that knows that Q of its first step is there."""
    return word_in(word_of_column(mem, t, COUNT))


@gluon.jit
def head_of(mem, t):
    """(batch element, key/value head) of column t."""
    return word_in(word_of_column(mem, t, BATCH)), word_in(word_of_column(mem, t, HEAD))


# ---------------------------------------------------------------- K and V of a column


@gluon.jit
def set_of(t):
    """The first buffer of K of a column."""
    return 2 * (t & 1)


@gluon.jit
def await_k(mem, t):
    """A consumer waits for K of column t."""
    mbarrier.wait(mem.k_full.index(t & 1), (t >> 1) & 1)


@gluon.jit
def set_after(t, j, n):
    """The first buffer of K for the step after step j of n: after the last one, the next column's."""
    return set_of(gl.where(j == n - 1, t + 1, t))


@gluon.jit
def await_gradients(t, j):
    """In a column's first step: wait until the gradients of the column before have left, and tell the
    producer that their K is free."""
    if (j == 0) & (t > 0):
        tma.store_wait(0)
        named_barrier("arrive", K_FREE, 288)


@gluon.jit
def meet(last):
    """Consumers wait for each other behind the last dQ of a column, whose last step is `last`."""
    named_barrier("sync", DS_FULL + ((last + 1) & 1), 256)


@gluon.jit
def change_keys(mem, t, j, n):
    """In a column's last step, behind its dP: V is free, and K of the next column is waited for."""
    if j == n - 1:
        named_barrier("arrive", V_FREE, 288)
        await_k(mem, t + 1)


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
        column = locate(number, work, plan)
        keys = place_of_keys(column, work, plan)
        if t >= 2:
            named_barrier("sync", K_FREE, 288)  # of column t - 2
        copy_keys(desc_k, mem.k_full.index(t & 1), mem.k, keys, column, plan, set_of(t))
        j = 0
        for g in range(work.GROUP):
            head, first, end = list_of(column, g, work)
            for e in range(first, end):
                if j == column.count - 1:  # earlier, and an idle program could have computed the column
                    asked = draw(work.counter)
                m = gl.load(work.steps + e)
                acquire_q(i, plan)
                if j == 0:
                    put_word(word_of_column(mem, t, KEYS), keys)
                    put_word(word_of_column(mem, t, COUNT), column.count)
                    put_word(word_of_column(mem, t, BATCH), column.i_b)
                    put_word(word_of_column(mem, t, HEAD), column.i_kv)
                copy_q(desc_q, desc_rows, desc_words, desc_bias, mem, i, e, head, m, column, work, plan)
                acquire(DO_FREE, i)
                copy_do(desc_do, desc_rows, mem, i, head, m, column, work, plan)
                if j == 0:
                    if t >= 1:
                        named_barrier("sync", V_FREE, 288)  # of column t - 1
                    copy_keys(desc_v, mem.v_full, mem.v, keys, column, plan)
                i += 1
                j += 1
        number = drawn(asked, work.counter, work.columns, 1)
        t += 1
    acquire_q(i, plan)
    put_word(word_of_column(mem, t, COUNT), 0)
    mbarrier.arrive(mem.q_full.index(q_slot(i, plan)), count=1)
    mbarrier.arrive(mem.k_full.index(t & 1), count=1)  # V of column t - 2 was given back, so its K had come
