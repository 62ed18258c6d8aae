"""Launch the portable forward kernel under a block mask."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.descriptors import Made, describable, given, lse_for, made_like, readable
from attnlib.kernels.common.launcher import Descriptor, Launch, Launches, Part, check_size
from attnlib.kernels.common.signature import LOG2_E, PREPARED, Signature, exp2_scale, signature
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.sparse.configs import SparseTile
from attnlib.params import Params

TILE = 128  # rows that share a list; steps of these kernels have half as many columns
STEP = 64
LISTS = "starts", "middles", "steps", "bits", "order", "words"
"""What launches call the lists of a mask and its words."""
SCORES = "alibi", "sinks", "bias"
"""What launches call the tensors of a score."""
TENSORS = ("q", "k", "v", "out", "lse", *LISTS, *SCORES)
KERNEL = "attnlib.kernels.sparse.forward_kernel.attention_sparse_forward"


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `forward_kernel.attention_sparse_forward` on valid arguments, none of them empty.

    Returns (out, lse); lse is None unless it was asked for. ValueError if a length or the grid is beyond
    2^31.
    """
    if device.widened(q.dtype):
        out, lse = forward(q.float(), k.float(), v.float(), params._replace(plan=None))
        return out.bfloat16(), lse
    plan = params.plan
    if plan is None:
        plan = prepare(signature(params, q, k, q, k, v))
        if not (describable(q) and describable(k) and describable(v)):
            return forward(*(readable(tensor) for tensor in (q, k, v)), params)
    out, lse = plan.out.like(q), lse_for(q, params)
    mask = params.block_mask
    plan.launches(q, k, v, out, lse, *mask.lists(STEP), mask.words, *tensors_of(params))
    return out, lse


class Plan(NamedTuple):
    """The launch of a call, and the layout of its output."""

    launches: Launches
    out: Made


@lru_cache(PREPARED)
def prepare(call: Signature) -> Plan | None:
    """None if an input has to be copied. ValueError if the call is too large."""
    B, H, H_kv, S_q, S_k = call.dimensions()
    config: SparseTile = call.config
    width = block_d(call.head_dim)
    num_tiles = -(-S_q // TILE)
    programs = num_tiles * (TILE // config.block_m) * B * H
    check_size(call, programs)
    windows = given(call, call.q, call.k, call.k)
    if windows is None:
        return None
    out = made_like(call, call.q, call.strides[0])
    rows, keys = (1, 1, config.block_m, width), (1, 1, config.block_n, width)
    launch = Launch(
        KERNEL,
        (programs, 1, 1),
        descriptors={
            "desc_q": Descriptor(Part("q"), windows[0], rows),
            "desc_k": Descriptor(Part("k"), windows[1], keys),
            "desc_v": Descriptor(Part("v"), windows[2], keys),
            "desc_o": Descriptor(Part("out"), out.window, rows),
        },
        pointers={"lse_ptr": Part("lse")}
        | {f"{name}_ptr": Part(name) for name in (*LISTS, *SCORES)}
        | {"bias_ptr": bias_part(call)},
        scalars={
            "S_q": S_q, "S_k": S_k, "H": H, "HEADS": B * H, "num_tiles": num_tiles, **mask_strides(call),
            **score_scalars(call),
        },
        constants={
            "GROUP": H // H_kv,
            "STORE_LSE": call.return_lse,
            **constants_of(call, config),
        },
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )  # fmt: skip
    return Plan(Launches([launch], call.device, TENSORS), out)


def tensors_of(params: Params) -> tuple[torch.Tensor | None, ...]:
    """Those of `SCORES`."""
    score = params.score
    return (None, None, None) if score is None else (score.alibi, score.sinks, score.bias)


def bias_part(call: Signature, name: str = "bias") -> Part:
    """The bias of a call, or what has its layout, from that of the first query and the first key on."""
    diagonal = call.score is not None and call.score.diagonal
    return Part(name, call.dimensions()[3] - 1 if diagonal else 0)


def is_scored(call: Signature) -> bool:
    """Whether the score is more than sinks."""
    score = call.score
    if score is None:
        return False
    return score.soft_cap is not None or score.alibi or score.bias is not None or score.function is not None


def score_scalars(call: Signature) -> dict[str, float | None]:
    """Numbers of a score, and what products of queries and keys are multiplied with; see `scores.scored`."""
    scale, cap, after, strides = exp2_scale(call.sm_scale), None, None, (None,) * 4
    if is_scored(call):
        unit, cap = LOG2_E, call.score.soft_cap
        if cap is not None:
            unit, cap = 1 / cap, cap * LOG2_E
        scale = call.sm_scale * unit
        if call.score.function is not None:
            scale, after = call.sm_scale, unit
        strides = call.score.strides or strides
    names = "bias_b", "bias_h", "bias_m"
    return {"qk_scale": scale, "cap": cap, "after": after, **dict(zip(names, strides, strict=False))}


def mask_strides(call: Signature) -> dict[str, int]:
    """How many masks lie between those of two batch elements, and of two heads."""
    B, H = call.mask[:2]
    return {"mask_b": H if B > 1 else 0, "mask_h": 1 if H > 1 else 0}


def constants_of(call: Signature, tile: SparseTile) -> dict[str, object]:
    """What the forward kernel and both backward kernels are compiled with; that of a bias' gradient takes a
    part of it."""
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": block_d(call.head_dim),
        "PARTIAL": call.mask.partial,
        "FLIP": call.sm_scale < 0 and not is_scored(call),  # then the scale has its sign
        "SCORED": is_scored(call),
        "BIAS_N": call.score.strides[3] if is_scored(call) and call.score.strides else None,
        "FUNCTION": None if call.score is None else call.score.function,
        "DERIVATIVE": None if call.score is None else call.score.derivative,
        "SECTION": tile.heads_per_section,
        "STEP": STEP,
        "NUM_STAGES": tile.num_stages,
        "PRECISION": "ieee" if call.dtype == torch.float32 else "tf32",
    }
