"""Block-Sparse FlashAttention, forward, for Hopper (sm_90a) in Gluon. Chapter 31 explains and measures it.

One persistent program per SM: a producer warp and two consumer warpgroups of 64 query rows each. A tile is
128 rows of one head, and its blocks of 128 keys come from the last one in sight to the first. Each consumer
decides for itself which blocks its rows keep: a block of scores is 64 x 128.

    Who copies what

The producer streams keys through a ring, whatever becomes of them: all scores are computed. Values are not in
the ring. A consumer has two buffers for the values of a block, and starts a copy itself, as soon as it has
decided to keep a block. It needs the values a step later: P V of a block is issued together with Q K^T of the
next one, and runs beside that one's decision and half of its exponentials. So no value is read in vain, no
consumer waits for the other's decision, and a wait for a copy is rare. Where both keep a block, its values
are read twice, from the L2.

    barrier          completes when                   waited for by            parity of the wait
    k_full[slot]     TMA has written K of slot c      each consumer            (c // STAGES) & 1
    kv_free[slot]    both consumers have released c   producer, to fill        see `common.ring`
    v_full[2 w + b]  TMA has written the values that  consumer w               (number of the copy // 2) & 1
                     consumer w asked for
    q_full[w]        TMA has written Q of consumer w  consumer w               tile number & 1
    q_free[w]        consumer w needs Q no more       producer                 tile number & 1, flipped
    drawn[b]         producer has told of tile        each consumer            (tile number // 2) & 1
                     2 n + b

Copies take both buffers in turn. One is free when P V of its values is done in all four warps. In the loop
the decision makes sure of that: it is a barrier of the warpgroup, and each warp has waited in the step before
it. At the end of a tile a barrier does. Then the output leaves through the buffer that was used last:
the first block of the next tile takes the other one, and when its second one is kept, the output has left.

How tiles are drawn and told of is in `kernels.hopper.forward_kernel`. A word of a tile may be read until its
consumer arrives at q_free.
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

from attnlib.kernels.common import softmax, thread_shift, tma
from attnlib.kernels.common import tile_scheduler as tiling
from attnlib.kernels.common.first_product import start_scores
from attnlib.kernels.common.logarithms import LN2, LOG2_E
from attnlib.kernels.common.memory import barriers, buffers, matrix, room
from attnlib.kernels.common.named_barrier import named_barrier
from attnlib.kernels.common.ring import acquire, release, slot, wait_k
from attnlib.kernels.common.warpgroup_vote import any_in_warpgroup, prepare_vote
from attnlib.kernels.common.words import await_tile, new_words, tell, told

BLOCK_M = gl.constexpr(128)  # rows of a tile
TOGETHER = gl.constexpr(12)  # and 13: named barriers of the warps of a consumer

# What the producer tells of a tile, word by word; word 0 is the first row, -1 after the last tile.
BLOCKS = gl.constexpr(1)  # of keys, up to the last one in sight
BATCH = gl.constexpr(2)
HEAD = gl.constexpr(3)
WORDS = gl.constexpr(4)


# ---------------------------------------------------------------- what is passed around


class Memory(NamedTuple):
    """Buffers and barriers in shared memory."""

    q: gl.shared_memory_descriptor  # [2, 1, 1, 64, d]
    k: gl.shared_memory_descriptor  # [stages, 1, 1, block_n, d]
    v: gl.shared_memory_descriptor  # [4, 1, 1, block_n, d]: two of each consumer
    next_tile: gl.shared_memory_descriptor  # [2 * WORDS, 32]
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    kv_free: gl.shared_memory_descriptor
    drawn: gl.shared_memory_descriptor


class Work(NamedTuple):
    """The problem and its division into tiles; see the kernel's arguments."""

    S_q: gl.tensor
    S_k: gl.tensor
    H: gl.tensor
    GROUP: gl.tensor
    HEADS: gl.tensor
    SECTION: gl.tensor
    num_m: gl.tensor
    tiles: gl.tensor


class Limits(NamedTuple):
    """The thresholds, and where it is written what was kept; see the kernel's arguments."""

    at: gl.tensor
    b: gl.tensor
    h: gl.tensor
    m: gl.tensor
    count: gl.tensor
    kept: gl.tensor


class Row(NamedTuple):
    """The running maximum and the sum of 64 rows, and their output so far."""

    p: gl.tensor  # [64, BLOCK_N], of the block that was kept last
    acc: gl.tensor  # [64, D], without its product while `pending`
    shift: gl.tensor  # [64, 4], a value for each of a row's threads
    sums: gl.tensor  # [64, 4]
    pending: gl.tensor  # whether P V of that block is still to be done
    asked: gl.tensor  # how many copies of values this consumer has started


# ---------------------------------------------------------------- producer


@gluon.jit
def _blocks(end, work, plan: gl.constexpr):
    """Blocks up to the last one that the rows before `end` see; one, all masked, where they see none."""
    visible = work.S_k
    if plan.causal:
        visible = gl.minimum(gl.maximum(end + work.S_k - work.S_q, 0), work.S_k)
    return gl.maximum(gl.cdiv(visible, plan.block_n), 1)


@gluon.jit
def _locate(number, work):
    """(first row, batch, head) of the tile of a number, any where there are none left: the last, longest rows
    come first."""
    number = gl.minimum(number, work.tiles - 1)
    rank, head = tiling.by_sections(number, work.num_m, work.HEADS, work.SECTION)
    i_b, i_h = tiling.divide(head, work.H)
    return (work.num_m - 1 - rank) * BLOCK_M, i_b, i_h


@gluon.jit
def _copy_k(desc_k, mem, c, at, block, plan: gl.constexpr):
    """Copy the keys of a block to slot c, when that is free."""
    acquire(mem, c, plan)
    bar = mem.k_full.index(slot(c, plan))
    mbarrier.expect(bar, desc_k.block_type.nbytes)
    tma.async_copy_global_to_shared(
        desc_k, tiling.coordinates(at, block * plan.block_n, 0), bar, mem.k.index(slot(c, plan))
    )


@gluon.jit
def _tell(mem, number, last, row, blocks, i_b, i_h):
    """Consumers read which tile has this number."""
    b = number & 1
    words = gl.where(last, -1, row), blocks, i_b, i_h  # in the order of their names
    tell(mem, b, words, WORDS)


@gluon.jit
def _produce(given, plan: gl.constexpr):
    desc_q, desc_k, counter_ptr, mem, work = given
    number = gl.program_id(0)  # of the tile among all
    row, i_b, i_h = _locate(number, work)
    blocks = _blocks(row + BLOCK_M, work, plan)
    _tell(mem, 0, number >= work.tiles, row, blocks, i_b, i_h)
    turn = 0  # number of the tile within this program
    c = 0  # slot of the tile's first keys
    while number < work.tiles:
        i_kv, _ = tiling.divide(i_h, work.GROUP)
        at = i_b, i_kv
        _copy_k(desc_k, mem, c, at, blocks - 1, plan)  # before Q, whose buffer is still in use
        for w in gl.static_range(2):
            mbarrier.wait(mem.q_free.index(w), (turn & 1) ^ 1)
            mbarrier.expect(mem.q_full.index(w), desc_q.block_type.nbytes)
            tma.async_copy_global_to_shared(
                desc_q, tiling.coordinates((i_b, i_h), row + w * 64, 0), mem.q_full.index(w), mem.q.index(w)
            )
        early = gl.maximum(blocks - 3, 1)
        for i in range(1, early):
            _copy_k(desc_k, mem, c + i, at, blocks - 1 - i, plan)
        asked = tiling.draw(counter_ptr)
        for i in range(early, blocks):
            _copy_k(desc_k, mem, c + i, at, blocks - 1 - i, plan)
        c += blocks
        number = tiling.drawn(asked, counter_ptr, work.tiles, 1)
        row, i_b, i_h = _locate(number, work)
        blocks = _blocks(row + BLOCK_M, work, plan)
        turn += 1
        _tell(mem, turn, number >= work.tiles, row, blocks, i_b, i_h)


# ---------------------------------------------------------------- consumer


@gluon.jit
def _issue_scores(q_registers, mem, c, WG: gl.constexpr, plan: gl.constexpr):
    """Start Q K^T of slot c: [64, BLOCK_N]."""
    return start_scores(q_registers, matrix(mem.q, WG), matrix(mem.k, slot(c, plan)), plan)


@gluon.jit
def _buffer(number, WG: gl.constexpr):
    """Where this consumer's copy of that number puts its values."""
    return 2 * WG + (number & 1)


@gluon.jit
def _issue_output(p, acc, asked, mem, WG: gl.constexpr):
    """Start acc += P V, of the values that were asked for last: [64, BLOCK_N] x [BLOCK_N, D]."""
    number = asked - 1  # of the copy
    mbarrier.wait(mem.v_full.index(_buffer(number, WG)), (number >> 1) & 1)
    return warpgroup_mma(p, matrix(mem.v, _buffer(number, WG)), acc, is_async=True)


@gluon.jit
def _ask(desc_v, mem, at, block, asked, WG: gl.constexpr, plan: gl.constexpr):
    """Start to copy the values of a block to this consumer's next buffer; returns how many were asked for."""
    bar = mem.v_full.index(_buffer(asked, WG))
    mbarrier.expect(bar, desc_v.block_type.nbytes)
    tma.async_copy_global_to_shared(
        desc_v, tiling.coordinates(at, block * plan.block_n, 0), bar, mem.v.index(_buffer(asked, WG))
    )
    return asked + 1


@gluon.jit
def _mask(s, row, block, work, plan: gl.constexpr):
    """-inf for keys that a row does not see; `row` is the first row."""
    o_n = gl.arange(0, plan.block_n, layout=gl.SliceLayout(0, plan.s_layout))[None, :]  # [1, BLOCK_N]
    last = gl.full([64], work.S_k - 1 - block * plan.block_n, gl.int32, plan.row_layout)  # [64]
    if plan.causal:
        o_m = gl.arange(0, 64, layout=plan.row_layout)  # [64]
        last = gl.minimum(last, o_m + (row + work.S_k - work.S_q - block * plan.block_n))
    # Bits 1 and 2 of a column are those of the thread, the others are known to the compiler.
    after = last[:, None] - (o_n & 6)  # [64, BLOCK_N], a number for each row of a thread
    return gl.where((o_n & -7) <= after, s, float("-inf"))


@gluon.jit
def _tops_of_threads(s):
    """[64, BLOCK_N] -> [64, 4]: the largest score of a row that each of its four threads has."""
    return gl.max(gl.max(s.reshape([64, s.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _reaches(tops, row, limit, qk_scale, work, WG: gl.constexpr):
    """1 if a score of a block reaches the limit, in a row that there is; tops: [64, 4]."""
    o_m = gl.arange(0, 64, layout=gl.SliceLayout(1, tops.type.layout))
    low = (tops * qk_scale < limit) | (row + o_m >= work.S_q)[:, None]
    return any_in_warpgroup(gl.where(low, 0, 1), row, TOGETHER + WG)


@gluon.jit
def _step(
    q_registers, now, c, row, block, always, limit, at, desc_v, kept, mem, qk_scale, work,
    WG: gl.constexpr, plan: gl.constexpr,
):  # fmt: skip
    """Slot c: its scores, the product of the block before if that is still to be done, and, if the slot's
    block is kept, its softmax. always: the diagonal crosses it."""
    block_of = block, row, always, limit, at, desc_v, kept
    wait_k(mem, c, plan)
    if now.pending != 0:
        s_token = _issue_scores(q_registers, mem, c, WG, plan)
        o_token = _issue_output(now.p, now.acc, now.asked, mem, WG)
        s = warpgroup_mma_wait(1, deps=(s_token,))  # not for P V
        now = _decide(s, o_token, now, c, block_of, mem, qk_scale, work, True, WG, plan)
    else:
        s_token = _issue_scores(q_registers, mem, c, WG, plan)
        s = warpgroup_mma_wait(0, deps=(s_token,))
        now = _decide(s, None, now, c, block_of, mem, qk_scale, work, False, WG, plan)
    return now


@gluon.jit
def _decide(
    s, product, now, c, block_of, mem, qk_scale, work,
    PENDING: gl.constexpr, WG: gl.constexpr, plan: gl.constexpr,
):  # fmt: skip
    """Keep the block with scores s [64, BLOCK_N], or not. product: P V of the block before, in
    flight; only if PENDING there is one."""
    dtype: gl.constexpr = mem.v.dtype
    block, row, always, limit, at, desc_v, kept = block_of
    release(mem, c, plan)
    if plan.flip:
        s = -s
    if plan.crosses:
        if always:
            s = _mask(s, row, block, work, plan)
    tops = _tops_of_threads(s)  # [64, 4]
    keep = _reaches(tops, row, limit, qk_scale, work, WG)
    if plan.crosses:
        keep = gl.where(always, 1, keep)
    p, acc, shift, sums, asked = now.p, now.acc, now.shift, now.sums, now.asked
    if keep != 0:
        asked = _ask(desc_v, mem, at, block, asked, WG, plan)
        if plan.store_kept:
            gl.store(kept + block, 1)
        shift, alpha, changed = thread_shift.new_shift(tops, shift, qk_scale)
        sums = sums * alpha
        left, right = softmax.halves(s)  # [64, BLOCK_N / 2] twice
        left = thread_shift.weights(left, shift, qk_scale)
        sums = softmax.add_sums(sums, left)
        if PENDING:
            sums = softmax.pin(sums)
            acc = warpgroup_mma_wait(0, deps=(product,))  # [64, D]
        acc = softmax.rescale(acc, alpha, changed)
        right = thread_shift.weights(right, shift, qk_scale)
        sums = softmax.add_sums(sums, right)
        p = gl.convert_layout(softmax.whole(left.to(dtype), right.to(dtype)), plan.p_layout)
    else:
        if PENDING:
            acc = warpgroup_mma_wait(0, deps=(product,))
    return Row(p, acc, shift, sums, keep, asked)


@gluon.jit
def _store_output(desc_o, o, mem, at, row, buffer):
    """Through a buffer of values."""
    o_buffer = room(mem.v, buffer, desc_o)
    o_buffer.reshape([64, o.shape[1]]).store(o)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc_o, tiling.coordinates(at, row, 0), o_buffer)


@gluon.jit
def _consume(given, WG: gl.constexpr, plan: gl.constexpr):
    desc_v, desc_o, lse_ptr, limits, mem, qk_scale, work = given
    dtype: gl.constexpr = mem.v.dtype
    turn = 0  # number of the tile within this program
    c = 0  # slot of the tile's first keys
    asked = 0
    prepare_vote(c, TOGETHER + WG)
    first_row = await_tile(mem, 0, WORDS)
    while first_row >= 0:
        row = first_row + WG * 64
        i_b, i_h = told(mem, turn, BATCH, WORDS), told(mem, turn, HEAD, WORDS)
        i_kv, _ = tiling.divide(i_h, work.GROUP)
        at = i_b, i_kv
        i_m = gl.minimum(row // 64, limits.count - 1)
        limit = gl.load(limits.at + i_b * limits.b + i_h * limits.h + i_m * limits.m) * LOG2_E
        end = c + told(mem, turn, BLOCKS, WORDS)  # slot of the next tile's first keys
        # Blocks that the other consumer's rows see and these do not. Beyond the last row there is one.
        own = gl.where(row < work.S_q, _blocks(row + 64, work, plan), 1)
        start = end - own
        kept = limits.kept
        if plan.store_kept:
            blocks_m, blocks_n = gl.cdiv(work.S_q, 64), gl.cdiv(work.S_k, plan.block_n)
            kept += ((i_b * work.H + i_h) * blocks_m + row // 64).to(gl.int64) * blocks_n

        mbarrier.wait(mem.q_full.index(WG), turn & 1)
        q_registers = 0
        if plan.q_columns > 0:
            q_left = matrix(mem.q, WG).slice(0, plan.q_columns, 1)
            q_registers = q_left.load(plan.q_layout)  # [64, Q_COLUMNS]
        for i in range(c, start):
            wait_k(mem, i, plan)
            release(mem, i, plan)

        # 1. The last block that these rows see, always kept.
        asked = _ask(desc_v, mem, at, own - 1, asked, WG, plan)
        wait_k(mem, start, plan)
        s_token = _issue_scores(q_registers, mem, start, WG, plan)
        tma.store_wait(0)  # the output of the tile before has left the other buffer
        s = warpgroup_mma_wait(0, deps=(s_token,))
        release(mem, start, plan)
        if plan.flip:
            s = -s
        if plan.causal or plan.tail:
            s = _mask(s, row, own - 1, work, plan)
        if plan.store_kept:
            if (row < work.S_q) & ((not plan.causal) | (row + 63 + work.S_k >= work.S_q)):
                gl.store(kept + (own - 1), 1)
        shift = softmax.row_max(s) * qk_scale  # [64]
        weights = softmax.weights(s, shift, qk_scale, plan.causal or plan.tail)
        sums = softmax.row_sum(weights)  # [64, 4]
        shift = thread_shift.of_threads(gl.maximum(shift, thread_shift.LOWEST), sums)
        p = gl.convert_layout(weights.to(dtype), plan.p_layout)
        acc = gl.zeros([64, plan.d], gl.float32, plan.o_layout)
        now = Row(p, acc, shift, sums, 1, asked)

        # 2. The blocks before it. If the first row's last key is not in the last block, it is in the first
        # of these.
        crossed = row + work.S_k - work.S_q < (own - 1) * plan.block_n
        for i in range(start + 1, end):
            now = _step(
                q_registers, now, i, row, end - 1 - i, (i == start + 1) & crossed, limit, at, desc_v, kept,
                mem, qk_scale, work, WG, plan,
            )  # fmt: skip
        at_o = told(mem, turn, BATCH, WORDS), told(mem, turn, HEAD, WORDS)
        if plan.q_columns > 0:
            fence_async_shared()  # between the load of Q and the copy that overwrites it
        mbarrier.arrive(mem.q_free.index(WG), count=1)

        # 3. What is left of the products, and the output.
        c = end
        asked = now.asked
        acc = now.acc
        if now.pending != 0:
            o_token = _issue_output(now.p, acc, asked, mem, WG)
            acc = warpgroup_mma_wait(0, deps=(o_token,))  # [64, D]
        row_sums = gl.convert_layout(gl.sum(now.sums, 1), plan.row_layout)  # [64]
        turn += 1
        first_row = await_tile(mem, turn, WORDS)
        # A row with nothing to attend to has a sum of 0: its output is 0 and its LSE -inf.
        empty = row_sums == 0.0
        if plan.store_lse:
            o_m = row + gl.arange(0, 64, layout=plan.row_layout)  # [64]
            shift = gl.convert_layout(gl.max(now.shift, 1), plan.row_layout)  # [64]
            lse = gl.where(empty, float("-inf"), (shift + gl.log2(row_sums)) * LN2)
            place = (at_o[0] * work.H + at_o[1]).to(gl.int64) * work.S_q
            gl.store(lse_ptr + place + o_m, lse, mask=o_m < work.S_q)
        named_barrier("sync", TOGETHER + WG, 128)  # P V is done in all warps
        if row < work.S_q:
            o = acc * softmax.rows_of_o(1.0 / gl.where(empty, 1.0, row_sums), acc)  # [64, D]
            _store_output(desc_o, o.to(dtype), mem, at_o, row, _buffer(asked - 1, WG))
    tma.store_wait(0)


# ---------------------------------------------------------------- kernel


NUMBERS = "S_q S_k H GROUP HEADS SECTION num_m tiles limit_b limit_h limit_m limits".split()


@gluon.jit(do_not_specialize=NUMBERS)
def attention_bsfa_forward_hopper(
    desc_q, desc_k, desc_v, desc_o,  # (B, H, S_q, D), (B, H_kv, S_k, D) twice, (B, H, S_q, D)
    lse_ptr,  # (B, H, S_q)
    kept_ptr,  # (B, H, blocks of rows, blocks of keys) uint8, 0; or None
    limit_ptr,  # thresholds of row blocks, float32, in units of scaled scores
    counter_ptr,  # one int32, 0 before and after a launch
    qk_scale,  # |sm_scale| * log2(e), positive
    S_q, S_k,
    H,  # query heads
    GROUP,  # query heads that share one key/value head
    HEADS,  # B * H
    SECTION,  # heads that advance together
    num_m,  # tiles of a head
    tiles,  # num_m * HEADS
    limit_b, limit_h, limit_m,  # strides of the thresholds
    limits,  # how many there are for a head; the last one is that of all later row blocks
    plan: gl.constexpr,
):  # fmt: skip
    """out = softmax(sm_scale * Q K^T) V over kept blocks; see the module docstring."""
    mem = Memory(
        buffers(desc_q, 2),
        buffers(desc_k, plan.pipeline.stages),
        buffers(desc_v, 4),
        new_words(2 * WORDS),
        barriers(2, 1),  # q_full
        barriers(2, 1),  # q_free
        barriers(plan.pipeline.stages, 1),  # k_full
        barriers(4, 1),  # v_full
        barriers(plan.pipeline.stages, 2),  # kv_free
        barriers(2, 1),  # drawn
    )
    fence_async_shared()
    work = Work(S_q, S_k, H, GROUP, HEADS, SECTION, num_m, tiles)
    given_limits = Limits(limit_ptr, limit_b, limit_h, limit_m, limits, kept_ptr)
    given = desc_v, desc_o, lse_ptr, given_limits, mem, qk_scale, work
    copied = desc_q, desc_k, counter_ptr, mem, work
    regs: gl.constexpr = plan.registers.consumer
    few: gl.constexpr = plan.registers.producer
    # A consumer's number is a constant, so each has code of its own.
    gl.warp_specialize([
        (_consume, (given, 0, plan)), (_consume, (given, 1, plan)), (_produce, (copied, plan)),
    ], [4, 1], [regs, few])
