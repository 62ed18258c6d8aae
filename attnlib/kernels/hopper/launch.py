"""Launch the Hopper forward kernel."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.descriptors import columns_of, given, made_like
from attnlib.kernels.common.distr import Narrow, contiguous, narrow_shapes
from attnlib.kernels.common.forward_plan import (
    TENSORS,
    ForwardPlan,
    numbers_of_result,
    pointers_of_result,
)
from attnlib.kernels.common.hopper_gpu import HALF
from attnlib.kernels.common.launcher import Descriptor, Launch, Launches, Part, check_size
from attnlib.kernels.common.signature import PREPARED, Signature, exp2_scale, signature
from attnlib.kernels.hopper.configs import HopperConfig
from attnlib.params import MaskWindow, Params

KERNEL = "attnlib.kernels.hopper.forward_kernel.attention_forward_hopper"


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `forward_kernel.attention_forward_hopper` on a call that it supports, no argument empty.

    q: (B, H, Sq, D); k: (B, Hkv, Sk, D); v: (B, Hkv, Sk, Dv). With `params.varlen` q: (Tq, H, D), and k and v
    likewise, of which single sequences may be empty. Returns (out, lse); lse is None unless it was asked for.
    ValueError if a length or the tiles are beyond 2^31, or there are more than 2^30 rows of varlen sequences.
    """
    plan = params.plan or prepare(signature(params, q, k, q, k, v))
    return plan.run(q, k, v, params)


@lru_cache(PREPARED)
def prepare(call: Signature, narrow: Narrow | None = None) -> ForwardPlan:
    """narrow: q and k of the call have fewer columns than v, whose shape it names."""
    config: HopperConfig = call.config
    into = call.into
    if bool(config.query_columns) != (call.own_value_dim is not None):
        raise ValueError(f"config: expected one for values of {call.value_dim} columns, got {config}")
    width = config.width(call.head_dim)
    programs, numbers = shared_out(call, width)
    windows = given(call, *narrow_shapes(call, narrow))
    out = made_like(call, call.out, call.strides[0] if narrow is None else contiguous(call.q))
    own_keys = {}
    if narrow is not None and narrow.rows is not None:
        own_keys = {"shared_rows": narrow.rows, "key_blocks": -(-numbers["S_q"] // narrow.rows)}
    launch = Launch(
        KERNEL,
        (programs, 1, 1),
        descriptors=descriptors(
            (*windows, *(() if into else (out.window,))), width, config, call.dtype, call.varlen, narrow
        ),
        pointers=pointers_of_result(into)
        | {"counter_ptr": Part("counter"), "cu_q": Part("cu_q"), "cu_k": Part("cu_k")},
        scalars=numbers | own_keys | numbers_of_result(into),
        constants={"plan": plan_of(call, narrow)},
        options={"num_warps": 4, "maxnreg": config.max_registers},
    )
    return ForwardPlan(Launches([launch], call.device, TENSORS), out, counted=True)


def shared_out(call: Signature, width: int) -> tuple[int, dict[str, float | None]]:
    """(how many programs share out the tiles of a call, numbers by which they find these). width: columns of
    keys, counted as of 16 bits. ValueError if a length or the tiles are beyond 2^31."""
    B, H, H_kv, S_q, S_k = call.dimensions()
    block_m = 64 * call.config.warpgroups
    blocks_m = -(-S_q // block_m)
    tiles, heads = blocks_m * B * H, B * H
    if call.varlen:  # the kernel counts them; so many at most: each sequence may end with a part of one
        tiles, heads = (call.q[0] // block_m + B) * H, H
    check_size(call, tiles, f"tiles of {block_m} rows")
    left, right = call.window.clipped(S_q, S_k)
    diagonal = right is not None and left is None and not call.varlen  # so tiles of one head are uneven
    section = call.config.heads_per_section(heads, H // H_kv, S_k, width, diagonal)
    return min(tiles, max(1, device.num_sms(call.device) - call.spare)), {
        "qk_scale": exp2_scale(call.sm_scale),
        "S_q": S_q,
        "S_k": S_k,
        "H": H,
        "GROUP": H // H_kv,
        "HEADS": B * H,
        "SECTION": section,
        "LAST": call.config.last_section(heads, blocks_m, section) if diagonal else None,
        "num_m": blocks_m,
        "tiles": tiles,
        "right": right or None,
        "left": left,
        "T_q": call.q[0] if call.varlen else None,
        "B": B if call.varlen else None,
    }


def plan_of(call: Signature, narrow: Narrow | None = None):
    """The kernel's constants for a call."""
    _, _, _, S_q, S_k = call.dimensions()
    mask = mask_of(call.window, S_q, S_k, call.config, call.varlen)
    options = {"flip": call.sm_scale < 0, "store_lse": call.return_lse, "varlen": call.varlen}
    plan = make_plan(call.config.width(call.head_dim), call.config, mask, **options, narrow=narrow)
    return replace(plan, accumulate=0 if call.into is None else call.value_dim)


def mask_of(
    window: MaskWindow, S_q: int, S_k: int, config: HopperConfig, varlen: bool
) -> dict[str, bool | int]:
    """What `plan.ForwardMask` takes."""
    left, right = window.clipped(S_q, S_k)
    blocks, skip = (1 if right is None else 2, True) if varlen else _masks(right, S_q, S_k, config)
    seen = {"causal": right is not None, "shifted": bool(right), "left": left is not None}
    return seen | {"blocks": blocks, "skip": skip}


def make_plan(
    width: int, config: HopperConfig, mask: dict[str, bool | int], flip: bool, store_lse: bool, varlen: bool,
    narrow: Narrow | None = None,
):  # fmt: skip
    """The kernel's constants; `mask` are those of `plan.ForwardMask`."""
    from attnlib.kernels.hopper.plan import ForwardPlan, NarrowPlan, SplitPlan

    fields = plan_fields(width, config, mask, flip, store_lse, varlen)
    if config.columns:
        left, right = config.columns
        return SplitPlan(**fields | {"d": left}, right=right)
    if config.query_columns:
        return NarrowPlan(**fields, columns=config.query_columns[0], keys_by_rows=False)
    if narrow is None:
        return ForwardPlan(**fields)
    return NarrowPlan(**fields, columns=narrow.columns, keys_by_rows=narrow.rows is not None)


def plan_fields(
    width: int, config: HopperConfig, mask: dict[str, bool | int], flip: bool, store_lse: bool, varlen: bool
) -> dict[str, Any]:
    """Those of `plan.ForwardPlan`, whatever the operands are."""
    from attnlib.kernels.hopper.plan import ForwardMask, Pipeline, Registers

    return dict(
        d=width, block_n=config.block_n, q_columns=config.q_columns, o_columns=config.o_columns,
        flip=flip, store_lse=store_lse, varlen=varlen, mask=ForwardMask(**mask),
        pipeline=Pipeline(
            config.warpgroups, config.stages, config.joint, config.named, config.late_wait, config.pin,
            config.keep_shift,
        ),
        registers=Registers(config.consumer_registers, config.producer_registers),
    )  # fmt: skip


def descriptors(
    windows: tuple, width: int, config: HopperConfig, dtype: torch.dtype, varlen: bool,
    narrow: Narrow | None = None,
) -> dict[str, Descriptor]:
    """Of Q, K, V and the output: what one copy of each moves."""
    from triton.experimental.gluon import language as gl

    ones, element = (1, 1, 1) if varlen else (1, 1), getattr(gl, HALF[dtype])
    rows = 64, config.block_n, config.block_n, 64
    values = config.columns or (width,)
    queries = config.query_columns or (values if narrow is None else (narrow.columns,))
    parts, described = (queries, queries, values, values), {}
    for letter, name, window, size, own in zip("qkvo", TENSORS, windows, rows, parts, strict=False):
        start = 0
        for suffix, columns in zip(("", "_right"), own, strict=False):
            at_once = config.o_columns if letter == "o" and not start else columns
            block = (*ones, size, at_once)
            part = columns_of(window, start, columns) if len(own) > 1 else window
            layout = gl.NVMMASharedLayout.get_default_for(list(block), element)
            described[f"desc_{letter}{suffix}"] = Descriptor(Part(name, start), part, block, layout)
            start += columns
    return described


def _masks(right: int | None, S_q: int, S_k: int, config: HopperConfig) -> tuple[int, bool]:
    """(blocks at the end of a row that need a mask, whether the warpgroups of a tile may visit different
    numbers of blocks), with a bound on the right or none."""
    if right is None:
        # In the last tile of a head, warpgroups that lie beyond the last row have nothing to visit.
        idle = 0 < S_q % (64 * config.warpgroups) <= 64 * (config.warpgroups - 1)
        return int(S_k % config.block_n != 0), idle
    # The diagonal enters a block at a corner of 64 rows, or crosses from one block to the next within them.
    diagonal, block_m = S_k - S_q + right, 64 * config.warpgroups
    return 1 + (diagonal % 64 != 0), not (block_m == config.block_n and diagonal % block_m == 0)
