"""Exact attention, forward, for Hopper (sm_90a) in Gluon: TMA, warp specialization, asynchronous wgmma.

Chapters 10 to 15 build this kernel step by step; chapter 19 measures it. Here is dense and causal attention,
as in chapter 15. What a call may ask for besides, and what a configuration may choose, is in files beside,
each of which does for a plain call what that needs, often nothing:

    masks           the sign of the scores and their mask; the blocks that need one; windows
    coordinates     where a tile's operands lie: of heads, of varlen sequences, of rows with their own keys
    told            what the producer tells of a tile: for varlen sequences, scales and maxima more words
    column_parts    a head dimension in two parts; without, tuples of one element
    kept_shift      steps that take a row's maximum only where it may matter (`keep_shift`)
    e4m3            operands in e4m3: scales, the range of P, the mean of V
    queries         of these, queries that come in 16 bits
    accumulate      the end of a tile that is merged into an existing output
    maxima          the largest score of each row and 64 keys is kept

and in `kernels.common`: `tile_scheduler` and `varlen_tiles` which tile is next and what it sees, `ring` the
waits for slots, `softmax` what happens in registers. `plan` says what there is; all of it is known when the
kernel is compiled.

One persistent program per SM: W consumer warpgroups of 64 query rows each, and one producer warp that does
nothing but start copies. A tile is 64 W query rows of one head; keys are visited from the last visible block
down to key 0, so that the block on the diagonal comes first and the long loop has no mask. In that loop the
product P V runs one block late: P V of block c-1 is in flight with Q K^T of block c, before the softmax of
block c, which does not need it.

    Who waits for what

The ring. Slot c of the ring (at c % STAGES in memory) holds the keys of block c and the values of block c-1,
because a step uses these two together. c counts all blocks of all tiles of a program and never starts again.
The n-th completion of a barrier has parity n & 1, so a wait names c // STAGES; waiting for the completion
*before* the first one, which is what a fresh barrier seems to have done, returns at once.

    barrier          completes when                   waited for by            parity of the wait
    k_full[slot]     TMA has written K of slot c      each consumer            (c // STAGES) & 1
    v_full[slot]     TMA has written V of slot c      each consumer            (c // STAGES) & 1
    kv_free[slot]    W consumers have released c      producer, to fill        (c // STAGES) & 1, flipped:
                                                      c                        the release of c - STAGES
    q_full[w]        TMA has written Q of warpgroup w consumer w               tile number & 1
    q_free[w]        consumer w needs Q no more       producer                 tile number & 1, flipped
                     (with `quantizes`: has it in registers)
    drawn[b]         producer has told of tile         each consumer           (tile number // 2) & 1
                     2 n + b

With `joint`, v_full[slot] is k_full[slot]: one barrier for both copies. With `named`, kv_free is not an
mbarrier but the hardware's barrier 8 + slot, at which consumers arrive and the producer waits: an arrival at
an mbarrier costs a synchronization of the warpgroup first.

A consumer releases slot c when its Q K^T of block c and its P V of block c-1 are done; a block that its rows
do not see, when both copies have landed (otherwise the parity of a full barrier could come round under a
slow warpgroup). V of a tile's last block goes to the slot of the next tile's first keys, the one step of
which half is missing: there are no values for the first slot of all and no keys for the last.

The producer tells the consumers of each tile, the n-th of a program as number n: its first row, -1 after the
last tile, how many blocks it sees, and where the output of tile n-1 goes. So only the producer divides, and
consumers need no registers for the place of their output during the loop. next_tile has two places, number n
in n & 1. Their reuse needs no barrier: before the producer tells of n+1 it has waited for q_free of tile n-1,
at which a consumer arrives after its last read of what was told as number n-1.

The producer draws the number of its next tile from a counter in global memory three blocks before the end of
this tile, and uses it one block before the end. A program that draws early reserves a tile that an idle one
could compute, and the launch ends later; two blocks are enough to hide the latency of the draw. The last draw
of a launch sets the counter back to 0. Tiles are numbered so that long ones come first.

What a consumer reads through its products it gives back by a barrier alone. Where it loads columns of Q into
registers (`q_columns`), it also executes fence.proxy.async before it arrives at q_free: a load belongs to the
generic proxy and the copy that overwrites Q to the async proxy, and a barrier does not order one after the
other.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from attnlib.kernels.common import kept_shift, softmax
from attnlib.kernels.common import tile_scheduler as tiling
from attnlib.kernels.common.first_product import start_scores
from attnlib.kernels.common.launch_order import await_launch_before
from attnlib.kernels.common.logarithms import LN2
from attnlib.kernels.common.memory import barriers, matrix
from attnlib.kernels.common.ring import acquire, as_parts, release, slot, wait_k, wait_v
from attnlib.kernels.common.words import new_words
from attnlib.kernels.hopper import (
    accumulate,
    column_parts,
    coordinates,
    e4m3,
    masks,
    maxima,
    queries,
    told,
)
from attnlib.kernels.hopper.column_parts import nbytes

# ---------------------------------------------------------------- what is passed around


class Memory(NamedTuple):
    """Buffers and barriers in shared memory; the protocol is in the module docstring."""

    q: tuple  # [warpgroups, 1, 1, 64, d], varlen with one more 1, as the others; of each part of the columns
    k: tuple  # [stages, 1, 1, block_n, d]
    v: tuple  # [stages, 1, 1, block_n, d]
    o: tuple  # [warpgroups, 1, 1, 64, o_columns]
    rotation: gl.shared_memory_descriptor  # see `queries`
    next_tile: gl.shared_memory_descriptor  # [2 * words, 32]
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor  # k_full once more with `joint`
    kv_free: gl.shared_memory_descriptor  # k_full once more with `named`, which needs none
    drawn: gl.shared_memory_descriptor


class Tile(NamedTuple):
    """What masks, scales and maxima of 64 rows need."""

    row: gl.tensor  # the first
    low: gl.tensor  # the last block that they visit
    seq: tiling.Sequence
    work: tiling.Work
    scale: gl.tensor  # see `e4m3.block_scale`
    maxima: gl.tensor  # see `maxima`


# ---------------------------------------------------------------- producer


@gluon.jit
def _copy_k(desc_k, mem, c, at, block, FOLLOWED_BY: gl.constexpr, plan: gl.constexpr):
    """Start to copy the keys of `block` to slot c. FOLLOWED_BY: the bytes of the values that follow."""
    bar = mem.k_full.index(slot(c, plan))
    mbarrier.expect(bar, nbytes(desc_k) + (FOLLOWED_BY if plan.pipeline.joint else 0))
    column_parts.copy(desc_k, coordinates.of_key(at, block * plan.block_n, plan), bar, mem.k, slot(c, plan))


@gluon.jit
def _copy_v(desc_v, mem, c, at, block, EXPECT: gl.constexpr, plan: gl.constexpr):
    bar = mem.v_full.index(slot(c, plan))
    if EXPECT:
        mbarrier.expect(bar, nbytes(desc_v))
    place = coordinates.of_values(at, block * plan.block_n, plan)
    column_parts.copy(desc_v, place, bar, mem.v, slot(c, plan))


@gluon.jit
def _copy_blocks(desc_k, desc_v, mem, c, begin, end, at, top, plan: gl.constexpr):
    """Keys of blocks `begin` to `end`, counted down from `top`, each with the values of the one before."""
    for i in range(begin, end):
        acquire(mem, c + i, plan)
        _copy_k(desc_k, mem, c + i, at, top - 1 - i, nbytes(desc_v), plan)
        _copy_v(desc_v, mem, c + i, at, top - i, not plan.pipeline.joint, plan)


@gluon.jit
def _copy_q(desc_q, mem, at, row, turn, plan: gl.constexpr):
    """Start to copy the queries of the tile from `row` on: of each warpgroup when it has given them back."""
    for w in gl.static_range(plan.pipeline.warpgroups):
        mbarrier.wait(mem.q_free.index(w), (turn & 1) ^ 1)
        mbarrier.expect(mem.q_full.index(w), nbytes(desc_q))
        place = tiling.coordinates(at, row + w * 64, 0)
        column_parts.copy(desc_q, place, mem.q_full.index(w), mem.q, w)


@gluon.jit
def _produce(given, plan: gl.constexpr):
    desc_q, desc_k, desc_v, counter_ptr, mem, work = given
    all_blocks = tiling.row_blocks(work, plan)
    end = tiling.tiles(all_blocks, work, plan)
    number = gl.program_id(0)  # of the tile among all
    row, i_b, i_h, top, cursor = tiling.locate(number, all_blocks, (0, 0), work, plan)
    at_k = coordinates.of_keys(row, i_b, i_h, work, plan)
    if number < end:
        _copy_k(desc_k, mem, 0, at_k, top - 1, 0, plan)
    told.tell(mem, 0, number >= end, row, i_b, i_h, top, (0, 0, 0), work, plan)
    if not plan.pipeline.joint:
        mbarrier.arrive(mem.v_full.index(0), count=1)  # the first slot of all has no values to wait for
    turn = 0  # number of the tile within this program
    c = 0  # slot of the tile's first keys
    while number < end:
        seq = tiling.sequence(i_b, work, plan)
        low = masks.first_block(row, seq, work, plan)
        at_q = coordinates.of_queries(i_b, i_h, seq, plan)
        _copy_q(desc_q, mem, at_q, row, turn, plan)
        blocks = top - low
        early, late = gl.maximum(blocks - 3, 1), gl.maximum(blocks - 1, 1)
        _copy_blocks(desc_k, desc_v, mem, c, 1, early, at_k, top, plan)
        asked = tiling.draw(counter_ptr)
        _copy_blocks(desc_k, desc_v, mem, c, early, late, at_k, top, plan)
        number = tiling.drawn(asked, counter_ptr, end, 1)
        before = at_q[0], at_q[1], coordinates.of_mean(i_b, i_h, work, plan)
        row, i_b, i_h, next_top, cursor = tiling.locate(number, all_blocks, cursor, work, plan)
        turn += 1
        told.tell(mem, turn, number >= end, row, i_b, i_h, next_top, before, work, plan)
        _copy_blocks(desc_k, desc_v, mem, c, late, blocks, at_k, top, plan)
        top = next_top
        c += blocks
        acquire(mem, c, plan)
        at_v = at_k
        if number < end:
            at_k = coordinates.of_keys(row, i_b, i_h, work, plan)
            _copy_k(desc_k, mem, c, at_k, top - 1, nbytes(desc_v), plan)
            _copy_v(desc_v, mem, c, at_v, low, not plan.pipeline.joint, plan)
        else:
            _copy_v(desc_v, mem, c, at_v, low, True, plan)


# ---------------------------------------------------------------- consumer: its parts


@gluon.jit
def _load_q(mem, WG: gl.constexpr, plan: gl.constexpr):
    """The columns of Q that stay in registers [64, Q_COLUMNS], if any do."""
    if plan.q_columns == 0:
        return 0
    else:
        return matrix(mem.q[0], WG).slice(0, plan.q_columns, 1).load(plan.q_layout)


@gluon.jit
def _start_scores(q_left, mem, c, WG: gl.constexpr, plan: gl.constexpr):
    """Start Q K^T of block c: [64, BLOCK_N]."""
    token = start_scores(q_left, matrix(mem.q[0], WG), matrix(mem.k[0], slot(c, plan)), plan)
    return column_parts.add_scores(token, mem, WG, slot(c, plan))


@gluon.jit
def _operand(left, right, dtype: gl.constexpr, plan: gl.constexpr):
    """P, in two halves or one, as first operand of a product, in registers: [64, BLOCK_N]."""
    if plan.fp8:
        return e4m3.operand(left, right, plan)
    else:
        p = left.to(dtype)
        if right is not None:
            p = softmax.whole(p, right.to(dtype))
        return gl.convert_layout(p, plan.p_layout)


@gluon.jit
def _start_output(p, acc, mem, c, plan: gl.constexpr):
    """Start acc += P V, V of slot c: [64, BLOCK_N] x [BLOCK_N, D]."""
    if plan.fp8:
        return e4m3.start_output(p, acc, mem, slot(c, plan), plan)
    else:
        return column_parts.start_output(p, acc, mem, slot(c, plan))


@gluon.jit
def _wait_output(o_token, alpha, changed, mem, c, plan: gl.constexpr):
    """O of the blocks before, in the units of the new shift; slot c is free."""
    acc = warpgroup_mma_wait(0, deps=o_token)  # [64, D]
    release(mem, c, plan)
    acc, rescaled = as_parts(acc, len(o_token)), ()
    for i in gl.static_range(len(acc)):
        rescaled = rescaled + (softmax.rescale(acc[i], alpha, changed),)
    return rescaled


@gluon.jit
def _skip(mem, c, end, row, low, seq, work, plan: gl.constexpr):
    """Release slots c to `start` of blocks that only other rows of the tile see; returns (start, first key of
    its block)."""
    own = tiling.top(row + 64, seq, work, plan) - low
    own = gl.where(row < seq.S_q, own, 1)  # no rows at all: one block, whose result is not stored
    start = end - own
    first = (low + own - 1) * plan.block_n
    for i in range(c, start):
        wait_k(mem, i, plan)
        if not plan.pipeline.joint:
            if i > c:
                wait_v(mem, i, plan)
        release(mem, i, plan)
    return start, first


@gluon.jit
def _first_weights(s, first, scale, tile, dtype: gl.constexpr, plan: gl.constexpr):
    """(shift, sums, P) of the first block, as `_step` takes them."""
    shift = maxima.top_of_rows(s, first, scale, tile, plan) * scale  # [64]
    if plan.fp8:
        shift -= e4m3.OFFSET
    weights = softmax.weights(s, shift, scale, plan.mask.blocks > 0, plan.quantizes)
    sums = softmax.row_sum(weights)  # [64, 4]
    if plan.keep_shift:
        words, shift, tops = kept_shift.first_operands(weights, shift, sums, dtype, False, plan)
        p = words, maxima.pending(tops, first, tile, plan)
    else:
        p = _operand(weights, None, dtype, plan)
    return shift, sums, p


@gluon.jit
def _store_lse(lse_ptr, shift, row_sums, empty, at, row, seq, work, plan: gl.constexpr):
    o_m = row + gl.arange(0, 64, layout=plan.row_layout)  # [64]
    lse = (shift + gl.log2(row_sums)) * LN2
    lse = gl.where(empty, float("-inf"), lse)
    place = coordinates.of_lse(at, seq, work, plan)
    gl.store(lse_ptr + place + o_m, lse, mask=o_m < seq.S_q)


# ---------------------------------------------------------------- consumer


@gluon.jit
def _step(q_left, p, acc, shift, sums, c, first, masked, mem, tile, WG: gl.constexpr, plan: gl.constexpr):
    """Block c of a tile, whose first key is `first`: its scores and softmax, and P V of the block before it.

    p: P of the block before [64, BLOCK_N]; acc: [64, D]; shift: [64]; sums: [64, 4]. Returns the new four.
    With `keep_shift` P is in words, with what `maxima` has to store, and the shift is [64, 4].
    """
    dtype: gl.constexpr = mem.v[0].dtype
    MASKED: gl.constexpr = plan.mask.blocks == 2  # a row may have seen no key in the block before
    if plan.keep_shift:
        words, pending = p
        p = kept_shift.unpacked(words, dtype, plan)
    wait_k(mem, c, plan)
    s_token = _start_scores(q_left, mem, c, WG, plan)
    if not plan.pipeline.joint:
        wait_v(mem, c, plan)
    o_token = _start_output(p, acc, mem, c, plan)
    if plan.keep_shift:
        at = maxima.keep(pending, shift, tile, plan)
    # Not before the products: ptxas would wait for the load of a scale at once.
    qk_scale = e4m3.block_scale(tile.scale, first, plan)
    s = warpgroup_mma_wait(len(acc), deps=(s_token,))  # [64, BLOCK_N]; the last ones are P V
    s = masks.later_scores(s, first, masked, tile, plan)
    if plan.keep_shift:
        words, acc, shift, sums, tops = kept_shift.step(
            s, o_token, shift, sums, qk_scale, mem, c, dtype, plan, plan.quantizes
        )
        p = words, at + tops
    else:
        top = maxima.top_of_rows(s, first, qk_scale, tile, plan)  # [64]
        if plan.fp8:
            shift, alpha, changed = e4m3.new_shift(top, shift, qk_scale, MASKED)
        else:
            shift, alpha, changed = softmax.new_shift(top, shift, qk_scale, MASKED)
        sums = sums * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None]
        if plan.pipeline.late_wait:
            left, right = softmax.halves(s)  # [64, BLOCK_N / 2] twice
            left = softmax.weights(left, shift, qk_scale, MASKED, plan.quantizes)
            sums = softmax.add_sums(sums, left)
            if plan.pipeline.pin:
                sums = softmax.pin(sums)
            acc = _wait_output(o_token, alpha, changed, mem, c, plan)
            right = softmax.weights(right, shift, qk_scale, MASKED, plan.quantizes)
            sums = softmax.add_sums(sums, right)
            p = _operand(left, right, dtype, plan)
        else:
            if plan.pipeline.pin:
                shift = softmax.pin(shift)
            acc = _wait_output(o_token, alpha, changed, mem, c, plan)
            p = softmax.weights(s, shift, qk_scale, MASKED, plan.quantizes)
            sums = softmax.add_sums(sums, p)
            p = _operand(p, None, dtype, plan)
    return p, acc, shift, sums


@gluon.jit
def _consume(given, WG: gl.constexpr, plan: gl.constexpr):
    out, lse_ptr, mem, qk_scale, work = given  # out: descriptors, or an `Existing` output
    dtype: gl.constexpr = mem.v[0].dtype
    if not plan.pipeline.joint:
        # Nothing to wait for, but a phase without a waiter is what compute-sanitizer's synccheck stops at.
        mbarrier.wait(mem.v_full.index(0), 0)
    turn = 0  # number of the tile within this program
    c = 0  # slot of the tile's first keys
    first_row = told.first_row(mem, 0, plan)
    while first_row >= 0:
        top = told.word(mem, turn, told.BLOCKS, plan)
        seq = told.sequence(mem, turn, work, plan)
        low = masks.first_block(first_row, seq, work, plan)
        row = first_row + WG * 64
        end = c + (top - low)  # slot of the next tile's first keys, and of this tile's last values
        start = c
        first = (top - 1) * plan.block_n  # first key of the block of slot `start`
        scale, v_scale = e4m3.tile_scales(qk_scale, mem, turn, first_row, row, seq, work, plan)
        mbarrier.wait(mem.q_full.index(WG), turn & 1)
        if plan.quantizes:
            q_left, of_queries = queries.quantized(mem, WG, plan)
            scale = scale[0] * of_queries, scale[1], scale[2]
        else:
            q_left = _load_q(mem, WG, plan)
        if plan.mask.skip:
            start, first = _skip(mem, c, end, row, low, seq, work, plan)

        # 1. The last block that these rows see. Its slot's values are of a block that was skipped, or
        # of the tile before.
        wait_k(mem, start, plan)
        s_token = _start_scores(q_left, mem, start, WG, plan)
        if plan.mask.skip:
            if not plan.pipeline.joint:
                if start > c:
                    wait_v(mem, start, plan)
        first_scale = e4m3.block_scale(scale, first, plan)
        s = warpgroup_mma_wait(0, deps=(s_token,))  # [64, BLOCK_N]
        release(mem, start, plan)
        s = masks.first_scores(s, row, first, seq, work, plan)
        tile = Tile(row, low, seq, work, scale, maxima.place_of_maxima(mem, turn, row, work, plan))
        shift, sums, p = _first_weights(s, first, first_scale, tile, dtype, plan)
        acc = column_parts.zeros(plan.o_layout, plan)  # [64, D]
        start += 1

        # 2. The blocks before it.
        cut = masks.second_is_cut(first, tile, plan)
        for i in range(start, end):
            key, masked = masks.later_block(i, start, end, first, cut, tile, plan)
            p, acc, shift, sums = _step(q_left, p, acc, shift, sums, i, key, masked, mem, tile, WG, plan)
        if not plan.quantizes:
            if plan.q_columns > 0:
                # Between the load of Q and the copy that overwrites it. Where a product in flight would hide
                # the fence, after the first Q K^T has begun, ptxas crashes.
                fence_async_shared()
            mbarrier.arrive(mem.q_free.index(WG), count=1)

        # 3. The last P V, and what can be done beside it.
        c = end
        wait_v(mem, c, plan)
        if plan.keep_shift:
            words, pending = p
            p = kept_shift.unpacked(words, dtype, plan)
        o_token = _start_output(p, acc, mem, c, plan)
        if plan.keep_shift:
            maxima.keep(pending, shift, tile, plan)
        row_sums = gl.convert_layout(gl.sum(sums, 1), plan.row_layout)  # [64]
        shift = kept_shift.shift_of_rows(shift, plan)  # [64]
        turn += 1
        first_row = told.first_row(mem, turn, plan)  # of the next tile
        at = told.output(mem, turn, seq, plan)  # of this one
        mean = e4m3.early_mean(mem, turn, work, plan)
        merging = accumulate.weigh(out, at, row, shift, row_sums, seq.S_q, plan)
        acc = as_parts(warpgroup_mma_wait(0, deps=o_token), len(o_token))  # [64, D]

        # 4. Output and LSE. A row with nothing to attend to has a sum of 0: its output is 0 and its LSE -inf.
        if plan.accumulate:
            accumulate.merge(out, acc, merging, row_sums, at, row, seq.S_q, plan)
        else:
            empty = row_sums == 0.0
            if plan.store_lse:
                _store_lse(lse_ptr, shift, row_sums, empty, at, row, seq, work, plan)
            if row < seq.S_q:
                factor = 1.0 / gl.where(empty, 1.0, row_sums)  # [64]
                if plan.fp8:
                    o = e4m3.output(acc, factor, v_scale, mean, row_sums, mem, turn, work, plan)
                else:
                    o = column_parts.scaled(acc, factor)  # [64, D]
                column_parts.store_output(out, o, mem, at, row, WG, plan)
    column_parts.await_stored()


# ---------------------------------------------------------------- kernel


@gluon.jit
def _memory(desc_q, desc_k, desc_v, out, plan: gl.constexpr):
    k_full = barriers(plan.pipeline.stages, 1)
    v_full = k_full
    if not plan.pipeline.joint:
        v_full = barriers(plan.pipeline.stages, 1)
    kv_free = k_full
    if not plan.pipeline.named:
        kv_free = barriers(plan.pipeline.stages, plan.pipeline.warpgroups)
    return Memory(
        column_parts.buffers(desc_q, plan.pipeline.warpgroups),
        column_parts.buffers(desc_k, plan.pipeline.stages),
        column_parts.buffers(desc_v, plan.pipeline.stages),
        () if plan.accumulate else column_parts.buffers(out, plan.pipeline.warpgroups),
        queries.rotation(desc_q, plan),
        new_words(2 * plan.words),
        barriers(plan.pipeline.warpgroups, 1),  # q_full
        barriers(plan.pipeline.warpgroups, 1),  # q_free
        k_full,
        v_full,
        kv_free,
        barriers(2, 1),  # drawn
    )


NUMBERS = "S_q S_k H GROUP HEADS SECTION num_m tiles right left T_q B shared_rows key_blocks LAST".split()
STRIDES = [f"{name}_scale_{part}" for name in "qkv" for part in "bhn" if name + part != "vn"] + ["v_mean_b"]
STRIDES += "into_b into_h into_m into_lse_b into_lse_h".split()
UNALIGNED = "cu_q cu_k into_lse_ptr".split()


@gluon.jit(do_not_specialize=NUMBERS + STRIDES, do_not_specialize_on_alignment=UNALIGNED)
def attention_forward_hopper(
    desc_q, desc_k, desc_v, desc_o,  # (B, H, S_q, D), (B, H_kv, S_k, D) twice, (B, H, S_q, D)
    lse_ptr,  # (B, H, S_q), varlen (H, T_q)
    counter_ptr,  # one int32, 0 before and after a launch
    qk_scale,  # |sm_scale| * log2(e), positive
    S_q, S_k,  # of varlen sequences the longest
    H,  # query heads
    GROUP,  # query heads that share one key/value head
    HEADS,  # B * H
    SECTION,  # heads that advance together
    num_m,  # row blocks of a head
    tiles,  # num_m * HEADS; of varlen sequences the kernel counts them
    plan: gl.constexpr,
    right=None, left=None,  # keys that a row sees after and before its place, where `plan` has them
    cu_q=None, cu_k=None,  # where varlen sequences begin and end (B + 1)
    T_q=None, B=None,  # rows of all varlen sequences, and how many these are
    q_scale=None, k_scale=None, v_scale=None,  # float32, what the values of e4m3 operands are multiplied by
    q_scale_b=None, q_scale_h=None, q_scale_n=None,  # strides: of batches, heads, blocks of 64 rows
    k_scale_b=None, k_scale_h=None, k_scale_n=None,  # of blocks of 128 keys
    v_scale_b=None, v_scale_h=None,
    v_mean=None, v_mean_b=None,  # what V is without [heads, D], and the heads of a batch
    shared_rows=None, key_blocks=None,  # query rows that share keys, and how many times these fit in S_q
    maxima=None,  # (B, H, 2 * ceil(S_k / 128), num_m * block_m), see `maxima`
    desc_q_right=None, desc_k_right=None, desc_v_right=None, desc_o_right=None,  # of the second part
    into_ptr=None, into_lse_ptr=None,  # an existing output and its LSE, instead of desc_o and lse_ptr
    into_b=None, into_h=None, into_m=None, into_lse_b=None, into_lse_h=None,  # their strides
    LAST=None,  # the head that the last section begins with, see `tile_order.by_sections`
):
    """out = softmax(sm_scale * Q K^T) V over descriptors of rank 4, varlen 5; see the module docstring."""
    desc_q = column_parts.together(desc_q, desc_q_right)
    desc_k = column_parts.together(desc_k, desc_k_right)
    desc_v = column_parts.together(desc_v, desc_v_right)
    if plan.accumulate:
        out = accumulate.Existing(into_ptr, into_lse_ptr, into_b, into_h, into_m, into_lse_b, into_lse_h)
    else:
        out = column_parts.together(desc_o, desc_o_right)
    mem = _memory(desc_q, desc_k, desc_v, out, plan)
    fence_async_shared()
    if plan.quantizes:
        await_launch_before()
    scales = e4m3.Scales(
        q_scale, q_scale_b, q_scale_h, q_scale_n, k_scale, k_scale_b, k_scale_h, k_scale_n,
        v_scale, v_scale_b, v_scale_h, v_mean, v_mean_b,
    )  # fmt: skip
    work = tiling.Work(
        S_q, S_k, H, GROUP, HEADS, SECTION, num_m, tiles, right, left, cu_q, cu_k, T_q, B, scales,
        shared_rows, key_blocks, maxima, LAST,
    )
    given = out, lse_ptr, mem, qk_scale, work
    producer_given = desc_q, desc_k, desc_v, counter_ptr, mem, work
    regs: gl.constexpr = plan.registers.consumer
    few: gl.constexpr = plan.registers.producer
    # A consumer's number is a constant, so each has code of its own.
    if plan.pipeline.warpgroups == 2:
        gl.warp_specialize([
            (_consume, (given, 0, plan)), (_consume, (given, 1, plan)), (_produce, (producer_given, plan)),
        ], [4, 1], [regs, few])
    elif plan.pipeline.warpgroups == 3:
        gl.warp_specialize([
            (_consume, (given, 0, plan)), (_consume, (given, 1, plan)), (_consume, (given, 2, plan)),
            (_produce, (producer_given, plan)),
        ], [4, 4, 1], [regs, regs, few])
    else:
        gl.warp_specialize([
            (_consume, (given, 0, plan)), (_consume, (given, 1, plan)), (_consume, (given, 2, plan)),
            (_consume, (given, 3, plan)), (_produce, (producer_given, plan)),
        ], [4, 4, 4, 1], [regs, regs, regs, few])
