"""Exact attention, backward, for Hopper (sm_90a) in Gluon: dK and dV of a block of keys, dQ added up.

Chapter 20 derives the backward pass, chapter 21 builds this kernel step by step; asynchronous products and
barriers are those of chapters 10 to 12.

One program per 128 keys of a key/value head: a producer warp that starts copies, and two consumer warpgroups
of 64 keys each. A consumer keeps dK and dV of its keys in registers and visits the blocks of BLOCK_M queries
that see them, one query head of the group after the other. Everything is transposed, keys are rows:

    S^T = K Q^T,  P^T = 2**(S^T * qk_scale - LSE2),  dV += P^T dO
    dP^T = V dO^T,  dS^T = P^T * (dP^T - delta),     dK += dS^T Q

so that P^T and dS^T are first operands in registers as they come. dS^T also goes to shared memory, where both
warpgroups read it to form dQ = dS K, each a half: of the queries where BLOCK_M is 128, else of the columns.
dQ is added to a buffer in global memory, in float32, as it lies in registers; see `postprocess`.

    The order of a step

A step's softmax waits for S^T, its dS for dP^T, and the tensor cores should have work meanwhile. So S^T of
block j+1 is started in step j, and dQ of block j-1 is formed in step j, by when the other warpgroup has long
written its dS: the two need not march in step.

    in flight, oldest first                        then
    dP(j)                                          P; wait for dP: dS
    dV(j), dQ(j-1)                                 wait for dV: dO of j is free
    dQ(j-1), dK(j), S(j+1)                         wait for dQ: dS(j) to shared memory; add dQ to memory
    dK(j), S(j+1)                                  wait for dK: Q of j is free
    S(j+1)                                         wait for S

The two consumers do the same, and in step with each other they want the tensor cores at the same time and the
exponential units at the same time. Where that lasts, the second one begins later (`begin_later`). A plan
that says `alternate` has barriers instead: a consumer starts the products of a step, from dV to S, when the
other one has started its own, consumer 0 first. Programs that stay on their SM drift out of any delay; there
turns go on from tile to tile, and consumer 0 waits once more behind its last one.

Step 0 has no dQ to form, and the last step no S to start. Both compute it all the same, from whatever lies in
shared memory, and the result is not used: that costs less than code of their own for these two steps.

    Who waits for what

    barrier           completes when                           waited for by          parity of the wait
    k_full, v_full    TMA has written the keys, the values     each consumer          0
    q_full[slot]      TMA has written Q and LSE2 of block j    each consumer          (j // 2) & 1
    do_full[slot]     TMA has written dO and delta of block j  each consumer          (j // 2) & 1
    Q_FREE + slot     both consumers have released Q of j      producer, to fill j+2
    DO_FREE + slot    both consumers have released dO of j     producer, to fill j+2
    DS_FULL + 2 w + buffer   consumer w has written dS of j    the other consumer
    START + w         the other consumer has started products  consumer w, where they alternate
    granted           it is the turn of dQ(j), and dQ(j-1)     each consumer, who     j & 1
                      has been added                           waits for turns
    added             both consumers have added dQ(j)          who counts             j & 1
    told              the producer has told the number of      who waits for turns,   (t - 1) & 1
                      tile t, from 1 on, of a persistent plan  who counts

The slot and the buffer of block j are j & 1. All from Q_FREE on are the hardware's named barriers, which have
no parity: an arrival at an mbarrier costs a synchronization of the warpgroup first. Two buffers of dS need no
barrier for their reuse: a consumer writes dS(j) after it has waited for the other's dS(j-1). Before the other
arrived for that, it had waited for its own dQ(j-2), the last product that reads this buffer.

LSE and delta come by TMA, through the async proxy, and ordinary loads read them, through the generic one. A
barrier does not order these two, so between a consumer's load and the copy that overwrites what it loaded
there has to be a fence, fence.proxy.async, by the same consumer. The one that dS(j) needs does for both: it
comes after the loads of step j and before the release of Q of j, which the producer awaits to copy block j+2.

    Windows and varlen sequences

A window with a left bound ends the queries that see a key (`backward_tiles`). Where none is left there is no
copy and no wait, and the consumers store zeros. Varlen sequences are read as in `varlen_tiles`. Programs that
stay on their SM count their blocks of keys (`backward_persistent`). Those of one tile search for a sequence
among blocks that are numbered with one to spare for each; a program of such a block ends at once. LSE2, delta
and the sums of dQ have rows for each sequence, padded to whole blocks of queries. Without a mask, only steps
with the last keys of a sequence look for keys that don't exist, where the plan has its `tail_apart`.

    dQ in bulk

Additions from registers wait for the L2 in the queue of loads and stores. A `bulk` plan stores dQ(j-1) to
shared memory before dS(j), and a warp more has it added from there (`backward_bulk`).

    Programs that stay on their SM

A `persistent` plan has a program for each SM, which computes tile after tile: in the last step of one S is
started of the next, whose first step forms the dQ that is left (`backward_persistent`). j then counts the
steps of all tiles.

    A fixed order of the additions to dQ

With a deterministic plan the programs of a head add to a block of sums one after the other, in the order of
their numbers (see `turns`; `backward_tiles.turn` has the order). In bulk, the warp that adds sees to that.
Else one more warp waits for the turn of each step and then arrives at `granted`. Another one waits at `added`
until both consumers have added their halves, arrives at `granted`, so that the next step may add, and counts
the additions when they are complete. Where programs stay on their SM, both go on from tile to tile
(`backward_turns`).

    Programs that share a key head

With many query heads for a key head there are few programs, and long ones: those of a launch visit different
query heads at one time, whose Q, dO and sums of dQ don't fit into L2 together. A `shared` plan has SHARE
programs for a block of keys, each of which visits GROUP of the group's query heads. As dQ is, dK and dV are
then float32 sums in memory in the order of registers, to which all of them add (`added`), or which each has
for itself; `postprocess` makes dK and dV of them.

    A head dimension that is no power of two

Descriptors, buffers and accumulators are tuples: of one, or of two parts of the columns (`SplitBackwardPlan`,
see `column_parts`). S and dP are sums of a product for each part, whose keys or values may stay in registers
(`backward_shared.Rows`); dV, dK and dQ have a product for each part. A part of dQ with 16 columns has no
halves that a product could have: there each consumer adds what its own 64 keys give to all 16.

    Values with columns of their own

V, dO and dV may have 128 columns beside 64 of Q, K, dQ and dK, or 64 beside 128 (`OwnValuesBackwardPlan`).
Then dK leaves through buffers of its own (`backward_gradients`).
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

from attnlib.kernels.common import tma
from attnlib.kernels.common.backward_pair import (
    await_ds,
    await_start,
    begin_later,
    here,
    issue_dq,
    tell_start,
    write_ds,
)
from attnlib.kernels.common.backward_ring import (
    DO_FREE,
    Q_FREE,
    STAGES,
    add_sums,
    opaque_zero,
    parity_of,
    release,
    slot_of,
)
from attnlib.kernels.common.launch_order import overlap
from attnlib.kernels.common.memory import barriers, matrix
from attnlib.kernels.hopper import backward_tiles as tiling
from attnlib.kernels.hopper import column_parts
from attnlib.kernels.hopper.backward_bulk import add_all, new_buffers, place_of_dq, tell_sums, write_sums
from attnlib.kernels.hopper.backward_gradients import (
    await_room,
    leave,
    leave_nothing,
    store,
    store_keys,
    times,
    zero_values,
)
from attnlib.kernels.hopper.backward_persistent import (
    await_gradients,
    first_tile,
    new_next_tile,
    produce_tiles,
    set_after,
    set_before,
    set_of,
    tile_number,
    told_tile,
)
from attnlib.kernels.hopper.backward_shared import NUMBERS, Rows, held, issue_scores, produce
from attnlib.kernels.hopper.backward_turns import Turns, await_grant, keep_turns, new_turns, tell_added
from attnlib.kernels.hopper.column_parts import await_parts, matrices, start_update, together

# ---------------------------------------------------------------- what is passed around


class Memory(NamedTuple):
    """Buffers and barriers in shared memory; the protocol is in the module docstring."""

    k: tuple  # [2, 1, 1, 64, d], varlen with one more 1, as the others; of each part of the columns
    v: tuple  # [2, 1, 1, 64, d], or columns of their own, as dO
    q: tuple  # [STAGES, 1, 1, block_m, d]
    do: tuple  # [STAGES, 1, 1, block_m, d]
    lse: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m]
    delta: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m]
    ds: gl.shared_memory_descriptor  # [4, 64, block_m]: buffer 0 of both consumers, buffer 1
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    turns: Turns  # where consumers are `granted` turns, else None
    sums: tuple  # of a bulk plan: [2, lines, LINE], of each part
    sums_free: gl.shared_memory_descriptor
    next_tile: gl.shared_memory_descriptor  # of a persistent plan
    dk: tuple  # of own values: [2, 1, 1, 64, d], see `backward_gradients`


# ---------------------------------------------------------------- consumer


@gluon.jit
def _before(block, m, j, last, tile, gap, plan: gl.constexpr):
    """The block of queries of the step before: the one before this, or the last of the head before, or, in a
    first step of a persistent plan, of the tile before. -1 where nobody adds its dQ."""
    # Not a variable of the loop: the compiler finds these by comparing what a name stands for before the loop
    # and after one trip, and would take one that begins as `block` and is set to `block` for a constant.
    found = block - 1 - gl.where(m == tile.m_start, gap, 0)
    if plan.persistent and plan.varlen:
        m_before = gl.where(m == tile.m_start, tile.m_end, m) - 1
        found = gl.where(tiling.behind_all(tile, m_before, plan), found * 0 - 1, found)
    if plan.persistent:
        found = gl.where(j == 0, last, found)
    return found


@gluon.jit
def _issue_dq(mem, j, first, WG: gl.constexpr, plan: gl.constexpr):
    """Start this consumer's half of dQ of block j, two products for each part: of the queries or of the
    columns, or where a part has too few columns for halves, of the keys, one product. K begins at buffer
    `first`."""
    left = issue_dq(mem.ds, mem.k[0], j, WG, plan, first)
    if plan.right == 0:
        return (left,)
    elif plan.own_right:
        zero = gl.zeros([64, plan.right], gl.float32, plan.right_layout)
        ds = mem.ds.index((j & 1) * 2 + WG).permute((1, 0))  # [BLOCK_M, 64]
        k = matrix(mem.k[1], first + WG + opaque_zero(j + 1))
        return left, warpgroup_mma(ds, k, zero, use_acc=False, is_async=True)
    else:
        return left, issue_dq(mem.ds, mem.k[1], j, WG, plan, first)


@gluon.jit
def _add_dq(dq_ptr, block, dq, wanted, WG: gl.constexpr, plan: gl.constexpr):
    if plan.persistent and plan.varlen:
        wanted = block >= 0  # which is -1 before the first step, too
    for i in gl.static_range(len(dq)):
        at = place_of_dq(i, dq[i].shape[1], WG, plan)
        add_sums(dq_ptr, block, dq[i], wanted, at, plan, plan.persistent)


@gluon.jit
def _consume(desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, WG: gl.constexpr, plan: gl.constexpr):
    if plan.persistent:
        _visit_tiles(desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, WG, plan)
    else:
        _consume_tile(desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, WG, plan)


@gluon.jit
def _consume_tile(
    desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, WG: gl.constexpr, plan: gl.constexpr
):
    tile = tiling.locate(gl.program_id(0), work, plan)
    if tiling.seen(tile, plan):
        _visit(desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, tile, work, WG, plan)
    else:
        leave_nothing(desc_dk, desc_dv, mem, tile, work, WG, plan)


@gluon.jit
def _visit(
    desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, tile, work, WG: gl.constexpr, plan: gl.constexpr
):
    """The queries that see the keys of this program."""
    n = (tile.m_end - tile.m_start) * work.GROUP
    row = tile.start + WG * 64  # first key
    block = tiling.first_sums(tile, work, plan)
    gap = tiling.gap(tile, work, plan)
    if plan.shared:
        sums = tiling.key_sums(desc_dk, WG, tile, work, plan)

    mbarrier.wait(mem.k_full, 0)
    k = held(mem.k, WG, plan)
    mbarrier.wait(mem.q_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(issue_scores(k, WG, matrices(mem.q, 0), 0, plan),))
    mbarrier.wait(mem.v_full, 0)
    v = held(mem.v, WG, plan)
    if WG * plan.delay > 0:
        begin_later(n, plan.delay)
    steps = tiling.Steps(0, 0, 0, block, gap, n)
    s, dk, dv, block, m = _all_steps(dq_ptr, mem, k, v, s, steps, qk_scale, tile, work, WG, plan)

    await_ds(n - 1, WG)
    dq_token = _issue_dq(mem, n - 1, 0, WG, plan)
    at = tiling.keys(tile, work, plan)
    if plan.shared:
        leave(sums, dv, 64 * plan.width, plan)
    else:
        store(desc_dv, dv, mem.v, WG, at, row)
    dq = await_parts(dq_token, 0)
    if plan.bulk:
        write_sums(mem, dq, n, WG)
        fence_async_shared()
        tell_sums(n, WG)
    else:
        if plan.granted:
            await_grant(mem.turns, n - 1)
        _add_dq(dq_ptr, _before(block, m, 1, 0, tile, gap, plan), dq, n > 0, WG, plan)
        if plan.granted:
            tell_added(mem.turns, n - 1)
    if plan.shared:
        leave(sums, dk, 0, plan)
    else:
        await_room(plan)
        store_keys(desc_dk, times(dk, sm_scale), mem, 0, WG, at, row, plan)
        tma.store_wait(0)


@gluon.jit
def _visit_tiles(
    desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, WG: gl.constexpr, plan: gl.constexpr
):
    """The same for one tile after the other, until the producer tells of none."""
    number = first_tile(mem, work, 4, plan)
    mbarrier.wait(mem.q_full.index(0), 0)
    s = gl.zeros([64, plan.block_m], gl.float32, plan.s_layout)
    if plan.held == 0:
        token = issue_scores(Rows(mem.k, ()), WG, matrices(mem.q, 0), 0, plan)
        s = warpgroup_mma_wait(0, deps=(token,))
    if WG * plan.delay > 0:
        begin_later(number, plan.delay)
    t = 0  # of the tiles of this program
    i = 0  # of its steps
    before = number * 0 - 1 if plan.varlen else work.num_m  # of the step before: none, or any
    while number >= 0:
        tile = told_tile(mem, t, number, work, 4, plan)
        n = (tile.m_end - tile.m_start) * work.GROUP
        first = set_of(t)
        own_k, own_v, s = _begin_tile(mem, s, i, first, WG, plan)
        block, gap = tiling.first_sums(tile, work, plan), tiling.gap(tile, work, plan)
        steps = tiling.Steps(i, first, before, block, gap, n)
        s, dk, dv, block, m = _all_steps(
            dq_ptr, mem, own_k, own_v, s, steps, qk_scale, tile, work, WG, plan
        )
        before = _before(block, m, 1, before, tile, gap, plan)
        if plan.shared:
            sums = tiling.key_sums(desc_dk, WG, tile, work, plan)
            leave(sums, dv, 64 * plan.width, plan)
            leave(sums, dk, 0, plan)
        else:
            at, row = tiling.keys(tile, work, plan), tile.start + WG * 64
            store(desc_dv, dv, mem.v, first + WG, at, row)
            dk = times(dk, sm_scale)
            await_room(plan)
            store_keys(desc_dk, dk, mem, first, WG, at, row, plan)
        i += n
        t += 1
        number = tile_number(mem, t, 4, plan)

    if plan.alternate:
        if WG == 0:
            await_start(i, WG)
    await_ds(i - 1, WG)
    dq = await_parts(_issue_dq(mem, i - 1, set_of(t - 1), WG, plan), 0)
    if plan.bulk:
        write_sums(mem, dq, i, WG)
        fence_async_shared()
        tell_sums(i, WG)
    else:
        if plan.granted:
            await_grant(mem.turns, i - 1)
        _add_dq(dq_ptr, before, dq, i > 0, WG, plan)
        if plan.granted:
            tell_added(mem.turns, i - 1)
    tma.store_wait(0)


@gluon.jit
def _begin_tile(mem, s, i, first, WG: gl.constexpr, plan: gl.constexpr):
    """(K, V, S) of a tile's first step. Where parts of K stay in registers, the step before had those of the
    tile before, and its S was none."""
    if plan.held > 0:
        slot = slot_of(i)
        k = held(mem.k, first + WG, plan)
        s = warpgroup_mma_wait(0, deps=(issue_scores(k, first + WG, matrices(mem.q, slot), i, plan),))
        mbarrier.wait(mem.do_full.index(slot), parity_of(i))
        return k, held(mem.v, first + WG, plan), s
    else:
        return Rows(mem.k, ()), Rows(mem.v, ()), s


@gluon.jit
def _all_steps(dq_ptr, mem, k, v, s, steps, qk_scale, tile, work, WG: gl.constexpr, plan: gl.constexpr):
    """`_steps`, which a plan with its tail apart has twice: where this consumer's keys all exist, no step
    looks for those that don't."""
    if not plan.tail_apart:
        found = _steps(dq_ptr, mem, k, v, s, steps, qk_scale, tile, work, False, WG, plan)
    elif tile.start + (WG + 1) * 64 <= tile.S_k:
        found = _steps(dq_ptr, mem, k, v, s, steps, qk_scale, tile, work, True, WG, plan)
    else:
        found = _steps(dq_ptr, mem, k, v, s, steps, qk_scale, tile, work, False, WG, plan)
    return found


@gluon.jit
def _steps(
    dq_ptr, mem, k, v, s, steps, qk_scale, tile, work,
    WHOLE: gl.constexpr, WG: gl.constexpr, plan: gl.constexpr,
):  # fmt: skip
    """All blocks of queries of a tile, from S of the first one on: (S of the block after, dK, dV, the block
    of sums and the one of queries behind the last). WHOLE: this consumer's keys all exist."""
    c, first, last, block, gap, n = steps
    dtype: gl.constexpr = mem.k[0].dtype
    parts: gl.constexpr = len(mem.k)
    row = tile.start + WG * 64  # first key
    m = tile.m_first
    dk = column_parts.zeros(plan.d_layout, plan)
    dv = zero_values(plan)
    for j in range(n):
        i = c + j
        slot = slot_of(i)
        q = matrices(mem.q, slot)  # [BLOCK_M, D]
        do = matrices(mem.do, slot)  # [BLOCK_M, D]

        # 1. P and dS, while dP is under way.
        mbarrier.wait(mem.do_full.index(slot), parity_of(i))
        dp_token = issue_scores(v, first + WG, do, j, plan)
        lse = mem.lse.index(slot).reshape([1, plan.block_m]).load(plan.s_layout)  # [1, BLOCK_M]
        if plan.early_mask:
            p = gl.exp2(tiling.visible(s * qk_scale - lse, row, m, tile, work, plan, WHOLE))  # [64, BLOCK_M]
        else:
            p = gl.exp2(s * qk_scale - lse)  # [64, BLOCK_M]
            p = tiling.visible(p, row, m, tile, work, plan, WHOLE)
        p_half = gl.convert_layout(p.to(dtype), plan.p_layout)
        delta = mem.delta.index(slot).reshape([1, plan.block_m]).load(plan.s_layout)  # [1, BLOCK_M]
        dp = warpgroup_mma_wait(0, deps=(dp_token,))  # [64, BLOCK_M]
        if plan.half_p:
            p = gl.convert_layout(here(p_half), plan.s_layout).to(gl.float32)
        ds_half = (p * (dp - delta)).to(dtype)  # [64, BLOCK_M]

        # 2. dV, dQ of the block before, dK, and S of the block after.
        if plan.alternate:
            await_start(i, WG)
        dv_token = start_update(p_half, do, dv)
        await_ds(i - 1, WG)
        dq_token = _issue_dq(mem, i - 1, set_before(first, j, plan), WG, plan)
        dv = await_parts(dv_token, plan.dq_products)
        if plan.persistent:
            await_gradients(i, j)
        release(DO_FREE, i)
        dk_token = start_update(gl.convert_layout(ds_half, plan.p_layout), q, dk)
        next_slot = slot_of(i + 1)
        if plan.persistent:  # the next tile's, or the end
            mbarrier.wait(mem.q_full.index(next_slot), parity_of(i + 1))
        elif j + 1 < n:
            mbarrier.wait(mem.q_full.index(next_slot), parity_of(i + 1))
        s_token = issue_scores(k, set_after(first, j, n, plan) + WG, matrices(mem.q, next_slot), j, plan)
        if plan.alternate:
            tell_start(i, n, WG, plan)
        dq = await_parts(dq_token, 2 * parts)
        if plan.bulk:
            write_sums(mem, dq, i, WG)
        write_ds(mem, ds_half, i, WG)  # the fence in there is for both
        if plan.bulk:
            tell_sums(i, WG)
        else:
            if plan.granted:
                await_grant(mem.turns, i - 1)
            # Not before the fence in write_ds, which might wait for it.
            _add_dq(dq_ptr, _before(block, m, j, last, tile, gap, plan), dq, i > 0, WG, plan)
        dk = await_parts(dk_token, parts)
        release(Q_FREE, i)
        if plan.granted:
            tell_added(mem.turns, i - 1)
        s = warpgroup_mma_wait(0, deps=(s_token,))  # [64, BLOCK_M]

        block += 1
        m += 1
        if m == tile.m_end:
            m = tile.m_start
            block += gap
    return s, dk, dv, block, m


# ---------------------------------------------------------------- kernel


@gluon.jit
def _produce(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan: gl.constexpr):
    if plan.persistent:
        produce_tiles(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan)
    else:
        produce(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan)


@gluon.jit(do_not_specialize=[*NUMBERS, "tiles"], do_not_specialize_on_alignment=["cu_q", "cu_k"])
def attention_backward_hopper(
    desc_q, desc_k, desc_v, desc_do,  # (B, H, S_q, D), (B, H_kv, S_k, D) twice, (B, H, S_q, D)
    desc_dk, desc_dv,  # (B, H_kv, S_k, D)
    desc_rows,  # (2, B * H, num_m * BLOCK_M), varlen (2, H, ...), float32: LSE2, and delta
    dq_ptr,  # float32, see postprocess
    qk_scale,  # sm_scale * log2(e)
    sm_scale,
    S_q, S_k,  # of varlen sequences the longest
    H,  # query heads
    GROUP,  # query heads that share one key/value head
    HEADS_KV,  # B * H_kv, varlen H_kv
    SECTION,  # key/value heads that advance together
    num_m,  # query blocks of a head, of a batch
    num_n,  # key blocks of a head, varlen of all sequences
    plan: gl.constexpr,
    right=None, left=None,  # keys that a query sees after and before its place, where `plan` has them
    cu_q=None, cu_k=None,  # where varlen sequences begin and end (B + 1)
    B=None,  # varlen sequences
    LAST=None,  # the head that the last section begins with, see `tile_order.by_sections`
    OVERLAPS: gl.constexpr = False,  # with the launches before and after it, see `launch_order`
    desc_q_right=None, desc_k_right=None, desc_v_right=None, desc_do_right=None,  # of the second part
    desc_dk_right=None, desc_dv_right=None,
    turns_ptr=None,  # of a deterministic plan, see `turns`
    keys_ptr=None, SHARE=None,  # of a shared plan: float32 sums instead of what desc_dk and desc_dv have
    desc_sums=None, desc_sums_right=None,  # of a bulk plan: what dq_ptr points to, LINE sums in a row
    tiles=None, counter_ptr=None,  # of a persistent plan: all tiles, and a counter of them that is 0
):
    """dK, dV, and the sum of dQ / sm_scale over all key blocks, over descriptors of rank 4, varlen 5; see the
    module docstring."""
    i_b = 0
    if plan.varlen and not plan.persistent:
        # Before the program is divided among warps: the loop in there makes ptxas take what follows it for
        # different in each thread, and with it the addresses of a step.
        i_b, any_keys = tiling.sequence(gl.program_id(0), cu_k, B, num_n, HEADS_KV, SECTION, LAST, plan)
        if not any_keys:
            return
    desc_q, desc_k = together(desc_q, desc_q_right), together(desc_k, desc_k_right)
    desc_v, desc_do = together(desc_v, desc_v_right), together(desc_do, desc_do_right)
    if plan.shared:
        desc_dk, desc_dv = keys_ptr, keys_ptr
    else:
        desc_dk, desc_dv = together(desc_dk, desc_dk_right), together(desc_dv, desc_dv_right)
    turns, sums, sums_free, told, dk = None, None, None, None, None
    sets: gl.constexpr = 2 if plan.persistent else 1  # of K and V
    if plan.persistent:
        told = new_next_tile(plan)
        counter_ptr = counter_ptr.to(gl.pointer_type(gl.int32))
    if plan.granted:
        turns = new_turns(2, plan)
    if plan.bulk:
        desc_sums = together(desc_sums, desc_sums_right)
        sums, sums_free = new_buffers(desc_sums, plan), barriers(2, 1)
    if plan.own_values > 0 and not plan.shared:
        dk = column_parts.buffers(desc_dk, 2)
    mem = Memory(
        column_parts.buffers(desc_k, 2 * sets),
        column_parts.buffers(desc_v, 2 * sets),
        column_parts.buffers(desc_q, STAGES),
        column_parts.buffers(desc_do, STAGES),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, plan.block_m], desc_rows.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, plan.block_m], desc_rows.layout),
        gl.allocate_shared_memory(
            desc_k[0].dtype, [4, 64, plan.block_m],
            gl.NVMMASharedLayout.get_default_for([64, plan.block_m], desc_k[0].dtype),
        ),
        None if plan.persistent else barriers(1, 1).index(0),  # k_full
        None if plan.persistent else barriers(1, 1).index(0),  # v_full
        barriers(STAGES, 1),  # q_full
        barriers(STAGES, 1),  # do_full
        turns,
        sums,
        sums_free,
        told,
        dk,
    )
    fence_async_shared()
    if OVERLAPS:
        overlap()
    first = None
    if plan.persistent and plan.deterministic:
        first = gl.atomic_add(counter_ptr, 1)
        if first >= tiles:  # others have drawn them all
            return
    work = tiling.Work(
        S_q, S_k, H, GROUP, HEADS_KV, SECTION, LAST, num_m, num_n, right, left, cu_q, cu_k, i_b, turns_ptr,
        SHARE, tiles, counter_ptr, first, B,
    )  # fmt: skip
    # A consumer's number is a constant, so each has code of its own.
    registers: gl.constexpr = plan.registers
    if plan.granted:
        gl.warp_specialize([
            (_consume, (desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, 0, plan)),
            (_consume, (desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, 1, plan)),
            (_produce, (desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan)),
            (keep_turns, (mem, work, False, plan)),
            (keep_turns, (mem, work, True, plan)),
        ], [4, 1, 1, 1], [registers.consumer, registers.producer, registers.producer, registers.producer])
    elif plan.bulk:
        gl.warp_specialize([
            (_consume, (desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, 0, plan)),
            (_consume, (desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, 1, plan)),
            (_produce, (desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan)),
            (add_all, (desc_sums, mem, work, plan)),
        ], [4, 1, 1], [registers.consumer, registers.producer, registers.producer])
    else:
        gl.warp_specialize([
            (_consume, (desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, 0, plan)),
            (_consume, (desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, 1, plan)),
            (_produce, (desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan)),
        ], [4, 1], [registers.consumer, registers.producer])
