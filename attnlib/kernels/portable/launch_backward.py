"""Launch the portable backward kernels: three or four, no atomics, memory of the order of the inputs."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.backward_plan import TENSORS, BackwardPlan, gradients_like, run
from attnlib.kernels.common.descriptors import Made, Window, given
from attnlib.kernels.common.launch_preprocess import Preprocess, preprocess
from attnlib.kernels.common.launcher import GRID_YZ, LIMIT, Descriptor, Launch, Launches, Part
from attnlib.kernels.common.signature import PREPARED, Signature, exp2_scale
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.portable.configs_backward import BackwardConfig, Tile
from attnlib.params import Params

DKDV = "attnlib.kernels.portable.backward_kernels.attention_backward_dkdv"
DQ = "attnlib.kernels.portable.backward_kernels.attention_backward_dq"


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    params: Params,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of attention by the kernels of `backward_kernels`, on valid arguments, none of them empty.

    q: (B, H, Sq, D); k: (B, Hkv, Sk, D); v: (B, Hkv, Sk, Dv); d_out, out: (B, H, Sq, Dv); lse: (B, H, Sq)
    float32, contiguous, as `forward` returned it. With `params.varlen` q: (Tq, H, D); k: (Tk, Hkv, D), the
    others likewise; lse: (H, Tq).
    Returns (dq, dk, dv), laid out like q, k, v where a descriptor can express that, equal bit by bit from run
    to run.
    """
    if device.widened(q.dtype):
        params = params._replace(plan=None)  # which has the strides of what is cast
        found = backward(*(x.float() for x in (d_out, q, k, v, out)), lse, params)
        return tuple(x.bfloat16() for x in found)
    return run(prepare, (d_out, q, k, v, out), lse, params)


class Windows(NamedTuple):
    """The windows of what a backward pass reads."""

    d_out: Window
    q: Window
    k: Window
    v: Window
    out: Window


@lru_cache(PREPARED)
def prepare(call: Signature) -> BackwardPlan | None:
    """None if an input has to be copied."""
    found = given(call, call.out, call.q, call.k, call.v, call.out)
    if found is None:
        return None
    at = Windows(*found)
    dq, dk, dv = gradients_like(call)
    B, _, H_kv, S_q, S_k = call.dimensions()
    first = preprocess(call, at.d_out, at.out, padding_of(call.config))
    if max(first.launch.grid[0], first.padded, B * H_kv * S_k // 16, S_k) >= LIMIT:
        raise ValueError(
            "q, k: expected fewer than 2^31 rows, keys and blocks of rows over all heads, "
            f"got {S_q}, {S_k} and {first.launch.grid[0]}"
        )
    launches = [
        first.launch, *_dkdv_launches(call, at, dk, dv, first), _dq_launch(call, at, dq, first)
    ]  # fmt: skip
    return BackwardPlan(Launches(launches, call.device, TENSORS), first.elements, dq, dk, dv)


def padding_of(config: BackwardConfig) -> int:
    """What the rows of a sequence are padded to a multiple of: all tiles of queries divide it."""
    return max(tile.block_m for tile in (config.keys, config.queries, config.values) if tile is not None)


def _dkdv_launches(
    call: Signature, at: Windows, dk: Made, dv: Made, rows: Preprocess
) -> tuple[Launch, ...]:
    """One for both gradients, or one for each."""
    _, _, H_kv, _, S_k = call.dimensions()

    def launch(tile: Tile, want_dk: bool, want_dv: bool) -> Launch:
        (_, keys), (_, values) = _blocks(call, tile, call.head_dim), _blocks(call, tile, call.value_dim)
        return _launch(
            DKDV,
            call,
            tile,
            (-(-S_k // tile.block_n), H_kv),
            {
                **_inputs(call, tile, at, rows),
                "desc_dk": Descriptor(Part("dk"), dk.window, keys),
                "desc_dv": Descriptor(Part("dv"), dv.window, values),
            },
            {"H_kv": H_kv},
            {"WANT_DK": want_dk, "WANT_DV": want_dv},
        )

    config = call.config
    if config.values is None:
        return (launch(config.keys, True, True),)
    return launch(config.keys, True, False), launch(config.values, False, True)


def _dq_launch(call: Signature, at: Windows, dq: Made, rows: Preprocess) -> Launch:
    _, H, _, S_q, S_k = call.dimensions()
    tile = call.config.queries
    queries, _ = _blocks(call, tile, call.head_dim)
    hidden = call.window.right == 0  # keys past S_k, by the right bound
    return _launch(
        DQ,
        call,
        tile,
        (-(-S_q // tile.block_m), H),
        {**_inputs(call, tile, at, rows), "desc_dq": Descriptor(Part("dq"), dq.window, queries)},
        {"H": H},
        {"TAIL": (call.varlen or S_k % tile.block_n != 0) and not hidden},
    )


def _inputs(call: Signature, tile: Tile, at: Windows, rows: Preprocess) -> dict[str, Descriptor]:
    """What both kernels read."""
    queries, keys = _blocks(call, tile, call.head_dim)
    outputs, values = _blocks(call, tile, call.value_dim)
    return {
        "desc_q": Descriptor(Part("q"), at.q, queries),
        "desc_do": Descriptor(Part("d_out"), at.d_out, outputs),
        "desc_k": Descriptor(Part("k"), at.k, keys),
        "desc_v": Descriptor(Part("v"), at.v, values),
        "desc_rows": rows.descriptor(tile.block_m),
    }


def _blocks(call: Signature, tile: Tile, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What one copy of queries and of keys moves, or of outputs and of values, with so many columns."""
    ones, width = (1, 1, 1) if call.varlen else (1, 1), block_d(columns)
    return (*ones, tile.block_m, width), (*ones, tile.block_n, width)


def _launch(
    kernel: str,
    call: Signature,
    tile: Tile,
    tiled: tuple[int, int],
    descriptors: Mapping[str, Descriptor],
    own_scalars: Mapping[str, int],
    own_constants: Mapping[str, Any],
) -> Launch:
    """One of the two large kernels; tiled: (blocks of a head, heads) that programs own."""
    B, H, H_kv, S_q, S_k = call.dimensions()
    blocks, heads = tiled
    section = max(n for n in range(1, tile.heads_per_section + 1) if heads % n == 0)
    grid = (blocks * section, heads // section, B)
    flat = max(grid[1:]) > GRID_YZ
    left, right = call.window.clipped(S_q, S_k)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.max_registers is not None:
        options["maxnreg"] = tile.max_registers
    return Launch(
        kernel,
        (blocks * heads * B, 1, 1) if flat else grid,
        descriptors=descriptors,
        pointers={"cu_q": Part("cu_q"), "cu_k": Part("cu_k")},
        scalars={
            "qk_scale": exp2_scale(call.sm_scale),
            "sm_scale": call.sm_scale,
            "S_q": S_q,
            "S_k": S_k,
            "right": right or 0,
            "left": left or 0,
            **own_scalars,
        },
        constants={
            "GROUP": H // H_kv,
            "PADDING": padding_of(call.config),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": block_d(call.head_dim),
            "BLOCK_V": block_d(call.value_dim),
            "RIGHT": right is not None,
            "LEFT": left is not None,
            "FLIP": call.sm_scale < 0,
            "SECTION": section,
            "FLAT": flat,
            "NUM_STAGES": tile.num_stages,
            "PRECISION": "ieee" if call.dtype == torch.float32 else "tf32",
            **own_constants,
        },
        options=options,
    )
