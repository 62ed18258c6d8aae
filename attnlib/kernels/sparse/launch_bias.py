"""Launch what makes the gradient of a bias, behind the other gradients' kernels, portable or for Hopper."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attnlib.kernels.common.launch_preprocess import Preprocess
from attnlib.kernels.common.launcher import Descriptor, Launch, Part, check_size
from attnlib.kernels.common.signature import Signature
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.sparse.configs import SparseTile
from attnlib.kernels.sparse.launch_forward import (
    TILE,
    bias_part,
    constants_of,
    mask_strides,
    score_scalars,
)

KERNEL = "attnlib.kernels.sparse.bias_kernel.attention_sparse_bias_gradient"


def bias_gradient(call: Signature, windows: Mapping[str, tuple], rows: Preprocess) -> list[Launch]:
    """The launch, if that gradient is asked for. windows: of d_out, q, k and v; rows: of LSE and delta."""
    score = call.score
    if score is None or not score.bias_gradient:
        return []
    B, H, H_kv, S_q, S_k = call.dimensions()
    tile = call.config.bias
    down, across, width = -(-S_q // TILE), -(-S_k // TILE), block_d(call.head_dim)
    rows_of, columns_of = down * (TILE // tile.block_m), across * (TILE // tile.block_n)
    blocks = rows_of * columns_of
    strides = score.strides
    if score.diagonal:
        blocks, sizes = tile.block_m // tile.block_n * (rows_of - 1) + columns_of, (1, H, S_q, S_k)
    else:
        sizes, strides = score.sizes, torch.empty(score.sizes, device="meta").stride()
    batches, heads, queries, keys = (x == y for x, y in zip(sizes, (B, H, S_q, S_k), strict=True))
    programs = blocks * sizes[0] * sizes[1]
    check_size(call, programs)
    names = {"desc_q": "q", "desc_do": "d_out", "desc_k": "k", "desc_v": "v"}
    own = [0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)]
    if score.diagonal:
        own[2] = strides[2]
    strides = dict(zip(("dbias_b", "dbias_h", "dbias_m"), own, strict=False))
    return [Launch(
        KERNEL,
        (programs, 1, 1),
        descriptors={
            key: Descriptor(
                Part(name), windows[name], (1, 1, tile.block_n if name in "kv" else tile.block_m, width)
            )
            for key, name in names.items()
        },
        pointers={
            "lse2_ptr": rows.rows, "delta_ptr": rows.deltas,
            "kinds_ptr": Part("kinds"), "slots_ptr": Part("slots"), "words_ptr": Part("words"),
            "alibi_ptr": Part("alibi"), "bias_ptr": bias_part(call), "dbias_ptr": bias_part(call, "dbias"),
        },
        scalars={
            "S_q": S_q, "S_k": S_k, "padded": rows.padded, "B": B, "H": H, "down": down, "across": across,
            **mask_strides(call), **score_scalars(call), **strides,
        },
        constants={
            "GROUP": H // H_kv, "BATCHES": batches, "HEADS": heads, "ROWS": queries, "COLUMNS": keys,
            "DIAGONAL": score.diagonal, **_constants(call, tile),
        },
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )]  # fmt: skip


def _constants(call: Signature, tile: SparseTile) -> dict[str, object]:
    names = "BIAS_N FUNCTION DERIVATIVE BLOCK_M BLOCK_N BLOCK_D PARTIAL NUM_STAGES PRECISION".split()
    found = constants_of(call, tile)
    return {name: found[name] for name in names}
