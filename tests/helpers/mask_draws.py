"""Calls under block masks and with scores drawn at random, forward and backward, against fp64."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import NamedTuple

from draws import SLACK
from score_cases import BIASES, ScoreCase, check_scored
from sparse_cases import FUNCTIONS, SparseCase, check_backward, check_forward

from attnlib.bench.oracle import poisoned_empty
from attnlib.bench.shapes import Shape

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
    Form(None, "bfloat16", 64, "own"), Form(None, "float16", 128, "own + cap 5 + sinks"),
    Form("triton", "float16", 64, "relative"), Form("triton", "bfloat16", 128, "cap 5 + bias", False),
]  # fmt: skip
MASKS = [*sorted(set(FUNCTIONS) - {"documents"}), "random 64", "random 128"]
"""`documents` ends with its 400 tokens."""


class MaskDraw(NamedTuple):
    """A call; SparseCase without a score."""

    case: ScoreCase | SparseCase
    impl: str | None
    kind: str
    poisoned: bool  # what is not written to is NaN


def draw(number: int) -> MaskDraw:
    """A call, the same one for the same number."""
    piece, rng = number // TOGETHER, random.Random(number)
    form, shared = FORMS[piece % len(FORMS)], random.Random(f"piece {piece}")
    masks, bias = shared.sample(MASKS, 3), shared.choice(sorted(BIASES))
    group, H_kv = rng.choice([1, 1, 2, 4]), rng.choice([1, 2, 3])
    S_q, S_k = (rng.choice([rng.randint(1, 40), rng.randint(1, 700), 256, 64 * rng.randint(1, 10)])
                for _ in "qk")  # fmt: skip
    shape = Shape(
        rng.choice([1, 2]), group * H_kv, S_q, form.head_dim, rng.random() < 0.3, form.dtype,
        heads_kv=H_kv, seqlen_k=S_k,
    )  # fmt: skip
    window = None
    if not shape.causal and rng.random() < 0.2:
        window = rng.choice([-1, rng.randint(0, 300)]), rng.choice([-1, rng.randint(0, 100)])
    inputs, scale = rng.choice(["normal", "normal", "outlier", "sink"]), rng.choice([None, None, 0.3])
    call = SparseCase(shape, rng.choice(masks), inputs, scale, window)
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
