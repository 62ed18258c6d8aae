"""The calls that `attention_monarch` is judged on, and the judgement."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from attnlib import attention_monarch
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels import monarch
from attnlib.kernels.monarch.configs import MonarchConfig, Tile
from attnlib.kernels.reference import monarch as model
from attnlib.params import MonarchParams


@dataclass(frozen=True)
class MonarchCase:
    """One call. masked: the share of tokens that do not count; of the last sequence none counts. transposed:
    tensors (B, N, H, D) in memory. tile: rows and columns of every tile, None for the family's choice."""

    name: str
    tokens: int
    block: int
    steps: int = 1
    pad: str = "post"
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    dtype: str = "float16"
    kind: str = "normal"
    sm_scale: float | None = None
    masked: float = 0.0
    transposed: bool = False
    tile: int | None = None

    @property
    def params(self) -> MonarchParams:
        first = -self.tokens % self.block if self.pad == "pre" else 0
        scale = self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale
        tiles = None if self.tile is None else MonarchConfig(*[Tile(self.tile, self.tile, 4, 2)] * 3)
        return MonarchParams(self.block, self.steps, first, scale, None, tiles)


def make(case: MonarchCase, device: str, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """(q, k, v) and the key mask."""
    shape = Shape(case.batch, case.heads, case.tokens, case.head_dim, False, case.dtype, case.kv_heads)
    tensors = make_inputs(shape, case.kind, seed, device)
    if case.transposed:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    if not case.masked:
        return list(tensors), None
    generator = torch.Generator(device).manual_seed(seed)
    mask = torch.rand(case.batch, case.tokens, generator=generator, device=device) >= case.masked
    if case.batch > 1:
        mask[-1] = False
    return list(tensors), mask


def run(case: MonarchCase, tensors: list[torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
    if case.tile is not None:
        return monarch.forward(*tensors, case.params._replace(key_mask=mask))
    options = {"block": case.block, "steps": case.steps, "pad": case.pad, "sm_scale": case.sm_scale}
    return attention_monarch(*tensors, key_mask=mask, impl="triton", **options)


RUNS, MORE = 8, 128
"""How often the model runs with roundings, to find what they cost; and for rows that look wrong."""


def costs_of(
    case: MonarchCase, tensors: list[torch.Tensor], params: MonarchParams, seed: int, runs: int = RUNS
) -> torch.Tensor:
    """(runs, rows): the largest error of each row of the output in runs of the model that round where the
    kernels round, each with noise on the keys that is as large as a rounding."""
    q, k, v = tensors
    truth, generator = model.output(q, k, v, params), torch.Generator(k.device).manual_seed(seed)
    found = []
    for _ in range(runs):
        noise = torch.randn(k.shape, generator=generator, dtype=torch.float64, device=k.device)
        moved = k.double() * (1 + torch.finfo(k.dtype).eps * noise)
        found.append(row_errors(model.output(q, moved, v, params, k.dtype).to(k.dtype), truth))
    return torch.stack(found)


def row_errors(out: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return (out.double() - truth).abs().amax(-1).flatten()


def check(case: MonarchCase, device: str, seed: int = 0) -> None:
    """AssertionError unless the errors against the model in fp64 are what roundings cost, see `costs_of`.

    A row may hang on a near tie: of two blocks that are as good as each other, a rounding decides. Such a row
    has large errors in every run with roundings, and how large is luck. So each row has its own budget: twice
    the 99th percentile of all costs, plus 10 times the RMS of this row's costs. The RMS of all errors may be
    twice that of all costs; there, what is above the percentile counts as the percentile, or one near tie
    would be most of it.

    One to three rows that are still above have the model's cost in MORE runs more: a tie that is missed by a
    few roundings goes the other way in one run of a hundred. Their budget is then twice the largest cost."""
    tensors, mask = make(case, device, seed)
    out = run(case, tensors, mask)
    assert out.shape == tensors[0].shape and out.dtype == tensors[0].dtype
    assert out.isfinite().all(), f"{case.name} is wrong: values are not finite"
    params = case.params._replace(key_mask=mask)
    errors, costs = row_errors(out, model.output(*tensors, params)), costs_of(case, tensors, params, seed)
    usual = costs.flatten().kthvalue(math.ceil(0.99 * costs.numel())).values
    allowed = 2 * usual + 10 * rms(costs, 0)
    above = errors > allowed
    if 0 < above.sum() <= 3:  # more are no luck
        more = costs_of(case, tensors, params, seed + 1, MORE)[:, above]
        allowed[above] = torch.maximum(allowed[above], 2 * more.amax(0))
    worst = (errors - allowed).argmax()
    found, budget = rms(errors.clamp(max=usual)), 2 * rms(costs.clamp(max=usual))
    right = (errors <= allowed).all() and found <= budget
    told = f"max error {errors[worst]:.2e} (budget {allowed[worst]:.2e}), RMS {found:.2e} ({budget:.2e})"
    assert right, f"{case.name} is wrong: {told}"


def rms(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    return x.square().mean(dim).sqrt()


FAMILIES = 24
"""Of random calls: what is compiled anew depends on a family's number alone, but for the rounds."""


def draw(number: int) -> MonarchCase:
    """A random call of family `number % FAMILIES`."""
    family, rng = random.Random(number % FAMILIES), random.Random(number)
    block = family.choice((1, 2, 7, 8, 16, 24, 32, 45, 64, 64, 100, 128, 200, 256, 300))
    most = min(family.choice((16, 32, 64, 64, 128, 256, 400)), max(16, 16384 // block))  # blocks
    uneven, masked, flipped = (family.random() < share for share in (0.6 * (block > 1), 0.4, 0.3))
    head_dim = family.choice((64, 64, 64, 128, 256, 8 * family.randint(1, 32)))
    dtype = family.choice(("float16", "bfloat16", "bfloat16", "float32"))
    group = family.randint(1, 3)
    blocks = rng.randint(1 if most == 16 else most // 2 + 1, most)
    tokens = max(1, blocks * block - uneven * rng.randint(1, max(1, block - 1)))
    scale = rng.choice((1.0, 1.0, 2.0, 0.3)) * head_dim**-0.5
    kv_heads = rng.randint(1, 2)
    kind = rng.choice(("normal", "normal", "outlier", "sink", "large", "constant"))
    return MonarchCase(
        f"draw {number}", tokens, block, rng.choice((1, 1, 2, 3)), rng.choice(("post", "pre")),
        rng.randint(1, 2), kv_heads * group, kv_heads, head_dim, dtype, kind, -scale if flipped else scale,
        rng.choice((0.1, 0.9)) * masked, rng.random() < 0.3,
    )  # fmt: skip
