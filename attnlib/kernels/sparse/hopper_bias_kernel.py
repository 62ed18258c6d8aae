"""The gradient of a bias for Hopper (sm_90a), in Gluon: dS summed up over all scores that share an element.
Chapter 30 has biases.

As in `bias_kernel`, whose docstring says what a program owns and visits, but of 128 x 128 scores, which are a
tile of the mask: two consumer warpgroups have 64 rows each. What bounds the kernel is the L2, from which each
visit reads four blocks, and a tile twice as wide needs two thirds of the bytes for each score.

- The producer warp copies two pairs of blocks for a visit, Q and K and then dO and V, through a ring
  (`common.ring`) whose slots have room for a pair. S takes the first pair, dP the second.
- Only the producer looks at the mask. It skips tiles that nobody sees; how many are left is counted before
  the program is divided among warps. With the first pair of visit j it stores two words in told[j % 4]: the
  block of rows over all heads, for LSE and delta, and the slot of the tile's words, -1 without. It has waited
  for the pair's slot before, so with up to 8 slots both consumers have read what is overwritten.
- The bias of the tile is in shared memory: beside S, dP and the sum there are no registers for it. A thread
  reads what it has written.
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
from attnlib.kernels.common.memory import barriers, matrix
from attnlib.kernels.common.ring import acquire, release, slot, wait_k
from attnlib.kernels.sparse.bits import hide_by
from attnlib.kernels.sparse.hopper_scores import LOG2_E

TILE = gl.constexpr(128)
BLOCK = gl.constexpr(0)  # of what the producer tells
SLOT = gl.constexpr(1)
LOOK = gl.constexpr(128)
"""Tiles that are looked at together for what is seen of them."""


# ---------------------------------------------------------------- what is passed around


class Memory(NamedTuple):
    """Buffers and barriers in shared memory; `common.ring` calls what a slot of the ring holds keys."""

    rows: gl.shared_memory_descriptor  # [2 * stages, 1, 1, 64, d], Q or dO: of slot c for consumer w, 2 c + w
    keys: gl.shared_memory_descriptor  # [stages, 1, 1, 128, d]: K or V
    bias: gl.shared_memory_descriptor  # [2, 64, 128]
    told: gl.shared_memory_descriptor  # [8, 2]: word w of visit j is in place 2 (j % 4) + w, twice
    k_full: gl.shared_memory_descriptor
    kv_free: gl.shared_memory_descriptor


class Mask(NamedTuple):
    """The tiles of a mask; see the kernel's arguments."""

    kinds: gl.tensor
    slots: gl.tensor
    down: gl.tensor
    across: gl.tensor
    mask_b: gl.tensor
    mask_h: gl.tensor


class Own(NamedTuple):
    """What a program visits: of visit 0 the batch element, the head and the row of tiles; how many columns of
    tiles its tiles lie to the right of the diagonal; and how many rows of tiles, and heads, it visits."""

    i_b: gl.tensor
    i_h: gl.tensor
    row: gl.tensor
    d: gl.tensor
    turns: gl.tensor
    heads: gl.tensor


@gluon.jit
def _place(t, own):
    """(batch element, head, row of tiles) of visit t, one number or several."""
    head = t // own.turns
    return own.i_b + head // own.heads, own.i_h + head % own.heads, own.row + t % own.turns


@gluon.jit
def _tile(t, own, mask):
    """(slot, whether anything is seen) of the tile of visit t."""
    i_b, i_h, row = _place(t, own)
    row = (i_b * mask.mask_b + i_h * mask.mask_h).to(gl.int64) * mask.down + row
    column = own.d + _place(t, own)[2]
    found = gl.load(mask.slots + row * mask.across + column)
    kind = gl.load(mask.kinds + row * 4 * mask.across + 2 * column)  # of the tile's first unit
    return found, (found >= 0) | (kind != 0)


# ---------------------------------------------------------------- producer


@gluon.jit
def _copy(desc_rows, desc_keys, mem, c, i_b, i_h, i_kv, row, column, plan: gl.constexpr):
    """Start to copy a pair to slot c."""
    s = slot(c, plan)
    bar = mem.k_full.index(s)
    mbarrier.expect(bar, 2 * desc_rows.block_type.nbytes + desc_keys.block_type.nbytes)
    for w in gl.static_range(2):
        place = tiling.coordinates((i_b, i_h), row * TILE + w * 64, 0)
        tma.async_copy_global_to_shared(desc_rows, place, bar, mem.rows.index(2 * s + w))
    place = tiling.coordinates((i_b, i_kv), column * TILE, 0)
    tma.async_copy_global_to_shared(desc_keys, place, bar, mem.keys.index(s))


@gluon.jit
def _produce(desc_q, desc_k, desc_v, desc_do, H, GROUP, num_m, visits, mem, own, mask, plan: gl.constexpr):
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    j = 0
    found, some = _tile(0, own, mask)
    for t in range(visits):
        after, more = _tile(gl.minimum(t + 1, visits - 1), own, mask)  # while there is time
        if some:
            i_b, i_h, row = _place(t, own)
            acquire(mem, 2 * j, plan)
            block = (i_b * H + i_h) * num_m + row
            mem.told.index(2 * (j & 3) + BLOCK).store(gl.full([2], block, gl.int32, lanes))
            mem.told.index(2 * (j & 3) + SLOT).store(gl.full([2], found, gl.int32, lanes))
            _copy(desc_q, desc_k, mem, 2 * j, i_b, i_h, i_h // GROUP, row, row + own.d, plan)
            acquire(mem, 2 * j + 1, plan)
            _copy(desc_do, desc_v, mem, 2 * j + 1, i_b, i_h, i_h // GROUP, row, row + own.d, plan)
            j += 1
        found, some = after, more


# ---------------------------------------------------------------- consumers


@gluon.jit
def _told(mem, j, word: gl.constexpr):
    """What the producer tells of visit j."""
    lanes = mem.told.index(2 * (j & 3) + word)
    return gl.max(lanes.slice(0, 1).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _issue(mem, c, WG: gl.constexpr, plan: gl.constexpr):
    """Start the product of the pair in slot c: [64, D] x [D, 128]."""
    wait_k(mem, c, plan)
    zero = gl.zeros([64, TILE], gl.float32, plan.s_layout)
    rows, keys = matrix(mem.rows, 2 * slot(c, plan) + WG), matrix(mem.keys, slot(c, plan))
    return warpgroup_mma(rows, keys.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _consume(given, WG: gl.constexpr, plan: gl.constexpr):
    lse2_ptr, delta_ptr, words_ptr, bias_ptr, bias_m, dbias_ptr, qk_scale, S_q, S_k, count, mem, own = given
    # Of the first tile of a band, whose places have the distances of all.
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, plan.s_layout))  # [64]
    o_m = own.row * TILE + WG * 64 + rows
    o_n = (own.row + own.d) * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, plan.s_layout))  # [128]
    if plan.diagonal:
        distance = o_n[None, :] - o_m[:, None]
        there = (distance > -S_q) & (distance < S_k)
    else:
        there = (o_m < S_q)[:, None] & (o_n < S_k)[None, :]
    if count > 0:
        places = (o_m.to(gl.int64) * bias_m)[:, None] + o_n[None, :]
        mem.bias.index(WG).store(gl.load(bias_ptr + places, mask=there, other=0.0))
    total = gl.zeros([64, TILE], gl.float32, plan.s_layout)
    for j in range(count):
        s_token = _issue(mem, 2 * j, WG, plan)
        first = _told(mem, j, BLOCK).to(gl.int64) * TILE + WG * 64
        found = _told(mem, j, SLOT)
        lse2, delta = gl.load(lse2_ptr + first + rows), gl.load(delta_ptr + first + rows)  # [64] twice
        dp_token = _issue(mem, 2 * j + 1, WG, plan)
        s = warpgroup_mma_wait(1, deps=(s_token,))  # [64, 128]
        release(mem, 2 * j, plan)
        bias = mem.bias.index(WG).load(plan.s_layout).to(gl.float32)
        p = gl.exp2(s * qk_scale + (bias * LOG2_E - lse2[:, None]))
        if plan.partial:
            if found >= 0:
                p = hide_by(p, words_ptr + (found.to(gl.int64) * TILE + WG * 64) * 4, 0.0)
        dp = warpgroup_mma_wait(0, deps=(dp_token,))  # [64, 128]
        release(mem, 2 * j + 1, plan)
        total += p * (dp - delta[:, None])
    if plan.diagonal:
        gl.atomic_add(dbias_ptr + (o_n[None, :] - o_m[:, None]), total, mask=there, sem="relaxed")
    else:
        # With an even stride, as the compiler sees, two elements of a thread are stored at once.
        stride = S_k // 2 * 2 if plan.even else S_k
        gl.store(dbias_ptr + (o_m.to(gl.int64) * stride)[:, None] + o_n[None, :], total, mask=there)


# ---------------------------------------------------------------- kernel


NUMBERS = "S_q S_k B H GROUP num_m down across mask_b mask_h bias_b bias_h bias_m dbias_own".split()


@gluon.jit(do_not_specialize=NUMBERS)
def attention_sparse_bias_gradient_hopper(
    desc_q, desc_do,  # (B, H, S_q, D)
    desc_k, desc_v,  # (B, H_kv, S_k, D)
    lse2_ptr, delta_ptr,  # (B * H, num_m * 128), see `common.preprocess`
    kinds_ptr,  # int8 (masks, 2 * down, 2 * across): of units, see `attnlib.block_mask.tiles`
    slots_ptr,  # (masks, down, across)
    words_ptr,  # (slots, 128, 4)
    bias_ptr,  # of query 0 and key 0; keys lie side by side
    dbias_ptr,  # float32, contiguous, from query 0 and key 0; 0 before the launch where it is of diagonals
    qk_scale,  # sm_scale * log2(e)
    S_q, S_k, B,
    H, GROUP,  # query heads, and those that share one key/value head
    num_m,  # blocks of 128 rows of a head in memory
    down, across,  # tiles of a mask
    mask_b, mask_h,  # masks from one batch element, or head, to the next; 0 where they share one
    bias_b, bias_h, bias_m,  # strides
    dbias_own,  # elements of dbias of a batch element and head
    plan: gl.constexpr,
):  # fmt: skip
    """Grid: (tiles, or bands of tiles, of a bias * its batch elements * its heads,)."""
    if plan.diagonal:  # longer bands first in a causal mask
        blocks = down + across - 1
        d = across - 1 - gl.program_id(0) % blocks
        row = gl.maximum(0, -d)
        turns = gl.minimum(down, across - d) - row
    else:  # a band of one tile
        blocks = down * across
        row = gl.program_id(0) % blocks // across
        d = gl.program_id(0) % blocks % across - row
        turns = 1
    number = gl.program_id(0) // blocks
    i_b, i_h, heads = number, 0 * number, H
    if plan.heads:
        i_b, i_h, heads = number // H, number % H, 1
    own = Own(i_b, i_h, row, d, turns, heads)
    mask = Mask(kinds_ptr, slots_ptr, down, across, mask_b, mask_h)
    visits = (1 if plan.batches else B) * heads * turns
    count = 0
    look: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for t in range(0, visits, LOOK):
        o_t = t + gl.arange(0, LOOK, layout=look)
        _, some = _tile(gl.minimum(o_t, visits - 1), own, mask)
        count += gl.sum((some & (o_t < visits)).to(gl.int32), 0)
    stages: gl.constexpr = plan.pipeline.stages
    bias_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, TILE], plan.bias_type)
    mem = Memory(
        gl.allocate_shared_memory(desc_q.dtype, [2 * stages, 1, 1, 64, plan.d], desc_q.layout),
        gl.allocate_shared_memory(desc_k.dtype, [stages, 1, 1, TILE, plan.d], desc_k.layout),
        gl.allocate_shared_memory(plan.bias_type, [2, 64, TILE], bias_layout),
        gl.allocate_shared_memory(gl.int32, [8, 2], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(stages, 1),
        barriers(stages, 2),
    )
    fence_async_shared()
    bias_ptr += i_b.to(gl.int64) * bias_b + i_h.to(gl.int64) * bias_h
    dbias_ptr += number.to(gl.int64) * dbias_own
    given = (lse2_ptr, delta_ptr, words_ptr, bias_ptr, bias_m, dbias_ptr, qk_scale, S_q, S_k, count, mem, own)
    # A consumer's number is a constant, so each has code of its own.
    gl.warp_specialize([
        (_consume, (given, 0, plan)),
        (_consume, (given, 1, plan)),
        (_produce, (desc_q, desc_k, desc_v, desc_do, H, GROUP, num_m, visits, mem, own, mask, plan)),
    ], [4, 1], [plan.registers.consumer, plan.registers.producer])
