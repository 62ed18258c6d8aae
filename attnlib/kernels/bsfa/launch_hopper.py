"""Launch the BSFA kernel for Hopper."""

from functools import lru_cache

import torch

from attnlib.kernels.bsfa.configs import HopperBsfaConfig, hopper_bsfa_config
from attnlib.kernels.bsfa.launch import TENSORS, Limits, Plan, call_of, limits_of, made_for
from attnlib.kernels.common import counters, device
from attnlib.kernels.common.bsfa import KEYS
from attnlib.kernels.common.descriptors import given, made_like
from attnlib.kernels.common.hopper_gpu import HALF
from attnlib.kernels.common.launcher import Descriptor, Launch, Launches, Part, check_size
from attnlib.kernels.common.signature import PREPARED, Signature, exp2_scale
from attnlib.params import BsfaParams

KERNEL = "attnlib.kernels.bsfa.hopper_kernel.attention_bsfa_forward_hopper"
TILE = 128


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: BsfaParams
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Run `attention_bsfa_forward_hopper` on a call that it supports, no argument empty.

    Returns (out, lse, kept), lse and kept None unless they were asked for. ValueError if a length or the
    tiles are beyond 2^31.
    """
    params = params._replace(config=params.config or hopper_bsfa_config(q.shape[-1]))
    plan = prepare(call_of(q, k, params, q, k, v), params.return_kept, limits_of(params.threshold))
    out, (lse, kept) = plan.out.like(q), made_for(q, k, params)
    plan.launches(q, k, v, out, lse, kept, params.threshold, counters.counter(q.get_device()))
    return out, lse, None if kept is None else kept.view(torch.bool)


@lru_cache(PREPARED)
def prepare(call: Signature, kept: bool, limits: Limits) -> Plan:
    """The launch of all calls that differ in addresses only."""
    B, H, H_kv, S_q, S_k = call.dimensions()
    config: HopperBsfaConfig = call.config
    num_m = -(-S_q // TILE)
    tiles = num_m * B * H
    check_size(call, tiles)
    out = made_like(call, call.q, call.strides[0])
    launch = Launch(
        KERNEL,
        (min(tiles, device.num_sms(call.device)), 1, 1),
        descriptors=descriptors((*given(call, call.q, call.k, call.k), out.window), call),
        pointers={
            "lse_ptr": Part("lse"), "kept_ptr": Part("kept"), "limit_ptr": Part("limits"),
            "counter_ptr": Part("counter"),
        },
        scalars={
            "qk_scale": exp2_scale(call.sm_scale), "S_q": S_q, "S_k": S_k, "H": H, "GROUP": H // H_kv,
            "HEADS": B * H, "SECTION": config.heads_per_section(B * H, H // H_kv, S_k, call.head_dim),
            "num_m": num_m, "tiles": tiles, **limits._asdict(),
        },
        constants={"plan": make_plan(call, kept)},
        options={"num_warps": 4, "maxnreg": config.max_registers},
    )  # fmt: skip
    return Plan(Launches([launch], call.device, TENSORS), out)


def make_plan(call: Signature, kept: bool):
    """The kernel's constants."""
    from attnlib.kernels.bsfa.plan import BsfaPlan
    from attnlib.kernels.common.pipeline import Pipeline, Registers

    config: HopperBsfaConfig = call.config
    _, _, _, S_q, S_k = call.dimensions()
    causal = call.window.right is not None
    return BsfaPlan(
        d=call.head_dim, q_columns=config.q_columns, flip=call.sm_scale < 0, causal=causal,
        crosses=causal and (S_k - S_q) % 64 != 0, tail=S_k % KEYS != 0, store_lse=call.return_lse,
        store_kept=kept,
        pipeline=Pipeline(2, config.stages, False, False, False, False),
        registers=Registers(config.consumer_registers, config.producer_registers),
    )  # fmt: skip


def descriptors(windows: tuple, call: Signature) -> dict[str, Descriptor]:
    """Of Q, K, V and the output: what one copy of each moves."""
    from triton.experimental.gluon import language as gl

    rows, keys = ((1, 1, n, call.head_dim) for n in (64, KEYS))
    blocks = rows, keys, keys, rows
    element = getattr(gl, HALF[call.dtype])
    return {
        f"desc_{letter}": Descriptor(
            Part(name), window, block, gl.NVMMASharedLayout.get_default_for(list(block), element)
        )
        for letter, name, window, block in zip("qkvo", TENSORS, windows, blocks, strict=False)
    }
