"""Launch the Monarch kernels: two for each round, three where the rows of L take several tiles."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.launcher import LIMIT, Launch, Launches, Part
from attnlib.kernels.common.signature import PREPARED, exp2_scale
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.monarch.configs import MonarchConfig, monarch_config
from attnlib.params import MonarchParams

TENSORS = "q", "k", "v", "out", "rows", "numbers", "mask"
MODULE = "attnlib.kernels.monarch.monarch_kernels"
ALIGNED = 16
"""Bytes: rows begin at multiples of it, as all that is read in one piece."""


class Call(NamedTuple):
    """A call without its addresses: what its launches depend on.

    q: shape (B, H, N, D). kv_heads: of k and v. strides: of q, k, v and out, in elements. masked: there is a
    key mask. device: a CUDA device's index, -1 for a CPU.
    """

    q: torch.Size
    kv_heads: int
    strides: tuple[tuple[int, ...], ...]
    masked: bool
    dtype: torch.dtype
    device: int
    params: MonarchParams

    @property
    def blocks(self) -> int:
        return self.params.blocks(self.q[2])


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: MonarchParams) -> torch.Tensor:
    """Run the kernels on valid arguments, of which none is empty; see `attnlib.attention_monarch`. ValueError
    if a grid is beyond 2^31."""
    if device.widened(q.dtype):
        return forward(q.float(), k.float(), v.float(), params).bfloat16()
    q, k, v = (_readable(x) for x in (q, k, v))
    mask = params.key_mask
    if mask is not None:
        mask = mask.contiguous().view(torch.uint8)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    strides = tuple(x.stride() for x in (q, k, v, out))
    call = Call(q.shape, k.shape[1], strides, mask is not None, q.dtype, q.get_device(),
                params._replace(key_mask=None))  # fmt: skip
    return run(prepare(call), q, k, v, out, mask)


def run(plan: "Plan", q, k, v, out: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Launch what was prepared for such tensors. Returns `out`."""
    rows = torch.empty(plan.rows, dtype=q.dtype, device=q.device)
    numbers = torch.empty(plan.numbers, dtype=torch.float32, device=q.device)
    plan.launches(q, k, v, out, rows, numbers, mask)
    return out


class Plan(NamedTuple):
    """The launches of a call, and the memory that they hand on: elements of the dtype of q, float32
    numbers."""

    launches: Launches
    rows: int
    numbers: int


def _readable(x: torch.Tensor) -> torch.Tensor:
    """The tensor with contiguous rows that begin at multiples of 16 bytes."""
    unit = ALIGNED // x.element_size()
    steps = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    if x.stride(3) == 1 and not x.data_ptr() % ALIGNED and not any(step % unit for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def configuration(call: Call) -> MonarchConfig:
    """How the kernels are compiled for a call."""
    return monarch_config(call.params.block, call.blocks, call.q[3], call.dtype.itemsize)


@lru_cache(PREPARED)
def prepare(call: Call) -> Plan:
    """The launches of all calls that differ in addresses only. ValueError if the call is too large."""
    B, H, N, D = call.q
    block, steps, M, params = call.params.block, call.params.steps, call.blocks, call.params
    config = params.config or configuration(call)
    pairs, places = B * H, B * H * M * block
    most = pairs * max(M * -(-block // config.r_step.rows), block * -(-M // config.l_step.rows))
    if most >= LIMIT:
        raise ValueError(f"q: expected fewer than 2^31 programs over all heads and blocks, got {most}")
    overlaps = device.overlaps(call.device)
    unit = ALIGNED // call.dtype.itemsize
    q_strides, k_strides, v_strides, out_strides = (
        {f"{name}_{dim}": 0 if size == 1 else stride // unit
         for dim, size, stride in zip("bhn", (B, H, N), strides, strict=False)}
        for name, strides in zip("qkvo", call.strides, strict=True)
    )  # fmt: skip
    scratch = {"mean_ptr": Part("rows"), "entropy_ptr": Part("numbers")}
    values, lse, mask = Part("rows", places * D), Part("numbers", places), Part("mask")
    sizes = {"scale": exp2_scale(params.sm_scale), "N": N, "M": M, "H": H, "first": params.first}
    sizes |= q_strides
    masked = {"mask_b": N if call.masked else 0}
    constants = {
        "BLOCK": block,
        "D": D,
        "BLOCK_D": block_d(D),
        "WIDE": max(N * max(stride[2] for stride in call.strides), M * block * D) >= LIMIT,
        "UNEVEN": M * block != N,
        "FLIP": params.sm_scale < 0,
        "UNIT": unit,
        "PRECISION": "ieee" if call.dtype == torch.float32 else "tf32",
    }
    launches: list[Launch] = []

    def launch(kernel: str, programs: int, pointers: dict, scalars: dict, more: dict) -> None:
        """One more launch, which may begin before the one ahead of it is done."""
        tile = getattr(config, kernel)
        ahead = overlaps and bool(launches)
        tiles = {"ROWS": tile.rows, "COLUMNS": tile.columns, "NUM_STAGES": tile.num_stages}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        tall = block if kernel == "r_step" else M  # a program takes some rows of that many
        launches.append(Launch(
            f"{MODULE}.{kernel}", (pairs * programs * -(-tall // tile.rows), 1, 1),
            descriptors={}, pointers=pointers | scratch, scalars=sizes | scalars,
            constants=constants | tiles | {"OVERLAPS": overlaps} | more,
            options=options | device.begins_early(ahead),
        ))  # fmt: skip

    q, k, v, out = (Part(name) for name in ("q", "k", "v", "out"))
    whole = M <= config.center_step.rows
    for step in range(steps):
        last = step == steps - 1
        launch("r_step", M, {"q_ptr": q, "k_ptr": k, "v_ptr": v, "value_ptr": values, "mask_ptr": mask},
               k_strides | v_strides | masked,
               {"GROUP": H // call.kv_heads, "FIRST": step == 0, "LAST": last})  # fmt: skip
        if last or not whole:
            launch("l_step", block, {"q_ptr": q, "value_ptr": values, "lse_ptr": lse, "out_ptr": out},
                   out_strides, {"OUTPUT": last, "SINGLE": M <= config.l_step.columns})  # fmt: skip
        if not last:
            launch("center_step", block, {"q_ptr": q, "lse_ptr": lse, "mask_ptr": mask}, masked,
                   {"WHOLE": whole, "SINGLE": M <= config.center_step.columns})  # fmt: skip
    return Plan(Launches(launches, call.device, TENSORS), 2 * places * D, (1 if whole else 2) * places)
