"""Launch the kernels that group columns."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.descriptors import legal, readable
from attnlib.kernels.common.distr import PROJECTIONS, Grouped, Grouping
from attnlib.kernels.common.launcher import LIMIT, Launch, Launches, Part
from attnlib.kernels.common.signature import PREPARED
from attnlib.kernels.common.tiles import block_d

MODULE = "attnlib.kernels.distr.group_kernels"
TENSORS = "q", "k", "partial", "places", "q_grouped", "k_grouped"
ROWS = 128
"""Of a tile; the product reads keys in tiles that divide it."""
ROWS_FLOAT32, WARPS_FLOAT32 = 16, 8
"""The same in float32, whose products on the CUDA cores take more registers: with 32 rows and four warps a
sum of 128 columns spills 1590 words."""
MOST_CHUNKS = 32
"""Parts of rows that share their groups, whose projections are summed apart: enough programs for a GPU, few
enough to be summed by one."""
PARTS = "hash", "sort", "sum", "gather"
"""The launches in order, by what they do."""


class Call(NamedTuple):
    """What the launches depend on: shapes and strides of q and k, dtype, device, the grouping without its
    seed, and whether keys are left out that a causal mask hides."""

    q: torch.Size
    k: torch.Size
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype
    device: int
    grouping: Grouping
    causal: bool


class Plan(NamedTuple):
    """The launches, and the shapes of what they make."""

    launches: Launches
    partial: tuple[int, ...]
    places: tuple[int, ...]
    q: tuple[int, ...]
    k: tuple[int, ...]


def group(q: torch.Tensor, k: torch.Tensor, grouping: Grouping, causal: bool) -> Grouped:
    """Run the kernels on q (B, H, Sq, D) and k (B, Hkv, Sk, D), neither of them empty.

    ValueError if the programs are beyond 2^31.
    """
    dtype = q.dtype
    if device.widened(dtype):
        found = group(q.float(), k.float(), grouping, causal)
        return found._replace(q=found.q.bfloat16(), k=found.k.bfloat16())
    q, k = map(readable, (q, k))
    plan = prepare(Call(q.shape, k.shape, (q.stride(), k.stride()), dtype, q.get_device(), grouping, causal))
    partial = torch.empty(plan.partial, dtype=torch.float32, device=q.device)
    places = torch.empty(plan.places, dtype=torch.int32, device=q.device)
    made_q, made_k = (torch.empty(shape, dtype=dtype, device=q.device) for shape in (plan.q, plan.k))
    plan.launches(q, k, partial, places, made_q, made_k)
    rows = None if made_k.shape[1] == k.shape[1] else min(grouping.rows or q.shape[2], q.shape[2])
    return Grouped(made_q, made_k, rows, places)


@lru_cache(PREPARED)
def prepare(call: Call) -> Plan:
    """The launches of all calls that differ in addresses only. ValueError if the call is too large."""
    B, H, S_q, D = call.q
    H_kv, S_k = call.k[1:3]
    grouping, of_queries = call.grouping, call.grouping.hashed == "q"
    rows, heads = (S_q, H) if of_queries else (S_k, H_kv)
    blocks = grouping.blocks(S_q) if of_queries else 1
    shared = (grouping.rows or S_q) if of_queries else S_q  # query rows
    hashed = shared if of_queries else S_k  # rows that are hashed together
    chunk = max(ROWS, -(-hashed // MOST_CHUNKS // ROWS) * ROWS)
    if of_queries and grouping.rows:  # chunks end where blocks do
        chunk = min(hashed, _divisor(hashed, chunk))
    of_block = -(-hashed // chunk)
    chunks = -(-rows // chunk)
    columns, width = grouping.columns(D), block_d(D)
    tile_rows, warps = (ROWS_FLOAT32, WARPS_FLOAT32) if call.dtype == torch.float32 else (ROWS, 4)
    tiles_q, tiles_k = -(-S_q // tile_rows), -(-S_k // tile_rows)
    programs = max(chunks * heads * B, tiles_q * H * B, tiles_k * heads * blocks * B)
    if programs >= LIMIT:
        raise ValueError(
            f"q, k: expected fewer than 2^31 tiles of {tile_rows} rows over all heads, got {programs}"
        )
    unit = 16 // call.dtype.itemsize

    def strides(number: int) -> dict[str, int]:
        shape = (call.q, call.k)[number]
        found = legal(shape, call.strides[number], call.dtype)
        return {f"x_{name}": stride // unit for name, stride in zip("bhs", found[:3], strict=True)}

    def launch(kernel, programs, pointers, scalars, constants, num_warps=4) -> Launch:
        pointers = {f"{name}_ptr": Part(tensor) for name, tensor in pointers.items()}
        widths = {"D": D, "WIDTH": width}
        return Launch(
            f"{MODULE}.{kernel}", (programs, 1, 1), {}, pointers, scalars, widths | constants,
            {"num_warps": num_warps},
        )  # fmt: skip

    side = 0 if of_queries else 1
    hashed_name = "qk"[side]
    tile = {"UNIT": unit, "PRECISION": "ieee" if call.dtype == torch.float32 else "tf32"}
    narrow = tile | {"GROUP": grouping.group, "COLUMNS": columns, "ROWS": tile_rows}
    group = H // H_kv
    launches = [
        launch("project_columns", chunks * heads * B, {"x": hashed_name, "partial": "partial"},
               strides(side) | {"S": rows, "H": heads, "chunks": chunks, "chunk_rows": chunk,
                                "seed": grouping.seed}, tile | {"ROWS": min(64, tile_rows)}),
        launch("order_columns", blocks * heads * B, {"partial": "partial", "places": "places"},
               {"chunks": chunks, "of_block": of_block, "blocks": blocks}, {}),
        launch("sum_queries", tiles_q * H * B, {"x": "q", "places": "places", "y": "q_grouped"},
               strides(0) | {"S": S_q, "H": H, "tiles": tiles_q, "blocks": blocks, "shared": shared},
               narrow | {"PER_KEY_HEAD": 1 if of_queries else group}, warps),
        launch("gather_keys", tiles_k * heads * B, {"x": "k", "places": "places", "y": "k_grouped"},
               strides(1) | {"S": S_k, "H": heads, "tiles": tiles_k, "blocks": blocks, "shared": shared,
                             "shift": S_k - S_q},
               narrow | {"PER_KEY_HEAD": group if of_queries else 1, "CAUSAL": call.causal and blocks > 1},
               warps),
    ]  # fmt: skip
    return Plan(
        Launches(launches, call.device, TENSORS),
        (B, heads, chunks, PROJECTIONS, width),
        (B, heads, blocks, D),
        (B, H, S_q, columns),
        (B, heads * blocks, S_k, columns),
    )


def _divisor(rows: int, least: int) -> int:
    """The smallest multiple of ROWS from `least` on that divides `rows`, a multiple of ROWS."""
    return next(n for n in range(least, rows + 1, ROWS) if rows % n == 0)
