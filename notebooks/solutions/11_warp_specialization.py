"""Solutions of chapter 11."""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.book import lesson

eleven = lesson.load_kernel("11_warp_specialization")
ten = eleven.ten


def place(i, stages):
    """(slot, parity of the full barrier, parity of the free barrier) for tile i of a ring."""
    slot, turn = i % stages, i // stages
    return slot, turn & 1, (turn & 1) ^ 1


def registers(consumers, producer):
    """(registers of a thread at the start, of a consumer's thread at work)."""
    threads = 128 * (consumers + 1)
    at_start = 65536 // threads // 8 * 8
    left = at_start * (consumers + 1) - producer
    return at_start, left // consumers // 8 * 8


def outcome(change):
    """What can happen in a ring with two slots after this change."""
    return {
        # V was ordered after K, but copies land in any order.
        "no V barrier": "wrong data",
        # The consumers wait for K and V by themselves; the order of the copies is nobody's concern.
        "V first": "fine",
        # The barrier completes while consumer 0 may still be reading.
        "one for both": "wrong data",
        # Nobody fills a slot after the last tile.
        "lazy consumer": "fine",
        # K stays a product longer than it must; the other slot is still there for the producer.
        "late release": "fine",
        # K 2 needs the slot of K 0, which is released with V 0, which is ordered after K 2.
        "K two ahead": "deadlock",
        # Tile 1 is the first in slot 1, and a fresh barrier lets a wait for parity 1 pass.
        "parity of the tile": "wrong data",
    }[change]


@gluon.jit(do_not_specialize=["S"])
def forward_of_three(q_desc, k_desc, v_desc, o_desc, S, qk_scale, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    mem = eleven.SharedStorage(
        gl.allocate_shared_memory(q_desc.dtype, [3] + q_desc.block_shape, q_desc.layout),
        gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout),
        gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout),
        eleven.barriers(3, 1), eleven.barriers(STAGES, 1), eleven.barriers(STAGES, 1),
        eleven.barriers(STAGES, 3), eleven.barriers(STAGES, 3),  # free: all three consumers arrive
    )  # fmt: skip
    fence_async_shared()
    i_h, i_m = gl.program_id(1), gl.num_programs(0) - 1 - gl.program_id(0)
    gl.warp_specialize([
        (eleven.consume, (o_desc, mem, S, qk_scale, i_m, i_h, 0, CAUSAL)),
        (eleven.consume, (o_desc, mem, S, qk_scale, i_m, i_h, 1, CAUSAL)),
        (eleven.consume, (o_desc, mem, S, qk_scale, i_m, i_h, 2, CAUSAL)),
        (eleven.produce, (q_desc, k_desc, v_desc, mem, S, i_m, i_h, CAUSAL)),
    ], [4, 4, 1], [160, 160, 24])


def attention_of_three(q, k, v, causal=True):
    (B, H, S, D), o, (n, stages) = q.shape, torch.empty_like(q), eleven.TILES[q.shape[3]]
    forward_of_three[(triton.cdiv(S, 192), B * H)](  # 192 rows a CTA; 4 warpgroups begin with 128 registers
        ten.windows(q, 64), ten.windows(k, n), ten.windows(v, n), ten.windows(o, 64), S,
        ten.LOG2_E * D**-0.5, stages, causal, num_warps=4, maxnreg=128)
    return o
