"""Launch the backward kernels: lists of keys and of queries, and the two walks along them."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.descriptors import Made, given, made_like, readable
from attnlib.kernels.common.launcher import Launch, Launches, Part
from attnlib.kernels.common.signature import PREPARED
from attnlib.kernels.entmax.call import Call, call_of
from attnlib.kernels.entmax.configs import EntmaxTile, entmax_backward_config
from attnlib.kernels.entmax.launch import (
    lists,
    lists_size,
    offsets,
    options,
    places,
    strides,
    tile_descriptor,
)
from attnlib.params import EntmaxParams

TENSORS = "d_out q k v out tau flags rows lists records dq dk dv cu_q cu_k".split()
MODULE = "attnlib.kernels.entmax.backward_kernels"


class Plan(NamedTuple):
    """The launches of a call, the sizes of what it allocates, and the layouts of the gradients."""

    launches: Launches
    lists: int
    blocks: int
    dq: Made
    dk: Made
    dv: Made


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    tau: torch.Tensor,
    flags: torch.Tensor,
    params: EntmaxParams,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) from what `launch.forward` gave with `params.columns`, on valid arguments, none of them
    empty: equal bit by bit from run to run. Nothing waits for the GPU."""
    if device.widened(q.dtype):
        found = backward(*(x.float() for x in (d_out, q, k, v, out)), tau, flags, params)
        return tuple(x.bfloat16() for x in found)
    d_out, q, k, v, out = map(readable, (d_out, q, k, v, out))
    plan = prepare(call_of(params, q, k, d_out, q, k, v, out))
    dq, dk, dv = plan.dq.like(q), plan.dk.like(k), plan.dv.like(v)
    rows = torch.empty((*tau.shape, 2), dtype=torch.float32, device=q.device)
    lists = torch.empty(plan.lists, dtype=torch.int32, device=q.device)
    records = torch.empty(plan.blocks * 4, dtype=torch.int32, device=q.device)
    plan.launches(
        d_out, q, k, v, out, tau.contiguous(), flags, rows, lists, records, dq, dk, dv, *offsets(params)
    )
    return dq, dk, dv


@lru_cache(PREPARED)
def prepare(call: Call) -> Plan:
    """The launches of all calls that differ in addresses only. The lists of queries take the memory of those
    of keys, which are done with by then."""
    call.check_size()
    config = call.config or entmax_backward_config(call.q[-1], str(call.dtype).removeprefix("torch."))
    shapes = {"d_out": call.q, "q": call.q, "k": call.k, "v": call.k, "out": call.q}
    at = dict(zip(shapes, given(call, *shapes.values()), strict=True))
    _, q, k, v, _ = call.strides
    made = {
        "dq": made_like(call, call.q, q), "dk": made_like(call, call.k, k), "dv": made_like(call, call.k, v)
    }  # fmt: skip
    at |= {name: gradient.window for name, gradient in made.items()}
    rows, columns = call.heads * call.query_blocks, call.heads * call.key_blocks
    launches = [
        lists(call, columns=False),
        _dq(call, config.queries, at),
        lists(call, columns=True),
    ]
    if config.values is None:
        launches.append(_dkdv(call, config.keys, at, True, True))
    else:
        launches += [_dkdv(call, config.keys, at, True, False), _dkdv(call, config.values, at, False, True)]
    size = max(lists_size(call, columns) for columns in (False, True))
    return Plan(Launches(launches, call.device, TENSORS), size, max(rows, columns), **made)


def _numbers(call: Call) -> dict[str, float]:
    return call.numbers() | {"sm_scale": call.sm_scale}


def _constants(call: Call, tile: EntmaxTile) -> dict[str, object]:
    own = {"KIND": call.kind, "UNIT": call.unit, "BLOCK_M": tile.block_m, "HEAD_DIM": call.q[-1]}
    return call.constants(tile) | own


ROWS = {name: Part(name.removesuffix("_ptr")) for name in "rows_ptr lists_ptr records_ptr".split()}


def _dq(call: Call, tile: EntmaxTile, at) -> Launch:
    return Launch(
        f"{MODULE}.attention_entmax_dq",
        (call.heads * call.blocks(call.rows[0], tile.block_m), 1, 1),
        descriptors={
            "desc_q": tile_descriptor("q", at["q"], tile.block_m),
            "desc_o": tile_descriptor("out", at["out"], tile.block_m),
            "desc_do": tile_descriptor("d_out", at["d_out"], tile.block_m),
            "desc_dq": tile_descriptor("dq", at["dq"], tile.block_m),
        },
        pointers={"k_ptr": Part("k"), "v_ptr": Part("v"), "tau_ptr": Part("tau")} | ROWS | call.offsets(),
        scalars=_numbers(call)
        | places(call, columns=False)
        | strides("k", call.units(call.k, call.strides[2]))
        | strides("v", call.units(call.k, call.strides[3])),
        constants=_constants(call, tile),
        options=options(tile),
    )


def _dkdv(call: Call, tile: EntmaxTile, at, want_dk: bool, want_dv: bool) -> Launch:
    numbers = _numbers(call)
    del numbers["HEADS"]
    return Launch(
        f"{MODULE}.attention_entmax_dkdv",
        (call.key_heads * call.blocks(call.rows[1], tile.block_n), 1, 1),
        descriptors={
            f"desc_{name}": tile_descriptor(name, at[name], tile.block_n) for name in ("k", "v", "dk", "dv")
        },
        pointers={"q_ptr": Part("q"), "do_ptr": Part("d_out")} | ROWS | call.offsets(),
        scalars=numbers
        | {"H_kv": call.k[1], "KV_HEADS": call.key_heads, "blocks": call.key_blocks}
        | places(call, columns=True)
        | strides("q", call.units(call.q, call.strides[1]))
        | strides("do", call.units(call.q, call.strides[0])),
        constants=_constants(call, tile) | {"WANT_DK": want_dk, "WANT_DV": want_dv},
        options=options(tile),
    )
