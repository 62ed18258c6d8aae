"""Launch the portable backward kernels under a block mask."""

from collections.abc import Mapping
from functools import lru_cache

import torch

from attnlib.kernels.common import backward_plan, device
from attnlib.kernels.common.backward_plan import BackwardPlan, gradients_like
from attnlib.kernels.common.descriptors import given
from attnlib.kernels.common.launch_preprocess import Preprocess, preprocess
from attnlib.kernels.common.launcher import Descriptor, Launch, Launches, Part, check_size
from attnlib.kernels.common.signature import PREPARED, Signature
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.sparse.configs import SparseTile
from attnlib.kernels.sparse.launch_bias import bias_gradient
from attnlib.kernels.sparse.launch_forward import (
    LISTS,
    STEP,
    TILE,
    bias_part,
    constants_of,
    mask_strides,
    score_scalars,
)
from attnlib.params import Params

COLUMNS = tuple(f"column_{name}" for name in LISTS)
"""What launches call the lists of the columns of tiles, and their words."""
GRADIENTS = "alibi", "sinks", "bias", "dsinks", "dbias"
"""What launches call the tensors of a score, and their gradients."""
TILES = "kinds", "slots", "words"
"""What they call the tiles of a mask, which the gradient of a bias goes by."""
TENSORS = (*backward_plan.TENSORS, *LISTS[:-1], *COLUMNS, *TILES, *GRADIENTS)
DKDV = "attnlib.kernels.sparse.backward_kernels.attention_sparse_backward_dkdv"
SINKS = "attnlib.kernels.sparse.scores.attention_sinks_gradient"
DQ = "attnlib.kernels.sparse.backward_kernels.attention_sparse_backward_dq"


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    params: Params,
) -> tuple[torch.Tensor | None, ...]:
    """(dq, dk, dv) by the kernels of `backward_kernels`, on valid arguments, none of them empty: equal bit by
    bit from run to run. With a score also (dsinks, dbias), of which a bias that queries or keys share has a
    sum in an order that changes."""
    if device.widened(q.dtype):
        params = params._replace(plan=None)  # which has the strides of what is cast
        found = backward(*(x.float() for x in (d_out, q, k, v, out)), lse, params)
        return *(x.bfloat16() for x in found[:3]), *found[3:]
    mask = params.block_mask
    lists = *mask.lists(STEP), *mask.lists(STEP, columns=True), mask.words_of_columns
    tiles, score = tiles_of(params), score_tensors(params)
    more = *lists, *tiles[:2], mask.words, *score
    found = backward_plan.run(prepare, (d_out, q, k, v, out), lse, params, more)
    return found if params.score is None else (*found, *score[3:])


def tiles_of(params: Params) -> tuple[torch.Tensor | None, ...]:
    """Those of `TILES`, if the gradient of a bias is asked for."""
    if params.score is None or not params.score.bias_gradient:
        return None, None, None
    return params.block_mask.tiles


def score_tensors(params: Params) -> tuple[torch.Tensor | None, ...]:
    """Those of `GRADIENTS`: memory for the gradients, of 0 where programs add to it."""
    score = params.score
    if score is None:
        return (None,) * 5
    dsinks = None if score.sinks is None else torch.empty_like(score.sinks)
    dbias = score.memory_of_bias(zeros=score.places_shared) if score.bias_gradient else None
    return score.alibi, score.sinks, score.bias, dsinks, dbias


@lru_cache(PREPARED)
def prepare(call: Signature) -> BackwardPlan | None:
    """None if an input has to be copied."""
    windows = given(call, call.q, call.q, call.k, call.k, call.q)
    if windows is None:
        return None
    at = dict(zip(("d_out", "q", "k", "v", "out"), windows, strict=True))
    made = dict(zip(("dq", "dk", "dv"), gradients_like(call), strict=True))
    first = preprocess(call, at["d_out"], at["out"], TILE)  # lists may name queries up to a whole tile
    at |= {name: gradient.window for name, gradient in made.items()}
    config = call.config

    def dkdv(tile: SparseTile, want_dk: bool, want_dv: bool) -> Launch:
        return _launch(DKDV, call, tile, at, first.descriptor(tile.block_m), want_dk, want_dv)

    launches = [first.launch]
    if config.values is None:
        launches.append(dkdv(config.keys, True, True))
    else:
        launches += [dkdv(config.keys, True, False), dkdv(config.values, False, True)]
    launches.append(_launch(DQ, call, config.queries, at, first.descriptor(config.queries.block_m)))
    launches += [*sinks_gradient(call, first), *bias_gradient(call, at, first)]
    return BackwardPlan(Launches(launches, call.device, TENSORS), first.elements, **made)


def sinks_gradient(call: Signature, rows: Preprocess) -> list[Launch]:
    """What makes the gradient of sinks, if there are any, of the LSE and delta of all rows."""
    if call.score is None or not call.score.sinks:
        return []
    B, H, *_ = call.dimensions()
    pointers = {"rows_ptr": rows.rows, "sinks_ptr": Part("sinks"), "dsinks_ptr": Part("dsinks")}
    scalars = {"H": H, "B": B, "padded": rows.padded}
    return [Launch(SINKS, (H, 1, 1), {}, pointers, scalars, {"BLOCK": TILE}, {"num_warps": 4})]


def _launch(
    kernel: str, call: Signature, tile: SparseTile, at: Mapping, rows: Descriptor, *wanted: bool
) -> Launch:
    """One of the two large kernels; `wanted` of dK and dV: the one that owns keys."""
    B, H, H_kv, S_q, S_k = call.dimensions()
    length, block, heads = (S_k, tile.block_n, H_kv) if wanted else (S_q, tile.block_m, H)
    num_tiles = -(-length // TILE)
    programs = num_tiles * (TILE // block) * B * heads
    check_size(call, programs)
    width = block_d(call.head_dim)
    shapes = {"q": tile.block_m, "do": tile.block_m, "k": tile.block_n, "v": tile.block_n}
    shapes |= {"dk": tile.block_n, "dv": tile.block_n} if wanted else {"dq": tile.block_m}
    descriptors = {"desc_rows": rows}
    for name, size in shapes.items():
        tensor = "d_out" if name == "do" else name
        descriptors[f"desc_{name}"] = Descriptor(Part(tensor), at[tensor], (1, 1, size, width))
    constants = {"GROUP": H // H_kv, **constants_of(call, tile)}
    if wanted:
        constants |= {"WANT_DK": wanted[0], "WANT_DV": wanted[1]}
    return Launch(
        kernel,
        (programs, 1, 1),
        descriptors=descriptors,
        pointers={
            f"{name}_ptr": Part(own) for name, own in zip(LISTS, COLUMNS if wanted else LISTS, strict=True)
        }
        | {"alibi_ptr": Part("alibi"), "bias_ptr": bias_part(call)},
        scalars={
            "sm_scale": call.sm_scale, "S_q": S_q, "S_k": S_k, "H": heads, "HEADS": B * heads,
            "num_tiles": num_tiles, **mask_strides(call), **score_scalars(call),
        },
        constants=constants,
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )  # fmt: skip
