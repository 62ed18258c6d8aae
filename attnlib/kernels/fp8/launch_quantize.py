"""Launch the quantizing kernels."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.descriptors import legal, readable
from attnlib.kernels.common.fp8 import (
    CHUNK,
    GROUP,
    ROWS,
    Fp8,
    Recipe,
    Role,
    num_blocks,
    padded_width,
    shapes_of,
)
from attnlib.kernels.common.launcher import LIMIT, Launch, Launches, Part
from attnlib.kernels.common.signature import PREPARED

MODULE = "attnlib.kernels.fp8.quantize_kernels"
MEANS = "attnlib.kernels.fp8.mean_kernels"
TENSORS = "x", "data", "scale", "amax", "cu", "mean", "parts"
POINTERS = "x_ptr", "data_ptr", "scale_ptr", "amax_ptr", "cu"
BLOCK = 128
"""Rows of a block where no scale depends on it."""
PROGRAMS, SPAN = 16, 8
"""Programs for each SM that look for the largest magnitude, where there are so many blocks; blocks that one
takes at most, in a loop, which holds for programs that quantize values as well."""
ROWS_PROGRAMS = {64: 12, 128: 8, 256: 4}
"""Programs for each SM that quantize rows of so many columns, four times as many as run at a time. Each
reads the next block while it rounds one."""
VALUES = 8
"""Programs for each SM that quantize values: four of them run at a time."""
SUMMED, TILES, SUMMING = 512, 16, 4
"""Values of a tile that programs sum up, 16 bytes of 16-bit numbers a thread; tiles that are asked for
together; and programs for each SM, which all run at a time. Each writes a part. 64 threads, because at the
end threads that have the same columns add up what they have, through shared memory: with 256 that took as
long as a fourth of the reading (docs/lab/fp8.md)."""
MOST_REGISTERS = 255
"""Of a thread, for the numbers that it has asked for. Without a word ptxas takes 64, which is slower."""
COLUMNS, STEP = 16, 32
"""Columns of a program that joins parts, and how many of these it looks at together."""


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
    """The launches, the shapes of data and scale as they are in memory, and the scale's as it is seen; of
    centered values, the shapes of mean and parts."""

    launches: Launches
    data: tuple[int, ...]
    stored: tuple[int, ...]
    scale: tuple[int, ...]
    mean: tuple[int, ...] | None
    parts: tuple[int, ...] | None


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
    given = x
    if device.widened(x.dtype):
        x = x.float()
    x = readable(x) if x.numel() else x.new_empty(x.shape)  # a copy of nothing keeps its strides
    recipe = recipe._replace(rotate=recipe.rotate and role != "v", center=recipe.center and role == "v")
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    longest = x.shape[2] if cu_seqlens is None else max_seqlen
    plan = prepare(Call(x.shape, x.stride(), x.dtype, x.get_device(), role, recipe, sequences, longest))
    data = torch.empty(plan.data, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(plan.stored, dtype=torch.float32, device=x.device)
    mean = None if plan.mean is None else torch.empty(plan.mean, dtype=torch.float32, device=x.device)
    if x.numel():
        parts = amax = None
        if mean is not None:
            parts = torch.empty(plan.parts, dtype=torch.float32, device=x.device)
            amax = torch.empty_like(scale)
        elif len(plan.launches.launches) > 1:
            amax = torch.zeros_like(scale)
        offsets = None if cu_seqlens is None else cu_seqlens.contiguous()
        plan.launches(x, data, scale, amax, offsets, mean, parts)
    else:
        data.zero_()
        scale.fill_(1.0)
        if mean is not None:
            mean.zero_()
    missing = len(plan.scale) - len(plan.stored)
    scale = scale.view(*plan.stored, *[1] * missing).expand(plan.scale)
    return Fp8(
        data, scale, role, recipe.scaling, recipe.rotate, given.shape[-1], given.dtype,
        given.shape[2 if cu_seqlens is None else 0], cu_seqlens, mean,
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
    scaling, rotate, center = call.recipe
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

    def span(blocks: int, heads: int, programs: int = PROGRAMS) -> int:
        return max(1, min(blocks * heads // (programs * sms), SPAN, blocks))

    per_block, per_head = scaling == "block" and not is_v, scaling != "tensor"
    stored = (1,) if not per_head else (*heads, room) if per_block else heads
    unit = 16 // call.dtype.itemsize
    sizes = {"x_b": x_b // unit, "x_h": x_h // unit, "x_s": x_s // unit, "S": T, "H": H}
    constants = {"PER_HEAD": per_head, "D": D, "WIDTH": width, "UNIT": unit}
    rotation = {"ROTATE": rotate, "PRECISION": "tf32x3" if call.dtype == torch.float32 else "tf32"}
    staged = {"NUM_STAGES": 2}
    overlaps = (center or not per_block) and device.overlaps(call.device)  # the launch before it
    constants["OVERLAPS"] = overlaps
    launches, mean, parts = [], None, None
    if center:
        mean = B, H, width
        found, parts = _centering(call, sizes, constants, sms)
        launches += found
    elif not per_block:
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
    if is_v:
        each = span(blocks, B * H * (width // CHUNK), VALUES)
    else:
        constants |= {**rotation, **staged, "PER_BLOCK": per_block, "NORM": width**-0.5 if rotate else 1.0}
        each = max(1, min(-(-blocks * B * H // (ROWS_PROGRAMS[width] * sms)), blocks))
    quantizing = Launch(
        f"{MODULE}.{'quantize_values' if is_v else 'quantize_rows'}",
        (-(-blocks // each) * H * B * (width // CHUNK if is_v else 1), 1, 1),
        descriptors={},
        pointers={name: Part(name.removesuffix("_ptr")) for name in POINTERS + ("mean_ptr",) * is_v},
        scalars={**sizes, "blocks": blocks, "span": each, "room": room},
        constants={**constants, "ROWS": rows, "INTERPRETED": device.interpreted()},
        options={"num_warps": max(4, rows // 16), **device.begins_early(overlaps)},
    )
    data, scale = shapes_of(call.role, call.shape, rows, call.sequences)
    launches = Launches([*launches, quantizing], call.device, TENSORS)
    return Plan(launches, data, stored, scale, mean, parts)


def _centering(
    call: Call, sizes: dict[str, int], constants: dict[str, int], sms: int
) -> tuple[list[Launch], tuple[int, ...]]:
    """The launches that find mean and largest magnitude of values, and the shape of what is between them."""
    varlen, width = call.sequences is not None, constants["WIDTH"]
    B, H = (call.sequences, call.shape[1]) if varlen else call.shape[:2]
    heads = (H,) if varlen else (B, H)
    tall = SUMMED // width
    rows = tall * TILES
    blocks = num_blocks(sizes["S"], rows, call.sequences)
    span = max(1, -(-blocks * math.prod(heads) // (SUMMING * sms)))
    room = num_blocks(sizes["S"], rows * span, call.sequences)
    longest = -(-call.longest // (rows * span))
    pointers = {"parts_ptr": Part("parts"), "amax_ptr": Part("amax"), "cu": Part("cu")}
    summing = Launch(
        f"{MEANS}.sum_values",
        (longest * H * B, 1, 1),
        descriptors={},
        pointers={"x_ptr": Part("x"), **pointers},
        scalars={**sizes, "parts": longest, "span": span, "room": room},
        constants={**constants, "ROWS": rows, "TALL": tall},
        options={"num_warps": SUMMED // 256, "maxnreg": MOST_REGISTERS},
    )
    joining = Launch(
        f"{MEANS}.join_parts",
        (H * B, width // COLUMNS, 1),
        descriptors={},
        pointers={"mean_ptr": Part("mean"), **pointers},
        scalars={"S": sizes["S"], "H": H, "span": span, "room": room},
        constants={name: constants[name] for name in ("PER_HEAD", "WIDTH", "OVERLAPS")}
        | {"ROWS": rows, "COLUMNS": COLUMNS, "STEP": STEP},
        options={"num_warps": 4, **device.begins_early(constants["OVERLAPS"])},
    )
    return [summing, joining], (*heads, room, 3, width)
