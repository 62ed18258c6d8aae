"""Exact attention, backward, for Hopper (sm_90a) in Gluon: dK and dV of a block of keys, dQ added up.

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
exponential units at the same time. Where that lasts, the second one begins later (`_begin_later`).

Step 0 has no dQ to form, and the last no S to start. They do it all the same, with whatever lies in shared
memory, and nobody looks at the result: that costs less than code for them.

    Who waits for what

    barrier           completes when                           waited for by          parity of the wait
    k_full, v_full    TMA has written the keys, the values     each consumer          0
    q_full[slot]      TMA has written Q and LSE2 of block j    each consumer          (j // 2) & 1
    do_full[slot]     TMA has written dO and delta of block j  each consumer          (j // 2) & 1
    Q_FREE + slot     both consumers have released Q of j      producer, to fill j+2
    DO_FREE + slot    both consumers have released dO of j     producer, to fill j+2
    DS_FULL + 2 w + buffer   consumer w has written dS of j    the other consumer

The slot and the buffer of block j are j & 1. The last three are the hardware's named barriers, which have no
parity: an arrival at an mbarrier costs a synchronization of the warpgroup first. Two buffers of dS need no
barrier for their reuse: a consumer writes dS(j) after it has waited for the other's dS(j-1), and the other
had waited for its own dQ(j-2), the last to read this buffer, before it said that this is there.

    Windows and packed sequences

A band with a left bound ends the queries that see a key, so a program visits the blocks between its first and
its last one (`backward_tiles`). There may be none: then nobody copies or waits, and the consumers
store zeros. Packed sequences are read as in `hopper`. Their blocks of keys are counted through, with one to
spare for each sequence, so that a program finds its sequence by a search, and few have no keys: these end at
once. LSE2, delta and the sums of dQ have rows for each sequence that are padded to whole blocks of queries.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.kernels.common.memory import barriers, buffers, matrix
from attnlib.kernels.hopper import backward_tiles as tiling
from attnlib.kernels.hopper.forward_kernel import _accumulator

LSE2 = gl.constexpr(0)  # places in desc_rows
DELTA = gl.constexpr(1)
STAGES = gl.constexpr(2)  # blocks of Q and of dO in shared memory; a power of two
# Of the hardware's 16 barriers Triton leaves these alone here.
Q_FREE = gl.constexpr(8)
DO_FREE = gl.constexpr(10)
DS_FULL = gl.constexpr(12)


# ---------------------------------------------------------------- what is passed around


@dataclass(frozen=True)
class Plan:
    """Everything fixed at compile time: what the call asks for, and how it is computed.

    Attributes:
        d: columns of a tile, the head dimension or more: 64 or 128.
        causal: the keys of a query end on a diagonal: query i sees none after i + S_k - S_q, or `right` more.
        tail: S_k may be no multiple of 128, and no diagonal cuts the keys beyond it off.

    The others are those of `configs_backward_hopper.HopperBackwardConfig`, and

        shifted: there is a `right` that is not 0.
        left: query i sees no key before i + S_k - S_q - `left`.
        packed: the sequences are packed.
    """

    d: int
    causal: bool
    tail: bool
    block_m: int
    half_p: bool
    stagger: int
    consumer_registers: int
    producer_registers: int
    shifted: bool = False
    left: bool = False
    packed: bool = False

    def __post_init__(self):
        # The compiler wants its constants wrapped.
        for field in fields(self):
            object.__setattr__(self, field.name, gl.constexpr(getattr(self, field.name)))

    block_n = gl.constexpr(128)  # keys of a program, 64 in a buffer
    # Keys may be seen by no query.
    sparse = property(lambda self: gl.constexpr(self.left.value or self.packed.value))

    # Clocks by which the second consumer begins later.
    delay = property(
        lambda self: gl.constexpr(0 if self.causal.value or self.left.value else self.stagger.value)
    )

    # Halves of dQ that the two consumers form: of the queries, or of the columns.
    by_rows = property(lambda self: gl.constexpr(self.block_m.value == 128))
    dq_columns = property(lambda self: gl.constexpr(self.d.value // (1 if self.by_rows.value else 2)))

    # Accumulators: of S^T and dP^T [64, block_m], of dK and dV [64, d], of half of dQ [64, dq_columns].
    s_layout = property(lambda self: _accumulator(self.block_m.value))
    d_layout = property(lambda self: _accumulator(self.d.value))
    dq_layout = property(lambda self: _accumulator(self.dq_columns.value))
    # P^T and dS^T as first operands of a product, in registers.
    p_layout = property(lambda self: gl.constexpr(gl.DotOperandLayout(0, self.d_layout.value, 2)))


class Memory(NamedTuple):
    """Buffers and barriers in shared memory; the protocol is in the module docstring."""

    k: gl.shared_memory_descriptor  # [2, 1, 1, 64, d], packed with one more 1, as the others
    v: gl.shared_memory_descriptor  # [2, 1, 1, 64, d]
    q: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m, d]
    do: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m, d]
    lse: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m]
    delta: gl.shared_memory_descriptor  # [STAGES, 1, 1, block_m]
    ds: gl.shared_memory_descriptor  # [4, 64, block_m]: buffer 0 of both consumers, buffer 1
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor


# ---------------------------------------------------------------- barriers


@gluon.jit
def _slot(j):
    return j & (STAGES - 1)


@gluon.jit
def _parity(j):
    return (j // STAGES) & 1


@gluon.constexpr_function
def _barrier_asm(operation, threads):
    return f"bar.{operation} $1, {threads}; mov.b32 $0, 0;"


@gluon.jit
def _named_barrier(operation: gl.constexpr, number, threads: gl.constexpr):
    gl.inline_asm_elementwise(
        _barrier_asm(operation, threads), "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _release(first: gl.constexpr, j):
    """This consumer needs Q, or dO, of block j no more."""
    _named_barrier("arrive", first + _slot(j), 288)


@gluon.jit
def _acquire(first: gl.constexpr, j):
    """Both consumers have released what lies where block j goes."""
    if j >= STAGES:
        _named_barrier("sync", first + _slot(j), 288)


@gluon.jit
def _tell_ds(j, WG: gl.constexpr):
    _named_barrier("arrive", DS_FULL + 2 * WG + (j & 1), 256)


@gluon.jit
def _await_ds(j, WG: gl.constexpr):
    """The other consumer has written its dS of block j; there is none of block -1."""
    if j >= 0:
        _named_barrier("sync", DS_FULL + 2 * (1 - WG) + (j & 1), 256)


# ---------------------------------------------------------------- producer


@gluon.jit
def _produce(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan: gl.constexpr):
    tile = tiling.locate(gl.program_id(0), work, plan)
    if tiling.seen(tile, plan):
        _copy(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, tile, work, plan)


@gluon.jit
def _copy_keys(desc, tile, bar, buffers, work, plan: gl.constexpr):
    """Of K or V, 64 rows into each buffer."""
    parts: gl.constexpr = plan.block_n // 64
    at = tiling.keys(tile, work, plan)
    mbarrier.expect(bar, parts * desc.block_type.nbytes)
    for w in gl.static_range(parts):
        tma.async_copy_global_to_shared(
            desc, tiling.coordinates(at, 0, tile.start + w * 64), bar, buffers.index(w)
        )


@gluon.jit
def _copy(desc_q, desc_k, desc_v, desc_do, desc_rows, mem, tile, work, plan: gl.constexpr):
    at_q = tiling.queries(tile, work, plan)
    n = (tile.m_end - tile.m_start) * work.GROUP
    q_bytes: gl.constexpr = desc_q.block_type.nbytes + desc_rows.block_type.nbytes
    do_bytes: gl.constexpr = desc_do.block_type.nbytes + desc_rows.block_type.nbytes
    _copy_keys(desc_k, tile, mem.k_full, mem.k, work, plan)
    m = tile.m_start
    g = 0
    for j in range(n):
        slot = _slot(j)
        bar = mem.q_full.index(slot)
        _acquire(Q_FREE, j)
        mbarrier.expect(bar, q_bytes)
        place = tiling.coordinates(at_q, g, m * plan.block_m)
        tma.async_copy_global_to_shared(desc_q, place, bar, mem.q.index(slot))
        tma.async_copy_global_to_shared(
            desc_rows, tiling.rows(tile, LSE2, g, m, work, plan), bar, mem.lse.index(slot)
        )
        if j == 0:
            _copy_keys(desc_v, tile, mem.v_full, mem.v, work, plan)
        bar = mem.do_full.index(slot)
        _acquire(DO_FREE, j)
        mbarrier.expect(bar, do_bytes)
        tma.async_copy_global_to_shared(desc_do, place, bar, mem.do.index(slot))
        tma.async_copy_global_to_shared(
            desc_rows, tiling.rows(tile, DELTA, g, m, work, plan), bar, mem.delta.index(slot)
        )
        m += 1
        if m == tile.m_end:
            m = tile.m_start
            g += 1


# ---------------------------------------------------------------- consumer


@gluon.jit
def _zero(j):
    """0, though the compiler doesn't know. Added to the number of a buffer that is the same in all steps, it
    keeps the addresses of its parts from being computed before the loop, dozens of registers."""
    return j >> 30


@gluon.jit
def _issue_scores(a, b, j, WG: gl.constexpr, plan: gl.constexpr):
    """Start K Q^T, or V dO^T: [64, D] x [D, BLOCK_M]."""
    zero = gl.zeros([64, plan.block_m], gl.float32, plan.s_layout)
    return warpgroup_mma(matrix(a, WG + _zero(j)), b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _issue_dq(mem, j, WG: gl.constexpr, plan: gl.constexpr):
    """Start this consumer's half of dQ of block j: [64, 128] x [128, DQ_COLUMNS], as two products."""
    dq = gl.zeros([64, plan.dq_columns], gl.float32, plan.dq_layout)
    for w in gl.static_range(2):
        ds = mem.ds.index((j & 1) * 2 + w)  # [64, BLOCK_M]: keys, queries
        k = matrix(mem.k, w + _zero(j + 1))  # [64, D]; j is -1 or more
        if plan.by_rows:
            ds = ds.slice(WG * 64, 64, 1)
        else:
            k = k.slice(WG * plan.dq_columns, plan.dq_columns, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def _write_ds(mem, ds_half, j, WG: gl.constexpr):
    mem.ds.index((j & 1) * 2 + WG).store(ds_half)
    fence_async_shared()
    _tell_ds(j, WG)


@gluon.constexpr_function
def _add_asm(n):
    """All n elements of a thread; n // 4 outputs of four bytes each that nobody reads."""
    outputs, values, pointer, wanted = 0, n // 4, n // 4 + n, n // 4 + 2 * n
    lines = [
        "{ .reg .pred q; .reg .b32 t; .reg .b64 a;",
        f"setp.eq.b32 q, ${wanted}, 0;",
        "@q bra DONE;",
        "mov.u32 t, %tid.x; and.b32 t, t, 127; shl.b32 t, t, 4; cvt.u64.u32 a, t;",
        f"add.s64 a, a, ${pointer};",
    ]
    for i in range(0, n, 4):
        four = ", ".join(f"${values + i + k}" for k in range(4))
        lines.append(f"red.global.add.v4.f32 [a + {i * 512}], {{{four}}};")
    lines.append("DONE:")
    lines += [f"mov.b32 ${outputs + i}, 0;" for i in range(n // 4)]
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _add_constraints(n):
    return ",".join(["=r"] * (n // 4) + ["f"] * n + ["l"] * n + ["r"] * n)


@gluon.jit
def _before(block, m, m_start, gap):
    """The block of queries of the step before: the one before this, or the last of the head before."""
    # Not a variable of the loop: the compiler finds these by comparing what a name stands for before the loop
    # and after one trip, and would take one that begins as `block` and is set to `block` for a constant.
    return block - 1 - gl.where(m == m_start, gap, 0)


@gluon.jit
def _add_dq(dq_ptr, block, dq, wanted, WG: gl.constexpr, plan: gl.constexpr):
    """Add [64, DQ_COLUMNS] to this consumer's half of a block, of [BLOCK_M / 64, D / 8, 512] in
    memory, as it lies in registers: four values of a thread, two columns of two rows, are 16 bytes, and the
    128 threads follow each other. Without `wanted`, do nothing."""
    n: gl.constexpr = plan.dq_columns // 2  # elements of dq in a thread
    offset = block.to(gl.int64) * (plan.block_m * plan.d) + WG * 64 * plan.dq_columns
    address = (dq_ptr + offset).to(gl.int64)
    gl.inline_asm_elementwise(
        _add_asm(n), _add_constraints(n), [dq, address, wanted.to(gl.int32)], dtype=gl.int8,
        is_pure=False, pack=n,
    )  # fmt: skip


@gluon.jit
def _here(x):
    """x, of 16 bits; what is computed from it is computed after this, not as soon as x is there."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )


@gluon.jit
def _store(desc, x, buffer, at, row):
    rows: gl.constexpr = buffer.shape[-2]
    columns: gl.constexpr = buffer.shape[-1]
    buffer.reshape([rows, columns]).store(x)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, tiling.coordinates(at, 0, row), buffer)


@gluon.jit
def _consume(desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, WG: gl.constexpr, plan: gl.constexpr):
    tile = tiling.locate(gl.program_id(0), work, plan)
    if tiling.seen(tile, plan):
        _visit(desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, tile, work, WG, plan)
    else:
        zeros = gl.zeros([64, plan.d], mem.k.dtype, plan.d_layout)
        at, row = tiling.keys(tile, work, plan), tile.start + WG * 64
        _store(desc_dv, zeros, mem.v.index(WG), at, row)
        tma.async_copy_shared_to_global(desc_dk, tiling.coordinates(at, 0, row), mem.v.index(WG))
        tma.store_wait(0)


@gluon.constexpr_function
def _wait_asm(clocks):
    return (
        "{ .reg .pred p; .reg .b32 first, now; mov.u32 first, %clock; AGAIN: mov.u32 now, %clock; "
        f"sub.u32 now, now, first; setp.lt.u32 p, now, {clocks}; @p bra AGAIN; mov.b32 $0, $1; }}"
    )


@gluon.jit
def _begin_later(n, plan: gl.constexpr):
    # A loop of the language's own, in a consumer's code, would make what follows it differ for each thread.
    gl.inline_asm_elementwise(
        _wait_asm(plan.delay), "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _visit(
    desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, tile, work, WG: gl.constexpr, plan: gl.constexpr
):
    """The queries that see the keys of this program."""
    dtype: gl.constexpr = mem.k.dtype
    n = (tile.m_end - tile.m_start) * work.GROUP
    row = tile.start + WG * 64  # first key
    block = tiling.first_sums(tile, work, plan)
    gap = tiling.gap(tile, work, plan)
    m = tile.m_start

    mbarrier.wait(mem.k_full, 0)
    mbarrier.wait(mem.q_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(_issue_scores(mem.k, matrix(mem.q, 0), 0, WG, plan),))
    mbarrier.wait(mem.v_full, 0)
    dk = gl.zeros([64, plan.d], gl.float32, plan.d_layout)
    dv = gl.zeros([64, plan.d], gl.float32, plan.d_layout)
    if WG * plan.delay > 0:
        _begin_later(n, plan)
    for j in range(n):
        slot = _slot(j)
        q = matrix(mem.q, slot)  # [BLOCK_M, D]
        do = matrix(mem.do, slot)  # [BLOCK_M, D]

        # 1. P and dS, while dP is under way.
        mbarrier.wait(mem.do_full.index(slot), _parity(j))
        dp_token = _issue_scores(mem.v, do, j, WG, plan)
        lse = mem.lse.index(slot).reshape([1, plan.block_m]).load(plan.s_layout)  # [1, BLOCK_M]
        p = gl.exp2(s * qk_scale - lse)  # [64, BLOCK_M]
        p = tiling.visible(p, row, m, tile, work, plan)
        p_half = gl.convert_layout(p.to(dtype), plan.p_layout)
        delta = mem.delta.index(slot).reshape([1, plan.block_m]).load(plan.s_layout)  # [1, BLOCK_M]
        dp = warpgroup_mma_wait(0, deps=(dp_token,))  # [64, BLOCK_M]
        if plan.half_p:
            p = gl.convert_layout(_here(p_half), plan.s_layout).to(gl.float32)
        ds_half = (p * (dp - delta)).to(dtype)  # [64, BLOCK_M]

        # 2. dV, dQ of the block before, dK, and S of the block after.
        dv_token = warpgroup_mma(p_half, do, dv, is_async=True)
        _await_ds(j - 1, WG)
        dq_token = _issue_dq(mem, j - 1, WG, plan)
        dv = warpgroup_mma_wait(2, deps=(dv_token,))
        _release(DO_FREE, j)
        dk_token = warpgroup_mma(gl.convert_layout(ds_half, plan.p_layout), q, dk, is_async=True)
        next_slot = _slot(j + 1)
        if j + 1 < n:
            mbarrier.wait(mem.q_full.index(next_slot), _parity(j + 1))
        s_token = _issue_scores(mem.k, matrix(mem.q, next_slot), j, WG, plan)
        dq = warpgroup_mma_wait(2, deps=(dq_token,))
        _write_ds(mem, ds_half, j, WG)
        # Not before the fence in there, which might wait for it.
        _add_dq(dq_ptr, _before(block, m, tile.m_start, gap), dq, j > 0, WG, plan)
        dk = warpgroup_mma_wait(1, deps=(dk_token,))
        _release(Q_FREE, j)
        s = warpgroup_mma_wait(0, deps=(s_token,))  # [64, BLOCK_M]

        block += 1
        m += 1
        if m == tile.m_end:
            m = tile.m_start
            block += gap

    _await_ds(n - 1, WG)
    dq_token = _issue_dq(mem, n - 1, WG, plan)
    at = tiling.keys(tile, work, plan)
    _store(desc_dv, dv.to(dtype), mem.v.index(WG), at, row)
    dq = warpgroup_mma_wait(0, deps=(dq_token,))
    _add_dq(dq_ptr, _before(block, m, tile.m_start, gap), dq, n > 0, WG, plan)
    tma.store_wait(0)
    _store(desc_dk, (dk * sm_scale).to(dtype), mem.v.index(WG), at, row)
    tma.store_wait(0)


# ---------------------------------------------------------------- kernel


NUMBERS = "S_q S_k H GROUP HEADS_KV SECTION num_m num_n right left B".split()


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["cu_q", "cu_k"])
def attention_backward_hopper(
    desc_q, desc_k, desc_v, desc_do,  # (B, H, S_q, D), (B, H_kv, S_k, D) twice, (B, H, S_q, D)
    desc_dk, desc_dv,  # (B, H_kv, S_k, D)
    desc_rows,  # (2, B * H, num_m * BLOCK_M), packed (2, H, ...), float32: LSE2, and delta
    dq_ptr,  # float32, see postprocess
    qk_scale,  # sm_scale * log2(e)
    sm_scale,
    S_q, S_k,  # of packed sequences the longest
    H,  # query heads
    GROUP,  # query heads that share one key/value head
    HEADS_KV,  # B * H_kv, packed H_kv
    SECTION,  # key/value heads that advance together
    num_m,  # query blocks of a head, unless packed
    num_n,  # key blocks of a head, packed of all sequences
    plan: gl.constexpr,
    right=None, left=None,  # keys that a query sees after and before its place, where `plan` has them
    cu_q=None, cu_k=None,  # where packed sequences begin and end (B + 1)
    B=None,  # packed sequences
):
    """dK, dV, and the sum of dQ / sm_scale over all key blocks, over descriptors of rank 4, packed 5; see the
    module docstring."""
    i_b = 0
    if plan.packed:
        # Before the program is divided among warps: the loop in there makes ptxas take what follows it for
        # different in each thread, and with it the addresses of a step.
        i_b, any_keys = tiling.sequence(gl.program_id(0), cu_k, B, num_n, HEADS_KV, SECTION, plan)
        if not any_keys:
            return
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
        barriers(1, 1).index(0),  # k_full
        barriers(1, 1).index(0),  # v_full
        barriers(STAGES, 1),  # q_full
        barriers(STAGES, 1),  # do_full
    )
    fence_async_shared()
    work = tiling.Work(
        S_q, S_k, H, GROUP, HEADS_KV, SECTION, num_m, num_n, right, left, cu_q, cu_k, i_b
    )  # fmt: skip
    # A consumer's number is a constant, so each has code of its own.
    gl.warp_specialize([
        (_consume, (desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, 0, plan)),
        (_consume, (desc_dk, desc_dv, dq_ptr, mem, qk_scale, sm_scale, work, 1, plan)),
        (_produce, (desc_q, desc_k, desc_v, desc_do, desc_rows, mem, work, plan)),
    ], [4, 1], [plan.consumer_registers, plan.producer_registers])
