"""Exact attention, backward, for Hopper (sm_90a) in Gluon, heads of 136 to 192 columns, 96 keys a program.

Chapter 20 derives the backward pass, chapter 21 explains `backward_wide_kernel`, whose division of the work
this kernel changes. There a program has 64 keys, and reads Q and dO and adds to dQ once for them: the L2
sets its pace. Here it has 96, half as many again for the same reads and additions. A product has 64 rows, so
keys are columns here, 64 and 32 ("few"), because sizes of tiles in Gluon are powers of two; rows are queries,
and of dK and dV columns of the head, in three parts of 64. A step is a block of 64 queries:

    warpgroup 0    S = Q K^T,   P = 2**(S * qk_scale - LSE2),   dV^T += dO^T P, of parts 0 and 1
    warpgroup 1    dP = dO V^T, dS = P * (dP - delta),          dK^T += Q^T dS, of parts 0 and 1
    warpgroup 2    dV^T and dK^T of part 2, and dQ = dS K, one part after the other, added to memory

So each has 2 x 48 registers of dK and dV in a thread and a third of the products. P goes from 0 to the others
through shared memory, dS from 1 to 2, both rounded as for the products, which read them there. Each has two
buffers, Q and dO as well, so warpgroups may be a step apart. First operands of dK^T and dV^T are needed for
64 and again for 32 keys: 0 and 1 read them once, into registers, for which 2 has no room. ptxas keeps 24
registers of a thread away from products, so S and dP of 64 keys are formed first, and those of 32 when their
registers are free again.

Values of up to 128 columns have two parts, and warpgroup 2 none of dV^T: it needs neither dO nor P.

Of a tile of 160 columns products that contract columns, and dQ, use 32 of part 2. Its buffers have 64, filled
with zeros, because dK^T and dV^T have 64 rows whatever is in them; swizzles of 64 bytes let products take 32.

As in the wide kernel a warpgroup waits for its dV^T, or dK^T, before it starts the next S, or dP, and the
last step starts an S and a dP for queries that are not there, which are not used.

    Who waits for what

    barrier           completes when                           waited for by          parity of the wait
    k_full, v_full    TMA has written the keys, the values     0 and 2; 1             0
    q_full[slot]      TMA has written Q and LSE2 of block j    all                    (j // 2) & 1
    do_full[slot]     TMA has written dO and delta of block j  all                    (j // 2) & 1
    p_full[slot]      0 has written P of j                     1 and 2                (j // 2) & 1
    Q_FREE + slot     all have released Q of j                 producer, to fill j+2
    DO_FREE + slot    all have released dO of j                producer, to fill j+2
    DS_FULL + slot    1 has written dS of j                    2
    DS_FREE + slot    2 has formed dK^T and dQ of j            1, to write dS of j+2
    END               all have done their last products        all, to put dK and dV where K and V were

The slot of block j is j & 1; all from Q_FREE on are the hardware's named barriers. At one of those 1 and 2
would wait for each other, too, so p_full is none. P needs no barrier for its reuse: 0 writes P of j+2 when it
has waited for Q of j+2, which was filled after 1 and 2 had released Q of j, and they no longer needed P of j.

Who loads what a copy will overwrite (0 LSE, 1 delta, both first operands) executes a fence between that and
the release, see `backward_kernel`. That of P, or dS, does, as they load before it.

Between its additions to dQ warpgroup 2 pauses, see `backward_ring.add_sums`. With a deterministic plan it
adds when it is granted its turn, as in the wide kernel.
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
from attnlib.kernels.common.memory import barriers, matrix
from attnlib.kernels.common.named_barrier import named_barrier
from attnlib.kernels.hopper import backward_tiles as tiling
from attnlib.kernels.hopper import column_parts
from attnlib.kernels.hopper.backward_shared import NUMBERS, Keys, produce
from attnlib.kernels.hopper.backward_turns import Turns, await_grant, keep_turns, new_turns, tell_added

# Of the hardware's 16 barriers Triton uses 0 to 4 here, and 8 to 11 are Q_FREE and DO_FREE. A partition
# of one warp has none.
END = gl.constexpr(5)
DS_FREE = gl.constexpr(6)
DS_FULL = gl.constexpr(14)
PARTS = gl.constexpr(3)  # of the columns


# ---------------------------------------------------------------- what is passed around


class Memory(NamedTuple):
    """Buffers and barriers in shared memory; the protocol is in the module docstring."""

    k: Keys  # [1, 1, 1, 64 or 32, 64], varlen with one more 1, as the others; of each part of the columns
    v: Keys
    q: tuple  # [STAGES, 1, 1, block_m, 64]
    do: tuple
    lse: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m]
    delta: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m]
    p: Keys  # [STAGES, block_m, 64 or 32]
    ds: Keys
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    turns: Turns  # of a deterministic plan, else None


# ---------------------------------------------------------------- products


@gluon.jit
def _used(x, PART: gl.constexpr, plan: gl.constexpr):
    """The columns of a part that are not all zeros."""
    if PART == PARTS - 1 and plan.last < 64:
        return x.slice(0, plan.last, 1)
    else:
        return x


@gluon.jit
def _scores(rows, slot, keys, j, plan: gl.constexpr):
    """Q K^T, or dO V^T, of the keys in one buffer: [BLOCK_M, D] x [D, 64 or 32]."""
    N: gl.constexpr = keys[0].shape[-2]
    s = gl.zeros([plan.block_m, N], gl.float32, plan.most_layout if N == 64 else plan.few_layout)
    for part in gl.static_range(len(rows)):
        b = _used(matrix(keys[part], opaque_zero(j)), part, plan).permute((1, 0))
        a = _used(matrix(rows[part], slot), part, plan)
        s = warpgroup_mma(a, b, s, use_acc=part > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def _columns(rows, slot, FIRST: gl.constexpr, N: gl.constexpr, LOADED: gl.constexpr, plan: gl.constexpr):
    """First operands dO^T, or Q^T, of N parts: [64, BLOCK_M] each, in shared memory or in registers."""
    found = ()
    for i in gl.static_range(N):
        a = matrix(rows[FIRST + i], slot).permute((1, 0))
        if LOADED:
            found = found + (a.load(plan.loaded_layout),)
        else:
            found = found + (a,)
    return found


@gluon.jit
def _issue_update(a, b, slot, acc, LOADED: gl.constexpr, plan: gl.constexpr):
    """Start acc += dO^T P, or Q^T dS, of each part in `a`, see `_columns`: [64, BLOCK_M] x [BLOCK_M, 64], and
    of few keys."""
    found = ()
    for i in gl.static_range(len(a)):
        few = gl.convert_layout(a[i], plan.loaded_few_layout) if LOADED else a[i]
        found = found + (
            warpgroup_mma(a[i], b.most.index(slot), acc[2 * i], is_async=True),
            warpgroup_mma(few, b.few.index(slot), acc[2 * i + 1], is_async=True),
        )
    return found


@gluon.jit
def _zeros(N: gl.constexpr, plan: gl.constexpr):
    """Of N parts of dK^T, or dV^T; there may be none."""
    found = ()
    for _ in gl.static_range(N):
        found = found + (
            gl.zeros([64, 64], gl.float32, plan.most_layout),
            gl.zeros([64, 32], gl.float32, plan.few_layout),
        )
    return found


# ---------------------------------------------------------------- gradients of keys and values


@gluon.jit
def _leave(ptr, x, AT: gl.constexpr, FIRST: gl.constexpr, tile, work, plan: gl.constexpr):
    """Sums where other programs add to them, of dK from element AT = 0 on, of dV behind them: of each part
    those of all keys, 8 of them after the other, as they lie in registers."""
    sums = tiling.key_sums(ptr, 0, tile, work, plan)
    for i in gl.static_range(len(x) // 2):
        leave_sums(sums, x[2 * i], AT + (FIRST + i) * plan.block_n * 64, plan.added, True)
        leave_sums(sums, x[2 * i + 1], AT + ((FIRST + i) * plan.block_n + 64) * 64, plan.added, True)


@gluon.jit
def _gradients(
    desc, x, scale, buffers, AT: gl.constexpr, FIRST: gl.constexpr, tile, work, plan: gl.constexpr
):
    """dK or dV of the parts from FIRST on."""
    if plan.shared:
        _leave(desc, x, AT, FIRST, tile, work, plan)
    else:
        _store(desc, x, scale, buffers, FIRST, tile, work, plan)


@gluon.jit
def _store(desc, x, scale, buffers, FIRST: gl.constexpr, tile, work, plan: gl.constexpr):
    """Through what was K or V."""
    dtype: gl.constexpr = buffers.most[0].dtype
    parts: gl.constexpr = len(x) // 2
    for i in gl.static_range(parts):
        matrix(buffers.most[FIRST + i], 0).permute((1, 0)).store((x[2 * i] * scale).to(dtype))
        matrix(buffers.few[FIRST + i], 0).permute((1, 0)).store((x[2 * i + 1] * scale).to(dtype))
    fence_async_shared()
    at = tiling.keys(tile, work, plan)
    place = tiling.coordinates(at, 0, tile.start)
    column_parts.store(desc.most, place, buffers.most, 0, FIRST, parts, plan.step)
    place = tiling.coordinates(at, 0, tile.start + 64)
    column_parts.store(desc.few, place, buffers.few, 0, FIRST, parts, plan.step)


# ---------------------------------------------------------------- consumers


@gluon.jit
def _values(desc_dv, mem, qk_scale, work, plan: gl.constexpr):
    """Warpgroup 0: P, and two parts of dV."""
    tile = tiling.locate(gl.program_id(0), work, plan)
    dv = _zeros(2, plan)
    if tiling.seen(tile, plan):
        dv = _visit_for_values(dv, mem, qk_scale, tile, work, plan)
    _gradients(desc_dv, dv, 1.0, mem.v, plan.block_n * PARTS * 64, 0, tile, work, plan)
    tma.store_wait(0)


@gluon.jit
def _probabilities(s, lse, qk_scale, key, m, tile, work, plan: gl.constexpr):
    """P of some keys from `key` on, as the products take it."""
    lse = gl.convert_layout(lse, gl.SliceLayout(1, s.type.layout))[:, None]  # [BLOCK_M, 1]
    if plan.early_mask:
        p = gl.exp2(tiling.visible_keys(s * qk_scale - lse, key, m, tile, work, plan))
    else:
        p = tiling.visible_keys(gl.exp2(s * qk_scale - lse), key, m, tile, work, plan)
    return p


@gluon.jit
def _visit_for_values(dv, mem, qk_scale, tile, work, plan: gl.constexpr):
    dtype: gl.constexpr = mem.q[0].dtype
    n = (tile.m_end - tile.m_start) * work.GROUP
    m = tile.m_start
    mbarrier.wait(mem.k_full, 0)
    mbarrier.wait(mem.q_full.index(0), 0)
    s = _scores(mem.q, 0, mem.k.most, 0, plan)
    for j in range(n):
        slot = slot_of(j)
        lse = mem.lse.index(slot).reshape([plan.block_m]).load(plan.row_layout)
        p = _probabilities(s, lse, qk_scale, tile.start, m, tile, work, plan)
        mem.p.most.index(slot).store(p.to(dtype))
        few = _scores(mem.q, slot, mem.k.few, j, plan)
        p_few = _probabilities(few, lse, qk_scale, tile.start + 64, m, tile, work, plan)
        mem.p.few.index(slot).store(p_few.to(dtype))
        mbarrier.wait(mem.do_full.index(slot), parity_of(j))
        do = _columns(mem.do, slot, 0, 2, True, plan)
        fence_async_shared()
        mbarrier.arrive(mem.p_full.index(slot), count=1)

        # dV, then S of the block after.
        tokens = _issue_update(do, mem.p, slot, dv, True, plan)
        release(Q_FREE, j, plan.consumers)
        release(DO_FREE, j, plan.consumers)
        dv = warpgroup_mma_wait(0, deps=tokens)
        next_slot = slot_of(j + 1)
        if j + 1 < n:
            mbarrier.wait(mem.q_full.index(next_slot), parity_of(j + 1))
        s = _scores(mem.q, next_slot, mem.k.most, j, plan)
        m += 1
        if m == tile.m_end:
            m = tile.m_start
    if not plan.shared:
        named_barrier("sync", END, 384)
    return dv


@gluon.jit
def _keys(desc_dk, mem, sm_scale, work, plan: gl.constexpr):
    """Warpgroup 1: dS, and two parts of dK."""
    tile = tiling.locate(gl.program_id(0), work, plan)
    dk = _zeros(2, plan)
    if tiling.seen(tile, plan):
        dk = _visit_for_keys(dk, mem, tile, work, plan)
    _gradients(desc_dk, dk, sm_scale, mem.k, 0, 0, tile, work, plan)
    tma.store_wait(0)


@gluon.jit
def _differences(p, dp, delta, out, dtype: gl.constexpr):
    """Store dS of some keys."""
    delta = gl.convert_layout(delta, gl.SliceLayout(1, dp.type.layout))[:, None]  # [BLOCK_M, 1]
    out.store((p.load(dp.type.layout).to(gl.float32) * (dp - delta)).to(dtype))


@gluon.jit
def _visit_for_keys(dk, mem, tile, work, plan: gl.constexpr):
    dtype: gl.constexpr = mem.q[0].dtype
    n = (tile.m_end - tile.m_start) * work.GROUP
    mbarrier.wait(mem.v_full, 0)
    mbarrier.wait(mem.do_full.index(0), 0)
    dp = _scores(mem.do, 0, mem.v.most, 0, plan)
    for j in range(n):
        slot = slot_of(j)
        delta = mem.delta.index(slot).reshape([plan.block_m]).load(plan.row_layout)
        if j >= STAGES:
            named_barrier("sync", DS_FREE + slot, 256)
        mbarrier.wait(mem.p_full.index(slot), parity_of(j))
        _differences(mem.p.most.index(slot), dp, delta, mem.ds.most.index(slot), dtype)
        few = _scores(mem.do, slot, mem.v.few, j, plan)
        _differences(mem.p.few.index(slot), few, delta, mem.ds.few.index(slot), dtype)
        mbarrier.wait(mem.q_full.index(slot), parity_of(j))
        q = _columns(mem.q, slot, 0, 2, True, plan)
        fence_async_shared()
        named_barrier("arrive", DS_FULL + slot, 256)

        # dK, then dP of the block after.
        tokens = _issue_update(q, mem.ds, slot, dk, True, plan)
        release(DO_FREE, j, plan.consumers)
        release(Q_FREE, j, plan.consumers)
        dk = warpgroup_mma_wait(0, deps=tokens)
        next_slot = slot_of(j + 1)
        if j + 1 < n:
            mbarrier.wait(mem.do_full.index(next_slot), parity_of(j + 1))
        dp = _scores(mem.do, next_slot, mem.v.most, j, plan)
    if not plan.shared:
        named_barrier("sync", END, 384)
    return dk


@gluon.jit
def _queries(desc_dk, desc_dv, dq_ptr, mem, sm_scale, work, plan: gl.constexpr):
    """Warpgroup 2: dQ, and a part of dK and dV."""
    tile = tiling.locate(gl.program_id(0), work, plan)
    dk, dv = _zeros(1, plan), _zeros(plan.value_parts - 2, plan)
    if tiling.seen(tile, plan):
        dk, dv = _visit_for_queries(dk, dv, dq_ptr, mem, tile, work, plan)
    if plan.value_parts > 2:
        _gradients(desc_dv, dv, 1.0, mem.v, plan.block_n * PARTS * 64, 2, tile, work, plan)
    _gradients(desc_dk, dk, sm_scale, mem.k, 0, 2, tile, work, plan)
    tma.store_wait(0)


@gluon.jit
def _issue_dq(mem, most, few, PART: gl.constexpr, j, plan: gl.constexpr):
    """Start a part of dS K, with dS of 64 and of 32 keys: [BLOCK_M, 96] x [96, 64 or 32]."""
    k = _used(matrix(mem.k.most[PART], opaque_zero(j)), PART, plan)
    k_few = _used(matrix(mem.k.few[PART], opaque_zero(j)), PART, plan)
    N: gl.constexpr = k.shape[1]
    dq = gl.zeros([plan.block_m, N], gl.float32, plan.most_layout if N == 64 else plan.few_layout)
    dq = warpgroup_mma(most, k, dq, use_acc=False, is_async=True)
    return warpgroup_mma(few, k_few, dq, is_async=True)


@gluon.jit
def _visit_for_queries(dk, dv, dq_ptr, mem, tile, work, plan: gl.constexpr):
    n = (tile.m_end - tile.m_start) * work.GROUP
    block = tiling.first_sums(tile, work, plan)
    gap = tiling.gap(tile, work, plan)
    m = tile.m_start
    mbarrier.wait(mem.k_full, 0)
    for j in range(n):
        slot = slot_of(j)
        if plan.value_parts > 2:
            mbarrier.wait(mem.do_full.index(slot), parity_of(j))
            do = _columns(mem.do, slot, 2, 1, False, plan)
            mbarrier.wait(mem.p_full.index(slot), parity_of(j))
            dv_tokens = _issue_update(do, mem.p, slot, dv, False, plan)
        mbarrier.wait(mem.q_full.index(slot), parity_of(j))
        q = _columns(mem.q, slot, 2, 1, False, plan)
        named_barrier("sync", DS_FULL + slot, 256)
        dk_tokens = _issue_update(q, mem.ds, slot, dk, False, plan)
        if plan.value_parts > 2:
            dv = warpgroup_mma_wait(2, deps=dv_tokens)
        release(DO_FREE, j, plan.consumers)
        dk = warpgroup_mma_wait(0, deps=dk_tokens)
        release(Q_FREE, j, plan.consumers)
        # As much of it as there are registers for is read once, not by each part.
        most, few = mem.ds.most.index(slot), mem.ds.few.index(slot).load(plan.loaded_layout)
        if plan.value_parts == 2:
            most = most.load(plan.loaded_layout)
        for part in gl.static_range(PARTS):
            # [BLOCK_M, 64], of the last part 32 columns of a tile of 160
            dq = warpgroup_mma_wait(0, deps=(_issue_dq(mem, most, few, part, j, plan),))
            if plan.deterministic:
                if part == 0:
                    await_grant(mem.turns, j)
            if part == PARTS - 1:
                named_barrier("arrive", DS_FREE + slot, 256)
            # The condition is always true, which the compiler does not know. Without a branch around the
            # additions it starts the next product before them, and there are no registers for both.
            add_sums(dq_ptr, block, dq, opaque_zero(j) == 0, part * 64 * 64, plan, True)
        if plan.deterministic:
            tell_added(mem.turns, j)
        block += 1
        m += 1
        if m == tile.m_end:
            m = tile.m_start
            block += gap
    if not plan.shared:
        named_barrier("sync", END, 384)
    return dk, dv


# ---------------------------------------------------------------- kernel


@gluon.jit
def _each(desc, N: gl.constexpr):
    """A descriptor for each of 2 or 3 parts: the same, for another column."""
    if N == 2:
        return desc, desc
    else:
        return desc, desc, desc


@gluon.jit
def _exchanged(dtype: gl.constexpr, plan: gl.constexpr):
    """Buffers for P or dS."""
    most: gl.constexpr = gl.NVMMASharedLayout.get_default_for([plan.block_m, 64], dtype)
    few: gl.constexpr = gl.NVMMASharedLayout.get_default_for([plan.block_m, 32], dtype)
    return Keys(
        gl.allocate_shared_memory(dtype, [STAGES, plan.block_m, 64], most),
        gl.allocate_shared_memory(dtype, [STAGES, plan.block_m, 32], few),
    )


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["cu_q", "cu_k"])
def attention_backward_hopper_keys96(
    desc_q, desc_k, desc_v, desc_do,  # (B, H, S_q, D), (B, H_kv, S_k, D) twice, (B, H, S_q, D); 64 columns
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
    desc_k_few=None, desc_v_few=None, desc_dk_few=None, desc_dv_few=None,  # 32 keys
    turns_ptr=None,  # of a deterministic plan, see `turns`
    keys_ptr=None, SHARE=None,  # of a shared plan: float32 sums instead of what desc_dk and desc_dv have
):
    """dK, dV, and the sum of dQ / sm_scale over all key blocks, over descriptors of rank 4, varlen 5; see the
    module docstring."""
    i_b = 0
    if plan.varlen:
        # Before the program is divided among warps, see `backward_wide_kernel`.
        i_b, any_keys = tiling.sequence(gl.program_id(0), cu_k, B, num_n, HEADS_KV, SECTION, LAST, plan)
        if not any_keys:
            return
    dtype: gl.constexpr = desc_q.dtype
    values: gl.constexpr = plan.value_parts
    desc_q, desc_do = _each(desc_q, PARTS), _each(desc_do, values)
    desc_k = Keys(_each(desc_k, PARTS), _each(desc_k_few, PARTS))
    desc_v = Keys(_each(desc_v, values), _each(desc_v_few, values))
    if plan.shared:
        desc_dk, desc_dv = keys_ptr, keys_ptr
    else:
        desc_dk = Keys(_each(desc_dk, PARTS), _each(desc_dk_few, PARTS))
        desc_dv = Keys(_each(desc_dv, values), _each(desc_dv_few, values))
    turns = None
    if plan.deterministic:
        turns = new_turns(1, plan)
    mem = Memory(
        Keys(column_parts.buffers(desc_k.most, 1), column_parts.buffers(desc_k.few, 1)),
        Keys(column_parts.buffers(desc_v.most, 1), column_parts.buffers(desc_v.few, 1)),
        column_parts.buffers(desc_q, STAGES),
        column_parts.buffers(desc_do, STAGES),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, plan.block_m], desc_rows.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, plan.block_m], desc_rows.layout),
        _exchanged(dtype, plan),
        _exchanged(dtype, plan),
        barriers(1, 1).index(0),  # k_full
        barriers(1, 1).index(0),  # v_full
        barriers(STAGES, 1),  # q_full
        barriers(STAGES, 1),  # do_full
        barriers(STAGES, 1),  # p_full
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
            (_queries, (desc_dk, desc_dv, dq_ptr, mem, sm_scale, work, plan)),
            (produce, (desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan)),
            (keep_turns, (mem, work, False, plan)),
            (keep_turns, (mem, work, True, plan)),
        ], [4, 4, 1, 1, 1], [consumer, dq, producer, producer, producer])
    else:
        gl.warp_specialize([
            (_keys, (desc_dk, mem, sm_scale, work, plan)),
            (_values, (desc_dv, mem, qk_scale, work, plan)),
            (_queries, (desc_dk, desc_dv, dq_ptr, mem, sm_scale, work, plan)),
            (produce, (desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan)),
        ], [4, 4, 1], [consumer, dq, producer])
