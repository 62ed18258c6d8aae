"""The gradient of a bias for Hopper (sm_90a), in Gluon: dS summed up over all scores that share an element.
Chapter 30 has biases.

`bias_kernel` says which blocks of scores belong to an element. Here they are tiles of a mask, 128 x 128: what
bounds the kernel is the L2, from which each visit of a tile reads four blocks, and a larger tile needs fewer
bytes for each score. An item is a tile of the bias, or of a bias of diagonals a band of tiles, for those
batch elements and heads that share it. A program stays on its SM, and has two consumer warpgroups of 64 rows,
a producer warp, and a warp that sets items to 0 of which nobody sees anything.

- The producer draws items. Of each it counts the visits, those that see nothing left out; of an item without
  one consumers never hear.
- A visit is two pairs of blocks, Q and K, then dO and V, with LSE2 and delta of the rows. They come through a
  ring (`common.ring`) whose slots have room for a pair: S takes the first one, dP the second.
- With the first pair of visit j the producer stores words in told[j % 4]: the slot of the tile's bits, -1
  without; the item, -1 behind the last one; and how many visits it has. It has waited for the pair's slot
  before, so with up to 8 slots both consumers have read what it overwrites.
- The bias of an item is in shared memory: beside S, dP and their sum there are no registers for it. A thread
  reads what it has written.
- Between the load of an LSE or a delta and the copy that overwrites it there is a fence, see `bits.hide`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.kernels.common import tile_scheduler as tiling
from attnlib.kernels.common import tma
from attnlib.kernels.common.logarithms import LOG2_E
from attnlib.kernels.common.memory import barriers, buffers, matrix
from attnlib.kernels.common.preprocess import DELTA, LSE2
from attnlib.kernels.common.ring import acquire, release, slot, wait_k
from attnlib.kernels.common.words import new_words, put_word
from attnlib.kernels.sparse.bits import hide_by
from attnlib.kernels.sparse.hopper_backward_steps import LANES, told

TILE = gl.constexpr(128)
LOOK = gl.constexpr(32)
"""Tiles that are looked at together for what is seen of them."""

# What the producer tells of a visit, word by word.
SLOT = gl.constexpr(0)
ITEM = gl.constexpr(1)
VISITS = gl.constexpr(2)
WORDS = gl.constexpr(3)


# ---------------------------------------------------------------- what is passed around


class Memory(NamedTuple):
    """Buffers and barriers in shared memory; `common.ring` calls what a slot of the ring holds keys."""

    rows: gl.shared_memory_descriptor  # [2 * stages, 1, 1, 64, d], Q or dO: of slot c for consumer w, 2 c + w
    sums: gl.shared_memory_descriptor  # [2 * stages, 1, 1, 64], LSE2 or delta: the same
    keys: gl.shared_memory_descriptor  # [stages, 1, 1, 128, d]: K or V
    bias: gl.shared_memory_descriptor  # [2, 64, 128]
    told: gl.shared_memory_descriptor  # [4 * WORDS, LANES]
    k_full: gl.shared_memory_descriptor


class Work(NamedTuple):
    """The problem; see the kernel's arguments."""

    S_q: gl.tensor
    S_k: gl.tensor
    B: gl.tensor
    H: gl.tensor
    GROUP: gl.tensor
    down: gl.tensor
    across: gl.tensor
    mask_b: gl.tensor
    mask_h: gl.tensor
    kinds: gl.tensor
    slots: gl.tensor
    dbias: gl.tensor
    dbias_own: gl.tensor


class Item(NamedTuple):
    """What is added up: of visit 0 the batch element, the head and the row of tiles; how many columns of
    tiles its tiles lie to the right of the diagonal; and how many rows of tiles, heads, and visits it has."""

    number: gl.tensor  # of the batch element and head, among those with a bias of their own
    i_b: gl.tensor
    i_h: gl.tensor
    row: gl.tensor
    d: gl.tensor
    turns: gl.tensor
    heads: gl.tensor
    visits: gl.tensor


@gluon.jit
def _item(i, work, plan: gl.constexpr):
    """The item of a number; of diagonals the longer bands of a causal mask come first."""
    if plan.diagonal:
        number, rank = tiling.divide(i, work.down + work.across - 1)
        d = work.across - 1 - rank
        row = gl.maximum(0, -d)
        turns = gl.minimum(work.down, work.across - d) - row
    else:  # a band of one tile
        number, rank = tiling.divide(i, work.down * work.across)
        row, column = tiling.divide(rank, work.across)
        d, turns = column - row, 1
    i_b, i_h, heads = number, 0 * number, work.H
    if plan.heads:
        i_b, i_h = tiling.divide(number, work.H)
        heads = 1
    visits = (1 if plan.batches else work.B) * heads * turns
    return Item(number, i_b, i_h, row, d, turns, heads, visits)


@gluon.jit
def _place(t, item):
    """(batch element, head, row of tiles) of visit t, one number or several."""
    head = t // item.turns
    return item.i_b + head // item.heads, item.i_h + head % item.heads, item.row + t % item.turns


@gluon.jit
def _tile(t, item, work):
    """(slot, whether anything is seen) of the tile of visit t."""
    i_b, i_h, row = _place(t, item)
    column = row + item.d
    row = (i_b * work.mask_b + i_h * work.mask_h).to(gl.int64) * work.down + row
    found = gl.load(work.slots + row * work.across + column)
    kind = gl.load(work.kinds + row * 4 * work.across + 2 * column)  # of the tile's first unit
    return found, (found >= 0) | (kind != 0)


# ---------------------------------------------------------------- producer


@gluon.jit
def _seen(item, work):
    """How many visits of an item see anything."""
    count = 0
    for t in range(0, item.visits, LOOK):
        o_t = t + tiling.lanes()
        _, some = _tile(gl.minimum(o_t, item.visits - 1), item, work)
        count += gl.sum(gl.where(o_t < item.visits, some.to(gl.int32), 0), 0)
    return count


@gluon.jit
def _copy(desc_rows, desc_keys, desc_sums, sums: gl.constexpr, mem, c, place, work, plan: gl.constexpr):
    """Start to copy a pair to slot c, and LSE2 or delta; place: batch element, head, row and column."""
    i_b, i_h, row, column = place
    s = slot(c, plan)
    bar = mem.k_full.index(s)
    rows: gl.constexpr = desc_rows.block_type.nbytes + desc_sums.block_type.nbytes
    mbarrier.expect(bar, 2 * rows + desc_keys.block_type.nbytes)
    for w in gl.static_range(2):
        first = row * TILE + w * 64
        at = tiling.coordinates((i_b, i_h), first, 0)
        tma.async_copy_global_to_shared(desc_rows, at, bar, mem.rows.index(2 * s + w))
        at = [sums, i_b * work.H + i_h, first]
        tma.async_copy_global_to_shared(desc_sums, at, bar, mem.sums.index(2 * s + w))
    at = tiling.coordinates((i_b, i_h // work.GROUP), column * TILE, 0)
    tma.async_copy_global_to_shared(desc_keys, at, bar, mem.keys.index(s))


@gluon.jit
def _tell(mem, j, words):
    for w in gl.static_range(WORDS):
        put_word(mem.told.index(WORDS * (j & 3) + w), words[w])


@gluon.jit
def _produce(desc_q, desc_k, desc_v, desc_do, desc_rows, counter_ptr, items, mem, work, plan: gl.constexpr):
    j = 0
    i = gl.program_id(0)
    while i < items:
        asked = tiling.draw(counter_ptr)
        item = _item(i, work, plan)
        visits = _seen(item, work)
        found, some = _tile(0, item, work)
        for t in range(item.visits if visits > 0 else 0):
            after, more = _tile(gl.minimum(t + 1, item.visits - 1), item, work)  # while there is time
            if some:
                i_b, i_h, row = _place(t, item)
                place = i_b, i_h, row, row + item.d
                acquire(mem, 2 * j, plan)
                _tell(mem, j, (found, i, visits))
                _copy(desc_q, desc_k, desc_rows, LSE2, mem, 2 * j, place, work, plan)
                acquire(mem, 2 * j + 1, plan)
                _copy(desc_do, desc_v, desc_rows, DELTA, mem, 2 * j + 1, place, work, plan)
                j += 1
            found, some = after, more
        i = tiling.drawn(asked, counter_ptr, items, 1)
    acquire(mem, 2 * j, plan)
    _tell(mem, j, (0, -1, 0))
    mbarrier.arrive(mem.k_full.index(slot(2 * j, plan)), count=1)


# ---------------------------------------------------------------- consumers


@gluon.jit
def _told(mem, j, word: gl.constexpr):
    """What the producer tells of visit j, whose first pair is there."""
    return told(mem, WORDS * (j & 3) + word)


@gluon.jit
def _issue(mem, c, WG: gl.constexpr, plan: gl.constexpr):
    """Start the product of the pair in slot c, [64, D] x [D, 128]; and LSE2, or delta, of its rows [64]."""
    wait_k(mem, c, plan)
    at = 2 * slot(c, plan) + WG
    zero = gl.zeros([64, TILE], gl.float32, plan.s_layout)
    keys = matrix(mem.keys, slot(c, plan)).permute((1, 0))
    token = warpgroup_mma(matrix(mem.rows, at), keys, zero, use_acc=False, is_async=True)
    return token, mem.sums.index(at).reshape([64]).load(gl.SliceLayout(1, plan.s_layout))


@gluon.jit
def _elements(o_m, o_n, item, work, plan: gl.constexpr):
    """Where dbias of queries and keys is."""
    number = item.number.to(gl.int64)
    if plan.diagonal:
        return work.dbias + number * work.dbias_own + (o_n - o_m)
    else:
        # With a stride that the compiler knows to be a multiple, a thread stores several elements at once.
        stride = work.S_k // 4 * 4 if plan.aligned else work.S_k
        return work.dbias + (number * work.S_q + o_m) * stride + o_n


@gluon.jit
def _clear(items, work, plan: gl.constexpr):
    """Set items that nobody sees to 0; those of diagonals are 0 before the launch."""
    lines: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    rows = gl.arange(0, 4, layout=gl.SliceLayout(1, lines))[:, None]  # [4, 1]
    columns = gl.arange(0, TILE, layout=gl.SliceLayout(0, lines))[None, :]  # [1, 128]
    zeros = gl.zeros([4, TILE], gl.float32, lines)
    for i in range(gl.program_id(0), 0 if plan.diagonal else items, gl.num_programs(0)):
        item = _item(i, work, plan)
        o_n = (item.row + item.d) * TILE + columns
        for row in range(0, TILE if _seen(item, work) == 0 else 0, 4):
            o_m = item.row * TILE + row + rows
            there = (o_m < work.S_q) & (o_n < work.S_k)
            gl.store(_elements(o_m, o_n, item, work, plan), zeros, mask=there)


@gluon.jit
def _consume(
    bias_ptr, bias_b, bias_h, bias_m, words_ptr, qk_scale, mem, work, WG: gl.constexpr, plan: gl.constexpr
):  # fmt: skip
    rows = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, plan.s_layout))[:, None]  # [64, 1]
    columns = gl.arange(0, TILE, layout=gl.SliceLayout(0, plan.s_layout))[None, :]  # [1, 128]
    j = 0
    wait_k(mem, 0, plan)
    i = _told(mem, 0, ITEM)
    while i >= 0:
        item = _item(i, work, plan)
        visits = _told(mem, j, VISITS)
        # Of the first tile of a band, whose places have the distances of all.
        o_m, o_n = item.row * TILE + rows, (item.row + item.d) * TILE + columns
        if plan.diagonal:
            there = (o_n - o_m > -work.S_q) & (o_n - o_m < work.S_k)
        else:
            there = (o_m < work.S_q) & (o_n < work.S_k)
        own = bias_ptr + item.i_b.to(gl.int64) * bias_b + item.i_h.to(gl.int64) * bias_h
        bias = gl.load(own + o_m.to(gl.int64) * bias_m + o_n, mask=there, other=0.0)
        mem.bias.index(WG).store(bias)
        total = gl.zeros([64, TILE], gl.float32, plan.s_layout)
        for _ in range(visits):
            s_token, lse2 = _issue(mem, 2 * j, WG, plan)
            found = _told(mem, j, SLOT)
            dp_token, delta = _issue(mem, 2 * j + 1, WG, plan)
            fence_async_shared()
            s = warpgroup_mma_wait(1, deps=(s_token,))  # [64, 128]
            release(mem, 2 * j, plan)
            shift = mem.bias.index(WG).load(plan.s_layout).to(gl.float32) * LOG2_E - lse2[:, None]
            p = gl.exp2(s * qk_scale + shift)
            if plan.partial:
                if found >= 0:
                    p = hide_by(p, words_ptr + (found.to(gl.int64) * TILE + WG * 64) * 4, 0.0)
            dp = warpgroup_mma_wait(0, deps=(dp_token,))  # [64, 128]
            release(mem, 2 * j + 1, plan)
            total += p * (dp - delta[:, None])
            j += 1
        if plan.diagonal:
            gl.atomic_add(_elements(o_m, o_n, item, work, plan), total, mask=there, sem="relaxed")
        else:
            gl.store(_elements(o_m, o_n, item, work, plan), total, mask=there)
        wait_k(mem, 2 * j, plan)
        i = _told(mem, j, ITEM)


# ---------------------------------------------------------------- kernel


NUMBERS = "S_q S_k B H GROUP down across mask_b mask_h bias_b bias_h bias_m dbias_own items".split()


@gluon.jit(do_not_specialize=NUMBERS)
def attention_sparse_bias_gradient_hopper(
    desc_q, desc_do,  # (B, H, S_q, D), of 64 rows
    desc_k, desc_v,  # (B, H_kv, S_k, D), of 128 keys
    desc_rows,  # (2, B * H, rows in memory) float32: LSE2, and delta, of 64 rows
    counter_ptr,  # a word of 32 bits, 0 before and after a launch
    kinds_ptr,  # int8 (masks, 2 * down, 2 * across): of units, see `attnlib.block_mask.tiles`
    slots_ptr,  # (masks, down, across)
    words_ptr,  # (slots, 128, 4)
    bias_ptr,  # of query 0 and key 0; keys lie side by side
    dbias_ptr,  # float32, contiguous, from query 0 and key 0; 0 before the launch where it is of diagonals
    qk_scale,  # sm_scale * log2(e)
    S_q, S_k, B,
    H, GROUP,  # query heads, and those that share one key/value head
    down, across,  # tiles of a mask
    mask_b, mask_h,  # masks from one batch element, or head, to the next; 0 where they share one
    bias_b, bias_h, bias_m,  # strides
    dbias_own,  # of diagonals, elements of dbias of a head
    items,
    plan: gl.constexpr,
):  # fmt: skip
    """dbias; see the module docstring. Grid: (programs,)."""
    work = Work(
        S_q, S_k, B, H, GROUP, down, across, mask_b, mask_h, kinds_ptr, slots_ptr, dbias_ptr, dbias_own
    )
    stages: gl.constexpr = plan.pipeline.stages
    bias_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, TILE], plan.bias_type)
    mem = Memory(
        buffers(desc_q, 2 * stages),
        gl.allocate_shared_memory(gl.float32, [2 * stages, 1, 1, 64], desc_rows.layout),
        buffers(desc_k, stages),
        gl.allocate_shared_memory(plan.bias_type, [2, 64, TILE], bias_layout),
        new_words(4 * WORDS, LANES),
        barriers(stages, 1),
    )
    fence_async_shared()
    counter_ptr = counter_ptr.to(gl.pointer_type(gl.int32))
    # A consumer's number is a constant, so each has code of its own.
    gl.warp_specialize([
        (_consume, (bias_ptr, bias_b, bias_h, bias_m, words_ptr, qk_scale, mem, work, 0, plan)),
        (_consume, (bias_ptr, bias_b, bias_h, bias_m, words_ptr, qk_scale, mem, work, 1, plan)),
        (_produce, (desc_q, desc_k, desc_v, desc_do, desc_rows, counter_ptr, items, mem, work, plan)),
        (_clear, (items, work, plan)),
    ], [4, 1, 1], [plan.registers.consumer, plan.registers.producer, plan.registers.producer])
