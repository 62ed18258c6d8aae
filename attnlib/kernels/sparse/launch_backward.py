"""Launch the portable backward kernels under a block mask."""

from collections.abc import Mapping
from functools import lru_cache

import torch

from attnlib.kernels.common import backward_plan, device
from attnlib.kernels.common.backward_plan import BackwardPlan, gradients_like
from attnlib.kernels.common.descriptors import given
from attnlib.kernels.common.launch_preprocess import Preprocess, preprocess
from attnlib.kernels.common.launcher import Descriptor, Launch, Launches, Part
from attnlib.kernels.common.signature import PREPARED, Signature
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.sparse.configs import SparseTile
from attnlib.kernels.sparse.launch_forward import (
    LISTS,
    STEP,
    TILE,
    bias_part,
    check_size,
    constants_of,
    mask_strides,
    score_scalars,
)
from attnlib.params import Params

COLUMNS = tuple(f"column_{name}" for name in LISTS)
"""What launches call the lists of the columns of tiles, and their words."""
GRADIENTS = "alibi", "sinks", "bias", "dsinks", "dbias"
"""What launches call the tensors of a score, and their gradients."""
TENSORS = (*backward_plan.TENSORS, *LISTS, *COLUMNS, *GRADIENTS)
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
    bit from run to run. With a score also (dsinks, dbias), of which a bias that broadcasts has a sum in an
    order that changes."""
    if device.widened(q.dtype):
        params = params._replace(plan=None)  # which has the strides of what is cast
        found = backward(*(x.float() for x in (d_out, q, k, v, out)), lse, params)
        return *(x.bfloat16() for x in found[:3]), *found[3:]
    mask = params.block_mask
    lists = *mask.lists(STEP), mask.words, *mask.lists(STEP, columns=True), mask.words_of_columns
    score = score_tensors(params)
    found = backward_plan.run(prepare, (d_out, q, k, v, out), lse, params, (*lists, *score))
    return found if params.score is None else (*found, *score[3:])


def score_tensors(params: Params) -> tuple[torch.Tensor | None, ...]:
    """Those of `GRADIENTS`: memory for the sinks' gradient, and zeros for that of the bias."""
    score = params.score
    if score is None:
        return (None,) * 5
    dsinks = None if score.sinks is None else torch.empty_like(score.sinks)
    dbias = score.zero_bias() if score.bias_gradient else None
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
    launches += sinks_gradient(call, first)
    return BackwardPlan(Launches(launches, call.device, TENSORS), first.elements, **made)


def sinks_gradient(call: Signature, rows: Preprocess) -> list[Launch]:
    """What makes the gradient of sinks, if there are any, of the LSE and delta of all rows."""
    if call.score is None or not call.score.sinks:
        return []
    B, H, *_ = call.dimensions()
    pointers = {"rows_ptr": rows.rows, "sinks_ptr": Part("sinks"), "dsinks_ptr": Part("dsinks")}
    scalars = {"H": H, "B": B, "padded": rows.padded}
    return [Launch(SINKS, (H, 1, 1), {}, pointers, scalars, {"BLOCK": TILE}, {"num_warps": 4})]


def bias_constants(call: Signature) -> tuple[dict, dict]:
    """Strides of the gradient of a bias, and what the kernel that makes it is compiled with."""
    names, score = ("dbias_b", "dbias_h", "dbias_m", "dbias_n"), call.score
    if score is None or not score.bias_gradient:
        return dict.fromkeys(names), {"ROWS": False, "COLUMNS": False, "ALONE": False}
    B, H, _, S_q, S_k = call.dimensions()
    if score.diagonal:
        own = dict(zip(names, score.strides, strict=True))
        return own, {"ROWS": True, "COLUMNS": True, "ALONE": False}
    strides = torch.empty(score.sizes, device="meta").stride()
    own = [0 if size == 1 else stride for size, stride in zip(score.sizes, strides, strict=True)]
    alone = score.sizes == (B, H, S_q, S_k)
    rows, columns = (x == y for x, y in zip(score.sizes[2:], (S_q, S_k), strict=True))
    return dict(zip(names, own, strict=True)), {"ROWS": rows, "COLUMNS": columns, "ALONE": alone}


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
    scalars, pointers = {}, {}
    if wanted:
        constants |= {"WANT_DK": wanted[0], "WANT_DV": wanted[1]}
    else:
        scalars, more = bias_constants(call)
        constants |= more
        pointers["dbias_ptr"] = bias_part(call, "dbias")
    return Launch(
        kernel,
        (programs, 1, 1),
        descriptors=descriptors,
        pointers={
            f"{name}_ptr": Part(own) for name, own in zip(LISTS, COLUMNS if wanted else LISTS, strict=True)
        }
        | {"alibi_ptr": Part("alibi"), "bias_ptr": bias_part(call), **pointers},
        scalars={
            "sm_scale": call.sm_scale, "S_q": S_q, "S_k": S_k, "H": heads, "HEADS": B * heads,
            "num_tiles": num_tiles, **mask_strides(call), **score_scalars(call), **scalars,
        },
        constants=constants,
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )  # fmt: skip
