"""Calls of what is not softmax attention, drawn at random: entmax attention, DistrAttention and
MonarchAttention, each against its own model in fp64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

import distr_cases
import entmax_cases
import monarch_cases
from distr_cases import DistrCase
from entmax_cases import EntmaxCase

from attnlib.bench.oracle import poisoned_empty
from attnlib.kernels.common.distr import Grouping

TOGETHER = 40
"""So many consecutive numbers are calls of one form, for which the same kernels are compiled."""


class EntmaxForm(NamedTuple):
    """What kernels are compiled for."""

    dtype: str
    head_dim: int
    alpha: float
    causal: bool
    group: int = 1
    sm_scale: float | None = None
    varlen: bool = False


ENTMAX = [
    EntmaxForm("bfloat16", 64, 1.5, True),
    EntmaxForm("bfloat16", 64, 1.5, False, 2),
    EntmaxForm("float16", 64, 1.5, True, 4),
    EntmaxForm("float16", 64, 2.0, True),
    EntmaxForm("bfloat16", 64, 1.25, True),
    EntmaxForm("float16", 64, 1.8, False),
    EntmaxForm("bfloat16", 128, 1.5, True, 2),
    EntmaxForm("float16", 128, 1.5, False, 1, -0.2),
    EntmaxForm("float16", 80, 1.5, True),
    EntmaxForm("bfloat16", 256, 1.5, True),
    EntmaxForm("float16", 32, 1.05, True, 3),
    EntmaxForm("float32", 64, 1.5, True),
    EntmaxForm("float32", 32, 2.0, False, 2),
    EntmaxForm("bfloat16", 64, 1.5, True, 2, varlen=True),
    EntmaxForm("float16", 128, 1.5, False, varlen=True),
    EntmaxForm("float16", 64, 2.0, True, varlen=True),
    EntmaxForm("bfloat16", 256, 1.25, True, varlen=True),
    EntmaxForm("float32", 40, 1.5, True, 2, varlen=True),
]


def entmax_of(form: EntmaxForm, seed: int) -> EntmaxCase:
    """A call of this form with up to some 700 queries and keys."""
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    queries, keys = (rng.choice([1, 63, 64, 65, 128, rng.randrange(1, 700)]) for _ in range(2))
    keys = rng.choice([keys, queries])
    case = EntmaxCase(
        f"draw {seed} of {form}", queries, keys, form.alpha, form.causal,
        kv_heads * form.group, kv_heads, form.head_dim, form.dtype, rng.choice([1, 2]), form.sm_scale,
        kind=rng.choice(["normal", "normal", "outlier", "constant", "sink", "large"]),
        spread=rng.choice([1.0, 1.0, 0.2, 4.0]), room=rng.choice([None, None, None, 64, 128]),
    )  # fmt: skip
    if not form.varlen:
        return case
    sizes = [0, 1, 63, 64, 65, rng.randrange(1, 300)]
    lengths = [(rng.choice(sizes), rng.choice(sizes)) for _ in range(rng.randint(0, 7))]
    return replace(case, batch=1, lengths=(*lengths, (queries, keys)))  # sequences are its only batch


class DistrForm(NamedTuple):
    impl: str
    head_dim: int
    group: int
    dtype: str
    causal: bool
    share: int  # query heads of a key head


DISTR = [
    DistrForm("hopper", 64, 2, "float16", True, 1), DistrForm("hopper", 64, 2, "bfloat16", False, 2),
    DistrForm("hopper", 64, 4, "bfloat16", True, 2), DistrForm("hopper", 64, 1, "float16", False, 1),
    DistrForm("hopper", 128, 2, "bfloat16", True, 1), DistrForm("hopper", 128, 2, "float16", False, 2),
    DistrForm("hopper", 128, 4, "float16", True, 2), DistrForm("hopper", 128, 8, "bfloat16", False, 1),
    DistrForm("hopper", 128, 1, "bfloat16", True, 3), DistrForm("hopper", 40, 5, "float16", True, 1),
    DistrForm("hopper", 72, 3, "bfloat16", False, 2), DistrForm("triton", 64, 2, "float16", True, 2),
    DistrForm("triton", 128, 4, "bfloat16", False, 1), DistrForm("triton", 64, 4, "float32", True, 1),
]  # fmt: skip


def distr_of(form: DistrForm, seed: int) -> DistrCase:
    """A call of this form."""
    rng = random.Random(f"{seed} {tuple(form)}")
    S, keys = (rng.choice((rng.randint(1, 40), rng.randint(1, 1500), 256, 1024)) for _ in "qk")
    if rng.random() < 0.5:
        keys = S
    hashed = rng.choice("kkqq")
    rows = rng.choice((None, 128, 256, 384, 1024)) if hashed == "q" else None
    heads = rng.randint(1, 3)
    return DistrCase(
        S, Grouping(form.group, hashed, rows, rng.randint(0, 2**31 - 1)), form.head_dim, heads * form.share,
        heads, keys, rng.randint(1, 2), form.causal, form.dtype, rng.choice((None, None, 0.3, -0.1)),
        rng.choice(("normal", "normal", "outlier", "sink")), strided=rng.random() < 0.3,
    )  # fmt: skip


class Drawn(NamedTuple):
    """A call, what it is counted by, and what `check` gets besides: a seed, or an implementation."""

    case: Any
    kind: str
    how: Any


def draw_entmax(number: int) -> Drawn:
    form = ENTMAX[number // TOGETHER % len(ENTMAX)]
    mask = "causal" if form.causal else "dense"
    varlen = ", varlen" if form.varlen else ""
    kind = f"{form.dtype}, D {form.head_dim}, alpha {form.alpha}, {mask}{varlen}"
    return Drawn(entmax_of(form, number), kind, number)


def draw_monarch(number: int) -> Drawn:
    # Its number chooses the family of a draw: here the same one for all that are together.
    families = monarch_cases.FAMILIES
    case = monarch_cases.draw(number * families + number // TOGETHER % families)
    mask = ", masked" if case.masked else ""
    return Drawn(case, f"{case.dtype}, block {case.block}, D {case.head_dim}{mask}", number)


def draw_distr(number: int) -> Drawn:
    form = DISTR[number // TOGETHER % len(DISTR)]
    mask = "causal" if form.causal else "dense"
    kind = f"{form.impl}, {form.dtype}, D {form.head_dim}, groups of {form.group}, {mask}"
    return Drawn(distr_of(form, number), kind, form.impl)


def check_entmax(drawn: Drawn, device: str) -> None:
    entmax_cases.check(drawn.case, device, drawn.how)


def check_monarch(drawn: Drawn, device: str) -> None:
    monarch_cases.check(drawn.case, device, drawn.how)


def check_distr(drawn: Drawn, device: str) -> None:
    with poisoned_empty():
        distr_cases.check(drawn.case, device, impl=drawn.how)


def kind(drawn: Drawn) -> str:
    return drawn.kind
