"""Calls of `attention_fp8` drawn at random: what quantizing makes of the tensors, bit by bit, and the error
of the output beside that of a model with the same roundings."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import torch
from fp8_cases import check_forward, compare_with_model, own_queries

from attnlib import attention_fp8, attention_fp8_varlen, quantize_fp8
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels.common.fp8 import WIDTHS, Recipe, scaled_by_row
from attnlib.params import Params, Varlen, mask_window

TOGETHER = 16
"""So many consecutive numbers are calls of one form, for which the same kernels are compiled: the forward
kernel takes some five seconds, the quantizing kernels a second or two each."""
QUANTIZERS = 15
"""Forms of quantizing, five of each width: fewer than forms of calls, as each is up to seven kernels."""

PERIOD = 384
"""Rows, and keys, after which the same blocks need masks: a multiple of all tiles."""


@dataclass(frozen=True)
class Fp8Draw:
    """A call. ends: of varlen sequences, where the queries and the keys of each end; None for a batch. mean:
    added to values. prepared: `attention_fp8` gets what `quantize_fp8` made, instead of tensors."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    ends: tuple[tuple[int, ...], tuple[int, ...]] | None
    head_dim: int
    dtype: str
    out_dtype: str
    recipe: Recipe
    causal: bool
    window: tuple[int, int] | None
    sm_scale: float
    return_lse: bool
    prepared: bool
    kind: str
    mean: float
    seed: int


def draw(number: int) -> Fp8Draw:
    """A call, the same one for the same number. Its form follows from `number // TOGETHER`."""
    chunk = number // TOGETHER
    form, rng, own = random.Random(chunk), random.Random(f"call {number}"), random.Random(chunk % QUANTIZERS)
    head_dim = WIDTHS[chunk % len(WIDTHS)] - own.choice((0, 0, 8, 24))
    scaling = own.choice(("block", "block", "head", "tensor"))
    recipe = Recipe(scaling, own.random() < 0.7, own.random() < 0.8)
    kv_heads, batch, varlen = rng.randint(1, 2), rng.randint(1, 3), form.random() < 0.3
    rows, keys = (form.choice((form.randint(1, 40), form.randint(1, PERIOD), 256)) for _ in "qk")
    rows, keys = (n + rng.choice((0, 0, 0, PERIOD)) for n in (rows, keys))
    ends = None
    if varlen:
        ends = tuple(
            (*sorted(rng.randint(0, batch * n) for _ in range(rng.randint(0, 5))), batch * n)
            for n in (rows, keys)
        )
        longer = max(ends, key=len)
        ends = tuple((0,) * (len(longer) - len(side)) + side for side in ends)
    window = None
    if form.random() < 0.4:
        left, right = form.random() < 0.7, form.random() < 0.7
        window = rng.randint(0, 200) if left else -1, rng.randint(0, 100) if right else -1
    return Fp8Draw(
        batch, kv_heads * rng.randint(1, 3), kv_heads, rows, keys, ends, head_dim,
        own.choice(("float16", "bfloat16", "bfloat16", "float32")),
        form.choice(("float16", "bfloat16", "float32")), recipe, form.random() < 0.5, window,
        form.choice((1.0, 1.0, -1.0)) * head_dim**-0.5 * rng.choice((1.0, 1.0, 0.3)),
        form.random() < 0.7, rng.random() < 0.7, rng.choice(("normal", "normal", "outlier", "sink")),
        rng.choice((0.0, 0.0, 1.0, -20.0)), number,
    )  # fmt: skip


def kind(call: Fp8Draw) -> str:
    """What the report counts calls by."""
    mask = f"{'causal' if call.causal else 'dense'}{' window' * bool(call.window)}"
    return f"D{call.head_dim}, {'batch' if call.ends is None else 'varlen'}, {mask}, by {call.recipe.scaling}"


def check(call: Fp8Draw, device: str, impl: str | None = None) -> None:
    """AssertionError unless quantized tensors and output are right."""
    shape = Shape(
        call.batch, call.heads, call.rows, call.head_dim, call.causal, call.dtype, call.kv_heads, call.keys
    )
    tensors, lengths, varlen = [*make_inputs(shape, call.kind, call.seed, device)], [(None, None)] * 3, None
    tensors[2] = tensors[2] + call.mean
    if call.ends is not None:
        tensors = [x.transpose(1, 2).flatten(0, 1) for x in tensors]
        starts = [torch.tensor([0, *side], dtype=torch.int32, device=device) for side in call.ends]
        sides = list(zip(starts, map(longest, call.ends), strict=True))
        lengths = [sides[0], sides[1], sides[1]]
        varlen = Varlen(*starts, *map(longest, call.ends))
    operands = []
    for x, role, (cu_seqlens, max_seqlen) in zip(tensors, "qkv", lengths, strict=True):
        found = quantize_fp8(x, role, **call.recipe._asdict(), cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        compare_with_model(found, x, call.recipe, f"{call}: {role}")
        operands.append(found)
    options = {
        **call.recipe._asdict(), "causal": call.causal, "window": call.window, "sm_scale": call.sm_scale,
        "return_lse": call.return_lse, "out_dtype": getattr(torch, call.out_dtype), "impl": impl,
    }  # fmt: skip
    given = operands if call.prepared else tensors
    if not call.prepared and scaled_by_row(tensors[0], call.recipe.scaling):
        operands[0] = own_queries(tensors[0], call.recipe.rotate, *lengths[0])
    if varlen is None:
        found = attention_fp8(*given, **options)
    else:
        found = attention_fp8_varlen(*given, *varlen, **options)
    params = Params(mask_window(call.causal, call.window), call.sm_scale, varlen)
    check_forward(found if call.return_lse else (found, None), tuple(operands), params, str(call))


def longest(ends: tuple[int, ...]) -> int:
    """Of sequences that end there."""
    return max(end - start for start, end in pairwise((0, *ends)))
