"""Solutions of chapter 13."""

import heapq
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from attnlib.book import lesson

thirteen = lesson.load_kernel("13_scheduling")
ten, eleven, twelve = thirteen.ten, thirteen.eleven, thirteen.twelve


def snake(jobs, workers):
    """Rounds dealt forward and backward in turn. Helps where a round is sorted; at D = 256 it isn't."""
    hands = [[] for _ in range(workers)]
    for job in range(jobs):
        turn, place = divmod(job, workers)
        hands[place if turn % 2 == 0 else workers - 1 - place].append(job)
    return hands


def section_heads(seqlen, head_dim, heads, budget):
    """The widest section whose K and V fit the budget and which divides the heads; at least one head."""
    for width in range(heads, 1, -1):
        if heads % width == 0 and 4 * width * seqlen * head_dim <= budget:
            return width
    return 1


def bad_for_early(workers):
    """One long job, short ones for everybody else twice over, and a long one that queues behind the first.

    At time 0 all draw twice. The second draws go in the order in which the first jobs end, so the worker with
    the long job draws last. Early it ends at 20. Late, somebody is free at 2 and ends at 12. Longest first
    helps because the job behind a long one is then no longer than it, and late jobs are short; within a
    section the sum of two is still small against a launch of many rounds. It does not help from one section
    to the next, where a short job is followed by a long one.
    """
    return [10.0] + [1.0] * (2 * workers - 2) + [10.0]


def choose(work, heads, mib, fits, price):
    """All pairs, one launch each. The package tries fewer, and follows the last 16 jobs of an SM only.

    D = 96, 4000: free of charge (1, 4), a last section of 28 heads and 87 MiB. With the price (4, 28), equal
    sections of 4, which was timed at 1.006 times FA3, beside 1.011 of 4, then 8. The model cannot tell the
    two apart, and in the table's last row it is wrong by 3%.
    """

    def end(section, last):
        lengths, first = [], 0
        while first < heads:
            together = heads - first if first >= last else section
            slower = 1 + price * max(together * mib - fits, 0)
            lengths += [length * slower for length in work for _ in range(together)]
            first += together
        free = [0.0] * 132
        for length in lengths:
            heapq.heapreplace(free, free[0] + length)
        return max(free)

    sections = [1 << n for n in range(heads.bit_length())]
    pairs = [(section, last) for section in sections for last in range(0, heads, section)]
    return min(pairs, key=lambda pair: end(*pair))


@triton.jit
def order_kernel(jobs_ptr, blocks, HEADS, SECTION, LAST):
    """Heads before a section have `blocks` jobs each; what is left is counted across its own."""
    number = tl.program_id(0)
    first = tl.minimum(number // (blocks * SECTION) * SECTION, LAST)
    heads = tl.where(first == LAST, HEADS - LAST, SECTION)
    rest = number - first * blocks
    tl.store(jobs_ptr + 2 * number, rest // heads)
    tl.store(jobs_ptr + 2 * number + 1, first + rest % heads)


def order(blocks, heads, section, last):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    jobs = torch.full((blocks * heads, 2), -1, dtype=torch.int32, device=device)
    order_kernel[(len(jobs),)](jobs, blocks, heads, section, last)
    return jobs


class OwnedStorage(NamedTuple):  # thirteen.SharedStorage without what draws jobs
    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    k_free: gl.shared_memory_descriptor
    v_free: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor  # [CONSUMERS, 1, 64, D]


@gluon.jit
def owned_consume(o_desc, mem, S, qk_scale, HEADS, JOBS, W: gl.constexpr, CAUSAL: gl.constexpr):
    BLOCK_N: gl.constexpr = mem.k.shape[2]
    D: gl.constexpr = mem.q.shape[3]
    s_layout: gl.constexpr = ten.accumulator(BLOCK_N)
    o_layout: gl.constexpr = ten.accumulator(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)  # P: first operand, in registers
    b_zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)  # [64, BLOCK_N]
    job, turn, c = gl.program_id(0), 0, 0
    while job < JOBS:
        i_m, i_h, tiles = thirteen.locate(job, S, HEADS, HEADS, 128, BLOCK_N, CAUSAL)
        row = i_m * 128 + W * 64
        b_m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))  # [64]
        b_l = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))  # [64]
        b_o = gl.zeros([64, D], gl.float32, o_layout)  # [64, D]
        mbarrier.wait(mem.q_full.index(W), turn & 1)
        b_s = twelve.finish(twelve.start_scores(mem, c, W, b_zero), mem.k_free, c, 0)  # [64, BLOCK_N]
        b_s = ten.mask(b_s, row, (tiles - 1) * BLOCK_N, S, CAUSAL)
        b_p, b_alpha, b_m, b_l = ten.softmax_tile(b_s, b_m, b_l, qk_scale)  # [64, BLOCK_N], [64]
        b_p = gl.convert_layout(b_p.to(mem.v.dtype), p_layout)
        for i in range(1, tiles):
            scores = twelve.start_scores(mem, c + i, W, b_zero)
            values = twelve.start_values(mem, c + i - 1, b_p, b_o)
            b_s = twelve.finish(scores, mem.k_free, c + i, 1)
            if i < (127 + BLOCK_N) // BLOCK_N:
                b_s = ten.mask(b_s, row, (tiles - 1 - i) * BLOCK_N, S, CAUSAL)
            b_p, b_alpha, b_m, b_l = ten.softmax_tile(b_s, b_m, b_l, qk_scale)
            b_o = twelve.finish(values, mem.v_free, c + i - 1, 0)
            b_p = gl.convert_layout(b_p.to(mem.v.dtype), p_layout)
            b_o = b_o * ten.rows_of(b_alpha, b_o)
        mbarrier.arrive(mem.q_free.index(W), count=1)  # the last product that reads Q is done
        c += tiles
        b_o = twelve.finish(twelve.start_values(mem, c - 1, b_p, b_o), mem.v_free, c - 1, 0)
        b_o = b_o / ten.rows_of(b_l, b_o)
        tma.store_wait(0)  # the O of the job before has left the buffer
        ten.matrix(mem.o.index(W)).store(b_o.to(o_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [i_h, row, 0], mem.o.index(W))
        job, turn = job + gl.num_programs(0), turn + 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["S", "HEADS", "JOBS"])
def owned_forward(q_desc, k_desc, v_desc, o_desc, S, qk_scale, HEADS, JOBS, STAGES: gl.constexpr,
                  CAUSAL: gl.constexpr):
    mem = OwnedStorage(
        gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_shape, q_desc.layout),
        gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout),
        gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout),
        eleven.barriers(2, 1), eleven.barriers(STAGES, 1), eleven.barriers(STAGES, 1),
        eleven.barriers(STAGES, 2), eleven.barriers(STAGES, 2), eleven.barriers(2, 1),
        gl.allocate_shared_memory(o_desc.dtype, [2] + o_desc.block_shape, o_desc.layout))
    fence_async_shared()
    gl.warp_specialize([
        (owned_consume, (o_desc, mem, S, qk_scale, HEADS, JOBS, 0, CAUSAL)),
        (owned_consume, (o_desc, mem, S, qk_scale, HEADS, JOBS, 1, CAUSAL)),
        (thirteen.produce, (q_desc, k_desc, v_desc, mem, None, S, HEADS, HEADS, JOBS, CAUSAL, False)),
    ], [4, 1], [240, 24])


def owned_attention(q, k, v, causal=True):
    (B, H, S, D), o, (n, stages) = q.shape, torch.empty_like(q), eleven.TILES[q.shape[3]]
    jobs = triton.cdiv(S, 128) * B * H
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    owned_forward[(min(jobs, sms),)](
        ten.windows(q, 64), ten.windows(k, n), ten.windows(v, n), ten.windows(o, 64), S,
        ten.LOG2_E * D**-0.5, B * H, jobs, stages, causal, num_warps=4, maxnreg=168)
    return o
