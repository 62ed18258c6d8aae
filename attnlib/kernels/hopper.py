"""Exact attention, forward, for Hopper (sm_90a) in Gluon: TMA, warp specialization, asynchronous wgmma.

One persistent program per SM: W consumer warpgroups of 64 query rows each, and one producer warp that does
nothing but start copies. A tile is 64 W query rows of one head; keys are visited from the last visible block
down to key 0, so that the block on the diagonal comes first and the long loop has no mask. In that loop the
product P V runs one block late: P V of block c-1 is in flight with Q K^T of block c, before the softmax of
block c, which does not need it.

    Who waits for what

The ring. Slot c of the ring (at c % STAGES in memory) holds the keys of block c and the values of block c-1,
because a step uses these two together. c counts all blocks of all tiles of a program and never starts again.
The n-th completion of a barrier has parity n & 1, so a wait names c // STAGES; waiting for the completion
*before* the first one, which is what a fresh barrier seems to have done, returns at once.

    barrier          completes when                   waited for by            parity of the wait
    k_full[slot]     TMA has written K of slot c      each consumer            (c // STAGES) & 1
    v_full[slot]     TMA has written V of slot c      each consumer            (c // STAGES) & 1
    kv_free[slot]    W consumers have released c      producer, to fill        (c // STAGES) & 1, flipped:
                                                      c                        the release of c - STAGES
    q_full[w]        TMA has written Q of warpgroup w consumer w               tile number & 1
    q_free[w]        consumer w needs Q no more       producer                 tile number & 1, flipped
    drawn[b]         producer has written next_tile[b] each consumer           (tile number // 2) & 1

With JOINT, v_full[slot] is k_full[slot]: one barrier for both copies. With NAMED, kv_free is not an mbarrier
but the hardware's barrier 8 + slot, at which consumers arrive and the producer waits: an arrival at an mbarrier
costs a synchronization of the warpgroup first.

A consumer releases slot c when its Q K^T of block c and its P V of block c-1 are done; a block that its rows
do not see, when both copies have landed (otherwise the parity of a full barrier could come round under a
slow warpgroup). V of a tile's last block goes to the slot of the next tile's first keys, the one step of
which half is missing: there are no values for the first slot of all and no keys for the last.

next_tile has two places, and needs no barrier for their reuse: before the producer draws for tile number t,
it has waited for q_free of tile t-1, which every consumer gives after it has read what was drawn for t-2.

The producer draws the number of its next tile from a counter in global memory as late as it can, after the
last K of its tile: an early draw is a queue of one tile per SM, and leaves some with a long tile at the end.
The last draw of a launch sets the counter back to 0. Tiles are numbered so that long ones come first.
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

NAMED_BARRIER = gl.constexpr(8)  # the first of the hardware's 16 that Triton leaves alone here
LN2 = gl.constexpr(0.6931471805599453)


# ---------------------------------------------------------------- what is passed around


@dataclass(frozen=True)
class Plan:
    """Everything fixed at compile time: what the call asks for, and how it is computed.

    Attributes:
        d: columns of a tile, the head dimension or more: 64, 128 or 256.
        causal: query i sees keys 0 .. i + S_k - S_q.
        masked: blocks at the end of a row that need a mask: 0, 1 or 2.
        skip: the rows of one tile may end in different blocks.
        flip: sm_scale is negative: the maximum of the flipped scores is the one to track.
        store_lse: write the LSE.

    The others are those of `configs.HopperConfig`.
    """

    d: int
    causal: bool
    masked: int
    skip: bool
    flip: bool
    store_lse: bool
    block_n: int
    warpgroups: int
    stages: int
    q_columns: int
    o_columns: int
    spread: bool
    o_wait: int
    pin: bool
    lazy: int
    tree: bool
    alpha_fma: bool
    joint: bool
    named: bool
    ones: bool
    consumer_registers: int
    producer_registers: int

    def __post_init__(self):
        # The compiler wants its constants wrapped.
        for field in fields(self):
            object.__setattr__(self, field.name, gl.constexpr(getattr(self, field.name)))

    block_m = property(lambda self: gl.constexpr(64 * self.warpgroups.value))

    # Accumulators: of Q K^T [64, block_n], of P V [64, d].
    s_layout = property(lambda self: _accumulator(self.block_n.value))
    o_layout = property(lambda self: _accumulator(self.d.value))
    # P and Q as first operands of a product, in registers.
    p_layout = property(lambda self: gl.constexpr(gl.DotOperandLayout(0, self.o_layout.value, 2)))
    q_layout = property(lambda self: gl.constexpr(gl.DotOperandLayout(0, self.s_layout.value, 2)))
    l_layout = property(lambda self: _accumulator(8))
    # A value per row [64].
    row_layout = property(lambda self: gl.constexpr(gl.SliceLayout(1, self.s_layout.value)))


def _accumulator(columns):
    return gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16]))


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


class Memory(NamedTuple):
    """Buffers and barriers in shared memory; the protocol is in the module docstring."""

    q: gl.shared_memory_descriptor  # [warpgroups, 1, 1, 64, d]
    k: gl.shared_memory_descriptor  # [stages, 1, 1, block_n, d]
    v: gl.shared_memory_descriptor  # [stages, 1, 1, block_n, d]
    o: gl.shared_memory_descriptor  # [warpgroups, 1, 1, 64, o_columns]
    next_tile: gl.shared_memory_descriptor  # [2, 1]
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    kv_free: gl.shared_memory_descriptor
    drawn: gl.shared_memory_descriptor
    ones: gl.shared_memory_descriptor  # [8, block_n]


@gluon.jit
def _blocks(end, work, plan: gl.constexpr):
    """Blocks of keys that the rows before `end` see; one, all masked, where they see none."""
    visible = work.S_k
    if plan.causal:
        visible = gl.minimum(gl.maximum(end + work.S_k - work.S_q, 0), work.S_k)
    return gl.maximum(gl.cdiv(visible, plan.block_n), 1)


@gluon.jit
def _locate(tile, work, plan: gl.constexpr):
    """(row block, batch * H + head, blocks of keys) of a tile: section of heads by section, so that their keys
    and values stay in L2, and within one the last, longest rows first."""
    section = tile // (work.num_m * work.SECTION)
    rest = tile % (work.num_m * work.SECTION)
    heads = gl.minimum(work.SECTION, work.HEADS - section * work.SECTION)
    i_m = work.num_m - 1 - rest // heads
    i_bh = section * work.SECTION + rest % heads
    return i_m, i_bh, _blocks((i_m + 1) * plan.block_m, work, plan)


@gluon.jit
def _barriers(N: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def _buffers(desc, N: gl.constexpr):
    rows: gl.constexpr = desc.block_shape[2]
    columns: gl.constexpr = desc.block_shape[3]
    return gl.allocate_shared_memory(desc.dtype, [N, 1, 1, rows, columns], desc.layout)


@gluon.jit
def _ones(dtype: gl.constexpr, plan: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    N: gl.constexpr = 8
    ones = gl.allocate_shared_memory(dtype, [N, plan.block_n], layout)
    if plan.ones:
        ones.store(gl.full([N, plan.block_n], 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    return ones


@gluon.jit
def _matrix(buffers, i):
    """Buffer i without its two leading dimensions of 1."""
    rows: gl.constexpr = buffers.shape[3]
    columns: gl.constexpr = buffers.shape[4]
    return buffers.index(i).reshape([rows, columns])


# ---------------------------------------------------------------- the ring


@gluon.constexpr_function
def _is_power_of_two(n):
    return n & (n - 1) == 0


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.jit
def _slot(c, plan: gl.constexpr):
    if _is_power_of_two(plan.stages):
        return c & (plan.stages - 1)
    else:
        return c % plan.stages


@gluon.jit
def _parity(c, plan: gl.constexpr):
    if _is_power_of_two(plan.stages):
        return (c >> _log2(plan.stages)) & 1
    else:
        return (c // plan.stages) & 1


@gluon.constexpr_function
def _barrier_asm(operation, threads):
    return f"bar.{operation} $1, {threads}; mov.b32 $0, 0;"


@gluon.jit
def _named_barrier(operation: gl.constexpr, c, plan: gl.constexpr):
    threads: gl.constexpr = 32 + 128 * plan.warpgroups
    gl.inline_asm_elementwise(
        _barrier_asm(operation, threads), "=r,r", [NAMED_BARRIER + _slot(c, plan)], dtype=gl.int32,
        is_pure=False, pack=1,
    )


@gluon.jit
def _wait_k(mem, c, plan: gl.constexpr):
    mbarrier.wait(mem.k_full.index(_slot(c, plan)), _parity(c, plan))


@gluon.jit
def _wait_v(mem, c, plan: gl.constexpr):
    mbarrier.wait(mem.v_full.index(_slot(c, plan)), _parity(c, plan))


@gluon.jit
def _release(mem, c, plan: gl.constexpr):
    if plan.named:
        _named_barrier("arrive", c, plan)
    else:
        mbarrier.arrive(mem.kv_free.index(_slot(c, plan)), count=1)


@gluon.jit
def _acquire(mem, c, plan: gl.constexpr):
    if plan.named:
        if c >= plan.stages:
            _named_barrier("sync", c, plan)
    else:
        mbarrier.wait(mem.kv_free.index(_slot(c, plan)), _parity(c, plan) ^ 1)


# ---------------------------------------------------------------- producer


@gluon.jit
def _copy_k(desc_k, mem, c, i_b, i_kv, block, EXTRA: gl.constexpr, plan: gl.constexpr):
    bar = mem.k_full.index(_slot(c, plan))
    mbarrier.expect(bar, desc_k.block_type.nbytes + EXTRA)
    tma.async_copy_global_to_shared(
        desc_k, [i_b, i_kv, block * plan.block_n, 0], bar, mem.k.index(_slot(c, plan))
    )


@gluon.jit
def _copy_v(desc_v, mem, c, i_b, i_kv, block, EXPECT: gl.constexpr, plan: gl.constexpr):
    bar = mem.v_full.index(_slot(c, plan))
    if EXPECT:
        mbarrier.expect(bar, desc_v.block_type.nbytes)
    tma.async_copy_global_to_shared(
        desc_v, [i_b, i_kv, block * plan.block_n, 0], bar, mem.v.index(_slot(c, plan))
    )


@gluon.jit
def _draw(counter_ptr, mem, turn, tiles):
    """The next tile of this program; told to the consumers."""
    b = turn & 1
    number = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    if number == tiles - 1:  # every program draws once in vain, so there are as many draws as tiles
        gl.store(counter_ptr, 0)
    tile = number + gl.num_programs(0)
    mem.next_tile.index(b).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(mem.drawn.index(b), count=1)
    return tile


@gluon.jit
def _produce(desc_q, desc_k, desc_v, counter_ptr, mem, work, plan: gl.constexpr):
    k_bytes: gl.constexpr = desc_k.block_type.nbytes
    v_extra: gl.constexpr = k_bytes if plan.joint else 0
    alone: gl.constexpr = not plan.joint
    tile = gl.program_id(0)
    turn = 0  # number of the tile within this program
    c = 0  # slot of the tile's first keys
    i_m, i_bh, n = _locate(tile, work, plan)
    i_b = i_bh // work.H
    i_kv = i_bh % work.H // work.GROUP
    _copy_k(desc_k, mem, 0, i_b, i_kv, n - 1, 0, plan)
    if not plan.joint:
        mbarrier.arrive(mem.v_full.index(0), count=1)  # the first slot of all has no values to wait for
    while tile < work.tiles:
        i_h = i_bh % work.H
        for w in gl.static_range(plan.warpgroups):
            mbarrier.wait(mem.q_free.index(w), (turn & 1) ^ 1)
            mbarrier.expect(mem.q_full.index(w), desc_q.block_type.nbytes)
            tma.async_copy_global_to_shared(
                desc_q, [i_b, i_h, i_m * plan.block_m + w * 64, 0], mem.q_full.index(w), mem.q.index(w)
            )
        for i in range(1, n):
            _acquire(mem, c + i, plan)
            _copy_k(desc_k, mem, c + i, i_b, i_kv, n - 1 - i, v_extra, plan)
            _copy_v(desc_v, mem, c + i, i_b, i_kv, n - i, alone, plan)
        tile = _draw(counter_ptr, mem, turn, work.tiles)
        turn += 1
        c += n
        _acquire(mem, c, plan)
        b_v = i_b
        kv_v = i_kv
        if tile < work.tiles:
            i_m, i_bh, n = _locate(tile, work, plan)
            i_b = i_bh // work.H
            i_kv = i_bh % work.H // work.GROUP
            _copy_k(desc_k, mem, c, i_b, i_kv, n - 1, v_extra, plan)
            _copy_v(desc_v, mem, c, b_v, kv_v, 0, alone, plan)
        else:
            _copy_v(desc_v, mem, c, b_v, kv_v, 0, True, plan)


# ---------------------------------------------------------------- softmax of one block


@gluon.jit
def _row_max(s, plan: gl.constexpr):
    """Largest score of each row of a block: [64, BLOCK_N] -> [64]."""
    if plan.tree:
        # As a tree within the thread, instead of a chain as long as the row.
        r = gl.max(s.reshape([64, plan.block_n // 8, 4, 2]), 3)
        if plan.block_n >= 128:
            r = gl.max(r.reshape([64, 8, 2, 4]), 2)
        r = gl.max(r.reshape([64, 4, 2, 4]), 2)
        r = gl.max(gl.max(r.reshape([64, 2, 2, 4]), 2), 1)
        return gl.convert_layout(gl.max(r, 1), plan.row_layout)
    else:
        return gl.max(s, 1)


@gluon.jit
def _row_sum(p):
    """[64, N] -> [64, 4]: the four threads that share a row add up what each of them has. They meet only at
    the end of the tile, so that no block pays for a shuffle."""
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([64, N // 8, 4, 2]), 3), 1)


@gluon.jit
def _mask(s, row, first, work, plan: gl.constexpr):
    """-inf for keys that a row does not see; `row` is the first row, `first` the first key."""
    o_n = gl.arange(0, plan.block_n, layout=gl.SliceLayout(0, plan.s_layout))  # [BLOCK_N]
    if plan.causal:
        o_m = gl.arange(0, 64, layout=plan.row_layout)  # [64]
        seen = o_n[None, :] <= (o_m + (row + work.S_k - work.S_q - first))[:, None]  # [64, BLOCK_N]
    else:
        seen = (o_n < work.S_k - first)[None, :]  # [1, BLOCK_N]
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _exp2_fma(x):
    """2**x for x <= 0 without the exponential unit: 2**i * 2**f, i an integer and |f| <= 1/2, the second by a
    polynomial of degree 5 (relative error 2e-7, exactly 1 at 0)."""
    x = gl.maximum(x, -126.0)
    r = x + 12582912.0  # 1.5 * 2**23: the integer part moves to the last bits
    f = x - (r - 12582912.0)
    y = 1.3264727080117051e-3 * f + 9.671512862185906e-3
    y = y * f + 5.5507337456457430e-2
    y = y * f + 2.4022242081843218e-1
    y = y * f + 6.9314697659758850e-1
    y = y * f + 1.0
    return (y.to(gl.int32, bitcast=True) + (r.to(gl.int32, bitcast=True) << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def _any_in_warp(flag):
    """1 in all rows of a warp where `flag` [64] is not 0 in one of them. A thread has two rows: pack=2."""
    asm: gl.constexpr = """{
        .reg .pred q;
        setp.ne.b32 q, $2, 0;
        setp.ne.or.b32 q, $3, 0, q;
        vote.sync.any.pred q, q, 0xffffffff;
        selp.b32 $0, 1, 0, q;
        mov.b32 $1, $0;
    }"""
    return gl.inline_asm_elementwise(asm, "=r,=r,r,r", [flag], dtype=gl.int32, is_pure=False, pack=2)


@gluon.constexpr_function
def _branch_asm(n):
    keep = "".join(f"mov.b32 ${i}, ${n + i};" for i in range(n))
    scale = "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"{{ .reg .pred q; setp.ne.b32 q, ${3 * n}, 0; {keep} @!q bra DONE; {scale} DONE: }}"


@gluon.constexpr_function
def _branch_constraints(n):
    return ",".join(["=f"] * n + ["f"] * (2 * n) + ["r"] * n)


@gluon.jit
def _rows_of_o(x, acc, plan: gl.constexpr):
    """A value per row [64] for each element of the output [64, D]."""
    x, _ = gl.broadcast(gl.convert_layout(x, gl.SliceLayout(1, plan.o_layout))[:, None], acc)
    return x


@gluon.jit
def _rescale(acc, alpha, changed, plan: gl.constexpr):
    """acc * alpha [64, D]. Lazily: each warp branches around the products where none of its rows changed."""
    if plan.lazy:
        n: gl.constexpr = plan.d // 2  # elements of acc in a thread
        return gl.inline_asm_elementwise(
            _branch_asm(n), _branch_constraints(n),
            [acc, _rows_of_o(alpha, acc, plan), _rows_of_o(changed, acc, plan)], dtype=gl.float32,
            is_pure=False, pack=n,
        )
    else:
        return acc * _rows_of_o(alpha, acc, plan)


@gluon.jit
def _new_shift(s, shift, qk_scale, MASKED: gl.constexpr, plan: gl.constexpr):
    """(new shift [64], alpha = 2**(old - new) [64], whether a row of the warp changed [64]).

    The shift is what the exponents are reduced by: P = 2**(s * qk_scale - shift). It is the running row
    maximum of s * qk_scale, -inf before the first key; with LAZY it follows the maximum only when that has
    grown by more than LAZY. P stays below 2**LAZY then, l and O are in the same units, and nothing is lost
    but a rescaling of O at every little step.
    """
    top = _row_max(s, plan)  # [64]
    changed = 0
    if plan.lazy:
        grown = top * qk_scale - shift > plan.lazy  # not where both are -inf
        new = gl.where(grown, top * qk_scale, shift)
        changed = _any_in_warp(grown.to(gl.int32))
    else:
        new = gl.maximum(shift, top * qk_scale)
    step = shift - new
    if MASKED:
        step = gl.where(new == float("-inf"), 0.0, step)
    if plan.alpha_fma:
        alpha = _exp2_fma(step)
    else:
        alpha = gl.exp2(step)
    return new, alpha, changed


@gluon.jit
def _weights(s, shift, qk_scale, MASKED: gl.constexpr):
    """P = 2**(s * qk_scale - shift) [64, N]; 0 in a row that has seen no key and has a shift of -inf."""
    if MASKED:
        shift = gl.where(shift == float("-inf"), 0.0, shift)
    shift = gl.convert_layout(shift, gl.SliceLayout(1, s.type.layout))
    return gl.exp2(s * qk_scale - shift[:, None])


# ---------------------------------------------------------------- consumer


@gluon.jit
def _pin(x):
    """x, and a side effect that depends on it but only happens to NaN, where it is harmless (a profiler's
    event): ptxas would otherwise move a wait for the tensor cores up, above what was to run beside them."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred q; setp.nan.f32 q, $1, $1; @q pmevent 0; mov.b32 $0, $1; }", "=f,f", [x],
        dtype=gl.float32, is_pure=False, pack=1,
    )


@gluon.jit
def _issue_scores(q_registers, mem, c, WG: gl.constexpr, plan: gl.constexpr):
    """Start Q K^T of block c: [64, BLOCK_N]. The first Q_COLUMNS columns of Q come from registers, which
    halves the shared memory that their product reads."""
    zero = gl.zeros([64, plan.block_n], gl.float32, plan.s_layout)
    q = _matrix(mem.q, WG)  # [64, D]
    k = _matrix(mem.k, _slot(c, plan))  # [BLOCK_N, D]
    if plan.q_columns == 0:
        return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    elif plan.q_columns == plan.d:
        return warpgroup_mma(q_registers, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        rest: gl.constexpr = plan.d - plan.q_columns
        k_left = k.slice(0, plan.q_columns, 1).permute((1, 0))
        k_right = k.slice(plan.q_columns, rest, 1).permute((1, 0))
        part = warpgroup_mma(q_registers, k_left, zero, use_acc=False, is_async=True)
        return warpgroup_mma(q.slice(plan.q_columns, rest, 1), k_right, part, is_async=True)


@gluon.jit
def _issue_output(p, acc, mem, c, plan: gl.constexpr):
    """Start acc += P V, V of slot c: [64, BLOCK_N] x [BLOCK_N, D]."""
    return warpgroup_mma(p, _matrix(mem.v, _slot(c, plan)), acc, is_async=True)


@gluon.jit
def _issue_sums(p, l, mem, plan: gl.constexpr):
    """Start l += P 1, the row sums as one more product: [64, BLOCK_N] x [BLOCK_N, 8]."""
    if plan.ones:
        return warpgroup_mma(p, mem.ones.permute((1, 0)), l, is_async=True)
    else:
        return l


@gluon.jit
def _wait_output(o_token, l_token, alpha, changed, mem, c, plan: gl.constexpr):
    """O and l of the blocks before, in the units of the new shift; slot c is free."""
    if plan.ones:
        acc, l = warpgroup_mma_wait(0, deps=(o_token, l_token))
    else:
        acc = warpgroup_mma_wait(0, deps=(o_token,))
        l = l_token
    _release(mem, c, plan)
    if plan.ones:
        l = l * gl.convert_layout(alpha, gl.SliceLayout(1, plan.l_layout))[:, None]
    return _rescale(acc, alpha, changed, plan), l


@gluon.jit
def _add_sums(l, weights, plan: gl.constexpr):
    if plan.ones:
        return l
    else:
        return l + gl.convert_layout(_row_sum(weights), l.type.layout)


@gluon.jit
def _halves(x):
    """Left and right half of the columns, without moving anything between threads."""
    N: gl.constexpr = x.shape[1]
    return gl.split(x.reshape([64, 2, N // 2]).permute((0, 2, 1)))


@gluon.jit
def _whole(left, right):
    N: gl.constexpr = left.shape[1]
    return gl.join(left, right).permute((0, 2, 1)).reshape([64, 2 * N])


@gluon.jit
def _step(q_registers, p, acc, shift, l, row, first, c, masked, mem, qk_scale, work, WG: gl.constexpr,
          plan: gl.constexpr):
    """Block c of a tile: its scores and softmax, and P V of the block before it.

    p: P of the block before [64, BLOCK_N]; acc: [64, D]; shift: [64]; l: [64, 4]. Returns the new four.
    """
    dtype: gl.constexpr = mem.v.dtype
    MASKED: gl.constexpr = plan.masked == 2
    _wait_k(mem, c, plan)
    s_token = _issue_scores(q_registers, mem, c, WG, plan)
    if not plan.joint:
        _wait_v(mem, c, plan)
    if plan.spread:  # ptxas then spreads the issue of P V over the softmax
        s = warpgroup_mma_wait(0, deps=(s_token,))
        o_token = _issue_output(p, acc, mem, c, plan)
        l = _issue_sums(p, l, mem, plan)
    else:
        o_token = _issue_output(p, acc, mem, c, plan)
        l = _issue_sums(p, l, mem, plan)
        s = warpgroup_mma_wait(2 if plan.ones else 1, deps=(s_token,))
    if plan.flip:
        s = -s
    if MASKED:
        if masked:
            s = _mask(s, row, first, work, plan)
    shift, alpha, changed = _new_shift(s, shift, qk_scale, MASKED, plan)
    if not plan.ones:
        l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None]
    if plan.o_wait == 0:
        if plan.pin:
            shift = _pin(shift)
        acc, l = _wait_output(o_token, l, alpha, changed, mem, c, plan)
        weights = _weights(s, shift, qk_scale, MASKED)
        l = _add_sums(l, weights, plan)
        p = weights.to(dtype)
    elif plan.o_wait == 1:
        left, right = _halves(s)
        left = _weights(left, shift, qk_scale, MASKED)
        l = _add_sums(l, left, plan)
        if plan.pin:
            if plan.ones:
                shift = _pin(shift)
            else:
                l = _pin(l)
        acc, l = _wait_output(o_token, l, alpha, changed, mem, c, plan)
        right = _weights(right, shift, qk_scale, MASKED)
        l = _add_sums(l, right, plan)
        p = _whole(left.to(dtype), right.to(dtype))
    else:
        weights = _weights(s, shift, qk_scale, MASKED)
        if plan.ones:
            if plan.pin:
                shift = _pin(shift)
        else:
            l = _add_sums(l, weights, plan)
            if plan.pin:
                l = _pin(l)
        acc, l = _wait_output(o_token, l, alpha, changed, mem, c, plan)
        p = weights.to(dtype)
    return gl.convert_layout(p, plan.p_layout), acc, shift, l


@gluon.jit
def _store_output(desc_o, o, mem, i_b, i_h, row, WG: gl.constexpr, plan: gl.constexpr):
    """Through shared memory, at once or in two halves; the copy of the tile before must have left it."""
    out = mem.o.index(WG)
    if plan.o_columns == plan.d:
        tma.store_wait(0)
        _matrix(mem.o, WG).store(o)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc_o, [i_b, i_h, row, 0], out)
    else:
        left, right = _halves(o)
        tma.store_wait(0)
        _matrix(mem.o, WG).store(left)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc_o, [i_b, i_h, row, 0], out)
        tma.store_wait(0)
        _matrix(mem.o, WG).store(right)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc_o, [i_b, i_h, row, plan.o_columns], out)


@gluon.jit
def _consume(desc_o, lse_ptr, mem, qk_scale, work, WG: gl.constexpr, plan: gl.constexpr):
    dtype: gl.constexpr = mem.v.dtype
    tile = gl.program_id(0)
    turn = 0  # number of the tile within this program
    c = 0  # slot of the tile's first keys
    while tile < work.tiles:
        i_m, i_bh, n = _locate(tile, work, plan)
        row = i_m * plan.block_m + WG * 64
        end = c + n  # slot of the next tile's first keys, and of this tile's last values
        start = c
        first = (n - 1) * plan.block_n  # first key of the block of slot `start`

        mbarrier.wait(mem.q_full.index(WG), turn & 1)
        q_registers = 0
        if plan.q_columns == plan.d:
            q_registers = _matrix(mem.q, WG).load(plan.q_layout)  # [64, D]
            mbarrier.arrive(mem.q_free.index(WG), count=1)
        elif plan.q_columns > 0:
            q_registers = _matrix(mem.q, WG).slice(0, plan.q_columns, 1).load(plan.q_layout)

        if plan.skip:  # blocks that other warpgroups' rows see and these do not
            own = _blocks(row + 64, work, plan)
            start = end - own
            first = (own - 1) * plan.block_n
            for i in range(c, start):
                _wait_k(mem, i, plan)
                if not plan.joint:
                    if i > c:
                        _wait_v(mem, i, plan)
                _release(mem, i, plan)

        # 1. The last block that these rows see. Its slot's values are of a block that was skipped, or
        # of the tile before.
        _wait_k(mem, start, plan)
        s_token = _issue_scores(q_registers, mem, start, WG, plan)
        if plan.skip:
            if not plan.joint:
                if start > c:
                    _wait_v(mem, start, plan)
        s = warpgroup_mma_wait(0, deps=(s_token,))
        _release(mem, start, plan)
        if plan.flip:
            s = -s
        if plan.masked:
            s = _mask(s, row, first, work, plan)
        shift = _row_max(s, plan) * qk_scale  # [64]
        weights = _weights(s, shift, qk_scale, plan.masked > 0)
        if plan.ones:
            l = gl.zeros([64, 8], gl.float32, plan.l_layout)
        else:
            l = _row_sum(weights)  # [64, 4]
        p = gl.convert_layout(weights.to(dtype), plan.p_layout)
        acc = gl.zeros([64, plan.d], gl.float32, plan.o_layout)
        start += 1

        # 2. The blocks before it. Where the diagonal misses the corners of the blocks, 64 rows cross it in
        # two of them, and the first of these needs a mask too.
        for i in range(start, end):
            p, acc, shift, l = _step(q_registers, p, acc, shift, l, row, first - plan.block_n, i, i == start, mem,
                                     qk_scale, work, WG, plan)
        if plan.q_columns < plan.d:
            mbarrier.arrive(mem.q_free.index(WG), count=1)

        # 3. The last P V, and what can be done beside it.
        c = end
        _wait_v(mem, c, plan)
        o_token = _issue_output(p, acc, mem, c, plan)
        l = _issue_sums(p, l, mem, plan)
        if not plan.ones:
            l_row = gl.convert_layout(gl.sum(l, 1), plan.row_layout)  # [64]
        b = turn & 1
        mbarrier.wait(mem.drawn.index(b), (turn >> 1) & 1)
        tile = gl.max(mem.next_tile.index(b).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        turn += 1
        if plan.ones:
            acc, l = warpgroup_mma_wait(0, deps=(o_token, l))
            l_row = gl.convert_layout(gl.max(l, 1), plan.row_layout)  # all 8 columns are the same
        else:
            acc = warpgroup_mma_wait(0, deps=(o_token,))
        # A row with nothing to attend to has l = 0: its output is 0 and its LSE -inf.
        empty = l_row == 0.0
        if plan.store_lse:
            o_m = row + gl.arange(0, 64, layout=plan.row_layout)  # [64]
            lse = (shift + gl.log2(l_row)) * LN2
            lse = gl.where(empty, float("-inf"), lse)
            gl.store(lse_ptr + i_bh.to(gl.int64) * work.S_q + o_m, lse, mask=o_m < work.S_q)
        if row < work.S_q:
            o = acc * _rows_of_o(1.0 / gl.where(empty, 1.0, l_row), acc, plan)  # [64, D]
            _store_output(desc_o, o.to(dtype), mem, i_bh // work.H, i_bh % work.H, row, WG, plan)
    tma.store_wait(0)


# ---------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["S_q", "S_k", "H", "GROUP", "HEADS", "SECTION", "num_m", "tiles"])
def attention_forward_hopper(
    desc_q, desc_k, desc_v, desc_o,  # (B, H, S_q, D), (B, H_kv, S_k, D) twice, (B, H, S_q, D)
    lse_ptr,  # (B, H, S_q)
    counter_ptr,  # one int32, 0 before and after a launch
    qk_scale,  # |sm_scale| * log2(e), positive
    S_q, S_k,
    H,  # query heads
    GROUP,  # query heads that share one key/value head
    HEADS,  # B * H
    SECTION,  # heads that advance together
    num_m,  # row blocks of a head
    tiles,  # num_m * HEADS
    plan: gl.constexpr,
):
    """out = softmax(sm_scale * Q K^T) V over descriptors of rank 4; see the module docstring."""
    ones = _ones(desc_v.dtype, plan)
    k_full = _barriers(plan.stages, 1)
    v_full = k_full
    if not plan.joint:
        v_full = _barriers(plan.stages, 1)
    mem = Memory(
        _buffers(desc_q, plan.warpgroups),
        _buffers(desc_k, plan.stages),
        _buffers(desc_v, plan.stages),
        _buffers(desc_o, plan.warpgroups),
        gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        _barriers(plan.warpgroups, 1),  # q_full
        _barriers(plan.warpgroups, 1),  # q_free
        k_full,
        v_full,
        _barriers(plan.stages, plan.warpgroups),  # kv_free
        _barriers(2, 1),  # drawn
        ones,
    )
    fence_async_shared()
    work = Work(S_q, S_k, H, GROUP, HEADS, SECTION, num_m, tiles)
    # A consumer's number is a constant, so each has code of its own.
    regs: gl.constexpr = plan.consumer_registers
    if plan.warpgroups == 2:
        gl.warp_specialize([
            (_consume, (desc_o, lse_ptr, mem, qk_scale, work, 0, plan)),
            (_consume, (desc_o, lse_ptr, mem, qk_scale, work, 1, plan)),
            (_produce, (desc_q, desc_k, desc_v, counter_ptr, mem, work, plan)),
        ], [4, 1], [regs, plan.producer_registers])
    elif plan.warpgroups == 3:
        gl.warp_specialize([
            (_consume, (desc_o, lse_ptr, mem, qk_scale, work, 0, plan)),
            (_consume, (desc_o, lse_ptr, mem, qk_scale, work, 1, plan)),
            (_consume, (desc_o, lse_ptr, mem, qk_scale, work, 2, plan)),
            (_produce, (desc_q, desc_k, desc_v, counter_ptr, mem, work, plan)),
        ], [4, 4, 1], [regs, regs, plan.producer_registers])
    else:
        gl.warp_specialize([
            (_consume, (desc_o, lse_ptr, mem, qk_scale, work, 0, plan)),
            (_consume, (desc_o, lse_ptr, mem, qk_scale, work, 1, plan)),
            (_consume, (desc_o, lse_ptr, mem, qk_scale, work, 2, plan)),
            (_consume, (desc_o, lse_ptr, mem, qk_scale, work, 3, plan)),
            (_produce, (desc_q, desc_k, desc_v, counter_ptr, mem, work, plan)),
        ], [4, 4, 4, 1], [regs, regs, regs, plan.producer_registers])
