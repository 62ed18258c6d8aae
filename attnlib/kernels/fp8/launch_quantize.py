"""Launch the quantizing kernels."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.descriptors import describable, legal, readable
from attnlib.kernels.common.fp8 import GROUP, ROWS, Fp8, Recipe, Role, num_blocks, padded_width
from attnlib.kernels.common.launcher import LIMIT, Launch, Launches, Part
from attnlib.kernels.common.signature import PREPARED

MODULE = "attnlib.kernels.fp8.quantize_kernels"
TENSORS = "x", "data", "scale", "amax", "cu"
POINTERS = "x_ptr", "data_ptr", "scale_ptr", "amax_ptr", "cu"
BLOCK = 128
"""Rows of a block where no scale depends on it."""
PROGRAMS, SPAN = 16, 8
"""Programs for each SM, where there are so many blocks; blocks that one takes at most, in a loop."""


class Call(NamedTuple):
    """A call without its addresses: what its launches depend on.

    shape, strides: of x, (B, H, S, D), of varlen sequences (T, H, D). sequences: their number, None for a
    batch. longest: the tokens of the longest.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: int
    role: Role
    recipe: Recipe
    sequences: int | None
    longest: int


class Plan(NamedTuple):
    """The launches, the shapes of data and scale as they are in memory, and the scale's as it is seen."""

    launches: Launches
    data: tuple[int, ...]
    stored: tuple[int, ...]
    scale: tuple[int, ...]


def quantize(
    x: torch.Tensor,
    role: Role,
    recipe: Recipe,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> Fp8:
    """Run the kernels on a tensor (B, H, S, D), or (T, H, D) with `cu_seqlens`; see `attnlib.quantize_fp8`.

    ValueError if a length or the grid is beyond 2^31.
    """
    if x.is_cuda and x.get_device() != torch.cuda.current_device():  # Triton launches on the current device
        with torch.cuda.device(x.get_device()):
            return quantize(x, role, recipe, cu_seqlens, max_seqlen)
    given = x
    if x.dtype == torch.bfloat16 and device.interpreted():  # its bfloat16 dot is wrong (triton 3.6)
        x = x.float()
    if not describable(x):
        x = readable(x)
    if role == "v":
        recipe = recipe._replace(rotate=False)
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    longest = x.shape[2] if cu_seqlens is None else max_seqlen
    plan = prepare(Call(x.shape, x.stride(), x.dtype, x.get_device(), role, recipe, sequences, longest))
    data = torch.empty(plan.data, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(plan.stored, dtype=torch.float32, device=x.device)
    if x.numel():
        amax = torch.zeros_like(scale) if len(plan.launches.launches) > 1 else None
        plan.launches(x, data, scale, amax, cu_seqlens)
    else:
        data.zero_()
        scale.fill_(1.0)
    missing = len(plan.scale) - len(plan.stored)
    scale = scale.view(*plan.stored, *[1] * missing).expand(plan.scale)
    return Fp8(
        data, scale, role, *recipe, given.shape[-1], given.dtype, given.shape[2 if cu_seqlens is None else 0],
        cu_seqlens, max_seqlen,
    )  # fmt: skip


@lru_cache(PREPARED)
def prepare(call: Call) -> Plan:
    """The launches of all calls that differ in addresses only. ValueError if the call is too large."""
    varlen = call.sequences is not None
    if varlen:
        (T, H, D), B = call.shape, call.sequences
        x_s, x_h, x_b = (*legal(call.shape, call.strides, call.dtype)[:2], 0)
    else:
        B, H, T, D = call.shape
        x_b, x_h, x_s = legal(call.shape, call.strides, call.dtype)[:3]
    width, is_v = padded_width(D), call.role == "v"
    scaling, rotate = call.recipe
    rows = BLOCK if is_v else ROWS[call.role]
    room = num_blocks(T, GROUP if is_v else rows, call.sequences)
    blocks = num_blocks(call.longest, rows)
    if varlen:  # what is a sequence's own may begin in the middle of a block, and end in the next but one
        blocks = call.longest // rows + 2
    if max(blocks * H * B, T) >= LIMIT:
        raise ValueError(
            f"x: expected fewer than 2^31 rows and blocks of {rows} rows over all heads, got {T} and "
            f"{blocks * H * B}"
        )
    heads = (H,) if varlen else (B, H)
    sms = 1 if call.device < 0 else device.num_sms(call.device)

    def span(blocks: int, heads: int) -> int:
        return max(1, min(blocks * heads // (PROGRAMS * sms), SPAN, blocks))

    per_block, per_head = scaling == "block" and not is_v, scaling != "tensor"
    stored = (1,) if not per_head else (*heads, room) if per_block else heads
    unit = 16 // call.dtype.itemsize
    sizes = {"x_b": x_b // unit, "x_h": x_h // unit, "x_s": x_s // unit, "S": T, "H": H}
    constants = {"PER_HEAD": per_head, "D": D, "WIDTH": width, "UNIT": unit}
    rotation = {"ROTATE": rotate, "PRECISION": "tf32x3" if call.dtype == torch.float32 else "tf32"}
    staged = {"NUM_STAGES": 2}
    launches = []
    if not per_block:
        count, of_heads = num_blocks(T, BLOCK), H if varlen else B * H
        each = span(count, of_heads)
        amax = Launch(
            f"{MODULE}.quantize_amax",
            (-(-count // each) * of_heads, 1, 1),
            descriptors={},
            pointers={"x_ptr": Part("x"), "amax_ptr": Part("amax")},
            scalars={**sizes, "blocks": count, "span": each},
            constants={**constants, **rotation, **staged, "ROWS": BLOCK},
            options={"num_warps": 8},
        )
        launches.append(amax)
    if not is_v:
        constants |= {**rotation, **staged, "PER_BLOCK": per_block, "NORM": width**-0.5 if rotate else 1.0}
    each = span(blocks, B * H)
    quantizing = Launch(
        f"{MODULE}.{'quantize_values' if is_v else 'quantize_rows'}",
        (-(-blocks // each) * H * B, 1, 1),
        descriptors={},
        pointers={name: Part(name.removesuffix("_ptr")) for name in POINTERS},
        scalars={**sizes, "blocks": blocks, "span": each, "room": room},
        constants={**constants, "ROWS": rows, "INTERPRETED": device.interpreted()},
        options={"num_warps": max(4, rows // 16)},
    )
    data = (*heads, width, room * GROUP) if is_v else (*call.shape[:-1], width)
    launches = Launches([*launches, quantizing], call.device, TENSORS)
    return Plan(launches, data, stored, heads if is_v else (*heads, room))
