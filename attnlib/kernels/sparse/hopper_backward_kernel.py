"""Exact attention under a block mask, backward, for Hopper (sm_90a) in Gluon: dK and dV of a column of tiles,
dQ added up. Chapter 30 has block masks, chapter 21 the backward kernel.

The kernel of `kernels.hopper.backward_kernel` for lists instead of windows; its docstring has the order of a
step, the barriers, and why there is one fence, and all of that holds here. What differs:

- A program has 128 keys of a key/value head, and visits, for one query head of the group after the other, the
  queries on the list of these keys (`block_mask.lists`, of columns). Only the producer reads the lists.
- With Q and LSE2 of step j the producer sends a word, in told[j % 4]: twice the number of the block of
  queries over all heads, to which dQ is added, plus 1 if the step carries bits. It is stored before the
  producer arrives at q_full. A consumer loads it for the bits of step j and, to save a register, again for dQ
  of step j, in step j + 1 or behind the last step. The place is filled again with step j + 4, for which the
  producer waits until Q of step j + 2 is released.
- The bits of a step, transposed, 64 keys of four words for each consumer, arrive with Q at q_full.
- A score (`hopper_scores`) is computed again. A soft cap's derivative goes into the copy of P that dS is made
  of, as soon as P is there for dV, so it has no registers of its own. For ALiBi the producer sends two more
  words with each step: where the first key stands among the queries, and the slope of the head.

A list has at least one step: keys that nobody sees have one whose bits are all 0.
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
from attnlib.kernels.common.backward_pair import await_ds, here, issue_dq, issue_scores, write_ds
from attnlib.kernels.common.backward_ring import (
    DO_FREE,
    Q_FREE,
    STAGES,
    acquire,
    add_sums,
    parity_of,
    release,
    slot_of,
)
from attnlib.kernels.common.memory import barriers, buffers, matrix
from attnlib.kernels.common.preprocess import DELTA, LSE2
from attnlib.kernels.sparse.bits import hide
from attnlib.kernels.sparse.hopper_scores import LOG2_E, away, tanh

BLOCK_N = gl.constexpr(128)  # keys of a program, 64 in a buffer


# ---------------------------------------------------------------- what is passed around


class Memory(NamedTuple):
    """Buffers and barriers in shared memory."""

    k: gl.shared_memory_descriptor  # [2, 1, 1, 64, d]
    v: gl.shared_memory_descriptor  # [2, 1, 1, 64, d]
    q: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m, d]
    do: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m, d]
    lse: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m]
    delta: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m]
    ds: gl.shared_memory_descriptor  # [4, 64, block_m]: buffer 0 of both consumers, buffer 1
    words: gl.shared_memory_descriptor  # [2 * STAGES, 1, 1, 256]: of a slot for consumer w, 2 slot + w
    told: gl.shared_memory_descriptor  # [5, 32]: the last one has the number of the column of tiles
    places: gl.shared_memory_descriptor  # [4, 32], for ALiBi: of the first key, from a step's first query
    slopes: gl.shared_memory_descriptor  # [4, 32], for ALiBi: of a step's head, times log2(e)
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor


class Work(NamedTuple):
    """The problem and its lists; see the kernel's arguments."""

    H: gl.tensor
    GROUP: gl.tensor
    num_m: gl.tensor
    num_n: gl.tensor
    mask_h: gl.tensor
    starts: gl.tensor
    steps: gl.tensor
    bits: gl.tensor
    i_b: gl.tensor  # of this program: batch element, key/value head, column of tiles,
    i_kv: gl.tensor
    i_n: gl.tensor
    number: gl.tensor  # its list of the first head of the group, and the steps on those of all
    count: gl.tensor
    inner: gl.tensor  # of a score; None without
    place: gl.tensor
    alibi: gl.tensor


# ---------------------------------------------------------------- producer


@gluon.jit
def _copy_keys(desc, bar, buffers, work):
    """Of K or V, 64 rows into each buffer."""
    mbarrier.expect(bar, 2 * desc.block_type.nbytes)
    for w in gl.static_range(2):
        row = work.i_n * BLOCK_N + w * 64
        tma.async_copy_global_to_shared(desc, [work.i_b, work.i_kv, row, 0], bar, buffers.index(w))


@gluon.jit
def _copy_q(desc_q, desc_rows, desc_words, mem, j, e, head, m, work, plan: gl.constexpr):
    """Q and LSE2 of step j, entry e of the lists: block m of a head; and what consumers are told of it."""
    slot = slot_of(j)
    bar = mem.q_full.index(slot)
    size: gl.constexpr = desc_q.block_type.nbytes + desc_rows.block_type.nbytes
    word = 2 * (head * work.num_m + m)
    bits = 0
    if plan.partial:
        bits = gl.load(work.bits + e)
        word += (bits >= 0).to(gl.int32)
    mem.told.index(j & 3).store(gl.full([32], word, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    if plan.alibi:
        place = work.i_n * BLOCK_N - (m * plan.block_m + work.place)
        slope = gl.load(work.alibi + (head - work.i_b * work.H)) * LOG2_E
        lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        mem.places.index(j & 3).store(gl.full([32], place, gl.int32, lanes))
        mem.slopes.index(j & 3).store(gl.full([32], slope, gl.float32, lanes))
    if plan.partial:
        # No branch: with one here, ptxas takes the loop of consumer 1, too, for different in each thread, and
        # moves the addresses of operands in every step.
        there = bits >= 0
        if plan.block_m == 128:
            bits = bits >> 1
        mbarrier.expect(bar, size + 2 * desc_words.block_type.nbytes, pred=there)
        mbarrier.expect(bar, size, pred=bits < 0)
        for w in gl.static_range(2):
            words = mem.words.index(2 * slot + w)
            tma.async_copy_global_to_shared(desc_words, [bits, w, 0], bar, words, pred=there)
    else:
        mbarrier.expect(bar, size)
    at = work.i_b, head - work.i_b * work.H
    place = tiling.coordinates(at, m * plan.block_m, 0)
    tma.async_copy_global_to_shared(desc_q, place, bar, mem.q.index(slot))
    tma.async_copy_global_to_shared(desc_rows, [LSE2, head, m * plan.block_m], bar, mem.lse.index(slot))


@gluon.jit
def _copy_do(desc_do, desc_rows, mem, j, head, m, work, plan: gl.constexpr):
    slot = slot_of(j)
    bar = mem.do_full.index(slot)
    mbarrier.expect(bar, desc_do.block_type.nbytes + desc_rows.block_type.nbytes)
    at = work.i_b, head - work.i_b * work.H
    place = tiling.coordinates(at, m * plan.block_m, 0)
    tma.async_copy_global_to_shared(desc_do, place, bar, mem.do.index(slot))
    tma.async_copy_global_to_shared(desc_rows, [DELTA, head, m * plan.block_m], bar, mem.delta.index(slot))


@gluon.jit
def _produce(desc_q, desc_k, desc_v, desc_do, desc_rows, desc_words, mem, work, plan: gl.constexpr):
    # Consumers need the place of their keys at the end alone, and have no register for it until then.
    mem.told.index(4).store(gl.full([32], work.i_n, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    _copy_keys(desc_k, mem.k_full, mem.k, work)
    j = 0
    for g in range(work.GROUP):
        number = work.number + g * work.mask_h * work.num_n
        head = work.i_b * work.H + work.i_kv * work.GROUP + g
        first, end = gl.load(work.starts + number), gl.load(work.starts + number + 1)
        for e in range(first, end):
            m = gl.load(work.steps + e)  # a step takes microseconds: no need to load it earlier
            acquire(Q_FREE, j)
            _copy_q(desc_q, desc_rows, desc_words, mem, j, e, head, m, work, plan)
            if j == 0:
                _copy_keys(desc_v, mem.v_full, mem.v, work)
            acquire(DO_FREE, j)
            _copy_do(desc_do, desc_rows, mem, j, head, m, work, plan)
            j += 1


# ---------------------------------------------------------------- consumer


@gluon.jit
def _told(mem, place):
    """A word of the producer's: that of step j is in place j % 4."""
    return _lane(mem.told.index(place))


@gluon.jit
def _lane(lanes):
    """The number that all 32 places have."""
    return gl.max(lanes.slice(0, 1).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _weights(s, lse, mem, j, qk_scale, work, WG: gl.constexpr, plan: gl.constexpr):
    """P^T of step j before its bits, and the derivative of its scores: [64, BLOCK_M] twice."""
    derivative = 1.0
    if plan.soft_cap:
        s = tanh(s * work.inner)
        derivative = 1.0 - s * s
    if plan.alibi:
        place = _lane(mem.places.index(j & 3)) + WG * 64
        s = away(s * qk_scale, _lane(mem.slopes.index(j & 3)), place)
        p = gl.exp2(s - lse)
    else:
        p = gl.exp2(s * qk_scale - lse)
    return p, derivative


@gluon.jit
def _store(desc, x, buffer, row, work):
    rows: gl.constexpr = buffer.shape[-2]
    columns: gl.constexpr = buffer.shape[-1]
    buffer.reshape([rows, columns]).store(x)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [work.i_b, work.i_kv, row, 0], buffer)


@gluon.jit
def _consume(desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, WG: gl.constexpr, plan: gl.constexpr):
    dtype: gl.constexpr = mem.k.dtype
    own_dq: gl.constexpr = WG * 64 * plan.dq_columns  # where its half begins
    n = work.count

    mbarrier.wait(mem.k_full, 0)
    mbarrier.wait(mem.q_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(issue_scores(mem.k, matrix(mem.q, 0), 0, WG, plan),))
    mbarrier.wait(mem.v_full, 0)
    dk = gl.zeros([64, plan.d], gl.float32, plan.d_layout)
    dv = gl.zeros([64, plan.d], gl.float32, plan.d_layout)
    for j in range(n):
        slot = slot_of(j)
        q = matrix(mem.q, slot)  # [BLOCK_M, D]
        do = matrix(mem.do, slot)  # [BLOCK_M, D]

        # 1. P and dS, while dP is under way.
        mbarrier.wait(mem.do_full.index(slot), parity_of(j))
        dp_token = issue_scores(mem.v, do, j, WG, plan)
        lse = mem.lse.index(slot).reshape([1, plan.block_m]).load(plan.s_layout)  # [1, BLOCK_M]
        p, derivative = _weights(s, lse, mem, j, qk_scale, work, WG, plan)  # [64, BLOCK_M]
        if plan.partial:
            if (_told(mem, j & 3) & 1) == 1:
                p = hide(p, mem.words.index(2 * slot + WG).reshape([64, 4]), 0.0)
        p_half = gl.convert_layout(p.to(dtype), plan.p_layout)
        if plan.soft_cap:
            p = p * derivative
        delta = mem.delta.index(slot).reshape([1, plan.block_m]).load(plan.s_layout)  # [1, BLOCK_M]
        dp = warpgroup_mma_wait(0, deps=(dp_token,))  # [64, BLOCK_M]
        if plan.half_p:
            p = gl.convert_layout(here(p_half), plan.s_layout).to(gl.float32)
        ds_half = (p * (dp - delta)).to(dtype)  # [64, BLOCK_M]

        # 2. dV, dQ of the step before, dK, and S of the step after.
        dv_token = warpgroup_mma(p_half, do, dv, is_async=True)
        await_ds(j - 1, WG)
        dq_token = issue_dq(mem.ds, mem.k, j - 1, WG, plan)
        dv = warpgroup_mma_wait(2, deps=(dv_token,))
        release(DO_FREE, j)
        dk_token = warpgroup_mma(gl.convert_layout(ds_half, plan.p_layout), q, dk, is_async=True)
        next_slot = slot_of(j + 1)
        if j + 1 < n:
            mbarrier.wait(mem.q_full.index(next_slot), parity_of(j + 1))
        s_token = issue_scores(mem.k, matrix(mem.q, next_slot), j, WG, plan)
        dq = warpgroup_mma_wait(2, deps=(dq_token,))
        write_ds(mem, ds_half, j, WG)
        # Not before the fence in there, which might wait for it.
        add_sums(dq_ptr, _told(mem, gl.maximum(j - 1, 0) & 3) >> 1, dq, j > 0, own_dq, plan)
        dk = warpgroup_mma_wait(1, deps=(dk_token,))
        release(Q_FREE, j)
        s = warpgroup_mma_wait(0, deps=(s_token,))  # [64, BLOCK_M]

    await_ds(n - 1, WG)
    dq_token = issue_dq(mem.ds, mem.k, n - 1, WG, plan)
    row = _told(mem, 4) * BLOCK_N + WG * 64  # first key
    _store(desc_dv, dv.to(dtype), mem.v.index(WG), row, work)
    dq = warpgroup_mma_wait(0, deps=(dq_token,))
    add_sums(dq_ptr, _told(mem, (n - 1) & 3) >> 1, dq, n > 0, own_dq, plan)
    tma.store_wait(0)
    _store(desc_dk, (dk * sm_scale).to(dtype), mem.v.index(WG), row, work)
    tma.store_wait(0)


# ---------------------------------------------------------------- kernel


NUMBERS = "H GROUP HEADS_KV SECTION num_m num_n mask_b mask_h place".split()


@gluon.jit(do_not_specialize=NUMBERS)
def attention_sparse_backward_hopper(
    desc_q, desc_k, desc_v, desc_do,  # (B, H, S_q, D), (B, H_kv, S_k, D) twice, (B, H, S_q, D)
    desc_dk, desc_dv,  # (B, H_kv, S_k, D)
    desc_rows,  # (2, B * H, num_m * BLOCK_M) float32: LSE2, and delta
    desc_words,  # (slots, 2, 256) int32: words of steps as the two consumers read them
    dq_ptr,  # float32, see common.postprocess
    starts_ptr, steps_ptr, bits_ptr, order_ptr,  # of columns, see `block_mask.lists.Lists`
    alibi_ptr,  # (H), None without
    qk_scale,  # sm_scale * log2(e); of capped scores the cap times log2(e)
    inner,  # sm_scale over the soft cap, None without
    sm_scale,
    place,  # of query 0 among the keys, for ALiBi; None without
    H,  # query heads
    GROUP,  # query heads that share one key/value head
    HEADS_KV,  # B * H_kv
    SECTION,  # key/value heads that advance together
    num_m,  # query blocks of a head in memory
    num_n,  # columns of tiles of a mask
    mask_b, mask_h,  # masks from one batch element, or head, to the next; 0 where they share one
    plan: gl.constexpr,
):  # fmt: skip
    """dK, dV, and the sum of dQ / sm_scale over all columns; see the module docstring."""
    rank, head = tiling.by_sections(gl.program_id(0), num_n, HEADS_KV, SECTION)
    i_b, i_kv = tiling.divide(head, H // GROUP)
    mask = (i_b * mask_b + i_kv * GROUP * mask_h) * num_n
    i_n = gl.load(order_ptr + mask + rank)
    number = mask + i_n
    # Before the program is divided among warps: a loop in a consumer's code makes ptxas take what follows it
    # for different in each thread.
    count = 0
    for g in range(GROUP):
        own = starts_ptr + number + g * mask_h * num_n
        count += gl.load(own + 1) - gl.load(own)
    slots: gl.constexpr = 2 * STAGES if plan.partial else 1
    places, slopes = None, None
    if plan.alibi:
        places = gl.allocate_shared_memory(gl.int32, [4, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        slopes = gl.allocate_shared_memory(gl.float32, [4, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mem = Memory(
        buffers(desc_k, 2),
        buffers(desc_v, 2),
        buffers(desc_q, STAGES),
        buffers(desc_do, STAGES),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, plan.block_m], desc_rows.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, plan.block_m], desc_rows.layout),
        gl.allocate_shared_memory(
            desc_k.dtype, [4, 64, plan.block_m],
            gl.NVMMASharedLayout.get_default_for([64, plan.block_m], desc_k.dtype),
        ),
        gl.allocate_shared_memory(gl.int32, [slots, 1, 1, 256], desc_words.layout),
        gl.allocate_shared_memory(gl.int32, [5, 32], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        places,
        slopes,
        barriers(1, 1).index(0),  # k_full
        barriers(1, 1).index(0),  # v_full
        barriers(STAGES, 1),  # q_full
        barriers(STAGES, 1),  # do_full
    )
    fence_async_shared()
    work = Work(
        H, GROUP, num_m, num_n, mask_h, starts_ptr, steps_ptr, bits_ptr, i_b, i_kv, i_n, number, count,
        inner, place, alibi_ptr,
    )  # fmt: skip
    # A consumer's number is a constant, so each has code of its own.
    gl.warp_specialize([
        (_consume, (desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, 0, plan)),
        (_consume, (desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, 1, plan)),
        (_produce, (desc_q, desc_k, desc_v, desc_do, desc_rows, desc_words, mem, work, plan)),
    ], [4, 1], [plan.registers.consumer, plan.registers.producer])
