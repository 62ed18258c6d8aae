"""A model of FP8 attention in PyTorch, on any device: the same roundings as the kernels, all else in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from attnlib.kernels.common.fp8 import (
    CHUNK,
    GROUP,
    LARGEST,
    SIGNS,
    SMALLEST_MAGNITUDE,
    Fp8,
    Recipe,
    Role,
    first_block,
    num_blocks,
    padded_width,
    rows_of,
)  # fmt: skip
from attnlib.params import MaskWindow, Params

_SCRATCH = 1 << 23  # scores that are looked at together
_SMALLEST = 2.0**-126
_WARP = 16  # rows


def unsupported(where: torch.device) -> None:
    """Nothing is."""


# ---------------------------------------------------------------- quantizing


@cache
def rotation(width: int) -> torch.Tensor:
    """Signs times Hadamard matrix, [width, width] of 1 and -1: a row x becomes x @ rotation / sqrt(width)."""
    negative = [SIGNS[column // 32] >> column % 32 & 1 for column in range(CHUNK)]
    kind = {"dtype": torch.float64, "device": "cpu"}
    signs = 1.0 - 2.0 * torch.tensor(negative, **kind).repeat(width // CHUNK)
    matrix = torch.ones(1, 1, **kind)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return signs[:, None] * matrix


def key_order(device: torch.device | str = "cpu") -> torch.Tensor:
    """[GROUP]: which of 16 keys each position of V has."""
    place = torch.arange(GROUP, device=device)
    return place // 2 % 2 * 8 + place // 4 * 2 + place % 2


@torch.no_grad()
def quantize(
    x: torch.Tensor,
    role: Role,
    recipe: Recipe,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    mean: torch.Tensor | None = None,
) -> Fp8:
    """What the kernels make of x, (B, H, S, D) or, with `cu_seqlens`, (T, H, D).

    Bit for bit, but for rotated queries and keys and for the mean of values: these are computed in fp64 here
    and in float32 there, so that a value next to the middle of two neighbors may become either. mean: what to
    subtract from values in place of that, as in `Fp8`. scaling "row": a scale for each query, as kernels
    have it that quantize queries themselves; that of zeros is not 1. max_seqlen: only kernels need it.
    """
    scaling, rotate, center = recipe
    rotate, center = rotate and role != "v", center and role == "v"
    varlen, width = cu_seqlens is not None, padded_width(x.shape[-1])
    values = F.pad(x.detach(), (0, width - x.shape[-1]))
    if rotate:
        values = values.double() @ rotation(width).to(x.device)
    values = values.float().transpose(0, 1) if varlen else values.float()  # [..., H, S, width]
    tokens, rows = values.shape[-2], rows_of(role, scaling)
    starts = [0, tokens] if not varlen else cu_seqlens.tolist()
    sequences = None if not varlen else len(starts) - 1
    if center:
        values, mean = _centered(values, starts if varlen else None, mean)
    size = torch.where(values.isfinite(), values.abs(), 0.0)
    heads, kind = values.shape[:-2], {"dtype": torch.float32, "device": x.device}

    def scaled(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        used = amax.clamp_min(SMALLEST_MAGNITUDE if scaling == "row" else _SMALLEST * LARGEST)
        scale = used * torch.tensor((width**-0.5 if rotate else 1.0) / LARGEST, **kind)
        factor = torch.full_like(used, LARGEST) / used  # LARGEST / used would be rounded twice
        if scaling == "row":
            return scale, factor
        return scale.where(amax > 0, 1.0), factor.where(amax > 0, 1.0)

    if scaling in ("block", "row") and role != "v":
        scale = torch.ones(*heads, num_blocks(tokens, rows, sequences), **kind)
        factor = torch.ones(*heads, tokens, 1, **kind)
        for b, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
            first, blocks = first_block(start, b, rows) if varlen else 0, -(-(end - start) // rows)
            amax = F.pad(size[..., start:end, :].amax(-1), (0, start - end + blocks * rows))
            of_blocks, factors = scaled(amax.unflatten(-1, (blocks, rows)).amax(-1))
            scale[..., first : first + blocks] = of_blocks
            factor[..., start:end, 0] = factors.repeat_interleave(rows, -1)[..., : end - start]
    else:
        if not values.numel():
            amax = size.new_zeros(heads)
        elif scaling == "tensor":
            amax = size.amax().expand(heads)
        else:
            amax = size.amax((-2, -1))
        scale, factor = scaled(amax)
        factor = factor[..., None, None]
        if role != "v":
            scale = scale[..., None].expand(*heads, num_blocks(tokens, rows, sequences))
    rounded = (values * factor).where(values.isfinite(), math.nan).to(torch.float8_e4m3fn)
    if role == "v":
        data = _transposed(rounded, starts, sequences)
    else:
        data = (rounded.transpose(0, 1) if varlen else rounded).contiguous()
    return Fp8(
        data, scale, role, scaling, rotate, x.shape[-1], x.dtype, tokens, cu_seqlens,
        mean if center else None,
    )  # fmt: skip


def _centered(
    values: torch.Tensor, starts: list[int] | None, mean: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [..., H, S, width] less their mean, the mean (B, H, width)); starts: of varlen sequences."""
    values = values.clone()
    parts = values.unbind(0) if starts is None else [values[:, a:b] for a, b in pairwise(starts)]
    if mean is None:
        mean = values.new_zeros(len(parts), values.shape[-3], values.shape[-1])
        for of_part, part in zip(mean, parts, strict=True):
            of_part.copy_(_mean(part))
    for of_part, part in zip(mean, parts, strict=True):
        part -= of_part[:, None]
    return values, mean


def _mean(x: torch.Tensor) -> torch.Tensor:
    """[H, S, width] -> [H, width], of what is finite and as if the rest were 0. It is 0 where it can't be
    subtracted in float32."""
    if not x.shape[-2]:
        return x.new_zeros(x.shape[0], x.shape[-1])
    finite = x.isfinite()
    mean = x.where(finite, 0.0).double().mean(-2).float()
    spread = (x - mean[:, None]).abs().where(finite, 0.0).amax(-2)
    return mean.where(spread < math.inf, 0.0)


def _transposed(rounded: torch.Tensor, starts: list[int], sequences: int | None) -> torch.Tensor:
    """[..., H, S, width] -> [..., H, width, positions], in the order that the kernel reads."""
    *heads, tokens, width = rounded.shape
    room = num_blocks(tokens, GROUP, sequences) * GROUP
    data = torch.zeros(*heads, room, width, dtype=torch.uint8, device=rounded.device)
    for b, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        first = first_block(start, b, GROUP) * GROUP if sequences is not None else 0
        data[..., first : first + end - start, :] = rounded[..., start:end, :].view(torch.uint8)
    data = data.unflatten(-2, (-1, GROUP))[..., key_order(rounded.device), :].flatten(-3, -2)
    return data.mT.contiguous().view(torch.float8_e4m3fn)


def values_of(x: Fp8) -> Iterator[torch.Tensor]:
    """What the data of each sequence stands for in fp64, (H, S, width), tokens in their order; rotated and
    centered ones stay so."""
    starts = x.cu_seqlens.tolist() if x.varlen else ()
    for b in range(x.sequences):
        start, end = starts[b : b + 2] if x.varlen else (0, x.tokens)
        if x.role == "v":
            positions = -(-(end - start) // GROUP) * GROUP
            first = first_block(start, b, GROUP) * GROUP if x.varlen else 0
            data = (x.data if x.varlen else x.data[b])[..., first : first + positions]
            data = data.double().mT.unflatten(-2, (-1, GROUP))[..., key_order(x.device).argsort(), :]
            data = data.flatten(-3, -2)[..., : end - start, :]
            scale = (x.scale if x.varlen else x.scale[b])[..., None, None]
        else:
            rows = rows_of(x.role, x.scaling)
            data = x.data[start:end].transpose(0, 1).double() if x.varlen else x.data[b].double()
            scale = x.scale if x.varlen else x.scale[b]
            first = first_block(start, b, rows) if x.varlen else 0
            block = torch.arange(end - start, device=x.device) // rows + first
            scale = scale[:, block, None]
        yield data * scale.double()


def means_of(x: Fp8) -> Iterator[torch.Tensor]:
    """What is to be added to the values of each sequence, fp64 (H, 1, width)."""
    for b in range(x.sequences):
        mean = x.scale.new_zeros(x.heads, x.width) if x.mean is None else x.mean[b]
        yield mean.double()[:, None]


# ---------------------------------------------------------------- attention


class Rounding(NamedTuple):
    """How P becomes float8_e4m3fn: exp2(score - shift + offset), rounded, with the score in base 2.

    offset: so that small weights are not lost; None: P is not rounded. whole: the shift is a maximum rounded
    up, so that roundings do not depend on which maximum was known. keys: in a block; the shift is the largest
    score of the blocks so far, the last block being the first to be looked at; None for the largest of the
    row. lazy: the shift stays while no score exceeds it by more than this. sum_rounded: P is divided by the
    sum of what it was rounded to. kept: as `common.kept_shift` has it, in place of lazy: the shift stays
    while no sum of four weights of a thread exceeds LARGEST in any of 16 rows, else it follows in all.
    """

    offset: float | None = 6.0
    whole: bool = False
    keys: int | None = 128
    lazy: float = 2.8
    sum_rounded: bool = False
    kept: bool = False


AS_KERNEL = Rounding()


@torch.no_grad()
def forward(
    q: Fp8 | torch.Tensor,
    k: Fp8,
    v: Fp8,
    params: Params,
    out_dtype: torch.dtype,
    rounding: Rounding = AS_KERNEL,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE in float32) of operands that fit together; see `attnlib.attention_fp8`. q: a tensor is
    quantized with a scale for each row, and rotated if k is."""
    if isinstance(q, torch.Tensor):
        lengths = () if params.varlen is None else params.varlen[0::2]
        q = quantize(q, "q", Recipe("row", k.rotated), *lengths)
    outs, lses = [], []
    for b_q, b_k, b_v, mean in zip(values_of(q), values_of(k), values_of(v), means_of(v), strict=True):
        group = len(b_q) // max(1, len(b_k))
        b_k, b_v, mean = (x.repeat_interleave(group, 0) for x in (b_k, b_v, mean))
        out, lse = attend(b_q, b_k, b_v, params.window, params.sm_scale, rounding)
        out += mean.where(lse[..., None] != -math.inf, 0.0)  # weights sum to 1, or there are none
        outs.append(out[..., : v.head_dim])
        lses.append(lse)
    if q.varlen:
        out, lse = torch.cat(outs, 1).transpose(0, 1), torch.cat(lses, 1)
    else:
        out, lse = torch.stack(outs), torch.stack(lses)
    return out.to(out_dtype).contiguous(), lse.float()


def attend(q, k, v, window: MaskWindow, sm_scale: float, rounding: Rounding):
    """(out, LSE) of heads: q [H, S_q, D], k and v [H, S_k, D]."""
    H, S_q, S_k = len(q), q.shape[1], k.shape[1]
    out, lse = q.new_zeros(H, S_q, v.shape[-1]), q.new_full((H, S_q), -math.inf)
    undefined = v.isnan()
    known = v.masked_fill(undefined, 0.0)
    rows = max(1, _SCRATCH // max(1, H * S_k))
    if rounding.kept:
        rows = -(-rows // _WARP) * _WARP
    for start in range(0, S_q if S_k else 0, rows):
        part = slice(start, min(start + rows, S_q))
        scores = q[:, part] @ k.mT * (sm_scale * math.log2(math.e))  # [H, rows, S_k], in base 2
        place = torch.arange(part.start, part.stop, device=q.device)[:, None] + (S_k - S_q)
        distance = torch.arange(S_k, device=q.device) - place
        if window.right is not None:
            scores.masked_fill_(distance > window.right, -math.inf)
        if window.left is not None:
            scores.masked_fill_(distance < -window.left, -math.inf)
        m = scores.amax(-1, keepdim=True)
        m = torch.where(m == -math.inf, 0.0, m)
        exact = torch.exp2(scores - m)  # [H, rows, S_k]
        p = exact if rounding.offset is None else _rounded(scores, m, rounding)
        l = exact.sum(-1, keepdim=True)  # noqa: E741  (as everywhere in the book)
        lse[:, part] = ((m + l.log2()) * math.log(2.0))[..., 0]
        if rounding.sum_rounded:
            l = p.sum(-1, keepdim=True)  # noqa: E741
        value = p @ known / torch.where(l == 0, 1.0, l)
        if bool(undefined.any()):
            value.masked_fill_((scores > -math.inf).double() @ undefined.double() > 0, math.nan)
        out[:, part] = value
    return out, lse


def looked_up(exponents: torch.Tensor) -> torch.Tensor:
    """The rows [H, rows] of warps that look up their largest scores, from exponents [H, rows, keys]."""
    weights = torch.exp2(exponents.nan_to_num(math.inf, math.inf, -math.inf))  # nan: no key was seen yet
    fours = F.pad(weights, (0, -weights.shape[-1] % GROUP)).unflatten(-1, (-1, 2, 4, 2)).sum((-3, -1))
    above = (fours.amax((-2, -1)) > LARGEST).double()  # [H, rows]
    warps = F.pad(above, (0, -above.shape[-1] % _WARP)).unflatten(-1, (-1, _WARP)).amax(-1)
    return warps.repeat_interleave(_WARP, -1)[..., : above.shape[-1]] > 0


def _rounded(scores: torch.Tensor, m: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """exp2(scores - m) as the second product gets it: scores [H, rows, S_k], m [H, rows, 1] their maximum."""
    offset, whole, keys, lazy, _, kept = rounding
    shift = m
    if keys is not None:
        S_k = scores.shape[-1]
        blocks = F.pad(scores, (0, -S_k % keys), value=-math.inf).unflatten(-1, (-1, keys))
        largest = blocks.amax(-1)  # [H, rows, blocks]
        known = torch.empty_like(largest)
        now = torch.full_like(m[..., 0], -math.inf)
        for block in reversed(range(largest.shape[-1])):
            grown = largest[..., block] > now + lazy
            if kept:
                grown = looked_up(blocks[..., block, :] - now[..., None] + offset)
                grown &= largest[..., block] > now
            now = torch.where(grown, largest[..., block], now)
            known[..., block] = now
        shift = torch.where(known == -math.inf, 0.0, known).repeat_interleave(keys, -1)[..., :S_k]
    if whole:
        shift = shift.ceil()
    p = torch.exp2(scores - shift + offset).clamp_max(LARGEST).to(torch.float8_e4m3fn).to(scores.dtype)
    return p * torch.exp2(shift - m - offset)
