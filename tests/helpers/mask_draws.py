"""Calls under block masks and with scores drawn at random, forward and backward, against fp64."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from draws import SLACK
from score_cases import BIASES, ScoreCase, check_scored
from sparse_cases import DOCUMENTS, FUNCTIONS, SparseCase, check_backward, check_forward

from attnlib import BlockMask, S2Pattern
from attnlib.bench.oracle import poisoned_empty
from attnlib.bench.shapes import Shape
from attnlib.kernels.reference.gradients import visible
from attnlib.params import mask_window

TOGETHER = 100
"""So many consecutive numbers are calls of one form, for which few kernels are compiled."""


class Form(NamedTuple):
    """What kernels are compiled for, but for a mask's steps; score: parts of a `ScoreCase`, "" for none."""

    impl: str | None
    dtype: str
    head_dim: int
    score: str = ""
    block_mask: bool = True


FORMS = [
    *(Form("hopper", dtype, D) for dtype, D in (
        ("float16", 64), ("bfloat16", 128), ("float16", 256), ("bfloat16", 72), ("float16", 128),
        ("bfloat16", 256), ("bfloat16", 64),
    )),
    Form("triton", "float16", 64), Form("triton", "bfloat16", 128), Form("triton", "float32", 64),
    Form("hopper", "float16", 64, "cap 5"), Form("hopper", "bfloat16", 128, "cap 30 + alibi"),
    Form("hopper", "float16", 128, "alibi"), Form("hopper", "bfloat16", 64, "alibi + sinks 4"),
    Form("hopper", "float16", 256, "cap 5 + alibi"), Form("hopper", "float16", 128, "sinks -3", False),
    Form("hopper", "float16", 128, "bias"), Form("hopper", "float16", 64, "bias"),
    Form("hopper", "bfloat16", 128, "half"), Form("hopper", "float16", 64, "half + cap 5"),
    Form("hopper", "float16", 256, "half + sinks"), Form("hopper", "bfloat16", 64, "relative"),
    Form("hopper", "float16", 128, "relative + alibi"), Form("hopper", "float16", 256, "relative", False),
    Form("hopper", "bfloat16", 64, "own"), Form("hopper", "float16", 128, "own + cap 5 + sinks"),
    Form(None, "float16", 256, "own", False), Form("triton", "float16", 64, "own"),
    Form("triton", "float16", 64, "relative"), Form("triton", "bfloat16", 128, "cap 5 + bias", False),
    Form("hopper", "float16", 40), Form("hopper", "bfloat16", 96), Form("hopper", "float16", 160),
    Form("hopper", "bfloat16", 192), Form("triton", "bfloat16", 96), Form("triton", "float16", 160, "alibi"),
    Form("hopper", "bfloat16", 40, "bias"), Form("hopper", "float16", 96, "own + alibi"),
    Form("hopper", "float16", 160, "half + cap 5 + sinks"), Form("hopper", "bfloat16", 192, "relative"),
]  # fmt: skip
SQUARE = "S2", "chosen 64", "chosen 128", "chosen 128 of known density"
MASKS = [*sorted(FUNCTIONS), "random 64", "random 128", *SQUARE]
DENSITY = 0.3
LONG = 700
"""Calls with more queries or keys have few heads, for the oracle's memory."""


@dataclass(frozen=True)
class SquareCase(SparseCase):
    """As many queries as keys, under a mask of `SQUARE`: that of an `S2Pattern`, or of chosen blocks of a
    size, for each head its own."""

    @property
    def size(self) -> int:
        return 64 if self.mask == "S2" else int(self.mask.split()[1])

    def chosen(self) -> torch.Tensor:
        """Bool (1, H, blocks, blocks)."""
        n, rng = -(-self.shape.seqlen // self.size), torch.Generator().manual_seed(0)
        return torch.rand(1, self.shape.heads, n, n, generator=rng) < DENSITY

    def block_mask(self, device: str) -> BlockMask:
        s = self.shape
        if self.mask == "S2":
            key_heads = s.heads_kv or s.heads
            return S2Pattern(s.heads, key_heads, local_blocks=1, stride=key_heads).mask(s.seqlen, device)
        density = DENSITY if self.mask.endswith("density") else None
        blocks = self.chosen().to(device)
        return BlockMask.from_chosen(blocks, s.seqlen, block_size=self.size, density=density)

    def dense(self, device: str) -> torch.Tensor:
        """By the definitions of both."""
        s = self.shape
        place = torch.arange(s.seqlen, device=device)
        i, j = place[:, None] // self.size, place // self.size
        if self.mask == "S2":
            key_heads = s.heads_kv or s.heads
            head = torch.arange(s.heads, device=device)[:, None, None] // (s.heads // key_heads)
            far = (j + head) % key_heads == 0
        else:
            far = self.chosen().to(device)[:, :, i, j]
        seen = ((i == j) | far) & (place[:, None] >= place)
        window = mask_window(s.causal, self.window)
        return seen.expand(s.batch, s.heads, -1, -1) & visible(s.seqlen, s.seqlen, window, device)


class MaskDraw(NamedTuple):
    """A call; SparseCase without a score."""

    case: ScoreCase | SparseCase
    impl: str | None
    kind: str
    poisoned: bool  # what is not written to is NaN


def length(rng: random.Random, longest: int) -> int:
    """Of queries or keys: few of them, some, whole units of 64, or up to `longest`."""
    some = min(LONG, longest)
    usual = [rng.randint(1, 40), rng.randint(1, some), rng.randint(1, some), 64 * rng.randint(1, some // 64)]
    return rng.choice([*usual, *usual, rng.randint(some, longest)])


def draw(number: int) -> MaskDraw:
    """A call, the same one for the same number."""
    piece, rng = number // TOGETHER, random.Random(number)
    form, shared = FORMS[piece % len(FORMS)], random.Random(f"piece {piece}")
    masks, bias = shared.sample(MASKS, 3), shared.choice(sorted(BIASES))
    mask, group, H_kv = rng.choice(masks), rng.choice([1, 1, 2, 4]), rng.choice([1, 2, 3])
    S_q, S_k = (length(rng, len(DOCUMENTS) if mask == "documents" else 2000) for _ in "qk")
    batch = rng.choice([1, 2])
    if mask in SQUARE:
        S_k, H_kv = S_q, max(H_kv, 2)  # a head alone sees all of S2's blocks
    if max(S_q, S_k) > LONG:
        batch = group = 1
    shape = Shape(
        batch, group * H_kv, S_q, form.head_dim, rng.random() < 0.3, form.dtype,
        heads_kv=H_kv, seqlen_k=S_k,
    )  # fmt: skip
    window = None
    if not shape.causal and rng.random() < 0.2:
        window = rng.choice([-1, rng.randint(0, 300)]), rng.choice([-1, rng.randint(0, 100)])
    inputs, scale = rng.choice(["normal", "normal", "outlier", "sink"]), rng.choice([None, None, 0.3])
    call = (SquareCase if mask in SQUARE else SparseCase)(shape, mask, inputs, scale, window)
    parts = []
    for part in form.score.split(" + ") if form.score else []:
        if part in ("bias", "half"):
            part = f"{part} {bias}".strip()
        parts.append(part)
    case = ScoreCase(call, " + ".join(parts), form.block_mask) if parts else call
    kind = f"{form.impl or 'any'}, {form.dtype}, D {form.head_dim}, {form.score or 'no score'}"
    return MaskDraw(case, form.impl, kind, number % 4 == 0)


def kind(drawn: MaskDraw) -> str:
    """What the report counts calls by."""
    return drawn.kind


def check(drawn: MaskDraw, device: str) -> None:
    """AssertionError unless output, LSE and gradients are right."""
    with poisoned_empty() if drawn.poisoned else nullcontext():
        if isinstance(drawn.case, ScoreCase):
            check_scored(drawn.case, device, drawn.impl, slack=SLACK)
        else:
            check_forward(drawn.case, device, drawn.impl)
            check_backward(drawn.case, device, drawn.impl, slack=SLACK)
