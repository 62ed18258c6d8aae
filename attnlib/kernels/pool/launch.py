"""Launch the pooling kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.coarser import coarser
from attnlib.kernels.common.descriptors import legal, readable
from attnlib.kernels.common.launcher import GRID_YZ, LIMIT, Descriptor, Launch, Launches, Part
from attnlib.kernels.common.signature import LOG2_E, PREPARED
from attnlib.kernels.common.tiles import UNIT, block_d

MODULE = "attnlib.kernels.pool.pool_kernels"
COLUMNS = 32
"""Units of keys of a program of `pool_maxima`: 8 KiB of maxima."""
MOST_KEYS = GRID_YZ * COLUMNS * UNIT
"""That `pool_maxima` has programs for."""
FLOAT32 = 32
"""Queries and keys of a tile in float32, whose products on the CUDA cores take more registers."""


def unsupported(where: torch.device) -> str | None:
    """What the kernels need and a device does not have; None if it has all."""
    return device.unsupported_on(where)


def too_many_keys(S_k: int) -> str | None:
    """Why maxima of so many keys can't be pooled; None if they can."""
    return f"needs at most {MOST_KEYS} keys; k has {S_k}" if S_k > MOST_KEYS else None


class ScoresCall(NamedTuple):
    """What the launch of `pool_scores` depends on: shapes and strides of q and k, and the options."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: int
    causal: bool
    sm_scale: float


class MaximaCall(NamedTuple):
    """What the launch of `pool_maxima` depends on. maxima: their shape, (B, H, blocks, rows)."""

    maxima: tuple[int, ...]
    S_q: int
    S_k: int
    device: int
    causal: bool


def of_scores(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, causal: bool, sm_scale: float
) -> torch.Tensor:
    """The map (B, H, units of queries, units of keys) float32 of units of 64, from scores that are computed
    anew. ValueError if the programs are beyond 2^31."""
    if device.widened(q.dtype):
        return of_scores(q.float(), k.float(), lse, causal, sm_scale)
    q, k = map(readable, (q, k))
    strides = q.stride(), k.stride()
    call = ScoresCall(tuple(q.shape), tuple(k.shape), strides, q.dtype, q.get_device(), causal, sm_scale)
    launches, shape, tile = _scores(call)
    found = torch.zeros(shape, dtype=torch.float32, device=q.device)
    launches(q, k, lse, found)
    return coarser(found, UNIT // tile)


def of_maxima(maxima: torch.Tensor, lse: torch.Tensor, S_k: int, causal: bool) -> torch.Tensor:
    """The same from the largest scores of rows and 64 keys, (B, H, blocks, rows) in units of log2; of no more
    than `MOST_KEYS` keys."""
    call = MaximaCall(tuple(maxima.shape), lse.shape[2], S_k, lse.get_device(), causal)
    launches, shape = _maxima(call)
    found = torch.zeros(shape, dtype=torch.float32, device=lse.device)
    launches(maxima, lse, found)
    return found


@lru_cache(PREPARED)
def _scores(call: ScoresCall) -> tuple[Launches, tuple[int, ...], int]:
    """The launch, the shape of its map, and the queries and keys of its tiles."""
    (B, H, S_q, D), (_, H_kv, S_k, _) = call.q, call.k
    tile = FLOAT32 if call.dtype == torch.float32 else UNIT
    down, across, width = -(-S_q // tile), -(-S_k // tile), block_d(D)
    _check(down * B * H)
    windows = [(shape, legal(shape, strides, call.dtype))
               for shape, strides in zip((call.q, call.k), call.strides, strict=True)]  # fmt: skip
    launch = Launch(
        f"{MODULE}.pool_scores",
        (down * B * H, 1, 1),
        descriptors={
            f"desc_{name}": Descriptor(Part(name), window, (1, 1, tile, width))
            for name, window in zip("qk", windows, strict=True)
        },
        pointers={"lse_ptr": Part("lse"), "map_ptr": Part("map")},
        scalars={"scale": call.sm_scale * LOG2_E, "S_q": S_q, "S_k": S_k, "H": H, "across": across},
        constants={
            "GROUP": H // H_kv, "CAUSAL": call.causal, "BLOCK_M": tile, "BLOCK_N": tile, "BLOCK_D": width,
            "NUM_STAGES": 1 if tile == FLOAT32 else 3,
            "PRECISION": "ieee" if call.dtype == torch.float32 else "tf32",
        },
        options={"num_warps": 8 if tile == FLOAT32 else 4},
    )  # fmt: skip
    return Launches([launch], call.device, ("q", "k", "lse", "map")), (B, H, down, across), tile


@lru_cache(PREPARED)
def _maxima(call: MaximaCall) -> tuple[Launches, tuple[int, ...]]:
    (B, H, blocks, rows), S_q, S_k = call.maxima, call.S_q, call.S_k
    down, across = -(-S_q // UNIT), -(-S_k // UNIT)
    _check(down * B * H)
    sizes = {"S_q": S_q, "S_k": S_k, "rows": rows, "blocks": blocks, "down": down, "across": across}
    launch = Launch(
        f"{MODULE}.pool_maxima",
        (down * B * H, -(-across // COLUMNS), 1),
        descriptors={},
        pointers={"maxima_ptr": Part("maxima"), "lse_ptr": Part("lse"), "map_ptr": Part("map")},
        scalars=sizes,
        constants={"CAUSAL": call.causal, "COLUMNS": COLUMNS},
        options={"num_warps": 4},
    )
    return Launches([launch], call.device, ("maxima", "lse", "map")), (B, H, down, across)


def _check(programs: int) -> None:
    if programs >= LIMIT:
        raise ValueError(f"q: expected fewer than 2^31 blocks of queries over all heads, got {programs}")
