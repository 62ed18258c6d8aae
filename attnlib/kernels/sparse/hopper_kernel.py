"""Exact attention under a block mask, forward, for Hopper (sm_90a) in Gluon. Chapter 30 explains it.

The kernel of `kernels.hopper.forward_kernel` for lists instead of windows; its docstring has the protocol
of the ring, of Q and of the tiles that the producer draws and tells of, and all of that holds here. What
differs:

- A tile is 128 query rows of one head, for a pair of consumer warpgroups, and has a list
  (`block_mask.lists`). The producer alone walks along it: it loads the number of each step's keys, one step
  ahead of the copy that needs it, and consumers never hear of a block that is absent. They are told how many
  steps there are, and how many of these all rows see whole. Those come first; the others carry bits.
- A program has one pair of consumers or two. Each pair has a producer warp and memory of its own, and takes
  tiles of its own: two pairs are two programs that share the registers of an SM.
- Bits come through the ring too. Slot c has room for the words of a step, 64 rows of four words for each
  consumer, which arrive with the keys, at the same barrier. A consumer reads them before it releases the
  slot, with a fence between (`bits.hide`).
- Tiles are numbered so that in each head the longest lists come first.
- Q has one buffer or two (`queries`). With two a consumer starts the first product of the next tile beside
  the last one of its tile, and the output leaves through the place of the tile's queries, which is given
  back in the next tile.
- With `keep_shift` the steps of `kept_shift`, with bits or without.
- A score (`hopper_scores`) has the tile's head from what the producer tells, and for ALiBi, a bias that is
  loaded, and a function the number of a step's keys, which the producer stores beside the slot before it
  arrives at k_full. A consumer loads its elements of a bias from global memory; or, with `copies_bias`, the
  producer copies them behind the values, 64 rows for each consumer. There is one buffer for each: a consumer
  has read that of slot c before its scores are there, and gives it back at named barrier 12 or 13, with a
  fence as for bits. bias_full[w] completes once for each slot, so the parity is c & 1.

A list has at least one step: a row of tiles that sees nothing has one whose bits are all 0.

With `leaves_out` lists are marked (`lists.marked`): of a tile there may be one step that the first consumer
sees whole and the second one not at all, and one that the second one sees alone. The producer copies the
first kind before all others, and the second kind comes last. So the second consumer may begin a step later:
it waits for the keys, for the slot is not filled before, and gives it back. And the first one may end a step
earlier: its last P V takes the values in the last slot of the tile's keys, which it gives back behind it.
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

from attnlib.kernels.common import kept_shift, softmax, tma
from attnlib.kernels.common import tile_scheduler as tiling
from attnlib.kernels.common.first_product import products_of_scores, start_scores
from attnlib.kernels.common.logarithms import LN2, LOG2_E
from attnlib.kernels.common.memory import barriers, buffers, matrix
from attnlib.kernels.common.named_barrier import named_barrier
from attnlib.kernels.common.ring import acquire, release, slot, wait_k, wait_v
from attnlib.kernels.common.words import await_tile, new_words, put_word, tell, told, word_in
from attnlib.kernels.sparse.bits import hide
from attnlib.kernels.sparse.hopper_output import give_q_back, store_output
from attnlib.kernels.sparse.hopper_scores import Score, of_tile, scored, top_of_rows, weights_of
from attnlib.kernels.sparse.hopper_tiles import SECOND_ALONE, Work, entry_after, entry_of, locate, whole_until
from attnlib.kernels.sparse.queries import await_q, copy_q, q_place

BIAS_FREE = gl.constexpr(12)  # and 13: named barriers of the producer and a consumer

# What the producer tells of a tile, word by word; word 0 is the first row, -1 after the last tile.
STEPS = gl.constexpr(1)
WHOLE = gl.constexpr(2)  # steps without bits
OUTPUT = gl.constexpr(3)  # and the word after: batch and head of the output of the tile before
HEAD = gl.constexpr(5)  # of this tile, for a score
BATCH = gl.constexpr(6)  # of this tile, for a bias that is loaded or a function
LEFT_OUT = gl.constexpr(5)  # with `leaves_out`, where there is no score: 1 and 2, see the module docstring


# ---------------------------------------------------------------- what is passed around


class Memory(NamedTuple):
    """Buffers and barriers in shared memory."""

    q: gl.shared_memory_descriptor  # [2 * q_buffers, 1, 1, 64, d]: of buffer b for warpgroup w, 2 b + w
    k: gl.shared_memory_descriptor  # [stages, 1, 1, block_n, d]
    v: gl.shared_memory_descriptor  # [stages, 1, 1, block_n, d]
    o: gl.shared_memory_descriptor  # [2, 1, 1, 64, o_columns], if Q has one buffer
    bias: gl.shared_memory_descriptor  # [2, 1, 1, 64, block_n], if it is copied
    words: gl.shared_memory_descriptor  # [2 * stages, 1, 1, 256]: of slot c for warpgroup w, 2 c + w
    steps: gl.shared_memory_descriptor  # [stages, 32]: whose keys are in a slot, for ALiBi and a bias
    next_tile: gl.shared_memory_descriptor  # [2 * plan.words, 32]
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor  # k_full once more with `joint`
    kv_free: gl.shared_memory_descriptor  # k_full once more with `named`, which needs none
    bias_full: gl.shared_memory_descriptor
    drawn: gl.shared_memory_descriptor


# ---------------------------------------------------------------- producer


@gluon.jit
def _copy_k(desc_k, desc_words, mem, c, tile, j, step, VALUES: gl.constexpr, work, plan: gl.constexpr):
    """Start to copy the keys of entry j of the lists, step number `step`, to slot c, and its bits if it has
    any. VALUES: values follow, as many bytes as the keys."""
    s = slot(c, plan)
    bar = mem.k_full.index(s)
    if plan.tells_steps:
        put_word(mem.steps.index(s), step)
    size: gl.constexpr = (2 if VALUES and plan.pipeline.joint else 1) * desc_k.block_type.nbytes
    if plan.partial:
        if j >= whole_until(tile, plan):
            bits = gl.load(work.bits + j)
            if plan.leaves_out:
                bits = bits & (SECOND_ALONE - 1)
            if plan.block_n == 128:
                bits = bits >> 1
            mbarrier.expect(bar, size + 2 * desc_words.block_type.nbytes)
            for w in gl.static_range(2):
                tma.async_copy_global_to_shared(desc_words, [bits, w, 0], bar, mem.words.index(2 * s + w))
        else:
            mbarrier.expect(bar, size)
    else:
        mbarrier.expect(bar, size)
    tma.async_copy_global_to_shared(
        desc_k, tiling.coordinates((tile.i_b, tile.i_kv), step * plan.block_n, 0), bar, mem.k.index(s)
    )


@gluon.jit
def _copy_v(desc_v, mem, c, tile, step, EXPECT: gl.constexpr, plan: gl.constexpr):
    bar = mem.v_full.index(slot(c, plan))
    if EXPECT:
        mbarrier.expect(bar, desc_v.block_type.nbytes)
    tma.async_copy_global_to_shared(
        desc_v, tiling.coordinates((tile.i_b, tile.i_kv), step * plan.block_n, 0), bar,
        mem.v.index(slot(c, plan)),
    )


@gluon.jit
def _copy_bias(desc_bias, mem, c, tile, step, plan: gl.constexpr):
    """Start to copy the bias of slot c, when that of the slot before was read."""
    if plan.copies_bias:
        i_b = tile.i_b if plan.bias_batches else 0
        i_h = tile.i_h if plan.bias_heads else 0
        for w in gl.static_range(2):
            if c > 0:
                named_barrier("sync", BIAS_FREE + w, 160)
            bar = mem.bias_full.index(w)
            mbarrier.expect(bar, desc_bias.block_type.nbytes)
            place = [i_b, i_h, tile.row + w * 64, step * plan.block_n]
            tma.async_copy_global_to_shared(desc_bias, place, bar, mem.bias.index(w))


@gluon.jit
def _copy_steps(
    desc_k, desc_v, desc_words, desc_bias, mem, c, begin, end, tile, before, step, work, plan: gl.constexpr
):  # fmt: skip
    """Keys of steps `begin` to `end` of a tile, each with the values of the one before. `before` and `step`
    are the numbers of the step before `begin` and of `begin`; returns those of `end`."""
    for i in range(begin, end):
        after = gl.load(work.steps + entry_after(tile, i, plan))
        acquire(mem, c + i, plan)
        _copy_k(desc_k, desc_words, mem, c + i, tile, entry_of(tile, i, plan), step, True, work, plan)
        _copy_v(desc_v, mem, c + i, tile, before, not plan.pipeline.joint, plan)
        _copy_bias(desc_bias, mem, c + i, tile, step, plan)
        before = step
        step = after
    return before, step


@gluon.jit
def _tell(mem, number, last, tile, before, plan: gl.constexpr):
    """Consumers read which tile has this number, and where the output of the one before goes."""
    b = number & 1
    # In the order of their names.
    whole = whole_until(tile, plan) - tile.first
    words = (gl.where(last, -1, tile.row), tile.end - tile.first, whole) + before
    if plan.leaves_out:
        words += (tile.alone,)
    else:
        words += (tile.i_h, tile.i_b)
    tell(mem, b, words, plan.words)


@gluon.jit
def _produce(given, PAIR: gl.constexpr, plan: gl.constexpr):
    desc_q, desc_k, desc_v, desc_words, desc_bias, counter_ptr, mem, work = given
    number = plan.pairs * gl.program_id(0) + PAIR  # of the tile among all
    tile = locate(number, work, plan)
    step = gl.load(work.steps + entry_of(tile, 0, plan))
    if number < work.tiles:
        _copy_k(desc_k, desc_words, mem, 0, tile, entry_of(tile, 0, plan), step, False, work, plan)
        _copy_bias(desc_bias, mem, 0, tile, step, plan)
    _tell(mem, 0, number >= work.tiles, tile, (0, 0), plan)
    if not plan.pipeline.joint:
        mbarrier.arrive(mem.v_full.index(0), count=1)  # the first slot of all has no values to wait for
    turn = 0  # number of the tile within this program
    c = 0  # slot of the tile's first keys
    if plan.q_buffers > 1:
        copy_q(desc_q, mem, 0, tile, number < work.tiles, plan)
    while number < work.tiles:
        if plan.q_buffers == 1:
            copy_q(desc_q, mem, turn, tile, True, plan)
        steps = tile.end - tile.first
        before = step
        step = gl.load(work.steps + entry_after(tile, 0, plan))
        early, late = gl.maximum(steps - 4, 1), gl.maximum(steps - 2, 1)
        before, step = _copy_steps(
            desc_k, desc_v, desc_words, desc_bias, mem, c, 1, early, tile, before, step, work, plan
        )
        asked = tiling.draw(counter_ptr)
        before, step = _copy_steps(
            desc_k, desc_v, desc_words, desc_bias, mem, c, early, late, tile, before, step, work, plan
        )
        number = tiling.drawn(asked, counter_ptr, work.tiles, plan.pairs)
        next_tile = locate(number, work, plan)
        first = gl.load(work.steps + entry_of(next_tile, 0, plan))
        turn += 1
        if plan.q_buffers > 1:
            copy_q(desc_q, mem, turn, next_tile, number < work.tiles, plan)
        _tell(mem, turn, number >= work.tiles, next_tile, (tile.i_b, tile.i_h), plan)
        before, step = _copy_steps(
            desc_k, desc_v, desc_words, desc_bias, mem, c, late, steps, tile, before, step, work, plan
        )
        c += steps
        acquire(mem, c, plan)
        if number < work.tiles:
            entry = entry_of(next_tile, 0, plan)
            _copy_k(desc_k, desc_words, mem, c, next_tile, entry, first, True, work, plan)
            _copy_v(desc_v, mem, c, tile, before, not plan.pipeline.joint, plan)
            _copy_bias(desc_bias, mem, c, next_tile, first, plan)
        else:
            _copy_v(desc_v, mem, c, tile, before, True, plan)
        tile = next_tile
        step = first


# ---------------------------------------------------------------- consumer


@gluon.jit
def _issue_scores(q_registers, mem, c, turn, WG: gl.constexpr, plan: gl.constexpr):
    """Start Q K^T of slot c: [64, BLOCK_N]."""
    at, _ = q_place(turn, WG, plan)
    return start_scores(q_registers, matrix(mem.q, at), matrix(mem.k, slot(c, plan)), plan)


@gluon.jit
def _first_slot(mem, turn, start, there, WG: gl.constexpr, plan: gl.constexpr):
    """Where this consumer's steps of a tile begin: at the tile's first slot, or with `leaves_out` at the next
    one."""
    if plan.leaves_out and WG == 1:
        start += gl.where(there, told(mem, turn, LEFT_OUT, plan.words) & 1, 0)
    return start


@gluon.jit
def _leave_out(mem, start, c, WG: gl.constexpr, plan: gl.constexpr):
    """Give a tile's first slot back, if this consumer begins with another one."""
    if plan.leaves_out and WG == 1:
        if c > start:
            wait_k(mem, start, plan)
            release(mem, start, plan)


@gluon.jit
def _first_scores(q_registers, mem, c, turn, there, WG: gl.constexpr, plan: gl.constexpr):
    """Start Q K^T of a tile's first slot c. Behind the last tile nobody looks at what that gives."""
    if there:
        wait_k(mem, c, plan)
    return _issue_scores(q_registers, mem, c, turn, WG, plan)


@gluon.jit
def _issue_output(p, acc, mem, c, plan: gl.constexpr):
    """Start acc += P V, V of slot c: [64, BLOCK_N] x [BLOCK_N, D]."""
    return warpgroup_mma(p, matrix(mem.v, slot(c, plan)), acc, is_async=True)


@gluon.jit
def _wait_output(o_token, alpha, changed, mem, c, plan: gl.constexpr):
    """O of the blocks before, in the units of the new shift; slot c is free."""
    acc = warpgroup_mma_wait(0, deps=(o_token,))  # [64, D]
    release(mem, c, plan)
    return softmax.rescale(acc, alpha, changed)


@gluon.jit
def _seen(s, mem, c, masked, WG: gl.constexpr, plan: gl.constexpr):
    """Scores [64, BLOCK_N] of slot c, -inf where the bits of the slot hide a key, if it has bits."""
    if plan.flip:
        s = -s
    if plan.partial:
        if masked:
            s = hide(s, mem.words.index(2 * slot(c, plan) + WG).reshape([64, 4]), float("-inf"))
    return s


@gluon.jit
def _first_key(mem, c, plan: gl.constexpr):
    """Of slot c, whose keys are there; read before the scores are waited for."""
    first = 0
    if plan.tells_steps:
        first = word_in(mem.steps.index(slot(c, plan))) * plan.block_n
    return first


@gluon.jit
def _copied_bias(mem, c, WG: gl.constexpr, plan: gl.constexpr):
    """That of slot c [64, BLOCK_N], where it is copied; 0 else."""
    if plan.copies_bias:
        mbarrier.wait(mem.bias_full.index(WG), c & 1)
        bias = matrix(mem.bias, WG).load(plan.s_layout)
        fence_async_shared()  # between the load and the copy that overwrites it
        named_barrier("arrive", BIAS_FREE + WG, 160)
        return bias
    else:
        return 0


@gluon.jit
def _step(
    q_registers, p, acc, shift, sums, c, masked, turn, mem, qk_scale, score, own,
    FUNCTION: gl.constexpr, WG: gl.constexpr, plan: gl.constexpr,
):  # fmt: skip
    """Slot c of a tile: its scores and softmax, and P V of the step before it.

    p: P of the step before [64, BLOCK_N]; acc: [64, D]; shift: [64]; sums: [64, 4]. Returns the new four.
    With `keep_shift` P and the shift are as there.
    """
    dtype: gl.constexpr = mem.v.dtype
    if plan.keep_shift:
        p = kept_shift.unpacked(p, dtype, plan)
    wait_k(mem, c, plan)
    s_token = _issue_scores(q_registers, mem, c, turn, WG, plan)
    if not plan.pipeline.joint:
        wait_v(mem, c, plan)
    o_token = _issue_output(p, acc, mem, c, plan)
    first, bias = _first_key(mem, c, plan), _copied_bias(mem, c, WG, plan)
    s = warpgroup_mma_wait(1, deps=(s_token,))  # [64, BLOCK_N]
    s, rest = scored(s, first, bias, score, own, FUNCTION, plan)
    s = _seen(s, mem, c, masked, WG, plan)
    if plan.keep_shift:
        p, parts, shift, sums, _ = kept_shift.step(s, (o_token,), shift, sums, qk_scale, mem, c, dtype, plan)
        acc = parts[0]
    else:
        shift, alpha, changed = softmax.new_shift(top_of_rows(s, rest, plan), shift, qk_scale, plan.hides)
        sums = sums * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None]
        if plan.pipeline.late_wait:
            left, right = softmax.halves(s)  # [64, BLOCK_N / 2] twice
            left = weights_of(left, rest, shift, qk_scale, plan)
            sums = softmax.add_sums(sums, left)
            if plan.pipeline.pin:
                sums = softmax.pin(sums)
            acc = _wait_output(o_token, alpha, changed, mem, c, plan)
            right = weights_of(right, rest, shift, qk_scale, plan)
            sums = softmax.add_sums(sums, right)
            p = softmax.whole(left.to(dtype), right.to(dtype))
        else:
            if plan.pipeline.pin:
                shift = softmax.pin(shift)
            acc = _wait_output(o_token, alpha, changed, mem, c, plan)
            weights = weights_of(s, rest, shift, qk_scale, plan)
            sums = softmax.add_sums(sums, weights)
            p = weights.to(dtype)
        p = gl.convert_layout(p, plan.p_layout)
    return p, acc, shift, sums


@gluon.jit
def _consume(given, FUNCTION: gl.constexpr, WG: gl.constexpr, plan: gl.constexpr):
    desc_o, lse_ptr, mem, qk_scale, score, work = given
    dtype: gl.constexpr = mem.v.dtype
    if not plan.pipeline.joint:
        # Nothing to wait for, but a phase without a waiter is what compute-sanitizer's synccheck stops at.
        mbarrier.wait(mem.v_full.index(0), 0)
    turn = 0  # number of the tile within this program
    start = 0  # slot of the tile's first keys
    first_row = await_tile(mem, 0, plan.words)
    if plan.ahead:
        there = first_row >= 0
        q_registers = await_q(mem, turn, there, WG, plan)
        c = _first_slot(mem, turn, start, there, WG, plan)
        _leave_out(mem, start, c, WG, plan)
        s_token = _first_scores(q_registers, mem, c, turn, there, WG, plan)
        s = warpgroup_mma_wait(0, deps=(s_token,))
    while first_row >= 0:
        row = first_row + WG * 64
        end = start + told(mem, turn, STEPS, plan.words)  # slot of the last values, the next first keys
        middle = start + told(mem, turn, WHOLE, plan.words)  # the first slot with bits
        last = end  # slot of this consumer's last values
        if plan.leaves_out and WG == 0:
            last -= told(mem, turn, LEFT_OUT, plan.words) >> 1
        head, batch = 0, 0
        if plan.words > HEAD and not plan.leaves_out:
            head = told(mem, turn, HEAD, plan.words)
        if plan.words > BATCH:
            batch = told(mem, turn, BATCH, plan.words)
        own = of_tile(head, batch, row, score, qk_scale, work.S_q, plan)
        sink = 0.0
        if plan.sinks:
            sink = gl.load(score.sinks + head) * LOG2_E

        # 1. The first step. Its slot's values are of the tile before.
        if not plan.ahead:
            c = _first_slot(mem, turn, start, True, WG, plan)
            _leave_out(mem, start, c, WG, plan)
            q_registers = await_q(mem, turn, True, WG, plan)
            s_token = _first_scores(q_registers, mem, c, turn, True, WG, plan)
        first, bias = _first_key(mem, c, plan), _copied_bias(mem, c, WG, plan)
        if not plan.ahead:
            s = warpgroup_mma_wait(0, deps=(s_token,))
        s, rest = scored(s, first, bias, score, own, FUNCTION, plan)
        s = _seen(s, mem, c, c >= middle, WG, plan)
        release(mem, c, plan)
        shift = top_of_rows(s, rest, plan) * qk_scale  # [64]
        if plan.sinks:
            shift = gl.maximum(shift, sink)
        weights = weights_of(s, rest, shift, qk_scale, plan)
        sums = softmax.row_sum(weights)  # [64, 4]
        if plan.keep_shift:
            p, shift, _ = kept_shift.first_operands(weights, shift, sums, dtype, plan.hides, plan)
        else:
            p = gl.convert_layout(weights.to(dtype), plan.p_layout)
        acc = gl.zeros([64, plan.d], gl.float32, plan.o_layout)

        if plan.ahead:
            if turn > 0:
                give_q_back(mem, turn - 1, WG, plan)

        # 2. The other steps.
        for i in range(c + 1, last):
            p, acc, shift, sums = _step(
                q_registers, p, acc, shift, sums, i, i >= middle, turn, mem, qk_scale, score, own, FUNCTION,
                WG, plan,
            )  # fmt: skip
        if plan.q_columns > 0:
            fence_async_shared()  # between the load of Q and the copy that overwrites it
        if not plan.ahead:
            give_q_back(mem, turn, WG, plan)

        # 3. The last P V, and what can be done beside it.
        turn += 1
        if plan.ahead:
            first_row = await_tile(mem, turn, plan.words)
            there = first_row >= 0
            q_registers = await_q(mem, turn, there, WG, plan)
        wait_v(mem, last, plan)
        if plan.keep_shift:
            p = kept_shift.unpacked(p, dtype, plan)
        o_token = _issue_output(p, acc, mem, last, plan)
        if plan.ahead:
            c = _first_slot(mem, turn, end, there, WG, plan)
            s_token = _first_scores(q_registers, mem, c, turn, there, WG, plan)
        row_sums = gl.convert_layout(gl.sum(sums, 1), plan.row_layout)  # [64]
        shift = kept_shift.shift_of_rows(shift, plan)  # [64]
        if plan.sinks:  # shift is its maximum with all scores, less what the maximum grew by little
            row_sums += gl.exp2(sink - gl.where(shift == float("-inf"), 0.0, shift))
        if not plan.ahead:
            first_row = await_tile(mem, turn, plan.words)
        at = told(mem, turn, OUTPUT, plan.words), told(mem, turn, OUTPUT + 1, plan.words)  # of this tile
        acc = warpgroup_mma_wait(products_of_scores(plan) if plan.ahead else 0, deps=(o_token,))  # [64, D]
        if plan.ahead:
            _leave_out(mem, end, c, WG, plan)
        if plan.leaves_out and WG == 0:
            if last < end:
                release(mem, last, plan)
        # A row that sees nothing has a sum of 0: its output is 0 and its LSE -inf.
        empty = row_sums == 0.0
        if plan.store_lse:
            o_m = row + gl.arange(0, 64, layout=plan.row_layout)  # [64]
            lse = (shift + gl.log2(row_sums)) * LN2
            lse = gl.where(empty, float("-inf"), lse)
            place = (at[0] * work.H + at[1]).to(gl.int64) * work.S_q
            gl.store(lse_ptr + place + o_m, lse, mask=o_m < work.S_q)
        if row < work.S_q:
            o = acc * softmax.rows_of_o(1.0 / gl.where(empty, 1.0, row_sums), acc)  # [64, D]
            store_output(desc_o, o.to(dtype), mem, at, row, turn - 1, WG, plan)
        if plan.ahead:
            s = warpgroup_mma_wait(0, deps=(s_token,))
        start = end
    tma.store_wait(0)


# ---------------------------------------------------------------- kernel


NUMBERS = "S_q H GROUP HEADS SECTION num_m tiles mask_b mask_h place bias_b bias_h bias_m S_k".split()


@gluon.jit(do_not_specialize=NUMBERS)
def attention_sparse_forward_hopper(
    desc_q, desc_k, desc_v, desc_o,  # (B, H, S_q, D), (B, H_kv, S_k, D) twice, (B, H, S_q, D)
    desc_words,  # (slots, 2, 256): words of steps as a tile's two warpgroups read them
    lse_ptr,  # (B, H, S_q)
    counter_ptr,  # one int32, 0 before and after a launch
    starts_ptr, middles_ptr, steps_ptr, bits_ptr, order_ptr,  # see `block_mask.lists.Lists`
    alibi_ptr, sinks_ptr,  # (H), None without
    bias_ptr,  # of query 0 and key 0; this and the next four are None without
    bias_b, bias_h, bias_m,  # its strides; that of keys is plan.bias_n
    S_k,
    qk_scale,  # |sm_scale| * log2(e), positive; behind a function log2(e), behind a cap that times the cap
    inner,  # sm_scale before a function; over the soft cap without; None without either
    after,  # one over the soft cap where there is a function, too; None else
    place,  # of query 0 among the keys
    S_q,
    H,  # query heads
    GROUP,  # query heads that share one key/value head
    HEADS,  # B * H
    SECTION,  # heads that advance together
    num_m,  # row tiles of a head
    tiles,  # num_m * HEADS
    mask_b, mask_h,  # masks from one batch element, or head, to the next; 0 where they share one
    plan: gl.constexpr,
    desc_bias=None,  # (B or 1, H or 1, S_q, S_k), where it is copied
    FUNCTION: gl.constexpr = None,  # the caller's own; by itself, as the compiler's caches know it so
):  # fmt: skip
    """out = softmax(sm_scale * Q K^T) V where the mask has a bit; see the module docstring."""
    mem = _memory(desc_q, desc_k, desc_v, desc_o, desc_words, desc_bias, plan)
    work = Work(
        S_q, H, GROUP, HEADS, SECTION, num_m, tiles, mask_b, mask_h, starts_ptr, middles_ptr, steps_ptr,
        bits_ptr, order_ptr,
    )  # fmt: skip
    score = Score(inner, after, place, alibi_ptr, sinks_ptr, bias_ptr, bias_b, bias_h, bias_m, S_k)
    given = desc_o, lse_ptr, mem, qk_scale, score, work
    copied = desc_q, desc_k, desc_v, desc_words, desc_bias, counter_ptr, mem, work
    regs: gl.constexpr = plan.registers.consumer
    few: gl.constexpr = plan.registers.producer
    # A consumer's number is a constant, so each has code of its own.
    if plan.pairs == 1:
        fence_async_shared()
        gl.warp_specialize([
            (_consume, (given, FUNCTION, 0, plan)), (_consume, (given, FUNCTION, 1, plan)),
            (_produce, (copied, 0, plan)),
        ], [4, 1], [regs, few])
    else:
        mem_1 = _memory(desc_q, desc_k, desc_v, desc_o, desc_words, desc_bias, plan)
        given_1 = desc_o, lse_ptr, mem_1, qk_scale, score, work
        copied_1 = desc_q, desc_k, desc_v, desc_words, desc_bias, counter_ptr, mem_1, work
        fence_async_shared()
        gl.warp_specialize([
            (_consume, (given, FUNCTION, 0, plan)), (_consume, (given, FUNCTION, 1, plan)),
            (_consume, (given_1, FUNCTION, 0, plan)), (_consume, (given_1, FUNCTION, 1, plan)),
            (_produce, (copied, 0, plan)), (_produce, (copied_1, 1, plan)),
        ], [4, 4, 4, 1, 1], [regs, regs, regs, few, few])


@gluon.jit
def _memory(desc_q, desc_k, desc_v, desc_o, desc_words, desc_bias, plan: gl.constexpr):
    """Of a pair of consumers and their producer."""
    stages: gl.constexpr = plan.pipeline.stages
    k_full = barriers(stages, 1)
    v_full = k_full
    if not plan.pipeline.joint:
        v_full = barriers(stages, 1)
    kv_free = k_full
    if not plan.pipeline.named:
        kv_free = barriers(stages, 2)
    places: gl.constexpr = 2 * stages if plan.partial else 1
    o, bias, bias_full = 0, 0, 0
    if not plan.ahead:
        o = buffers(desc_o, 2)
    if plan.copies_bias:
        bias, bias_full = buffers(desc_bias, 2), barriers(2, 1)
    return Memory(
        buffers(desc_q, 2 * plan.q_buffers),
        buffers(desc_k, stages),
        buffers(desc_v, stages),
        o,
        bias,
        gl.allocate_shared_memory(desc_words.dtype, [places, 1, 1, 256], desc_words.layout),
        new_words(stages if plan.tells_steps else 1),
        new_words(2 * plan.words),
        barriers(2 * plan.q_buffers, 1),  # q_full
        barriers(2 * plan.q_buffers, 1),  # q_free
        k_full,
        v_full,
        kv_free,
        bias_full,
        barriers(2, 1),  # drawn
    )
