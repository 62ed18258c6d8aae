"""Launch the portable forward kernel."""

from functools import lru_cache

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.descriptors import describable, given, made_like, readable
from attnlib.kernels.common.distr import Narrow, contiguous, narrow_shapes
from attnlib.kernels.common.forward_plan import (
    TENSORS,
    ForwardPlan,
    numbers_of_result,
    pointers_of_result,
)
from attnlib.kernels.common.launcher import GRID_YZ, Descriptor, Launch, Launches, Part, check_size
from attnlib.kernels.common.signature import PREPARED, Signature, exp2_scale, signature
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.portable.configs import upwards
from attnlib.params import Existing, Params

KERNEL = "attnlib.kernels.portable.forward_kernel.attention_forward"


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `forward_kernel.attention_forward` on valid arguments, none of them empty; see `attention`.

    q: (B, H, Sq, D); k: (B, Hkv, Sk, D); v: (B, Hkv, Sk, Dv). With `params.varlen` q: (Tq, H, D), and k and v
    likewise, of which single sequences may be empty. The order of `params.config` is replaced by one that can
    have a left edge, where the window does. Returns (out, lse); lse is None unless it was asked for.
    ValueError if a length or the grid is beyond 2^31, or there are more than 2^30 rows of varlen sequences.
    """
    if device.widened(q.dtype):
        into = params.into
        wide = into if into is None else Existing(into.out.float(), into.lse)
        params = params._replace(plan=None, into=wide)  # the plan has the strides of what is cast
        out, lse = forward(q.float(), k.float(), v.float(), params)
        return (out.bfloat16(), lse) if into is None else (into.out.copy_(out), lse)
    plan = params.plan
    if plan is None:
        plan = prepare(signature(params, q, k, q, k, v))  # an error before anything is copied
        if not (describable(q) and describable(k) and describable(v)):
            return forward(*(readable(tensor) for tensor in (q, k, v)), params)
    return plan.run(q, k, v, params)


@lru_cache(PREPARED)
def prepare(call: Signature, narrow: Narrow | None = None) -> ForwardPlan | None:
    """None if an input has to be copied. ValueError if the call is too large. narrow: q and k of the call
    have fewer columns than v, whose shape it names."""
    B, H, H_kv, S_q, S_k = call.dimensions()
    config = call.config if call.window.left is None else upwards(call.config)
    width = block_d(call.value_dim)
    blocks = -(-S_q // config.block_m)
    programs = blocks * B * H
    check_size(call, programs, f"blocks of {config.block_m} rows")
    qk_width = block_d(call.head_dim) if narrow is None else narrow.columns
    windows = given(call, *narrow_shapes(call, narrow))
    if windows is None:
        return None
    left, right = call.window.clipped(S_q, S_k)
    section = max(n for n in range(1, config.heads_per_section + 1) if H % n == 0)
    grid = (blocks * section, H // section, B)
    flat = max(grid[1:]) > GRID_YZ
    shift = S_k - S_q + (right or 0)
    diagonal = right is not None
    out = made_like(call, call.out, call.strides[0] if narrow is None else contiguous(call.q))
    ones = (1, 1, 1) if call.varlen else (1, 1)
    rows, keys = (*ones, config.block_m, width), (*ones, config.block_n, width)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    launch = Launch(
        KERNEL,
        (programs, 1, 1) if flat else grid,
        descriptors={
            "desc_q": Descriptor(Part("q"), windows[0], (*rows[:-1], qk_width)),
            "desc_k": Descriptor(Part("k"), windows[1], (*keys[:-1], qk_width)),
            "desc_v": Descriptor(Part("v"), windows[2], keys),
            **({} if call.into else {"desc_o": Descriptor(Part("out"), out.window, rows)}),
        },
        pointers=pointers_of_result(call.into) | {"cu_q": Part("cu_q"), "cu_k": Part("cu_k")},
        scalars={
            "qk_scale": exp2_scale(call.sm_scale),
            "S_q": S_q,
            "S_k": S_k,
            "T_q": call.q[0] if call.varlen else None,
            "H": H,
            "left": left,
            "right": right or None,
            "shared_rows": None if narrow is None else narrow.rows,
            **numbers_of_result(call.into),
        },
        constants={
            "GROUP": H // H_kv,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_D": width,
            "BLOCK_QK": qk_width,
            "DIAGONAL": diagonal,
            # The mask of a diagonal covers the tail.
            "HAS_TAIL": not diagonal and (call.varlen or S_k % config.block_n != 0),
            "ONE_MASKED_TILE": diagonal
            and not call.varlen
            and config.block_m == config.block_n
            and shift % config.block_n == 0,
            "EMPTY_ROWS": call.varlen or (diagonal and shift < 0),
            "FLIP": call.sm_scale < 0,
            "STORE_LSE": call.return_lse,
            "ORDER": config.order,
            "Q_IN_REGISTERS": config.q_in_registers,
            "SECTION": section,
            "FLAT": flat,
            "NUM_STAGES": config.num_stages,
            "PRECISION": "ieee" if call.dtype == torch.float32 else "tf32",
            "ACCUMULATE": 0 if call.into is None else call.value_dim,
        },
        options=options,
    )
    return ForwardPlan(Launches([launch], call.device, TENSORS), out)
