"""Solutions of the exercises of chapter 21; kernels are functions that take the place of the kernel's own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.kernels.common.named_barrier import named_barrier


@gluon.jit
def tell_ds(mem, ds, j, W: gl.constexpr):
    mem.ds.index((j & 1) * 2 + W).store(ds)
    fence_async_shared()  # before the other is told
    named_barrier("arrive", DS_FULL + 2 * W + (j & 1), 256)


@gluon.jit
def await_ds(j, W: gl.constexpr):
    if j >= 0:
        named_barrier("sync", DS_FULL + 2 * (1 - W) + (j & 1), 256)  # the other's


@gluon.jit
def start_dq(mem, j, W: gl.constexpr, plan: gl.constexpr):
    dq = gl.zeros([64, plan.dq_columns], gl.float32, ten.accumulator(plan.dq_columns))
    for w in gl.static_range(2):
        ds = mem.ds.index((j & 1) * 2 + w)  # [64, BLOCK_M]
        k = ten.matrix(mem.k.index(w + opaque_zero(j + 1)))  # [64, D]; j is -1 or more
        if plan.dq_columns == plan.d:
            ds = ds.slice(W * 64, 64, 1)  # [64, 64]
        else:
            k = k.slice(W * plan.dq_columns, plan.dq_columns, 1)  # [64, dq_columns]
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=w > 0, is_async=True)
    return dq


mended_exchange = [tell_ds, await_ds, start_dq]


@gluon.jit
def await_ds(j, W: gl.constexpr):  # consumer 0: the other's dS of block j; consumer 1: of block j + 1
    if j + W >= 0:
        named_barrier("sync", DS_FULL + 2 * (1 - W) + ((j + W) & 1), 256)


@gluon.jit
def consume(given, W: gl.constexpr, plan: gl.constexpr):
    dk_desc, dv_desc, dq_ptr, mem, qk_scale, sm_scale, work = given
    dtype: gl.constexpr = dk_desc.dtype
    i_h, start, first = locate(work, plan)
    key = start + W * 64  # the first one of this consumer
    n = work.num_m - first
    block = i_h * work.num_m + first  # of the queries of all heads
    dk = gl.zeros([64, plan.d], gl.float32, ten.accumulator(plan.d))
    dv = gl.zeros([64, plan.d], gl.float32, ten.accumulator(plan.d))
    mbarrier.wait(mem.k_full.index(0), 0)
    wait(mem.q_full, 0, plan)
    s_token = start_scores(mem.k, ten.matrix(mem.q.index(0)), 0, W, plan)
    s = warpgroup_mma_wait(0, deps=(s_token,))  # [64, BLOCK_M]
    mbarrier.wait(mem.v_full.index(0), 0)
    for j in range(n):
        q = ten.matrix(mem.q.index(slot(j, plan)))  # [BLOCK_M, D]
        do = ten.matrix(mem.do.index(slot(j, plan)))  # [BLOCK_M, D]
        wait(mem.do_full, j, plan)
        dp_token = start_scores(mem.v, do, j, W, plan)
        p = gl.exp2(s * qk_scale - row(mem.lse, j, plan))  # [64, BLOCK_M]
        p = visible(p, key - first * plan.block_m, j * plan.block_m, work.S, plan)
        p_half, delta = p.to(dtype), row(mem.delta, j, plan)  # [64, BLOCK_M], [1, BLOCK_M]
        dp = warpgroup_mma_wait(0, deps=(dp_token,))  # [64, BLOCK_M]
        ds = (again(p_half, p, plan) * (dp - delta)).to(dtype)  # [64, BLOCK_M]
        dv_token = start_update(p_half, do, dv, plan)
        await_ds(j - 1, W)
        dq_token = start_dq(mem, j - 1, W, plan)  # two products
        dv = warpgroup_mma_wait(2, deps=(dv_token,))  # [64, D]
        release(DO_FREE, j, plan)
        dk_token = start_update(ds, q, dk, plan)
        if j + 1 < n:
            wait(mem.q_full, j + 1, plan)
        s_token = start_scores(mem.k, ten.matrix(mem.q.index(slot(j + 1, plan))), j, W, plan)  # of j + 1
        dq = warpgroup_mma_wait(2, deps=(dq_token,))  # [BLOCK_M, dq_columns]
        tell_ds(mem, ds, j, W)
        add_dq(dq_ptr, dq, block + j - 1, j > 0, W, plan)
        dk = warpgroup_mma_wait(1, deps=(dk_token,))  # [64, D]
        release(Q_FREE, j, plan)
        s = warpgroup_mma_wait(0, deps=(s_token,))  # [64, BLOCK_M]
    if W == 0:  # consumer 1 has waited for the last dS in its last step
        await_ds(n - 1, W)
    dq = warpgroup_mma_wait(0, deps=(start_dq(mem, n - 1, W, plan),))  # [BLOCK_M, dq_columns]
    add_dq(dq_ptr, dq, block + n - 1, n > 0, W, plan)
    store(dv_desc, dv.to(dtype), mem.v.index(W), i_h, key)
    tma.store_wait(0)
    store(dk_desc, (dk * sm_scale).to(dtype), mem.v.index(W), i_h, key)  # the other may still read K
    tma.store_wait(0)


in_turns = [await_ds, consume]


@gluon.constexpr_function
def add_asm(n):  # 32 sleeps in a step; in front of the branch none would stand between two additions
    values, pointer, wanted = n // 4, n // 4 + n, n // 4 + 2 * n
    lines = ["{ .reg .pred q; .reg .b32 t; .reg .b64 a;", f"setp.eq.b32 q, ${wanted}, 0;", "@q bra DONE;",
             "mov.u32 t, %tid.x; and.b32 t, t, 127; shl.b32 t, t, 4;",
             f"cvt.u64.u32 a, t; add.s64 a, a, ${pointer};"]
    for i in range(0, n, 4):
        four = ", ".join(f"${values + i + k}" for k in range(4))
        lines.append(f"red.global.add.v4.f32 [a + {i * 512}], {{{four}}};")
        lines.append("nanosleep.u32 16;")
    lines += ["DONE:", *(f"mov.b32 ${i}, 0;" for i in range(n // 4))]
    return " ".join([*lines, "}"])


pausing = [add_asm]


def rows_of_sums(sums):
    d = sums.numel() // 64
    eights = sums.reshape(d // 8, 4, 8, 4, 2, 2)  # columns / 8, warp, row, pair, rows 8 apart, column
    return eights.permute(1, 4, 2, 0, 3, 5).reshape(64, d)


def shared_kib(d, block_m, stages, buffers):
    keys, slot = 2 * 128 * d * 2, 2 * block_m * d * 2 + 2 * block_m * 4
    return (keys + stages * slot + 2 * buffers * 64 * block_m * 2) / 1024


def turn(n, m, S_q, S_k):  # one too many for the last block: it waits for a program that waits for it
    last_key = min(64 * m + 63 + S_k - S_q, S_k - 1)
    return last_key // 128 - n
