"""DistrAttention in PyTorch, in fp64.

A product of summed queries with chosen keys is one of all keys with queries that hold a group's sum in the
column of the chosen key and 0 in the others of the group. So the model is dense attention of other queries.
"""

import torch

from attnlib.kernels.common.distr import PROJECTIONS, Grouped, Grouping
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.params import Params

WORD = 0xFFFFFFFF


def unsupported(q: torch.Tensor) -> None:
    """It runs everywhere."""


def group(q: torch.Tensor, k: torch.Tensor, grouping: Grouping, causal: bool) -> Grouped:
    """q as in the docstring of the module, and k unchanged; both in fp64."""
    places = places_of(q, k, grouping)
    return Grouped(scattered(q, places, grouping), k.double(), None, places)


def forward(grouped: Grouped, v: torch.Tensor, params: Params) -> torch.Tensor:
    """out, in the dtype of v."""
    causal = params.window.right == 0
    out, _ = attention_fp64(grouped.q, grouped.k, v.double(), causal=causal, sm_scale=params.sm_scale)
    return out.to(v.dtype)


def projections(rows: int, seed: int, device: torch.device) -> torch.Tensor:
    """Random signs, [16, rows] fp64: bits of a hash of the row."""
    word = _mixed((torch.arange(rows, device=device) + _mixed(torch.tensor(seed, device=device))) & WORD)
    bits = torch.arange(PROJECTIONS, device=device)[:, None]
    return ((word >> bits) & 1).double() * 2 - 1


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Each bit of x, 32 bits in int64, changes about half of the bits."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def projected(x: torch.Tensor, shared: int, seed: int) -> torch.Tensor:
    """(B, H, blocks, 16, D) fp64: projections of the columns of each `shared` rows of x, (B, H, S, D)."""
    signs = projections(x.shape[2], seed, x.device)
    parts = zip(x.double().split(shared, 2), signs.split(shared, 1), strict=True)
    return torch.stack([sign @ part for part, sign in parts], 2)


def places_of(q: torch.Tensor, k: torch.Tensor, grouping: Grouping) -> torch.Tensor:
    """As in `Grouped`."""
    x = q if grouping.hashed == "q" else k
    shared = (grouping.rows or x.shape[2]) if grouping.hashed == "q" else x.shape[2]
    bits = projected(x, shared, grouping.seed) > 0
    code = (bits.long() << torch.arange(PROJECTIONS, device=x.device)[:, None]).sum(-2)  # (B, H, blocks, D)
    for shift in (1, 2, 4, 8):
        code = code ^ (code >> shift)
    order = code.argsort(stable=True, dim=-1)
    return order.argsort(-1).int()


def scattered(q: torch.Tensor, places: torch.Tensor, grouping: Grouping) -> torch.Tensor:
    """Queries (B, H, Sq, D) fp64 with the sum of each group in the column that comes first in the order."""
    B, H, S, D = q.shape
    group = H // places.shape[1]
    shared = -(-S // places.shape[2]) if grouping.rows is None else grouping.rows
    member = places // grouping.group  # (B, Hp, blocks, D)
    first = (places % grouping.group == 0)[..., None, :]
    same = ((member[..., :, None] == member[..., None, :]) & first).double()  # (B, Hp, blocks, D, D)
    same = same.repeat_interleave(group, 1)
    parts = q.double().split(shared, 2)
    return torch.cat([part @ same[:, :, i] for i, part in enumerate(parts)], 2)
