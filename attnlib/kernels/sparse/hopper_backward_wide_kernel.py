"""Exact attention under a block mask, backward, for Hopper (sm_90a) in Gluon: dK and dV of 64 keys, dQ added
up. For heads of 136 to 256 columns, and of 72 to 128 under masks of which 64 keys see much less than 128.
Chapter 30 has block masks, chapter 21 the wide backward kernel.

The kernel of `kernels.hopper.backward_wide_kernel` for lists instead of windows; its docstring says which
warpgroup has which products and who waits for what, and all of that holds here. What differs is in
`hopper_backward_steps`, and:

- Warpgroup 0 alone has scores: it loads the words of a step, hides what they hide, and so P of warpgroup 1
  has 0 there. With a soft cap it leaves P times the derivative of the scores for warpgroup 1, and keeps P
  itself for dV.
- Warpgroup 2 needs the word of step j for the sums that it adds to. It loads it before it gives dS of step j
  back (DS_FREE), without which warpgroup 1 does not release Q of step j + 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.kernels.common import tma
from attnlib.kernels.common.backward_pair import issue_scores
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
from attnlib.kernels.common.memory import matrix
from attnlib.kernels.common.named_barrier import named_barrier
from attnlib.kernels.sparse.bits import hide
from attnlib.kernels.sparse.hopper_backward_steps import (
    Work,
    by_derivative,
    locate,
    memory,
    produce,
    told,
    weights,
)

# Of the hardware's 16 barriers Triton uses 0 to 4 here, and 8 to 11 are Q_FREE and DO_FREE.
END = gl.constexpr(5)
DS_FREE = gl.constexpr(6)
P_FULL = gl.constexpr(12)
DS_FULL = gl.constexpr(14)


@gluon.jit
def _zeros(plan: gl.constexpr):
    return gl.zeros([64, plan.half], gl.float32, plan.d_layout)


@gluon.jit
def _issue_update(a_half, b, left, right, plan: gl.constexpr):
    """Start left, right += P^T dO, or dS^T Q: [64, BLOCK_M] x [BLOCK_M, D / 2] twice."""
    a = gl.convert_layout(a_half, plan.p_layout)
    left = warpgroup_mma(a, b.slice(0, plan.half, 1), left, is_async=True)
    right = warpgroup_mma(a, b.slice(plan.half, plan.half, 1), right, is_async=True)
    return left, right


@gluon.jit
def _store(desc, left, right, buffer, column, plan: gl.constexpr):
    x = buffer.reshape([64, plan.d])
    x.slice(0, plan.half, 1).store(left)
    x.slice(plan.half, plan.half, 1).store(right)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [column.i_b, column.i_kv, column.i_n * 64, 0], buffer)
    tma.store_wait(0)


@gluon.jit
def _values(
    desc_dv, mem, qk_scale, work, column, FUNCTION: gl.constexpr, DERIVATIVE: gl.constexpr,
    plan: gl.constexpr,
):  # fmt: skip
    """Warpgroup 0: P for warpgroup 1, and dV."""
    dtype: gl.constexpr = mem.k.dtype
    n = column.count

    mbarrier.wait(mem.k_full.index(0), 0)
    mbarrier.wait(mem.q_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(issue_scores(mem.k, matrix(mem.q, 0), 0, 0, plan),))
    dv_left, dv_right = _zeros(plan), _zeros(plan)
    for j in range(n):
        slot = slot_of(j)
        lse = mem.lse.index(slot).reshape([1, plan.block_m]).load(plan.s_layout)  # [1, BLOCK_M]
        p, derivative = weights(
            s, lse, mem, j, qk_scale, work, column, FUNCTION, DERIVATIVE, 0, plan
        )  # [64, BLOCK_M]
        if plan.partial:
            if (told(mem, j & 3) & 1) == 1:
                p = hide(p, mem.words.index(slot).reshape([64, 4]), 0.0)
        p_half = p.to(dtype)  # [64, BLOCK_M]
        if plan.curved:
            mem.p.index(slot).store(by_derivative(p, derivative, plan).to(dtype))
        else:
            mem.p.index(slot).store(p_half)
        named_barrier("arrive", P_FULL + slot, 256)

        # dV, then S of the step after.
        mbarrier.wait(mem.do_full.index(slot), parity_of(j))
        tokens = _issue_update(p_half, matrix(mem.do, slot), dv_left, dv_right, plan)
        fence_async_shared()  # between the loads of LSE and of words and the copies that overwrite them
        release(Q_FREE, j)
        dv_left, dv_right = warpgroup_mma_wait(0, deps=tokens)
        next_slot = slot_of(j + 1)
        if j + 1 < n:
            mbarrier.wait(mem.q_full.index(next_slot), parity_of(j + 1))
        s_token = issue_scores(mem.k, matrix(mem.q, next_slot), j, 0, plan)
        release(DO_FREE, j)
        s = warpgroup_mma_wait(0, deps=(s_token,))  # [64, BLOCK_M]

    named_barrier("sync", END, 256)
    _store(desc_dv, dv_left.to(dtype), dv_right.to(dtype), mem.do.index(0), column, plan)


@gluon.jit
def _keys(desc_dk, mem, sm_scale, column, plan: gl.constexpr):
    """Warpgroup 1: dS for warpgroup 2, and dK, which leaves where V was."""
    dtype: gl.constexpr = mem.k.dtype
    n = column.count

    mbarrier.wait(mem.v_full, 0)
    mbarrier.wait(mem.do_full.index(0), 0)
    dp = warpgroup_mma_wait(0, deps=(issue_scores(mem.v, matrix(mem.do, 0), 0, 0, plan),))
    dk_left, dk_right = _zeros(plan), _zeros(plan)
    for j in range(n):
        slot = slot_of(j)
        delta = mem.delta.index(slot).reshape([1, plan.block_m]).load(plan.s_layout)  # [1, BLOCK_M]
        named_barrier("sync", P_FULL + slot, 256)
        p = mem.p.index(slot).load(plan.s_layout).to(gl.float32)  # [64, BLOCK_M]
        ds_half = (p * (dp - delta)).to(dtype)  # [64, BLOCK_M]

        # dK, then dP of the step after.
        mbarrier.wait(mem.q_full.index(slot), parity_of(j))
        tokens = _issue_update(ds_half, matrix(mem.q, slot), dk_left, dk_right, plan)
        if j >= STAGES:
            named_barrier("sync", DS_FREE + slot, 256)
        mem.ds.index(slot).store(ds_half)
        fence_async_shared()
        named_barrier("arrive", DS_FULL + slot, 256)
        release(DO_FREE, j)
        dk_left, dk_right = warpgroup_mma_wait(0, deps=tokens)
        next_slot = slot_of(j + 1)
        if j + 1 < n:
            mbarrier.wait(mem.do_full.index(next_slot), parity_of(j + 1))
        dp_token = issue_scores(mem.v, matrix(mem.do, next_slot), j, 0, plan)
        release(Q_FREE, j)
        dp = warpgroup_mma_wait(0, deps=(dp_token,))  # [64, BLOCK_M]

    named_barrier("arrive", END, 256)
    dk_left, dk_right = (dk_left * sm_scale).to(dtype), (dk_right * sm_scale).to(dtype)
    _store(desc_dk, dk_left, dk_right, mem.v.index(0), column, plan)


@gluon.jit
def _queries(dq_ptr, mem, column, plan: gl.constexpr):
    """Warpgroup 2: dQ, one half of the columns after the other."""
    mbarrier.wait(mem.k_full.index(0), 0)
    for j in range(column.count):
        slot = slot_of(j)
        named_barrier("sync", DS_FULL + slot, 256)
        block = told(mem, j & 3) >> 1
        ds = mem.ds.index(slot).permute((1, 0))  # [BLOCK_M, 64]
        for part in gl.static_range(2):
            k = matrix(mem.k, opaque_zero(j)).slice(part * plan.half, plan.half, 1)
            dq = warpgroup_mma(ds, k, _zeros(plan), use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))  # [BLOCK_M, D / 2]
            if part == 1:
                named_barrier("arrive", DS_FREE + slot, 256)
            # The condition is always true, which the compiler does not know. Without a branch around the
            # additions it starts the next product before them, and there are no registers for both.
            add_sums(dq_ptr, block, dq, opaque_zero(j) == 0, part * 64 * plan.half, plan, True)


# ---------------------------------------------------------------- kernel


NUMBERS = "H GROUP HEADS_KV SECTION num_m num_n mask_b mask_h place bias_b bias_h bias_m S_q S_k".split()


@gluon.jit(do_not_specialize=NUMBERS)
def attention_sparse_backward_hopper_wide(
    desc_q, desc_k, desc_v, desc_do,  # all as in `attention_sparse_backward_hopper`,
    desc_dk, desc_dv,
    desc_rows,
    desc_words,
    dq_ptr,
    starts_ptr, steps_ptr, bits_ptr, order_ptr,  # but of columns of 64 keys
    units_ptr,  # None
    alibi_ptr,
    bias_ptr,
    bias_b, bias_h, bias_m,
    S_k,
    qk_scale,
    inner, after,
    sm_scale,
    place,
    S_q,
    H,
    GROUP,
    HEADS_KV,
    SECTION,
    num_m,
    num_n,
    mask_b, mask_h,
    plan: gl.constexpr,
    desc_bias=None,
    FUNCTION: gl.constexpr = None, DERIVATIVE: gl.constexpr = None,  # see the forward kernel
    OVERLAPS: gl.constexpr = False,  # with the launches before and after it, see `launch_order`
):  # fmt: skip
    """dK, dV, and the sum of dQ / sm_scale over all columns; see the module docstring."""
    work = Work(
        H, GROUP, HEADS_KV, SECTION, num_m, num_n, mask_b, mask_h, starts_ptr, steps_ptr, bits_ptr, order_ptr,
        inner, after, place, alibi_ptr, bias_ptr, bias_b, bias_h, bias_m, S_q, S_k, units_ptr,
        None, None, None,
    )  # fmt: skip
    column = locate(gl.program_id(0), work, plan)
    mem = memory(desc_q, desc_k, desc_v, desc_do, desc_rows, desc_words, desc_bias, plan)
    fence_async_shared()
    if OVERLAPS:
        overlap()
    gl.warp_specialize([
        (_keys, (desc_dk, mem, sm_scale, column, plan)),
        (_values, (desc_dv, mem, qk_scale, work, column, FUNCTION, DERIVATIVE, plan)),
        (_queries, (dq_ptr, mem, column, plan)),
        (produce, (
            desc_q, desc_k, desc_v, desc_do, desc_rows, desc_words, desc_bias, mem, work, column, plan,
        )),
    ], [4, 4, 1], [plan.registers.consumer, plan.registers.dq, plan.registers.producer])
