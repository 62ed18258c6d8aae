"""What the two Hopper backward kernels under a block mask have in common: the lists, what a producer copies
and tells for each of their steps, and P of a step. Chapter 30 has block masks, chapter 21 kernels without.

- A column is 64 or 128 keys of a key/value head (`plan.block_n`), in one or two buffers of 64. A program
  visits, for one query head of the group after the other, the queries on the list of these keys
  (`block_mask.lists`, of columns). Only the producer reads the lists. A program has one column, or, with a
  `persistent` plan, one after the other (`hopper_backward_columns`); j then counts the steps of all.
- With Q and LSE2 of step j the producer sends a word, in told[j % 4]: twice the number of the block of
  queries over all heads, to which dQ is added, plus 1 if the step carries bits. It is stored before the
  producer arrives at q_full, and the place is filled again with step j + 4, for which the producer waits
  until Q of step j + 4 - q_stages is released, which is behind step j.
- The bits of a step, transposed, four words for each of the keys of a buffer, arrive with Q at q_full.
- A score (`hopper_scores`) is computed again. For ALiBi the producer sends two more words with each step:
  where the first key stands among the queries, and the slope of the head.
- A bias arrives with Q at q_full, where TMA can read it, as it lies in memory: block_m queries of the keys of
  each buffer, which are loaded transposed. The warpgroup that has loaded it executes a fence before it
  releases Q, as for LSE2. Other biases are loaded from where they are, and the producer sends two words
  more: the head of the step, and its first query. These a function of the caller's own gets, too.

A list has at least one step: keys that nobody sees have one whose bits are all 0.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.kernels.common import tile_scheduler as tiling
from attnlib.kernels.common import tma
from attnlib.kernels.common.backward_ring import (
    DO_FREE,
    STAGES,
    acquire,
    parity_of,
    release,
    slot_of,
)
from attnlib.kernels.common.logarithms import LOG2_E
from attnlib.kernels.common.memory import barriers, buffers
from attnlib.kernels.common.preprocess import DELTA, LSE2
from attnlib.kernels.common.tile_order import leading_first
from attnlib.kernels.common.words import new_words, put_word, word_in
from attnlib.kernels.sparse.hopper_scores import away, bias_of_keys, tanh

LANES = gl.constexpr(2)
"""Places of a word in shared memory; all have it."""

COLUMNS = gl.constexpr(4)  # of which words are kept, a power of two; see `hopper_backward_columns`
WORDS = gl.constexpr(4)
KEYS, COUNT, BATCH, HEAD = (gl.constexpr(w) for w in range(4))  # which keys, steps, batch element, kv head


# ---------------------------------------------------------------- what is passed around


class Memory(NamedTuple):
    """Buffers and barriers in shared memory."""

    k: gl.shared_memory_descriptor  # [block_n / 64, 1, 1, 64, d], of a persistent plan twice as many
    v: gl.shared_memory_descriptor  # [block_n / 64, 1, 1, 64, d]
    q: gl.shared_memory_descriptor  # [q_stages, 1, 1, block_m, d]
    do: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m, d]
    lse: gl.shared_memory_descriptor  # [q_stages, 1, 1, block_m]
    delta: gl.shared_memory_descriptor  # [q_stages, 1, 1, block_m]
    words: gl.shared_memory_descriptor  # [parts * q_stages, 1, 1, 256]: of buffer w, parts * slot + w
    told: gl.shared_memory_descriptor  # [4, LANES], and behind them words of columns: one, which keys the
    # program has, or of a persistent plan COLUMNS * WORDS
    places: gl.shared_memory_descriptor  # [4, LANES], for ALiBi: of the first key, from a step's first query
    slopes: gl.shared_memory_descriptor  # [4, LANES], for ALiBi: of a step's head, times log2(e)
    bias: gl.shared_memory_descriptor  # copied, [parts * q_stages, 1, 1, block_m, 64]: numbered as words
    heads: gl.shared_memory_descriptor  # [4, LANES], for a bias that is loaded, or a function: of a step,
    queries: gl.shared_memory_descriptor  # [4, LANES]: and its first query
    ds: gl.shared_memory_descriptor  # [2 * parts, 64, block_m]: buffer 0 of each consumer, buffer 1
    p: gl.shared_memory_descriptor  # [STAGES, 64, block_m], of the wide kernel
    k_full: gl.shared_memory_descriptor  # [1], of a persistent plan [2]: of each set
    v_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor


class Work(NamedTuple):
    """The problem and its lists; see the kernel's arguments."""

    H: gl.tensor
    GROUP: gl.tensor
    HEADS_KV: gl.tensor
    SECTION: gl.tensor
    num_m: gl.tensor
    num_n: gl.tensor
    mask_b: gl.tensor
    mask_h: gl.tensor
    starts: gl.tensor
    steps: gl.tensor
    bits: gl.tensor
    order: gl.tensor
    inner: gl.tensor  # of a score; None without
    after: gl.tensor
    place: gl.tensor
    alibi: gl.tensor
    bias: gl.tensor
    bias_b: gl.tensor
    bias_h: gl.tensor
    bias_m: gl.tensor
    S_q: gl.tensor
    S_k: gl.tensor
    units: gl.tensor  # see `block_mask.gathered`; None without
    columns: gl.tensor  # of a persistent plan: how many there are, a counter of them, and how many lead
    counter: gl.tensor
    LEADING: gl.tensor


class Column(NamedTuple):
    """Keys of a program, and their lists."""

    i_b: gl.tensor  # batch element
    i_kv: gl.tensor  # key/value head
    i_n: gl.tensor  # number of the keys
    number: gl.tensor  # of their list of the first head of the group
    count: gl.tensor  # of steps on the lists of all heads


# ---------------------------------------------------------------- begin of a program


@gluon.jit
def locate(place, work, plan: gl.constexpr):
    """The `Column` of this place in their order: those of a head with the longest lists come first, and of a
    persistent plan LEADING of these, of all heads, before all others. Other plans do without: their consumers
    hold the `Column`, and the choice between two orders made them spill. Not for the code of a consumer: a
    loop in there makes ptxas take what follows it for different in each thread."""
    if plan.persistent:
        rank, head = leading_first(place, work.num_n, work.HEADS_KV, work.SECTION, work.LEADING)
    else:
        rank, head = tiling.by_sections(place, work.num_n, work.HEADS_KV, work.SECTION)
    i_b, i_kv = tiling.divide(head, work.H // work.GROUP)
    mask = (i_b * work.mask_b + i_kv * work.GROUP * work.mask_h) * work.num_n
    i_n = gl.load(work.order + mask + rank)
    number = mask + i_n
    count = 0
    for g in range(work.GROUP):
        own = work.starts + number + g * work.mask_h * work.num_n
        count += gl.load(own + 1) - gl.load(own)
    return Column(i_b, i_kv, i_n, number, count)


@gluon.jit
def memory(desc_q, desc_k, desc_v, desc_do, desc_rows, desc_words, desc_bias, plan: gl.constexpr):
    """The `Memory` of a program."""
    slots: gl.constexpr = plan.parts * plan.q_stages if plan.partial else 1
    places, slopes = 0, 0  # a function can't return a None
    if plan.alibi:
        places, slopes = new_words(4, LANES), new_words(4, LANES, gl.float32)
    bias, heads, queries, p = 0, 0, 0, 0
    if plan.copies_bias:
        bias = buffers(desc_bias, plan.parts * plan.q_stages)
    if plan.tells_heads:
        heads, queries = new_words(4, LANES), new_words(4, LANES)
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, plan.block_m], desc_k.dtype)
    if plan.parts == 1:
        p = gl.allocate_shared_memory(desc_k.dtype, [STAGES, 64, plan.block_m], half_layout)
    sets: gl.constexpr = 2 if plan.persistent else 1  # of K
    return Memory(
        buffers(desc_k, sets * plan.parts),
        buffers(desc_v, plan.parts),
        buffers(desc_q, plan.q_stages),
        buffers(desc_do, STAGES),
        gl.allocate_shared_memory(gl.float32, [plan.q_stages, 1, 1, plan.block_m], desc_rows.layout),
        gl.allocate_shared_memory(gl.float32, [plan.q_stages, 1, 1, plan.block_m], desc_rows.layout),
        gl.allocate_shared_memory(desc_words.dtype, [slots, 1, 1, 256], desc_words.layout),
        new_words(4 + (COLUMNS * WORDS if plan.persistent else 1), LANES),
        places,
        slopes,
        bias,
        heads,
        queries,
        gl.allocate_shared_memory(desc_k.dtype, [2 * plan.parts, 64, plan.block_m], half_layout),
        p,
        barriers(sets, 1),  # k_full
        barriers(1, 1).index(0),  # v_full
        barriers(plan.q_stages, 1),  # q_full
        barriers(STAGES, 1),  # do_full
    )


@gluon.jit
def word_of_column(mem, t, w):
    """Where word w of column t of this program is."""
    return mem.told.index(4 + (t & (COLUMNS - 1)) * WORDS + w)


@gluon.jit
def place_of_keys(column, work, plan: gl.constexpr):
    """The number of a column's keys; of those that are gathered, the numbers of both units."""
    if plan.gathered:
        return gl.load(work.units + column.number)
    else:
        return column.i_n


@gluon.jit
def first_row(place, w, plan: gl.constexpr):
    """Of the keys in buffer w, from that number."""
    if plan.gathered:
        return ((place >> (16 * w)) & 0xFFFF) * 64
    else:
        return place * plan.block_n + w * 64


# ---------------------------------------------------------------- slots of Q


@gluon.jit
def q_slot(j, plan: gl.constexpr):
    """Where Q of step j is, and what comes with it."""
    return slot_of(j, plan.q_stages)


@gluon.jit
def await_q(mem, j, plan: gl.constexpr):
    """A consumer waits for Q of step j."""
    mbarrier.wait(mem.q_full.index(q_slot(j, plan)), parity_of(j, plan.q_stages))


@gluon.jit
def release_q(j, plan: gl.constexpr):
    """This consumer, one of two, no longer needs Q of step j."""
    release(plan.q_free, j, 2, plan.q_stages)


@gluon.jit
def acquire_q(j, plan: gl.constexpr):
    """The producer waits until all consumers have released what lies where Q of step j goes."""
    acquire(plan.q_free, j, 2, plan.q_stages)


# ---------------------------------------------------------------- producer


@gluon.jit
def copy_keys(desc, bar, buffers, keys, column, plan: gl.constexpr, first=0):
    """Of K or V, 64 rows into each buffer from `first` on. keys: `place_of_keys`."""
    mbarrier.expect(bar, plan.parts * desc.block_type.nbytes)
    for w in gl.static_range(plan.parts):
        place = tiling.coordinates((column.i_b, column.i_kv), first_row(keys, w, plan), 0)
        tma.async_copy_global_to_shared(desc, place, bar, buffers.index(first + w))


@gluon.jit
def copy_q(desc_q, desc_rows, desc_words, desc_bias, mem, j, e, head, m, column, work, plan: gl.constexpr):
    """Q and LSE2 of step j, entry e of the lists: block m of a head; and what consumers are told of it. Of a
    persistent plan delta, too. It can't come with dO: that is given back before the fence that follows the
    load of delta, and with three slots the producer has not waited for Q of that step either."""
    slot = q_slot(j, plan)
    bar = mem.q_full.index(slot)
    biases: gl.constexpr = plan.parts * desc_bias.block_type.nbytes if plan.copies_bias else 0
    row_bytes: gl.constexpr = (2 if plan.persistent else 1) * desc_rows.block_type.nbytes
    size: gl.constexpr = desc_q.block_type.nbytes + row_bytes + biases
    i_h = head - column.i_b * work.H
    word = 2 * (head * work.num_m + m)
    bits = 0
    if plan.partial:
        bits = gl.load(work.bits + e)
        word += (bits >= 0).to(gl.int32)
    put_word(mem.told.index(j & 3), word)
    if plan.alibi:
        place = column.i_n * plan.block_n - (m * plan.block_m + work.place)
        slope = gl.load(work.alibi + i_h) * LOG2_E
        put_word(mem.places.index(j & 3), place)
        put_word(mem.slopes.index(j & 3), slope)
    if plan.tells_heads:
        put_word(mem.heads.index(j & 3), i_h)
        put_word(mem.queries.index(j & 3), m * plan.block_m)
    if plan.partial:
        # No branch: with one here, ptxas takes the loop of consumer 1, too, for different in each thread, and
        # moves the addresses of operands in every step.
        there = bits >= 0
        if plan.block_m == 128:
            bits = bits >> 1
        mbarrier.expect(bar, size + plan.parts * desc_words.block_type.nbytes, pred=there)
        mbarrier.expect(bar, size, pred=bits < 0)
        for w in gl.static_range(plan.parts):
            half = w if plan.parts == 2 else column.i_n & 1  # of the keys of the tile
            words = mem.words.index(plan.parts * slot + w)
            tma.async_copy_global_to_shared(desc_words, [bits, half, 0], bar, words, pred=there)
    else:
        mbarrier.expect(bar, size)
    place = tiling.coordinates((column.i_b, i_h), m * plan.block_m, 0)
    tma.async_copy_global_to_shared(desc_q, place, bar, mem.q.index(slot))
    tma.async_copy_global_to_shared(desc_rows, [LSE2, head, m * plan.block_m], bar, mem.lse.index(slot))
    if plan.persistent:
        rows = [DELTA, head, m * plan.block_m]
        tma.async_copy_global_to_shared(desc_rows, rows, bar, mem.delta.index(slot))
    if plan.copies_bias:
        own_b = column.i_b if plan.bias_batches else 0
        own_h = i_h if plan.bias_heads else 0
        for w in gl.static_range(plan.parts):
            place = [own_b, own_h, m * plan.block_m, column.i_n * plan.block_n + w * 64]
            tma.async_copy_global_to_shared(desc_bias, place, bar, mem.bias.index(plan.parts * slot + w))


@gluon.jit
def copy_do(desc_do, desc_rows, mem, j, head, m, column, work, plan: gl.constexpr):
    slot = slot_of(j)
    bar = mem.do_full.index(slot)
    row_bytes: gl.constexpr = 0 if plan.persistent else desc_rows.block_type.nbytes
    mbarrier.expect(bar, desc_do.block_type.nbytes + row_bytes)
    at = column.i_b, head - column.i_b * work.H
    place = tiling.coordinates(at, m * plan.block_m, 0)
    tma.async_copy_global_to_shared(desc_do, place, bar, mem.do.index(slot))
    if not plan.persistent:
        rows = [DELTA, head, m * plan.block_m]
        tma.async_copy_global_to_shared(desc_rows, rows, bar, mem.delta.index(slot))


@gluon.jit
def list_of(column, g, work):
    """(query head over all batch elements, first entry, end) of the list of head g of the group."""
    number = column.number + g * work.mask_h * work.num_n
    head = column.i_b * work.H + column.i_kv * work.GROUP + g
    return head, gl.load(work.starts + number), gl.load(work.starts + number + 1)


@gluon.jit
def produce(
    desc_q, desc_k, desc_v, desc_do, desc_rows, desc_words, desc_bias, mem, work, column, plan: gl.constexpr
):  # fmt: skip
    # Consumers need the place of their keys at the end alone, and have no register for it until then.
    keys = place_of_keys(column, work, plan)
    put_word(word_of_column(mem, 0, KEYS), keys)
    copy_keys(desc_k, mem.k_full.index(0), mem.k, keys, column, plan)
    j = 0
    for g in range(work.GROUP):
        head, first, end = list_of(column, g, work)
        for e in range(first, end):
            m = gl.load(work.steps + e)  # a step takes microseconds: no need to load it earlier
            acquire_q(j, plan)
            copy_q(desc_q, desc_rows, desc_words, desc_bias, mem, j, e, head, m, column, work, plan)
            if j == 0:
                copy_keys(desc_v, mem.v_full, mem.v, keys, column, plan)
            acquire(DO_FREE, j)
            copy_do(desc_do, desc_rows, mem, j, head, m, column, work, plan)
            j += 1


# ---------------------------------------------------------------- consumers


@gluon.jit
def told(mem, place):
    """A word of the producer's: that of step j is in place j % 4."""
    return word_in(mem.told.index(place))


@gluon.jit
def keys_of(mem, t=0):
    """Which keys column t of this program has, see `place_of_keys`."""
    return word_in(word_of_column(mem, t, KEYS))


@gluon.jit
def weights(
    s, lse, mem, j, qk_scale, work, column, FUNCTION: gl.constexpr, DERIVATIVE: gl.constexpr,
    WG: gl.constexpr, plan: gl.constexpr,
):  # fmt: skip
    """P^T of step j for the keys of buffer WG, before its bits, and the derivative of its scores:
    [64, BLOCK_M] twice."""
    derivative = 1.0
    if plan.function:
        key, query = keys_of(mem) * plan.block_n + WG * 64, word_in(mem.queries.index(j & 3))
        o_n = key + gl.arange(0, 64, layout=gl.SliceLayout(1, plan.s_layout))[:, None]  # [64, 1]
        o_m = query + gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, plan.s_layout))[None, :]
        i_h, s = word_in(mem.heads.index(j & 3)), s * work.inner
        derivative = DERIVATIVE(s, o_m, o_n, i_h, column.i_b)
        s, _ = gl.broadcast(FUNCTION(s, o_m, o_n, i_h, column.i_b), s)
    if plan.soft_cap:
        if plan.function:
            s = tanh(s * work.after)
            derivative = derivative * (1.0 - s * s)
        else:
            s = tanh(s * work.inner)
            derivative = 1.0 - s * s
    if plan.bias:
        lse = lse - _bias(mem, j, work, column, WG, plan) * LOG2_E
    if plan.alibi:
        place = word_in(mem.places.index(j & 3)) + WG * 64
        s = away(s * qk_scale, word_in(mem.slopes.index(j & 3)), place)
        p = gl.exp2(s - lse)
    else:
        p = gl.exp2(s * qk_scale - lse)
    if plan.function:  # which may be NaN for a query that does not exist
        p = gl.where(o_m < work.S_q, p, 0.0)
    return p, derivative


@gluon.jit
def by_derivative(p, derivative, plan: gl.constexpr):
    """Their product. A function's derivative may be anything where the function is not finite; P, or the
    derivative of a cap, is 0 there, and so is the product. NaN of P itself stays."""
    found = p * derivative
    if plan.function:
        found = gl.where((found == found) | (p != p), found, 0.0)
    return found


@gluon.jit
def _bias(mem, j, work, column, WG: gl.constexpr, plan: gl.constexpr):
    """That of step j for the keys of buffer WG [64, BLOCK_M]."""
    if plan.copies_bias:
        buffer = mem.bias.index(plan.parts * q_slot(j, plan) + WG).reshape([plan.block_m, 64])
        return buffer.permute((1, 0)).load(plan.s_layout).to(gl.float32)
    else:
        i_h, query = word_in(mem.heads.index(j & 3)), word_in(mem.queries.index(j & 3))
        key = keys_of(mem) * plan.block_n + WG * 64
        place = column.i_b.to(gl.int64) * work.bias_b + i_h.to(gl.int64) * work.bias_h
        place += query.to(gl.int64) * work.bias_m
        return bias_of_keys(work.bias + place, key, work.S_q - query, work.S_k, work.bias_m, plan)
