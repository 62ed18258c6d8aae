"""The calls that `attention_bsfa` is judged on, and the judgement."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from attnlib import attention_bsfa, bsfa_threshold
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.bench.structured import structured
from attnlib.kernels.common.bsfa import element_mask
from attnlib.kernels.reference import bsfa as model
from attnlib.params import BsfaParams


@dataclass(frozen=True)
class BsfaCase:
    """One call. threshold: a number, or how many of the blocks `bsfa_threshold` is to keep, as a string."""

    name: str
    rows: int
    keys: int
    threshold: float | str = "0.5"
    causal: bool = True
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    dtype: str = "float16"
    kind: str = "normal"
    sm_scale: float | None = None
    transposed: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale


def make(case: BsfaCase, device: str, seed: int = 0) -> list[torch.Tensor]:
    """(q, k, v). kind: as in `make_inputs`; "positive", of which all products are; or "structured"."""
    longest = max(case.rows, case.keys)
    shape = Shape(case.batch, case.heads, longest, case.head_dim, True, case.dtype, case.kv_heads)
    if case.kind == "structured":
        q, k, v = structured(shape, seed, device)
    else:
        q, k, v = make_inputs(shape, "normal" if case.kind == "positive" else case.kind, seed, device)
    if case.kind == "positive":
        q, k = q.abs(), k.abs()
    tensors = [q[:, :, -case.rows :], k[:, :, -case.keys :], v[:, :, -case.keys :]]
    if case.transposed:
        return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    return [x.contiguous() for x in tensors]


def threshold_of(case: BsfaCase, q: torch.Tensor, k: torch.Tensor) -> float | torch.Tensor:
    if not isinstance(case.threshold, str):
        return case.threshold
    kept = float(case.threshold) if "." in case.threshold else int(case.threshold)
    return bsfa_threshold(q, k, kept=kept, causal=case.causal, sm_scale=case.sm_scale)


def check(case: BsfaCase, device: str, seed: int = 0, impl: str | None = "triton") -> torch.Tensor:
    """AssertionError unless what is kept is what the threshold says, up to ties, and the output and the LSE
    are within the budget of softmax attention to it. Returns what is kept."""
    q, k, v = make(case, device, seed)
    threshold = threshold_of(case, q, k)
    options = {"causal": case.causal, "sm_scale": case.sm_scale, "impl": impl}
    out, lse, kept = attention_bsfa(
        q, k, v, threshold=threshold, return_lse=True, return_kept=True, **options
    )
    alone = attention_bsfa(q, k, v, threshold=threshold, **options)
    assert torch.equal(out, alone), f"{case.name} is wrong: other bits without LSE and kept blocks"
    limits = threshold if isinstance(threshold, torch.Tensor) else torch.tensor([[threshold]])
    limits = limits.to(device, torch.float32)[None] if limits.dim() == 2 else limits
    params = BsfaParams(limits, case.causal, case.scale)
    maxima = model.maxima(q, k, params)
    least, most = (  # what has to be kept, and what may be
        model.decided(maxima + sign * tolerance(maxima), case.rows, case.keys, params) for sign in (-1, 1)
    )
    assert bool((kept >= least).all()), f"{case.name} is wrong: a block is missing"
    assert bool((kept <= most).all()), f"{case.name} is wrong: a block too many"
    mask = element_mask(kept, case.rows, case.keys, case.causal)
    verdict = Oracle(q, k, v, sm_scale=case.sm_scale, mask=mask).judge(out, lse)
    verdict.raise_if_bad(case.name)
    return kept


def tolerance(maxima: torch.Tensor) -> torch.Tensor:
    """What the rounding of float32 sums may move a score by."""
    return 1e-5 * (1 + maxima.abs().nan_to_num(posinf=0.0))


FAMILIES = 16
"""Of random calls: what is compiled anew depends on a family's number alone."""


def draw(number: int) -> BsfaCase:
    """A random call of family `number % FAMILIES`."""
    family, rng = random.Random(number % FAMILIES), random.Random(number)
    causal, flipped = family.random() < 0.7, family.random() < 0.2
    head_dim, dtype = family.choice((64, 128)), family.choice(("float16", "bfloat16"))
    group = family.choice((1, 1, 2, 4))
    long = rng.random() < 0.3
    rows = rng.randint(1, 4096 if long else 700)
    keys = rng.choice((rows, rows, rng.randint(1, 4096 if long else 700)))
    kind = rng.choice(("normal", "large", "outlier", "sink", "structured", "structured"))
    threshold = rng.choice(("0.1", "0.3", "0.7", "2", "0", -1.0, 0.0, 2.0, float("inf"), -float("inf")))
    scale = rng.choice((1.0, 1.0, 0.3, 2.0)) * head_dim**-0.5 * (-1 if flipped else 1)
    kv_heads = rng.randint(1, 2)
    return BsfaCase(
        f"draw {number}", rows, keys, threshold, causal, rng.randint(1, 2), kv_heads * group, kv_heads,
        head_dim, dtype, kind, scale, rng.random() < 0.3,
    )  # fmt: skip
