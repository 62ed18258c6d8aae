"""The pass over values as it was before it was made faster, for `time_fp8.py --values` to time beside the one
that is there now: batches of values that are centered, with a scale for each head. It has done its work with
that measurement; this file and the option go then.
"""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl

from attnlib.kernels.common import device
from attnlib.kernels.common.fp8 import CHUNK as CHUNK_COLUMNS
from attnlib.kernels.common.fp8 import GROUP, Fp8, num_blocks
from attnlib.kernels.common.launcher import Launch, Launches, Part
from attnlib.kernels.common.varlen_rows import sequence
from attnlib.kernels.fp8.launch_quantize import TENSORS
from attnlib.kernels.fp8.mean_kernels import _parts
from attnlib.kernels.fp8.quantize_kernels import _load_chunk, _rounded, _scale

CHUNK, KEYS, INF = tl.constexpr(CHUNK_COLUMNS), tl.constexpr(GROUP), tl.constexpr(float("inf"))
BLOCK, SUMMED = 128, 64


@triton.jit(
    do_not_specialize=["x_b", "x_h", "x_s", "S", "H", "parts", "span", "room"],
    do_not_specialize_on_alignment=["cu"],
)
def sum_values(
    x_ptr,  # (B, H, S, D), or varlen (T, H, D)
    parts_ptr,  # (B, H, room, 3, WIDTH), varlen (H, room, 3, WIDTH): sums over S, minima, maxima
    amax_ptr,  # (B, H) or (1,), varlen (H) or (1,): set to 0
    cu,  # (B + 1), None for a batch
    x_b, x_h, x_s,  # strides of x, in UNITs
    S,  # tokens of a batch's sequence
    H, parts, span,  # parts of the longest sequence; their blocks of ROWS
    room,  # parts of a head
    PER_HEAD: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A part of a head of a sequence, CHUNK columns. Grid: (parts * H * B, WIDTH / CHUNK)."""
    i_n, i_bh = tl.program_id(0) % parts, tl.program_id(0) // parts
    i_h, i_b = i_bh % H, i_bh // H
    if i_n == 0:
        place = 0 if not PER_HEAD else i_bh if cu is None else i_h
        tl.store(amax_ptr + place, 0.0)
    start, length, first, count = _parts(cu, i_b, S, room, span, H, i_h, ROWS)
    if i_n >= count:
        return
    x_ptr += (i_b.to(tl.int64) * x_b + i_h.to(tl.int64) * x_h + start.to(tl.int64) * x_s) * UNIT
    o_c = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
    share = 1.0 / length.to(tl.float32)  # of a key: a sum of numbers as large as float32 has stays finite
    b_sum = tl.zeros([ROWS, CHUNK], tl.float32)
    b_min, b_max = b_sum + INF, b_sum - INF
    for i in tl.range(i_n * span, tl.minimum((i_n + 1) * span, tl.cdiv(length, ROWS)), num_stages=NUM_STAGES):
        o_n = i * ROWS + tl.arange(0, ROWS)  # [ROWS]
        seen = (o_n < length)[:, None]
        if D < WIDTH:
            seen = seen & (o_c < D)[None, :]  # [ROWS, CHUNK]
        rows = x_ptr + o_n.to(tl.int64) * x_s * UNIT  # [ROWS]
        b_x = tl.load(rows[:, None] + o_c[None, :], mask=seen, other=INF).to(tl.float32)  # [ROWS, CHUNK]
        counts = tl.abs(b_x) < INF
        b_sum += tl.where(counts, b_x, 0.0) * share
        b_min = tl.minimum(b_min, tl.where(counts, b_x, INF))
        b_max = tl.maximum(b_max, tl.where(counts, b_x, -INF))
    columns = parts_ptr + (first + i_n) * 3 * WIDTH + o_c  # [CHUNK]
    tl.store(columns, tl.sum(b_sum, 0))
    tl.store(columns + WIDTH, tl.min(b_min, 0))
    tl.store(columns + 2 * WIDTH, tl.max(b_max, 0))


@triton.jit
def _place(blocks, span, H):
    """(the first block of this program, the one after its last, head, sequence). Grid: (cdiv(blocks, span) *
    H * B,)."""
    programs = tl.cdiv(blocks, span)
    i_n, i_h = tl.program_id(0) % programs * span, tl.program_id(0) // programs
    return i_n, tl.minimum(i_n + span, blocks), i_h % H, i_h // H


@triton.jit(
    do_not_specialize=["x_b", "x_h", "x_s", "S", "H", "blocks", "span", "room"],
    do_not_specialize_on_alignment=["cu"],
)
def quantize_values(
    x_ptr,  # (B, H, S, D), or varlen (T, H, D)
    data_ptr,  # (B, H, WIDTH, room * KEYS), or varlen (H, WIDTH, room * KEYS), contiguous
    scale_ptr, amax_ptr,  # (B, H) or (1,), varlen (H) or (1,)
    mean_ptr,  # (B, H, WIDTH); None: values are not centered
    cu,  # (B + 1), None for a batch
    x_b, x_h, x_s,  # strides of x, in UNITs
    S,  # tokens of a batch's sequence
    H, blocks, span,  # blocks of a head of a sequence; how many a program takes
    room,  # groups of keys in data_ptr
    PER_HEAD: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Blocks of values: centered, scaled, rounded, transposed, keys permuted."""
    begin, end, i_h, i_b = _place(blocks, span, H)
    begin, end = blocks - end, blocks - begin  # what the pass before read last may still be in L2
    if cu is None:
        length, head = S, i_b * H + i_h
        of_data, groups = head.to(tl.int64) * WIDTH * room, room
    else:
        # Positions are a sequence's own up to the next one's first: all are written.
        end_x, length = sequence(cu, i_b)
        start, head = end_x - length, i_h
        before = start // KEYS + i_b
        groups = end_x // KEYS + i_b + 1 - before
        of_data = i_h.to(tl.int64) * WIDTH * room + before
        end = tl.minimum(end, tl.cdiv(groups * KEYS, ROWS))
        x_ptr += start.to(tl.int64) * x_s * UNIT
    x_ptr += (i_b.to(tl.int64) * x_b + i_h.to(tl.int64) * x_h) * UNIT
    place = head if PER_HEAD else 0
    scale, factor = _scale(tl.load(amax_ptr + place), 1.0)
    tl.store(scale_ptr + place, scale)
    for i_n in tl.range(begin, end):
        o_p = i_n * ROWS + tl.arange(0, ROWS)  # [ROWS], positions
        o_n = o_p // KEYS * KEYS + o_p // 2 % 2 * 8 + o_p // 4 % 4 * 2 + o_p % 2  # [ROWS], their keys
        rows = x_ptr + o_n.to(tl.int64) * x_s * UNIT  # [ROWS]
        for first in tl.static_range(0, WIDTH, CHUNK):
            o_c = first + tl.arange(0, CHUNK)  # [CHUNK]
            b_x = _load_chunk(rows, o_n < length, first, D).to(tl.float32)  # [ROWS, CHUNK]
            b_x = b_x * 0.0 + b_x
            if mean_ptr is not None:  # what is past the end stays 0
                mean = tl.load(mean_ptr + (i_b * H + i_h).to(tl.int64) * WIDTH + o_c)  # [CHUNK]
                b_x = tl.where((o_n < length)[:, None], b_x - mean[None, :], 0.0)
            b_y = _rounded(b_x * factor, INTERPRETED).T  # [CHUNK, ROWS]
            columns = data_ptr + (of_data + o_c.to(tl.int64) * room) * KEYS  # [CHUNK]
            tl.store(columns[:, None] + o_p[None, :], b_y, mask=(o_p < groups * KEYS)[None, :])


@lru_cache
def plan(shape: torch.Size, strides: tuple[int, ...], item: int, index: int):
    """(launches, shape of what is between the first two)."""
    B, H, S, D = shape
    sms, unit, columns = device.num_sms(index), 16 // item, D // CHUNK_COLUMNS
    parts = num_blocks(S, SUMMED)
    span = max(1, min(parts * B * H * columns // (8 * sms), parts))
    room = num_blocks(S, SUMMED * span)
    groups, blocks = num_blocks(S, GROUP), num_blocks(S, BLOCK)
    each = max(1, min(blocks * B * H // (16 * sms), 8, blocks))
    sizes = {name: stride // unit for name, stride in zip(("x_b", "x_h", "x_s"), strides, strict=False)}
    sizes |= {"S": S, "H": H}
    constants = {"PER_HEAD": True, "D": D, "WIDTH": D, "UNIT": unit}
    between = {"parts_ptr": Part("parts"), "amax_ptr": Part("amax"), "cu": Part("cu")}
    pointers = {f"{name}_ptr": Part(name) for name in ("x", "data", "scale", "amax", "mean")}
    launches = [
        Launch(
            "fp8_before.sum_values", (room * H * B, columns, 1), {}, {"x_ptr": Part("x"), **between},
            {**sizes, "parts": room, "span": span, "room": room},
            {**constants, "ROWS": SUMMED, "NUM_STAGES": 2}, {"num_warps": 8},
        ),
        Launch(
            "attnlib.kernels.fp8.mean_kernels.join_parts", (H * B, D // 16, 1), {},
            {"mean_ptr": Part("mean"), **between}, {"S": S, "H": H, "span": span, "room": room},
            {"PER_HEAD": True, "WIDTH": D, "ROWS": SUMMED, "COLUMNS": 16, "STEP": 32, "OVERLAPS": False},
            {"num_warps": 4},
        ),
        Launch(
            "fp8_before.quantize_values", (math.ceil(blocks / each) * H * B, 1, 1), {},
            {**pointers, "cu": Part("cu")}, {**sizes, "blocks": blocks, "span": each, "room": groups},
            {**constants, "ROWS": BLOCK, "INTERPRETED": device.interpreted()}, {"num_warps": 8},
        ),
    ]  # fmt: skip
    return Launches(launches, index, TENSORS), (B, H, room, 3, D)


def quantize(x: torch.Tensor) -> Fp8:
    """Values (B, H, S, D), contiguous, D = 64, 128 or 256."""
    B, H, S, D = x.shape
    launches, parts = plan(x.shape, x.stride(), x.element_size(), x.get_device())
    real = {"dtype": torch.float32, "device": x.device}
    scale, amax, mean = torch.empty(B, H, **real), torch.empty(B, H, **real), torch.empty(B, H, D, **real)
    size = num_blocks(S, GROUP) * GROUP
    data = torch.empty(B, H, D, size, dtype=torch.float8_e4m3fn, device=x.device)
    launches(x, data, scale, amax, None, mean, torch.empty(parts, **real))
    return Fp8(data, scale, "v", "block", False, D, x.dtype, S, mean=mean)
