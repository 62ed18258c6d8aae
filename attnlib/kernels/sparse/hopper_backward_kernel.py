"""Exact attention under a block mask, backward, for Hopper (sm_90a) in Gluon: dK and dV of 128 keys, dQ added
up. Chapter 30 has block masks, chapter 21 the backward kernel.

The kernel of `kernels.hopper.backward_kernel` for lists instead of windows; its docstring has the order of a
step, the barriers, and why there is one fence, and that holds here for programs of one column. Those that
stay on their SM have three slots of Q, delta comes with Q, and gradients leave through K: see
`hopper_backward_columns`. What else differs is in `hopper_backward_steps`, and:

- A consumer loads the word of step j for its bits and, to save a register, again for dQ of step j, in step
  j + 1 or behind the last step.
- The derivative of a soft cap, or of the caller's function, goes into the copy of P that dS is made of, as
  soon as P is there for dV, so it has no registers of its own.
- The fence of dS is behind the load of a bias, too.
"""

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
from attnlib.kernels.common.backward_pair import (
    await_ds,
    await_start,
    here,
    issue_dq,
    issue_scores,
    tell_start,
    write_ds,
)
from attnlib.kernels.common.backward_ring import (
    DO_FREE,
    add_sums,
    parity_of,
    release,
    slot_of,
)
from attnlib.kernels.common.launch_order import overlap
from attnlib.kernels.common.memory import matrix
from attnlib.kernels.sparse.bits import hide
from attnlib.kernels.sparse.hopper_backward_columns import (
    await_gradients,
    change_keys,
    count_of,
    head_of,
    meet,
    produce_columns,
    set_after,
    set_of,
)
from attnlib.kernels.sparse.hopper_backward_steps import (
    Work,
    await_q,
    by_derivative,
    first_row,
    keys_of,
    locate,
    memory,
    produce,
    q_slot,
    release_q,
    told,
    weights,
)


@gluon.jit
def _store(desc, x, buffer, at, row):
    rows: gl.constexpr = buffer.shape[-2]
    columns: gl.constexpr = buffer.shape[-1]
    buffer.reshape([rows, columns]).store(x)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, tiling.coordinates(at, row, 0), buffer)


@gluon.jit
def _before(i, j, plan: gl.constexpr):
    """The step before, -1 in the first one of a column."""
    if plan.persistent:
        return gl.where(j == 0, -1, i - 1)
    else:
        return j - 1


@gluon.jit
def _first_scores(mem, WG: gl.constexpr, plan: gl.constexpr):
    """S of the first step of a program."""
    mbarrier.wait(mem.k_full.index(0), 0)
    mbarrier.wait(mem.q_full.index(0), 0)
    return warpgroup_mma_wait(0, deps=(issue_scores(mem.k, matrix(mem.q, 0), 0, WG, plan),))


@gluon.jit
def _visit(
    desc_dk, desc_dv, dq_ptr, mem, s, qk_scale, sm_scale, work, column, n, t, c,
    FUNCTION: gl.constexpr, DERIVATIVE: gl.constexpr, WG: gl.constexpr, plan: gl.constexpr,
):  # fmt: skip
    """The n steps of a column, from S of the first one on, and its dK and dV. Returns S of the first step of
    the next column. Of a persistent plan, whose producer alone has the `Column`: t, columns of this program
    before, and c, steps."""
    dtype: gl.constexpr = mem.k.dtype
    own_dq: gl.constexpr = WG * 64 * plan.dq_columns  # where its half begins
    own_k = 0
    if plan.persistent:
        own_k = set_of(t)

    mbarrier.wait(mem.v_full, t & 1)
    dk = gl.zeros([64, plan.d], gl.float32, plan.d_layout)
    dv = gl.zeros([64, plan.d], gl.float32, plan.d_layout)
    for j in range(n):
        i = c + j
        place, slot = q_slot(i, plan), slot_of(i)  # of Q, of dO
        q = matrix(mem.q, place)  # [BLOCK_M, D]
        do = matrix(mem.do, slot)  # [BLOCK_M, D]

        # 1. P and dS, while dP is under way.
        mbarrier.wait(mem.do_full.index(slot), parity_of(i))
        dp_token = issue_scores(mem.v, do, j, WG, plan)
        lse = mem.lse.index(place).reshape([1, plan.block_m]).load(plan.s_layout)  # [1, BLOCK_M]
        p, derivative = weights(
            s, lse, mem, i, qk_scale, work, column, FUNCTION, DERIVATIVE, WG, plan
        )  # [64, BLOCK_M]
        if plan.partial:
            if (told(mem, i & 3) & 1) == 1:
                p = hide(p, mem.words.index(2 * place + WG).reshape([64, 4]), 0.0)
        p_half = gl.convert_layout(p.to(dtype), plan.p_layout)
        if plan.curved:
            p = by_derivative(p, derivative, plan)
        delta = mem.delta.index(place).reshape([1, plan.block_m]).load(plan.s_layout)  # [1, BLOCK_M]
        dp = warpgroup_mma_wait(0, deps=(dp_token,))  # [64, BLOCK_M]
        if plan.half_p:
            p = gl.convert_layout(here(p_half), plan.s_layout).to(gl.float32)
        ds_half = (p * (dp - delta)).to(dtype)  # [64, BLOCK_M]

        # 2. dV, dQ of the step before, dK, and S of the step after.
        if plan.persistent:
            await_gradients(t, j)
        if plan.alternate:
            await_start(i, WG)
        dv_token = warpgroup_mma(p_half, do, dv, is_async=True)
        await_ds(_before(i, j, plan), WG)
        dq_token = issue_dq(mem.ds, mem.k, i - 1, WG, plan, own_k)
        dv = warpgroup_mma_wait(2, deps=(dv_token,))
        release(DO_FREE, i)
        dk_token = warpgroup_mma(gl.convert_layout(ds_half, plan.p_layout), q, dk, is_async=True)
        next_k, next_place = 0, q_slot(i + 1, plan)
        if plan.persistent:  # the next column's, or the end
            await_q(mem, i + 1, plan)
            change_keys(mem, t, j, n)
            next_k = set_after(t, j, n)
        elif j + 1 < n:
            await_q(mem, i + 1, plan)
        s_token = issue_scores(mem.k, matrix(mem.q, next_place), j, WG, plan, next_k)
        if plan.alternate:
            tell_start(i, n, WG, plan)
        dq = warpgroup_mma_wait(2, deps=(dq_token,))
        write_ds(mem, ds_half, i, WG)
        # Not before the fence in there, which might wait for it.
        block = told(mem, gl.maximum(i - 1, 0) & 3) >> 1
        add_sums(dq_ptr, block, dq, j > 0, own_dq, plan, plan.persistent)
        dk = warpgroup_mma_wait(1, deps=(dk_token,))
        release_q(i, plan)
        s = warpgroup_mma_wait(0, deps=(s_token,))  # [64, BLOCK_M]

    last = c + n - 1
    await_ds(last, WG)
    dq_token = issue_dq(mem.ds, mem.k, last, WG, plan, own_k)
    row = first_row(keys_of(mem, t), WG, plan)
    if plan.persistent:
        at = head_of(mem, t)
        left = mem.k.index(own_k + WG)
        dq = warpgroup_mma_wait(0, deps=(dq_token,))
        add_sums(dq_ptr, told(mem, last & 3) >> 1, dq, n > 0, own_dq, plan, True)
        meet(last)
        _store(desc_dv, dv.to(dtype), left, at, row)
    else:
        at = column.i_b, column.i_kv
        left = mem.v.index(WG)
        _store(desc_dv, dv.to(dtype), left, at, row)
        dq = warpgroup_mma_wait(0, deps=(dq_token,))
        add_sums(dq_ptr, told(mem, last & 3) >> 1, dq, n > 0, own_dq, plan)
    tma.store_wait(0)
    _store(desc_dk, (dk * sm_scale).to(dtype), left, at, row)
    if not plan.persistent:
        tma.store_wait(0)
    return s


@gluon.jit
def _consume(
    desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, column, FUNCTION: gl.constexpr,
    DERIVATIVE: gl.constexpr, WG: gl.constexpr, plan: gl.constexpr,
):  # fmt: skip
    s = _first_scores(mem, WG, plan)
    if plan.persistent:
        t = 0  # of the columns of this program
        c = 0  # steps of those before
        n = count_of(mem, 0)
        while n > 0:
            s = _visit(
                desc_dk, desc_dv, dq_ptr, mem, s, qk_scale, sm_scale, work, column, n, t, c,
                FUNCTION, DERIVATIVE, WG, plan,
            )  # fmt: skip
            c += n
            t += 1
            n = count_of(mem, t)
        if plan.alternate:
            if WG == 0:
                await_start(c, WG)
        tma.store_wait(0)
    else:
        _visit(
            desc_dk, desc_dv, dq_ptr, mem, s, qk_scale, sm_scale, work, column, column.count, 0, 0,
            FUNCTION, DERIVATIVE, WG, plan,
        )  # fmt: skip


@gluon.jit
def _produce(
    desc_q, desc_k, desc_v, desc_do, desc_rows, desc_words, desc_bias, mem, work, column, plan: gl.constexpr
):  # fmt: skip
    if plan.persistent:
        produce_columns(desc_q, desc_k, desc_v, desc_do, desc_rows, desc_words, desc_bias, mem, work, plan)
    else:
        produce(desc_q, desc_k, desc_v, desc_do, desc_rows, desc_words, desc_bias, mem, work, column, plan)


# ---------------------------------------------------------------- kernel


NUMBERS = "H GROUP HEADS_KV SECTION num_m num_n mask_b mask_h place bias_b bias_h bias_m S_q S_k".split()


@gluon.jit(do_not_specialize=[*NUMBERS, "columns", "LEADING"])
def attention_sparse_backward_hopper(
    desc_q, desc_k, desc_v, desc_do,  # (B, H, S_q, D), (B, H_kv, S_k, D) twice, (B, H, S_q, D)
    desc_dk, desc_dv,  # (B, H_kv, S_k, D)
    desc_rows,  # (2, B * H, num_m * BLOCK_M) float32: LSE2, and delta
    desc_words,  # (slots, 2, 256): words of steps, of the first and the second 64 keys of a tile
    dq_ptr,  # float32, see common.postprocess
    starts_ptr, steps_ptr, bits_ptr, order_ptr,  # of columns, see `block_mask.lists.Lists`
    units_ptr,  # (masks * num_n), see `block_mask.gathered`; None without
    alibi_ptr,  # (H), None without
    bias_ptr,  # of query 0 and key 0; this and the next four are None without
    bias_b, bias_h, bias_m,  # its strides; that of keys is plan.bias_n
    S_k,
    qk_scale,  # sm_scale * log2(e); behind a function log2(e), behind a cap that times the cap
    inner,  # sm_scale before a function; over the soft cap without; None without either
    after,  # one over the soft cap where there is a function, too; None else
    sm_scale,
    place,  # of query 0 among the keys, for ALiBi; None without
    S_q,
    H,  # query heads
    GROUP,  # query heads that share one key/value head
    HEADS_KV,  # B * H_kv
    SECTION,  # key/value heads that advance together
    num_m,  # query blocks of a head in memory
    num_n,  # columns of tiles of a mask
    mask_b, mask_h,  # masks from one batch element, or head, to the next; 0 where they share one
    plan: gl.constexpr,
    desc_bias=None,  # (B or 1, H or 1, S_q, S_k), where it is copied
    FUNCTION: gl.constexpr = None, DERIVATIVE: gl.constexpr = None,  # see the forward kernel
    OVERLAPS: gl.constexpr = False,  # with the launches before and after it, see `launch_order`
    columns=None, counter_ptr=None,  # of a persistent plan: all columns, and a counter of them that is 0
    LEADING=None,  # and of each head so many, its longest ones, that come before all others
):  # fmt: skip
    """dK, dV, and the sum of dQ / sm_scale over all columns; see the module docstring."""
    if plan.persistent:
        counter_ptr = counter_ptr.to(gl.pointer_type(gl.int32))
    work = Work(
        H, GROUP, HEADS_KV, SECTION, num_m, num_n, mask_b, mask_h, starts_ptr, steps_ptr, bits_ptr, order_ptr,
        inner, after, place, alibi_ptr, bias_ptr, bias_b, bias_h, bias_m, S_q, S_k, units_ptr,
        columns, counter_ptr, LEADING,
    )  # fmt: skip
    column = 0  # none: Triton has no tuples with a None
    if not plan.persistent:
        column = locate(gl.program_id(0), work, plan)
    mem = memory(desc_q, desc_k, desc_v, desc_do, desc_rows, desc_words, desc_bias, plan)
    fence_async_shared()
    if OVERLAPS:
        overlap()
    # A consumer's number is a constant, so each has code of its own.
    gl.warp_specialize([
        (_consume, (
            desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, column, FUNCTION, DERIVATIVE, 0, plan,
        )),
        (_consume, (
            desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, column, FUNCTION, DERIVATIVE, 1, plan,
        )),
        (_produce, (
            desc_q, desc_k, desc_v, desc_do, desc_rows, desc_words, desc_bias, mem, work, column, plan,
        )),
    ], [4, 1], [plan.registers.consumer, plan.registers.producer])
