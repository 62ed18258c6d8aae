"""Calls of `attention_decode` drawn at random, for caches in 16 bits (and float32) and in FP8."""

from __future__ import annotations

import random

from decode_cases import DecodeCase

TOGETHER = 16
"""So many consecutive numbers are calls of one form, for which the same kernels are compiled: that takes
seconds, and a call with its reference 10 to 50 ms."""
LARGEST = 1 << 24
"""Numbers of keys in a call."""
PAGES = 16, 64, 48, 80
"""Keys of a page: powers of two, and other multiples of 16, which tiles do not divide."""


def draw(number: int, fp8: bool = False) -> DecodeCase:
    """A call, the same one for the same number. Its form follows from `number // TOGETHER`."""
    form, rng = random.Random(number // TOGETHER), random.Random(f"call {number}")
    dtype = form.choice(("float16", "bfloat16") * 2 + ("float32",) * (not fp8))
    width = 64 if dtype == "float32" else form.choice((64, 128, 256))
    head_dim = width - form.choice((0, 0, 8, 24))
    count, kv_heads = form.choice((1, 1, 2, 3, 17, 150)), form.choice((1, 2, 8))
    most = form.choice((300, 3000, 60000)) // count + 1
    most = min(most, LARGEST // (count * kv_heads * head_dim))
    full, page = form.random() < 0.25, form.choice((None, None, *PAGES))
    room = most + form.choice((0, 0, 1, 7, 100))
    if full and page is not None:
        room += -room % page
    lengths = [rng.choice((0, 1, rng.randrange(most), rng.randrange(most), most)) for _ in range(count)]
    counts = [room] * count if full else lengths
    starts = tuple(rng.choice((0, n, rng.randint(0, n), rng.randint(0, n) // 8)) for n in counts)
    window = rng.randrange(most), rng.randrange(4)
    return DecodeCase(
        f"call {number}", None if full else tuple(lengths), room=room, batch=count,
        heads=kv_heads * form.choice((1, 4, 8)), kv_heads=kv_heads, queries=form.choice((1, 1, 1, 2, 5, 16)),
        head_dim=head_dim, dtype=dtype, page=page, causal=form.random() < 0.7,
        window=form.choice((None, None, window)), sm_scale=form.choice((None, None, 0.05, -0.1)),
        split=form.choice((None, None, "none", "fixed", "stream_k", 3)),
        kind=rng.choice(("normal", "normal", "normal", "large", "outlier", "constant", "sink")),
        same_launch=form.random() < 0.2, starts=None if form.random() < 0.6 else starts,
        scales=form.choice(("nothing", "all", "heads", "pairs", "pairs")) if fp8 else None, seed=number,
        whole=form.choice((None, None, None, 1)),
    )  # fmt: skip


def kind(case: DecodeCase) -> str:
    """What the report counts calls by."""
    where = "contiguous" if case.page is None else f"pages of {case.page}"
    scales = "" if case.scales is None else f", scales of {case.scales}"
    return f"{case.dtype}, {where}{scales}{', window' * bool(case.window)}{', starts' * bool(case.starts)}"
