"""The calls that `attention_monarch` is judged on, and the judgement."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from attnlib import attention_monarch
from attnlib.bench.oracle import make_inputs, max_and_rms
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


def check(case: MonarchCase, device: str, seed: int = 0) -> None:
    """AssertionError unless the errors against the model in fp64 are at most twice what roundings cost: those
    of the dtype within the model, those of the keys, and one of the output. The second is there because a fit
    may hang on little: of two blocks as good as each other, a rounding decides."""
    tensors, mask = make(case, device, seed)
    out = run(case, tensors, mask)
    assert out.shape == tensors[0].shape and out.dtype == tensors[0].dtype
    assert out.isfinite().all(), f"{case.name} is wrong: values are not finite"
    params = case.params._replace(key_mask=mask)
    truth = model.output(*tensors, params)
    noise = torch.randn_like(tensors[1].double()) * torch.finfo(out.dtype).eps
    others = [
        model.output(*tensors, params, out.dtype).double(),
        model.output(tensors[0], tensors[1].double() * (1 + noise), tensors[2], params),
        truth.to(out.dtype).double(),
    ]
    costs = [max_and_rms(other - truth) for other in others]
    budget = [2 * sum(some) for some in zip(*costs, strict=True)]
    found = max_and_rms(out.double() - truth)
    told = f"max error {found[0]:.2e} (budget {budget[0]:.2e}), RMS error {found[1]:.2e} ({budget[1]:.2e})"
    right = all(a <= b for a, b in zip(found, budget, strict=True))
    assert right, f"{case.name} is wrong: {told}"


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
