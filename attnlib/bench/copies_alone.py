"""What the copies of a kernel take by themselves: the Hopper forward kernel under a block mask without its
arithmetic.

Its consumers wait for each block and give it back at once; what is stored is 0. The producer is the kernel's
own, so the same bytes move in the same order through the same ring. No kernel that reads these bytes from the
L2 cache, tile by tile, is faster.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import ModuleType

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.bench import sources
from attnlib.block_mask import BlockMask
from attnlib.kernels.common import launcher, tma
from attnlib.kernels.common.ring import release, wait_k, wait_v
from attnlib.kernels.common.signature import signature
from attnlib.kernels.common.words import await_tile, told
from attnlib.kernels.sparse import hopper, hopper_kernel, launch_hopper
from attnlib.kernels.sparse.hopper_kernel import OUTPUT, STEPS
from attnlib.kernels.sparse.hopper_output import give_q_back, store_output
from attnlib.kernels.sparse.launch_hopper import KERNEL
from attnlib.kernels.sparse.queries import q_place
from attnlib.params import MaskWindow, Params


@gluon.jit
def _consume(given, FUNCTION: gl.constexpr, WG: gl.constexpr, plan: gl.constexpr):
    desc_o, lse_ptr, mem, qk_scale, score, work = given
    if not plan.pipeline.joint:
        mbarrier.wait(mem.v_full.index(0), 0)
    turn = 0
    c = 0
    first_row = await_tile(mem, 0, plan.words)
    while first_row >= 0:
        row = first_row + WG * 64
        end = c + told(mem, turn, STEPS, plan.words)
        q_at, q_parity = q_place(turn, WG, plan)
        mbarrier.wait(mem.q_full.index(q_at), q_parity)
        wait_k(mem, c, plan)
        release(mem, c, plan)
        if plan.ahead:
            if turn > 0:
                give_q_back(mem, turn - 1, WG, plan)
        for i in range(c + 1, end):
            wait_k(mem, i, plan)
            if not plan.pipeline.joint:
                wait_v(mem, i, plan)
            release(mem, i, plan)
        if not plan.ahead:
            give_q_back(mem, turn, WG, plan)
        c = end
        wait_v(mem, c, plan)
        turn += 1
        first_row = await_tile(mem, turn, plan.words)
        at = told(mem, turn, OUTPUT, plan.words), told(mem, turn, OUTPUT + 1, plan.words)
        if row < work.S_q:
            o = gl.zeros([64, plan.d], gl.float32, plan.o_layout)
            store_output(desc_o, o.to(mem.v.dtype), mem, at, row, turn - 1, WG, plan)
    tma.store_wait(0)


@cache
def module() -> ModuleType:
    """The kernel's, with these consumers: of two definitions of a name the kernel calls the last one."""
    text = f"{inspect.getsource(hopper_kernel)}\n\n{inspect.getsource(_consume.fn)}"
    return sources.load_source("sparse_copies_alone", text)


def call_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> Callable[[], torch.Tensor]:
    """The copies of `attnlib.attention(q, k, v, block_mask=mask)` on Hopper, as a call. It returns an output
    of zeros."""
    params = Params(MaskWindow(None, None), q.shape[-1] ** -0.5, block_mask=mask)
    params = params._replace(config=hopper.configuration(q, k, v, params))
    # Not the plan that the cache gives to calls of the kernel.
    plan = launch_hopper.prepare.__wrapped__(signature(params, q, k, q, k, v))
    params = params._replace(plan=plan)
    other = getattr(module(), KERNEL.rpartition(".")[2])

    def call() -> torch.Tensor:
        # What was launched once is launched again; Triton would look the kernel up by its name.
        known = plan.launches.packed is not None
        with nullcontext() if known else launcher.replaced(KERNEL, other):
            return hopper.forward(q, k, v, params)[0]

    call()
    return call
