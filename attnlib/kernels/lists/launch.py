"""Launch the kernel that makes lists of chosen blocks."""

from __future__ import annotations

from functools import lru_cache

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.launcher import LIMIT, Launch, Launches, Part
from attnlib.kernels.common.signature import PREPARED

KERNEL = "attnlib.kernels.lists.list_kernel.chosen_lists"
TENSORS = "blocks", "counts", "starts", "steps", "bits"
CHUNK = 256


def unsupported(where: torch.device) -> str | None:
    """What the kernel needs and a device does not have; None if it has all."""
    return device.unsupported_on(where, "blocks")


def lists_of_chosen(
    blocks: torch.Tensor, seqlen: int, units: int, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors of `block_mask.lists.Lists`, of steps of 64 or 128 keys. blocks: bool (B, H, n, n),
    contiguous, of `units` x `units` units of 64 each. ValueError if there are 2^31 steps."""
    masks, tiles, halves = blocks.shape[0] * blocks.shape[1], -(-seqlen // 128), 128 // step
    rows, most = masks * tiles, masks * halves * tiles * (tiles + 1) // 2
    if most >= LIMIT:
        raise ValueError(f"blocks: expected fewer than 2^31 steps of {step} keys over all heads, got {most}")
    whole = {"dtype": torch.int32, "device": blocks.device}
    counts, starts = torch.empty(2, masks, tiles, **whole), torch.zeros(rows + 1, **whole)
    steps, bits = torch.empty(most, **whole), torch.empty(most, **whole)
    given = blocks.view(torch.uint8), counts, starts, steps, bits
    for write in (False, True):
        launches = _prepare(
            rows, blocks.shape[-1], -(-seqlen // 64), tiles, units, halves, write, blocks.get_device()
        )
        launches(*given)
        if not write:
            torch.cumsum(counts[0].view(-1), 0, out=starts[1:])
    order = counts[0].sort(dim=1, descending=True, stable=True).indices
    return starts, starts[:-1] + counts[1].view(-1), steps, bits, order.int().flatten()


@lru_cache(PREPARED)
def _prepare(
    rows: int, blocks: int, units_down: int, tiles: int, units: int, halves: int, write: bool, index: int
):
    launch = Launch(
        KERNEL,
        (rows, 1, 1),
        descriptors={},
        pointers={f"{name}_ptr": Part(name) for name in TENSORS},
        scalars={"blocks": blocks, "units": units_down, "tiles": tiles, "rows": rows},
        constants={"UNITS": units, "HALVES": halves, "WRITE": write, "CHUNK": CHUNK},
        options={"num_warps": 4},
    )
    return Launches([launch], index, TENSORS)
