"""Launch the forward kernels: bounds, flags, lists, and the walks along the lists."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.descriptors import Made, Window, given, made_like, readable
from attnlib.kernels.common.launcher import Descriptor, Launch, Launches, Part
from attnlib.kernels.common.signature import PREPARED
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.entmax.call import Call, call_of
from attnlib.kernels.entmax.configs import LIST, EntmaxTile, entmax_config
from attnlib.params import EntmaxParams

TENSORS = "q k v out tau rows flags lists records none cu_q cu_k".split()
LIST_KERNELS = "attnlib.kernels.entmax.list_kernels"
FORWARD = "attnlib.kernels.entmax.forward_kernel.attention_entmax_forward"
SMALLEST = 2.0**-126
CHUNK = 64
"""Words of flags that a step of `entmax_lists` takes."""


class Plan(NamedTuple):
    """The launches of a call, the layout of its output, and the sizes of what it allocates."""

    launches: Launches
    out: Made
    flags: int
    lists: int
    blocks: int


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: EntmaxParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, tau, flags) of valid arguments, none of them empty: tau (B, H, Sq) float32, varlen
    (H, Tq), and int32 flags of the keys of each block of queries, followed with `params.columns` by those of
    the queries of each block of keys, which the backward pass wants. Nothing waits for the GPU. ValueError
    if a length or the grid is beyond 2^31."""
    if device.widened(q.dtype):
        out, tau, flags = forward(q.float(), k.float(), v.float(), params)
        return out.bfloat16(), tau, flags
    q, k, v = map(readable, (q, k, v))
    plan = prepare(call_of(params, q, k, q, k, v))
    shape = q.shape[:3] if params.varlen is None else q.shape[1::-1]
    out, tau = plan.out.like(q), torch.empty(shape, dtype=torch.float32, device=q.device)
    flags = torch.empty(plan.flags, dtype=torch.int32, device=q.device)
    rows = torch.empty((2, *tau.shape), dtype=torch.float32, device=q.device)
    lists = torch.empty(plan.lists, dtype=torch.int32, device=q.device)
    records = torch.empty(plan.blocks * 4, dtype=torch.int32, device=q.device)
    plan.launches(q, k, v, out, tau, rows, flags, lists, records, None, *offsets(params))
    return out, tau, flags


def offsets(params: EntmaxParams) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if params.varlen is None else params.varlen[:2]


@lru_cache(PREPARED)
def prepare(call: Call) -> Plan:
    """The launches of all calls that differ in addresses only."""
    call.check_size()
    config = call.config or entmax_config(call.q[-1], str(call.dtype).removeprefix("torch."))
    q, k, _ = given(call, call.q, call.k, call.k)
    out = made_like(call, call.q, call.strides[0])
    launches = [
        _bound(call, config.bound, q, k),
        _flags(call, config.flags, q, k),
        lists(call, columns=False),
        _walk(call, config.walk, q, out.window),
    ]
    flags = call.key_flags + (call.heads * call.key_blocks * call.query_words if call.columns else 0)
    size, blocks = lists_size(call, columns=False), call.heads * call.query_blocks
    return Plan(Launches(launches, call.device, TENSORS), out, flags, size, blocks)


def tile_descriptor(name: str, window: Window, rows: int) -> Descriptor:
    """Of `rows` rows of one head."""
    shape = window[0]
    return Descriptor(Part(name), window, (*(1,) * (len(shape) - 2), rows, block_d(shape[-1])))


def options(tile: EntmaxTile) -> dict[str, int]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def lists(call: Call, columns: bool) -> Launch:
    """Lists of keys for each block of queries, or of queries for each block of keys."""
    words = call.query_words if columns else call.key_words
    blocks = call.key_blocks if columns else call.query_blocks
    return Launch(
        f"{LIST_KERNELS}.entmax_lists",
        (call.heads * blocks - (-words // CHUNK), 1, 1),
        descriptors={},
        pointers={
            "words_ptr": Part("flags", call.key_flags if columns else 0),
            "lists_ptr": Part("lists"),
            "records_ptr": Part("records"),
        }
        | call.offsets(),
        scalars={"words": words, "blocks": blocks, "S_q": call.rows[0], "S_k": call.rows[1]}
        | call.sequences()
        | places(call, columns),
        constants={"CAUSAL": call.causal, "COLUMNS": columns, "CHUNK": CHUNK},
        options={"num_warps": 4},
    )


def places(call: Call, columns: bool) -> dict[str, int]:
    """Where lists begin."""
    blocks = call.heads * (call.key_blocks if columns else call.query_blocks)
    room = call.room(call.longest[0 if columns else 1])
    return {"room": room, "identity": blocks * room}


def lists_size(call: Call, columns: bool) -> int:
    """int32 numbers of all lists, and of the identity behind them."""
    words = call.query_words if columns else call.key_words
    return places(call, columns)["identity"] - (-words // CHUNK) * CHUNK * 32


def _positive(call: Call) -> dict[str, float]:
    """The numbers of a call with a positive scale, of which an unseen score, -inf, stays what it is."""
    numbers = call.numbers()
    return numbers | {"scale": max(abs(numbers["scale"]), SMALLEST)}


def _bound(call: Call, tile: EntmaxTile, q: Window, k: Window) -> Launch:
    return Launch(
        f"{LIST_KERNELS}.entmax_bound",
        (call.heads * call.blocks(call.rows[0], tile.block_m), 1, 1),
        descriptors={
            "desc_q": tile_descriptor("q", q, tile.block_m),
            "desc_k": tile_descriptor("k", k, tile.block_n),
        },
        pointers={"rows_ptr": Part("rows")} | call.offsets(),
        scalars=_positive(call),
        constants=call.constants(tile)
        | {"BLOCK_M": tile.block_m, "FLIP": call.sm_scale < 0, "KIND": call.kind},
        options=options(tile),
    )


def _flags(call: Call, tile: EntmaxTile, q: Window, k: Window) -> Launch:
    numbers = _positive(call)
    del numbers["exponent"]
    return Launch(
        f"{LIST_KERNELS}.entmax_flags",
        (call.heads * call.query_blocks, 1, 1),
        descriptors={
            "desc_q": tile_descriptor("q", q, LIST),
            "desc_k": tile_descriptor("k", k, tile.block_n),
        },
        pointers={
            "rows_ptr": Part("rows"),
            "keys_ptr": Part("flags"),
            "queries_ptr": Part("flags", call.key_flags) if call.columns else Part("none"),
        }
        | call.offsets(),
        scalars=numbers | {"key_words": call.key_words, "query_words": call.query_words},
        constants=call.constants(tile) | {"FLIP": call.sm_scale < 0, "COLUMNS": call.columns},
        options=options(tile),
    )


def enough(call: Call) -> float:
    """The error of sum p after which one more step is the last. Halley's method makes 1e-2 about 1e-6, as it
    is cubic, Newton's 1e-3."""
    if call.dtype == torch.float32:
        return 1e-4
    return 1e-2 if call.halley else 1e-3


def _walk(call: Call, tile: EntmaxTile, q: Window, out: Window) -> Launch:
    return Launch(
        FORWARD,
        (call.heads * call.blocks(call.rows[0], tile.block_m), 1, 1),
        descriptors={
            "desc_q": tile_descriptor("q", q, tile.block_m),
            "desc_o": tile_descriptor("out", out, tile.block_m),
        },
        pointers={
            "k_ptr": Part("k"), "v_ptr": Part("v"), "rows_ptr": Part("rows"), "lists_ptr": Part("lists"),
            "records_ptr": Part("records"), "tau_ptr": Part("tau"),
        }
        | call.offsets(),
        scalars=call.numbers()
        | {"enough": enough(call)}
        | places(call, columns=False)
        | strides("k", call.units(call.k, call.strides[1]))
        | strides("v", call.units(call.k, call.strides[2])),
        constants=call.constants(tile)
        | {
            "KIND": call.kind, "HALLEY": call.halley, "UNIT": call.unit, "BLOCK_M": tile.block_m,
            "HEAD_DIM": call.q[-1],
        },
        options=options(tile),
    )  # fmt: skip


def strides(name: str, found: tuple[int, ...]) -> dict[str, int]:
    return {f"{name}_{axis}": stride for axis, stride in zip("bhs", found, strict=True)}
