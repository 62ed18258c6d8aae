"""Launch the portable BSFA kernels."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.bsfa.configs import BsfaTile, bsfa_tile
from attnlib.kernels.common import device
from attnlib.kernels.common.bsfa import KEYS, ROWS, grid_of
from attnlib.kernels.common.descriptors import Made, given, lse_for, made_like, readable
from attnlib.kernels.common.launcher import Descriptor, Launch, Launches, Part, check_size
from attnlib.kernels.common.signature import PREPARED, Signature, exp2_scale, signature
from attnlib.params import BsfaParams, Params, mask_window

MODULE = "attnlib.kernels.bsfa.forward_kernel"
TENSORS = "q k v out lse kept limits counter".split()
"""What the launches of a forward pass call their tensors."""


class Plan(NamedTuple):
    """The launch of a call, and the layout of its output."""

    launches: Launches
    out: Made


class Limits(NamedTuple):
    """Strides of the thresholds (b, h, m), and how many there are for a head."""

    limit_b: int
    limit_h: int
    limit_m: int
    limits: int


def limits_of(threshold: torch.Tensor) -> Limits:
    steps = (0 if size == 1 else step for size, step in zip(threshold.shape, threshold.stride(), strict=True))
    return Limits(*steps, threshold.shape[2])


def call_of(q: torch.Tensor, k: torch.Tensor, params: BsfaParams, *strided: torch.Tensor) -> Signature:
    window, config = mask_window(params.causal, None), params.config or bsfa_tile(q.shape[-1])
    asked = Params(window, params.sm_scale, return_lse=params.return_lse, config=config)
    return signature(asked, q, k, *strided)


def made_for(
    q: torch.Tensor, k: torch.Tensor, params: BsfaParams
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Memory for (lse, kept), None for what was not asked for; of `kept` all blocks are 0."""
    lse = lse_for(q, Params(mask_window(params.causal, None), params.sm_scale, return_lse=params.return_lse))
    kept = None
    if params.return_kept:
        shape = *q.shape[:2], *grid_of(q.shape[2], k.shape[2])
        kept = torch.zeros(shape, dtype=torch.uint8, device=q.device)
    return lse, kept


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: BsfaParams
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Run `attention_bsfa_forward` on valid arguments, none of them empty.

    Returns (out, lse, kept), lse and kept None unless they were asked for. ValueError if a length or the grid
    is beyond 2^31.
    """
    if device.widened(q.dtype):
        out, lse, kept = forward(q.float(), k.float(), v.float(), params)
        return out.bfloat16(), lse, kept
    q, k, v = map(readable, (q, k, v))
    plan = prepare(call_of(q, k, params, q, k, v), params.return_kept, limits_of(params.threshold))
    out, (lse, kept) = plan.out.like(q), made_for(q, k, params)
    plan.launches(q, k, v, out, lse, kept, params.threshold, None)
    return out, lse, None if kept is None else kept.view(torch.bool)


def maxima(q: torch.Tensor, k: torch.Tensor, params: BsfaParams) -> torch.Tensor:
    """(B, H, blocks of queries, blocks of keys) float32: the largest score of each block that is decided on,
    elsewhere -inf. Of arguments as `forward` takes them."""
    if device.widened(q.dtype):
        return maxima(q.float(), k.float(), params)
    q, k = map(readable, (q, k))
    shape = *q.shape[:2], *grid_of(q.shape[2], k.shape[2])
    found = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    prepare_maxima(call_of(q, k, params, q, k))(q, k, found)
    return found


@lru_cache(PREPARED)
def prepare(call: Signature, kept: bool, limits: Limits) -> Plan:
    """The launch of all calls that differ in addresses only."""
    q, k, v = given(call, call.q, call.k, call.k)
    out = made_like(call, call.q, call.strides[0])
    grid, scalars, constants, options = _common(call)
    D = call.head_dim
    launch = Launch(
        f"{MODULE}.attention_bsfa_forward",
        grid,
        descriptors={
            "desc_q": Descriptor(Part("q"), q, (1, 1, ROWS, D)),
            "desc_k": Descriptor(Part("k"), k, (1, 1, KEYS, D)),
            "desc_v": Descriptor(Part("v"), v, (1, 1, KEYS, D)),
            "desc_o": Descriptor(Part("out"), out.window, (1, 1, ROWS, D)),
        },
        pointers={"lse_ptr": Part("lse"), "kept_ptr": Part("kept"), "limit_ptr": Part("limits")},
        scalars={"qk_scale": exp2_scale(call.sm_scale), **scalars, **limits._asdict()},
        constants={"STORE_LSE": call.return_lse, **constants},
        options=options,
    )
    return Plan(Launches([launch], call.device, TENSORS), out)


@lru_cache(PREPARED)
def prepare_maxima(call: Signature) -> Launches:
    q, k = given(call, call.q, call.k)
    grid, scalars, constants, options = _common(call)
    D = call.head_dim
    launch = Launch(
        f"{MODULE}.block_maxima",
        grid,
        descriptors={
            "desc_q": Descriptor(Part("q"), q, (1, 1, ROWS, D)),
            "desc_k": Descriptor(Part("k"), k, (1, 1, KEYS, D)),
        },
        pointers={"maxima_ptr": Part("maxima")},
        scalars={"scale": abs(call.sm_scale), **scalars},
        constants=constants,
        options=options,
    )
    return Launches([launch], call.device, ("q", "k", "maxima"))


def _common(call: Signature) -> tuple[tuple[int, int, int], dict, dict, dict]:
    """Grid, scalars, constants and options that both kernels have."""
    B, H, H_kv, S_q, S_k = call.dimensions()
    tile: BsfaTile = call.config
    num_m, num_n = grid_of(S_q, S_k)
    check_size(call, num_m * B * H)
    scalars = {"S_q": S_q, "S_k": S_k, "H": H, "HEADS": B * H, "num_m": num_m, "num_n": num_n}
    constants = {
        "GROUP": H // H_kv,
        "D": call.head_dim,
        "CAUSAL": call.window.right is not None,
        "FLIP": call.sm_scale < 0,
        "SECTION": tile.heads_per_section,
        "NUM_STAGES": tile.num_stages,
        "PRECISION": "ieee" if call.dtype == torch.float32 else "tf32",
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return (num_m * B * H, 1, 1), scalars, constants, options
