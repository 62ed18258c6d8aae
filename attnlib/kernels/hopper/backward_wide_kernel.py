"""Exact attention, backward, for Hopper (sm_90a) in Gluon, heads of 200 to 256 columns, or values of 256.

Chapter 20 derives the backward pass, chapter 21 explains this kernel and why registers end at D = 256.

One program per 64 keys of a key/value head. dK and dV of 64 keys and 256 columns are 128 registers of a
thread each, so no warpgroup can keep both, and the five products are divided otherwise than in
`backward_kernel`. Keys are rows here too; a step is a block of 64 queries:

    warpgroup 0    S^T = K Q^T,   P^T = 2**(S^T * qk_scale - LSE2),   dV += P^T dO
    warpgroup 1    dP^T = V dO^T, dS^T = P^T * (dP^T - delta),        dK += dS^T Q
    warpgroup 2    dQ = dS K, 128 columns after the other, added to memory

P^T goes from 0 to 1 and dS^T from 1 to 2 through shared memory, rounded as for the products. Each of them has
two buffers, Q and dO as well, so 0 may be a step or two ahead of 1, and 1 of 2. So the tensor cores have
products of one warpgroup while another computes P or dS, and no product waits for the additions, which are in
a warpgroup of their own. Between them it pauses, so that they do not fill the queue in front of shared memory
(see `backward_ring.add_sums`). A warpgroup waits for its dV, or dK, before it starts the next S, or dP: with
both in flight ptxas finds the registers too few, those before they are shared out anew (C7512), and all
products wait for each other. The last step starts an S and a dP for queries that are not there, from whatever
lies in shared memory; their results are not used.

    Who waits for what

    barrier           completes when                           waited for by          parity of the wait
    k_full, v_full    TMA has written the keys, the values     0 and 2; 1             0
    q_full[slot]      TMA has written Q and LSE2 of block j    0 and 1                (j // 2) & 1
    do_full[slot]     TMA has written dO and delta of block j  0 and 1                (j // 2) & 1
    Q_FREE + slot     0 and 1 have released Q of j             producer, to fill j+2
    DO_FREE + slot    0 and 1 have released dO of j            producer, to fill j+2
    P_FULL + slot     0 has written P of j                     1
    DS_FULL + slot    1 has written dS of j                    2
    DS_FREE + slot    2 has formed dQ of j                     1, to write dS of j+2
    END               1 has done its last product              0, to put dV where dO was

The slot of block j is j & 1; all from Q_FREE on are the hardware's named barriers. P needs none for its
reuse: 0 writes P of j+2 after it has waited for Q of j+2, which was filled after 1 had released Q of j, long
after it had read P of j. For the same reason 0 can't arrive twice at P_FULL before 1 has come once.

Before the copies that overwrite LSE and delta, the warpgroup that has loaded them has to execute a fence, see
`backward_kernel`. Warpgroup 1 loads delta and executes one for dS in each step. Warpgroup 0 loads LSE and
executes one for that alone, before it releases Q and while dV is under way.

With a deterministic plan the programs of a head add to a block of sums one after the other (see `turns`;
`backward_tiles.turn` has the order). Two warps more keep the turns as in `backward_kernel`: warpgroup 2 waits
for `granted` before it adds, and arrives at `added`.

Programs that share a key head leave float32 sums of dK and dV, as in `backward_kernel`; then END is not used.

V, dO and dV may have 256 columns beside 64 or 128 of Q, K, dQ and dK (`OwnValuesWidePlan`).
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
from attnlib.kernels.common.backward_ring import (
    DO_FREE,
    Q_FREE,
    STAGES,
    add_sums,
    leave_sums,
    opaque_zero,
    parity_of,
    release,
    slot_of,
)
from attnlib.kernels.common.launch_order import overlap
from attnlib.kernels.common.memory import barriers, room
from attnlib.kernels.common.named_barrier import named_barrier
from attnlib.kernels.hopper import backward_tiles as tiling
from attnlib.kernels.hopper import column_parts
from attnlib.kernels.hopper.backward_shared import NUMBERS, Rows, issue_scores, produce
from attnlib.kernels.hopper.backward_turns import Turns, await_grant, keep_turns, new_turns, tell_added
from attnlib.kernels.hopper.column_parts import await_parts, matrices

# Of the hardware's 16 barriers Triton uses 0 to 4 here, and 8 to 11 are Q_FREE and DO_FREE. A partition
# of one warp has none.
END = gl.constexpr(5)
DS_FREE = gl.constexpr(6)
P_FULL = gl.constexpr(12)
DS_FULL = gl.constexpr(14)


# ---------------------------------------------------------------- what is passed around


class Memory(NamedTuple):
    """Buffers and barriers in shared memory; the protocol is in the module docstring."""

    k: tuple  # [1, 1, 1, 64, d], varlen with one more 1, as the others; tuples of one
    v: tuple  # [1, 1, 1, 64, d], or columns of their own, as dO
    q: tuple  # [STAGES, 1, 1, block_m, d]
    do: tuple  # [STAGES, 1, 1, block_m, d]
    lse: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m]
    delta: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m]
    p: gl.shared_memory_descriptor  # [STAGES, 64, block_m]
    ds: gl.shared_memory_descriptor  # [STAGES, 64, block_m]
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    turns: Turns  # of a deterministic plan, else None


# ---------------------------------------------------------------- consumers


@gluon.jit
def _part(b, PART: gl.constexpr, COLUMNS: gl.constexpr):
    """So many columns of something in shared memory."""
    return b.slice(PART * COLUMNS, COLUMNS, 1)


@gluon.jit
def _issue_update(a_half, b, acc, plan: gl.constexpr):
    """Start acc += P^T dO, or dS^T Q, of each part: [64, BLOCK_M] x [BLOCK_M, columns]."""
    a = gl.convert_layout(a_half, plan.p_layout)
    tokens = ()
    for i in gl.static_range(len(acc)):
        tokens = tokens + (warpgroup_mma(a, _part(b[0], i, acc[i].shape[1]), acc[i], is_async=True),)
    return tokens


@gluon.jit
def _zero_keys(plan: gl.constexpr):
    """An accumulator of each part of dK."""
    found = ()
    for _ in gl.static_range(plan.d // plan.part):
        found = found + (gl.zeros([64, plan.part], gl.float32, plan.part_layout),)
    return found


@gluon.jit
def _zero_values(plan: gl.constexpr):
    """And of dV."""
    found = ()
    for _ in gl.static_range(plan.values // plan.values_part):
        found = found + (gl.zeros([64, plan.values_part], gl.float32, plan.values_layout),)
    return found


@gluon.jit
def _rounded(x, factor, dtype: gl.constexpr):
    found = ()
    for i in gl.static_range(len(x)):
        found = found + ((x[i] if factor is None else x[i] * factor).to(dtype),)
    return found


@gluon.jit
def _store(descs, x, buffer, tile, work, plan: gl.constexpr):
    """Parts of a gradient, through the buffer of a copy."""
    whole = buffer.reshape([64, buffer.shape[-1]])
    for i in gl.static_range(len(x)):
        _part(whole, i, x[i].shape[1]).store(x[i])
    fence_async_shared()
    place = tiling.coordinates(tiling.keys(tile, work, plan), 0, tile.start)
    tma.async_copy_shared_to_global(descs[0], place, buffer)
    tma.store_wait(0)


@gluon.jit
def _room_of_keys(desc_dk, mem, plan: gl.constexpr):
    """For dK, where V was."""
    if plan.own_values == 0:
        return mem.v[0].index(0)
    else:
        return room(mem.v[0], 0, desc_dk[0])


@gluon.jit
def _leave(ptr, x, AT: gl.constexpr, tile, work, plan: gl.constexpr):
    """Sums where other programs add to them, of dK from element AT = 0 on, of dV behind them."""
    sums = tiling.key_sums(ptr, 0, tile, work, plan)
    for i in gl.static_range(len(x)):
        leave_sums(sums, x[i], AT + 64 * x[i].shape[1] * i, plan.added, True)


@gluon.jit
def _values(desc_dv, mem, qk_scale, work, plan: gl.constexpr):
    """Warpgroup 0: P for warpgroup 1, and dV."""
    tile = tiling.locate(gl.program_id(0), work, plan)
    if tiling.seen(tile, plan):
        _visit_for_values(desc_dv, mem, qk_scale, tile, work, plan)
    else:
        _leave_no_values(desc_dv, mem, tile, work, plan)


@gluon.jit
def _leave_no_values(desc_dv, mem, tile, work, plan: gl.constexpr):
    """Zeros for dV of keys that no query sees."""
    if not plan.shared:
        zeros = _rounded(_zero_values(plan), None, mem.do[0].dtype)
        _store(desc_dv, zeros, mem.do[0].index(0), tile, work, plan)
    elif not plan.added:
        _leave(desc_dv, _zero_values(plan), 64 * plan.width, tile, work, plan)


@gluon.jit
def _visit_for_values(desc_dv, mem, qk_scale, tile, work, plan: gl.constexpr):
    dtype: gl.constexpr = mem.k[0].dtype
    n = (tile.m_end - tile.m_start) * work.GROUP
    m = tile.m_start

    mbarrier.wait(mem.k_full, 0)
    k = Rows(mem.k, ())
    mbarrier.wait(mem.q_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(issue_scores(k, None, matrices(mem.q, 0), 0, plan),))
    dv = _zero_values(plan)
    for j in range(n):
        slot = slot_of(j)
        lse = mem.lse.index(slot).reshape([1, plan.block_m]).load(plan.s_layout)  # [1, BLOCK_M]
        if plan.early_mask:
            p = gl.exp2(tiling.visible(s * qk_scale - lse, tile.start, m, tile, work, plan))  # [64, BLOCK_M]
        else:
            p = gl.exp2(s * qk_scale - lse)  # [64, BLOCK_M]
            p = tiling.visible(p, tile.start, m, tile, work, plan)
        p_half = p.to(dtype)  # [64, BLOCK_M]
        mem.p.index(slot).store(p_half)
        named_barrier("arrive", P_FULL + slot, 256)

        # dV, then S of the block after.
        mbarrier.wait(mem.do_full.index(slot), parity_of(j))
        do = matrices(mem.do, slot)  # [BLOCK_M, D]
        tokens = _issue_update(p_half, do, dv, plan)
        fence_async_shared()  # between the load of LSE and the copy that overwrites it
        release(Q_FREE, j)
        dv = await_parts(tokens, 0)
        next_slot = slot_of(j + 1)
        if j + 1 < n:
            mbarrier.wait(mem.q_full.index(next_slot), parity_of(j + 1))
        s_token = issue_scores(k, None, matrices(mem.q, next_slot), j, plan)
        release(DO_FREE, j)
        s = warpgroup_mma_wait(0, deps=(s_token,))  # [64, BLOCK_M]
        m += 1
        if m == tile.m_end:
            m = tile.m_start

    if plan.shared:
        _leave(desc_dv, dv, 64 * plan.width, tile, work, plan)
    else:
        named_barrier("sync", END, 256)
        _store(desc_dv, _rounded(dv, None, dtype), mem.do[0].index(0), tile, work, plan)


@gluon.jit
def _keys(desc_dk, mem, sm_scale, work, plan: gl.constexpr):
    """Warpgroup 1: dS for warpgroup 2, and dK."""
    tile = tiling.locate(gl.program_id(0), work, plan)
    if tiling.seen(tile, plan):
        _visit_for_keys(desc_dk, mem, sm_scale, tile, work, plan)
    else:
        _leave_no_keys(desc_dk, mem, tile, work, plan)


@gluon.jit
def _leave_no_keys(desc_dk, mem, tile, work, plan: gl.constexpr):
    """Zeros for dK of keys that no query sees."""
    if not plan.shared:
        zeros = _rounded(_zero_keys(plan), None, mem.v[0].dtype)
        _store(desc_dk, zeros, _room_of_keys(desc_dk, mem, plan), tile, work, plan)
    elif not plan.added:
        _leave(desc_dk, _zero_keys(plan), 0, tile, work, plan)


@gluon.jit
def _visit_for_keys(desc_dk, mem, sm_scale, tile, work, plan: gl.constexpr):
    dtype: gl.constexpr = mem.k[0].dtype
    n = (tile.m_end - tile.m_start) * work.GROUP

    mbarrier.wait(mem.v_full, 0)
    v = Rows(mem.v, ())
    mbarrier.wait(mem.do_full.index(0), 0)
    dp = warpgroup_mma_wait(0, deps=(issue_scores(v, None, matrices(mem.do, 0), 0, plan),))
    dk = _zero_keys(plan)
    for j in range(n):
        slot = slot_of(j)
        delta = mem.delta.index(slot).reshape([1, plan.block_m]).load(plan.s_layout)  # [1, BLOCK_M]
        named_barrier("sync", P_FULL + slot, 256)
        p = mem.p.index(slot).load(plan.s_layout).to(gl.float32)  # [64, BLOCK_M]
        ds_half = (p * (dp - delta)).to(dtype)  # [64, BLOCK_M]

        # dK, then dP of the block after.
        mbarrier.wait(mem.q_full.index(slot), parity_of(j))
        q = matrices(mem.q, slot)  # [BLOCK_M, D]
        tokens = _issue_update(ds_half, q, dk, plan)
        if j >= STAGES:
            named_barrier("sync", DS_FREE + slot, 256)
        mem.ds.index(slot).store(ds_half)
        fence_async_shared()
        named_barrier("arrive", DS_FULL + slot, 256)
        release(DO_FREE, j)
        dk = await_parts(tokens, 0)
        next_slot = slot_of(j + 1)
        if j + 1 < n:
            mbarrier.wait(mem.do_full.index(next_slot), parity_of(j + 1))
        dp_token = issue_scores(v, None, matrices(mem.do, next_slot), j, plan)
        release(Q_FREE, j)
        dp = warpgroup_mma_wait(0, deps=(dp_token,))  # [64, BLOCK_M]

    if plan.shared:
        _leave(desc_dk, dk, 0, tile, work, plan)
    else:
        named_barrier("arrive", END, 256)
        dk = _rounded(dk, sm_scale, dtype)
        _store(desc_dk, dk, _room_of_keys(desc_dk, mem, plan), tile, work, plan)


@gluon.jit
def _queries(dq_ptr, mem, work, plan: gl.constexpr):
    """Warpgroup 2: dQ."""
    tile = tiling.locate(gl.program_id(0), work, plan)
    if tiling.seen(tile, plan):
        _visit_for_queries(dq_ptr, mem, tile, work, plan)


@gluon.jit
def _visit_for_queries(dq_ptr, mem, tile, work, plan: gl.constexpr):
    n = (tile.m_end - tile.m_start) * work.GROUP
    block = tiling.first_sums(tile, work, plan)
    gap = tiling.gap(tile, work, plan)
    m = tile.m_start
    mbarrier.wait(mem.k_full, 0)
    for j in range(n):
        slot = slot_of(j)
        named_barrier("sync", DS_FULL + slot, 256)
        ds = mem.ds.index(slot).permute((1, 0))  # [BLOCK_M, 64]
        parts: gl.constexpr = plan.d // plan.part
        for part in gl.static_range(parts):
            k = _part(matrices(mem.k, opaque_zero(j))[0], part, plan.part)
            zero = gl.zeros([64, plan.part], gl.float32, plan.part_layout)
            dq = warpgroup_mma(ds, k, zero, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))  # [BLOCK_M, columns of a part]
            if plan.deterministic:
                if part == 0:
                    await_grant(mem.turns, j)
            if part == parts - 1:
                named_barrier("arrive", DS_FREE + slot, 256)
            # The condition is always true, which the compiler does not know. Without a branch around the
            # additions it starts the next product before them, and there are no registers for both.
            add_sums(dq_ptr, block, dq, opaque_zero(j) == 0, part * 64 * plan.part, plan, True)
        if plan.deterministic:
            tell_added(mem.turns, j)
        block += 1
        m += 1
        if m == tile.m_end:
            m = tile.m_start
            block += gap


# ---------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["cu_q", "cu_k"])
def attention_backward_hopper_wide(
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
    turns_ptr=None,  # of a deterministic plan, see `turns`
    keys_ptr=None, SHARE=None,  # of a shared plan: float32 sums instead of what desc_dk and desc_dv have
):
    """dK, dV, and the sum of dQ / sm_scale over all key blocks, over descriptors of rank 4, varlen 5; see the
    module docstring."""
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, plan.block_m], desc_k.dtype)
    i_b = 0
    if plan.varlen:
        # Before the program is divided among warps: the loop in there makes ptxas take what follows it for
        # different in each thread, and with it the addresses of a step.
        i_b, any_keys = tiling.sequence(gl.program_id(0), cu_k, B, num_n, HEADS_KV, SECTION, LAST, plan)
        if not any_keys:
            return
    desc_q, desc_k, desc_v, desc_do = (desc_q,), (desc_k,), (desc_v,), (desc_do,)
    if plan.shared:
        desc_dk, desc_dv = keys_ptr, keys_ptr
    else:
        desc_dk, desc_dv = (desc_dk,), (desc_dv,)
    turns = None
    if plan.deterministic:
        turns = new_turns(1, plan)
    mem = Memory(
        column_parts.buffers(desc_k, 1),
        column_parts.buffers(desc_v, 1),
        column_parts.buffers(desc_q, STAGES),
        column_parts.buffers(desc_do, STAGES),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, plan.block_m], desc_rows.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, plan.block_m], desc_rows.layout),
        gl.allocate_shared_memory(desc_k[0].dtype, [STAGES, 64, plan.block_m], half_layout),
        gl.allocate_shared_memory(desc_k[0].dtype, [STAGES, 64, plan.block_m], half_layout),
        barriers(1, 1).index(0),  # k_full
        barriers(1, 1).index(0),  # v_full
        barriers(STAGES, 1),  # q_full
        barriers(STAGES, 1),  # do_full
        turns,
    )
    fence_async_shared()
    if OVERLAPS:
        overlap()
    work = tiling.Work(
        S_q, S_k, H, GROUP, HEADS_KV, SECTION, LAST, num_m, num_n, right, left, cu_q, cu_k, i_b, turns_ptr,
        SHARE,
    )  # fmt: skip
    consumer: gl.constexpr = plan.registers.consumer
    dq: gl.constexpr = plan.registers.dq
    producer: gl.constexpr = plan.registers.producer
    if plan.deterministic:
        gl.warp_specialize([
            (_keys, (desc_dk, mem, sm_scale, work, plan)),
            (_values, (desc_dv, mem, qk_scale, work, plan)),
            (_queries, (dq_ptr, mem, work, plan)),
            (produce, (desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan)),
            (keep_turns, (mem, work, False, plan)),
            (keep_turns, (mem, work, True, plan)),
        ], [4, 4, 1, 1, 1], [consumer, dq, producer, producer, producer])
    else:
        gl.warp_specialize([
            (_keys, (desc_dk, mem, sm_scale, work, plan)),
            (_values, (desc_dv, mem, qk_scale, work, plan)),
            (_queries, (dq_ptr, mem, work, plan)),
            (produce, (desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan)),
        ], [4, 4, 1], [consumer, dq, producer])
