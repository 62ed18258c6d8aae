"""A backward program that stays on its SM: it computes tile after tile, each a block of keys, without a gap.

What a program costs beyond its steps is its launch, its barriers, the latency of its first copies, a first
and a last product that nothing overlaps, and the stores of its gradients. A `persistent` plan has a program
for each SM. Steps are counted through all tiles of a program, i below, and the last step of a tile starts S
of the next one, whose first step forms the last dQ of the tile before, as in the middle of a tile. K and V
have two sets of buffers; tile t, of those of a program, uses set t & 1, and there its dV and dK leave.

    Who tells whom

The producer draws the number of the next tile from a counter in global memory when it has come to the last
block of this one, and leaves it in `next_tile`, -1 after the last one. It copies K with the first Q and V
with the first dO, so these need no barriers of their own:

    q_full[slot]      Q and LSE2 of step i are there, in a tile's first step K, too, and its number; after the
                      last tile, that there is none
    do_full[slot]     dO and delta of step i are there, in a first step V, too

Who keeps turns does not look at Q, and has a barrier `told` for the number (`backward_turns`).

Nor do they need barriers that tell when their buffers are free. K and V of tile t + 2 come to where those of
tile t were, behind Q and dO of the first step of tile t + 2, for which the producer waits until step i - 2
has released its own.
A tile has two steps or more, so that is a step of tile t + 1, and in the first one of these the last dQ of
tile t has been formed, and its gradients have left (`await_gradients`). A tile with one block of queries has
a second one, which sees none of its keys.

There are two places for a number, of tile t in t & 1. Consumers read it behind the last step of tile t - 1,
the warp that adds dQ in bulk before it lets them write the dQ after next, and the warps of `backward_turns`
before they let them add dQ of that last step.

    Varlen sequences

Who has the number of a tile still has to find its sequence. The producer does, as that of the forward pass
does (`varlen_tiles`): it counts the blocks of keys once, and goes on from where it found the tile before. It
tells the others six words, from which they make the `Tile`; the first one is the head, or -1. So there are
exactly as many tiles as blocks, and consumers wait for no load of lengths between two tiles. The words of the
first tile come with its Q, too; the warp that adds dQ in bulk does not look at Q, and waits at a named
barrier, TOLD. It reads the words of tile t before it frees dQ of the first step of t. So no consumer has
released Q of the third step from there on. The producer waits for that before it tells of tile t + 2.

A tile may belong to a sequence of one block of queries, or of none, and has two steps all the same. What lies
behind the queries of its sequence belongs to another one: Q and dO are zeros there by the bounds of their
descriptors, LSE and delta are copied from beyond all rows, so zeros, too, and dQ is not added anywhere
(`backward_tiles.behind_all`).

`mem` is the `Memory` of a kernel, `plan` its plan. Chapter 20 derives the backward pass.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.kernels.common import tma
from attnlib.kernels.common.backward_ring import DO_FREE, Q_FREE, acquire, slot_of
from attnlib.kernels.common.named_barrier import named_barrier
from attnlib.kernels.common.preprocess import DELTA, LSE2
from attnlib.kernels.common.tile_scheduler import draw, drawn, lanes
from attnlib.kernels.common.words import new_words, put_word, word_in
from attnlib.kernels.hopper import backward_tiles as tiling
from attnlib.kernels.hopper.backward_shared import copy_keys, copy_rows
from attnlib.kernels.hopper.column_parts import nbytes

TOLD = gl.constexpr(3)  # of the named barriers, see above

# ---------------------------------------------------------------- numbers of tiles


@gluon.jit
def new_next_tile(plan: gl.constexpr):
    """Places for the words of two tiles. Readers take that of the first lane, which also arrives at the
    barrier."""
    return new_words(2 * plan.words, 4 if plan.varlen else 32)


@gluon.jit
def _places(mem, t, w, plan: gl.constexpr):
    """Of word w of tile t."""
    return mem.next_tile.index((t & 1) * plan.words + w)


@gluon.jit
def _tell(mem, t, words, plan: gl.constexpr):
    for w in gl.static_range(len(words)):
        put_word(_places(mem, t, w, plan), words[w])
    if plan.granted:
        if t > 0:
            mbarrier.arrive(mem.turns.told, count=1)
    if plan.varlen and plan.bulk:
        if t == 0:
            named_barrier("arrive", TOLD, 64)


@gluon.jit
def tile_number(mem, t, WARPS: gl.constexpr, plan: gl.constexpr):
    """The first word of tile t, -1 if there is none: for those who have waited for Q of its first step, or
    for `told`. It is the tile's number, or of varlen sequences its head."""
    return word_in(_places(mem, t, 0, plan), WARPS)


@gluon.jit
def told_tile(mem, t, number, work, WARPS: gl.constexpr, plan: gl.constexpr):
    """Tile t, whose first word is `number`, for the same."""
    if plan.varlen:
        words = (number,)
        for w in gl.static_range(1, plan.words):
            words = words + (word_in(_places(mem, t, w, plan), WARPS),)
        return tiling.of_words(words, work, plan)
    else:
        return tiling.locate(number, work, plan)


@gluon.jit
def drawn_first(work, plan: gl.constexpr):
    """The number of a program's first tile: its own, or, where tiles wait for those of smaller numbers, one
    that the program has drawn. Otherwise, on fewer SMs than there are programs, a program could draw a tile
    that waits for the first one of a program that has not begun."""
    if plan.deterministic:
        return work.first
    else:
        return gl.program_id(0)


@gluon.jit
def first_tile(mem, work, WARPS: gl.constexpr, plan: gl.constexpr):
    """The first word of a program's first tile, for consumers and, of one warp, for who adds dQ in bulk."""
    if plan.varlen:
        if WARPS == 1:
            named_barrier("sync", TOLD, 64)
        else:
            mbarrier.wait(mem.q_full.index(0), 0)
        return tile_number(mem, 0, WARPS, plan)
    else:
        return drawn_first(work, plan)


# ---------------------------------------------------------------- sets of K and V


@gluon.jit
def set_of(t):
    """The first buffer of K and of V of a tile, there are two for 128 keys; of the tile after and of the one
    before it is `_other_set` of this."""
    return 2 * (t & 1)


@gluon.jit
def _other_set(first):
    return 2 - first


@gluon.jit
def set_before(first, j, plan: gl.constexpr):
    """The buffer of K for dQ of the step before."""
    if plan.persistent:
        return gl.where(j == 0, _other_set(first), first)
    else:
        return first


@gluon.jit
def set_after(first, j, n, plan: gl.constexpr):
    """And for S of the step after."""
    if plan.persistent:
        return gl.where(j == n - 1, _other_set(first), first)
    else:
        return first


@gluon.jit
def await_gradients(i, j):
    """In the first step of a tile: those of the tile before have left shared memory."""
    if (j == 0) & (i > 0):
        tma.store_wait(0)


# ---------------------------------------------------------------- producer


@gluon.jit
def produce_tiles(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan: gl.constexpr):
    q_bytes: gl.constexpr = nbytes(desc_q) + desc_rows.block_type.nbytes
    do_bytes: gl.constexpr = nbytes(desc_do) + desc_rows.block_type.nbytes
    number = drawn_first(work, plan)
    blocks = tiling.key_blocks(work, plan)
    tiles = blocks * work.HEADS_KV if plan.varlen else work.tiles
    cursor = 0, 0
    t = 0  # of the tiles of this program
    i = 0  # of its steps
    asked = 0 * lanes()
    while number < tiles:
        tile, cursor = tiling.find(number, blocks, cursor, work, plan)
        at = tiling.queries(tile, work, plan)
        first = set_of(t)
        n = (tile.m_end - tile.m_start) * work.GROUP
        m = tile.m_first
        g = 0
        for j in range(n):
            if j == n - 1:  # earlier, and an idle program could have computed the tile
                asked = draw(work.counter_ptr)
            slot = slot_of(i)
            bar = mem.q_full.index(slot)
            acquire(Q_FREE, i)
            if j == 0:
                _tell(mem, t, tiling.varlen_words(tile) if plan.varlen else (number,), plan)
                copy_keys(desc_k, tile, bar, q_bytes, mem.k, first, work, plan)
            else:
                mbarrier.expect(bar, q_bytes)
            copy_rows(desc_q, desc_rows, LSE2, mem.q, mem.lse, bar, slot, at, tile, g, m, work, plan)
            bar = mem.do_full.index(slot)
            acquire(DO_FREE, i)
            if j == 0:
                copy_keys(desc_v, tile, bar, do_bytes, mem.v, first, work, plan)
            else:
                mbarrier.expect(bar, do_bytes)
            copy_rows(desc_do, desc_rows, DELTA, mem.do, mem.delta, bar, slot, at, tile, g, m, work, plan)
            i += 1
            m, g = tiling.block_after(m, g, tile, plan)
        if plan.deterministic:  # there are more draws than tiles, so none of them sets the counter back
            number = drawn(asked, work.counter_ptr, 0, 0)
        else:
            number = drawn(asked, work.counter_ptr, tiles, 1)
        t += 1
    acquire(Q_FREE, i)
    _tell(mem, t, (-1,), plan)
    mbarrier.arrive(mem.q_full.index(slot_of(i)), count=1)
