"""Calls drawn at random, and the judgement: forward and backward within the error budget, inputs unwritten.

test_properties draws small ones for the interpreter, gpu/random_draws.py large ones for the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attnlib import attention, attention_varlen
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Judgement, Oracle


def as_it_is(x):
    return x


def rows_before_heads(x):
    """(B, S, H, D) in memory, as a projection leaves it; varlen: (H, T, D)."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def part_of_more(x):
    """A slice of every dimension of a larger tensor; all else in that is NaN."""
    more = x.new_full([2 * n + 3 for n in x.shape[:-1]] + [x.shape[-1] + 16], math.nan)
    window = tuple(slice(1, 1 + 2 * n, 2) for n in x.shape[:-1])
    return more[(*window, slice(8, 8 + x.shape[-1]))].copy_(x)


def misaligned(x):
    """At an address that is no multiple of 16 bytes."""
    return torch.cat([x.new_full((1,), math.nan), x.flatten()])[1:].view(x.shape)


def columns_apart(x):
    """What no descriptor can express."""
    return torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0]


def expanded(x):
    """Heads (varlen: too) that share their memory: the values of the first."""
    return x[..., :1, :, :].expand(x.shape) if x.dim() == 4 else x[:, :1].expand(x.shape)


def backwards(x):
    """The batch and the heads in reverse, in memory."""
    return x.flip(0, 1).contiguous().flip(0, 1)


LAYOUTS = (as_it_is, rows_before_heads, part_of_more, misaligned, columns_apart, expanded, backwards)
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Draw:
    """One call. lengths: (Sq, Sk) of the one shape, or of every varlen sequence; layouts: of q, k, v and of
    the gradient of the output, places in LAYOUTS; value_dim: of values, None for head_dim."""

    lengths: tuple[tuple[int, int], ...]
    varlen: bool
    batch: int
    kv_heads: int
    group: int
    head_dim: int
    dtype: str
    causal: bool
    window: tuple[int, int] | None
    sm_scale: float | None
    layouts: tuple[int, int, int, int]
    seed: int
    value_dim: int | None = None

    @property
    def options(self) -> dict:
        return {"causal": self.causal, "window": self.window, "sm_scale": self.sm_scale}


def tensors(draw: Draw, device: str) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(draw.seed)
    rows, keys = (sum(n[side] for n in draw.lengths) for side in (0, 1))
    heads, made = draw.kv_heads * draw.group, []
    counts, own = (heads, draw.kv_heads, draw.kv_heads, heads), draw.head_dim
    values = own if draw.value_dim is None else draw.value_dim
    for length, count, columns, place in zip(
        (rows, keys, keys, rows), counts, (own, own, values, values), draw.layouts, strict=True
    ):
        size = (length, count) if draw.varlen else (draw.batch, count, length)
        x = torch.randn(*size, columns, generator=generator, device=device)
        made.append(LAYOUTS[place](x.to(getattr(torch, draw.dtype))))
    return made


def check(
    draw: Draw, device: str, impl: str | None, backward: bool = True, deterministic: bool = False
) -> None:
    """AssertionError unless the call is right, forward and (if asked) backward."""
    q, k, v, d_out = tensors(draw, device)
    before = [x.clone() for x in (q, k, v, d_out)]
    inputs = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    options = {**draw.options, "return_lse": True, "impl": impl, "deterministic": deterministic}
    if draw.varlen:
        sides = zip(*draw.lengths, strict=True)
        ends = [torch.tensor([0, *side], device=device).cumsum(0).int() for side in sides]
        longest = [max(side) for side in zip(*draw.lengths, strict=True)]
        out, lse = attention_varlen(*inputs, *ends, *longest, **options)
        oracle = Oracle(q, k, v, draw.causal, draw.sm_scale, window=draw.window, cu_seqlens=tuple(ends))
    else:
        out, lse = attention(*inputs, **options)
        oracle = Oracle(q, k, v, draw.causal, draw.sm_scale, window=draw.window)
    oracle.judge(out, lse).raise_if_bad(str(draw))
    assert not out[(oracle.lse if q.dim() == 4 else oracle.lse.T) == -math.inf].any(), f"{draw}: empty rows"
    if backward:
        found = torch.autograd.grad(out, inputs, d_out)
        for parts in sequences(draw, (d_out, q, k, v), found):
            verdicts = GradientOracle(*parts[:4], **draw.options).judge(*parts[4:])
            for verdict in verdicts.values():
                raise_if_bad(verdict, SLACK, str(draw))
    for name, now, then in zip(("q", "k", "v", "d_out"), (q, k, v, d_out), before, strict=True):
        assert torch.equal(now, then), f"{draw}: {name} was written to"


SLACK = 2
"""Gradient budgets, times this. Draws are small, so that the yardstick's own error is a matter of luck. A
wrong mask, scale or tile is wrong by orders of magnitude."""


def raise_if_bad(verdict: Judgement, slack: float, name: str) -> None:
    """AssertionError unless errors are within the budget times `slack`."""
    budget = verdict.budget
    if not (verdict.max_error <= slack * budget.max and verdict.rms_error <= slack * budget.rms):
        raise AssertionError(f"{name} is wrong: {verdict.reason}")


def sequences(draw: Draw, given, found):
    """(d_out, q, k, v, dq, dk, dv) of each sequence as (1, H, S, D), or of the whole batch."""
    everything = (*given, *found)
    if not draw.varlen:
        yield everything
        return
    rows, keys = (list(side) for side in zip(*draw.lengths, strict=True))
    splits = [x.split(n) for x, n in zip(everything, (rows, rows, keys, keys, rows, keys, keys), strict=True)]
    for parts in zip(*splits, strict=True):
        if len(parts[1]) and len(parts[2]):
            yield tuple(x.transpose(0, 1)[None] for x in parts)
        else:
            assert not any(x.any() for x in parts[4:]), f"{draw}: gradients of a sequence with nothing to see"
