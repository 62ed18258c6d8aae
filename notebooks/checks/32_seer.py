"""Checks of the exercises of chapter 32."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.book import lesson


def check_pool_keys(pool_keys: Callable) -> None:
    """Against torch: whole blocks, a short last one, one key, keys that are all negative or all positive."""
    for S, shift in ((128, 0.0), (130, -5.0), (100, 5.0), (1, 0.0)):
        k = make_inputs(Shape(1, 2, S, 32), device=lesson.device())[1] + shift
        with np.errstate(all="ignore"):
            found = pool_keys(k)
        parts = [x.float() for x in k.split(64, 2)]
        truth = torch.stack([torch.cat([x.amax(2), x.amin(2), x.mean(2)], -1) for x in parts], 2)
        assert found.shape == truth.shape, (
            f"S={S}: expected shape {tuple(truth.shape)}, got {tuple(found.shape)}"
        )
        for name, one, other in zip(("largest", "smallest", "mean"), found.chunk(3, -1), truth.chunk(3, -1),
                                    strict=True):  # fmt: skip
            error = (one - other).abs().max().item()
            assert error <= 1e-5, f"S={S}, keys around {shift:g}: the {name} is off by {error:.1e}"


def check_mean_pooled_attention(attend: Callable) -> None:
    """Output and map against fp64: several blocks, a short last one, scores in the hundreds."""
    for S, causal, kind in (
        (128, True, "normal"),
        (150, False, "normal"),
        (140, True, "large"),
        (1, True, "normal"),
    ):
        shape = Shape(1, 2, S, 32, causal)
        q, k, v = make_inputs(shape, kind, device=lesson.device())
        with np.errstate(all="ignore"):
            out, found = attend(q, k, v, causal)
        case, n = f"S={S}, causal={causal}, {kind} inputs", -(-S // 64)
        verdict = Oracle(q, k, v, causal=causal).judge(out)
        assert verdict.ok, f"{case}: {verdict.reason}"
        scores = q.double() @ k.double().mT / math.sqrt(32)
        if causal:
            hidden = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        weights = torch.softmax(scores, -1).split(64, 2)
        truth = torch.stack([
            torch.stack([x.sum(3).mean(2) for x in rows.split(64, 3)], -1) for rows in weights
        ], 2)  # fmt: skip
        assert found.shape == (1, 2, n, n), (
            f"{case}: expected a map (1, 2, {n}, {n}), got {tuple(found.shape)}"
        )
        error = (found - truth).abs().max().item()
        assert error <= 1e-4, f"{case}: the map is off by {error:.1e}"


def check_pays_from(pays_from: Callable) -> None:
    """The first multiple of 1024 tokens, and none before it."""

    def pays(tokens: int, sparsity, heads, head_dim, rate, tbs, fixed) -> bool:
        dense = 4 * heads * head_dim * tokens**2 / 2 / (rate * 1e12)
        gate = 4 * heads * tokens * head_dim * 2 / (tbs * 1e12) + fixed * 1e-6
        return dense * (1 - sparsity) + gate < dense

    for case in ((0.5, 32, 128, 700, 3, 100), (0.9, 32, 128, 700, 3, 100), (0.7, 8, 64, 500, 2, 30)):
        tokens = pays_from(*case)
        told = f"pays_from{case}: {tokens} tokens"
        assert tokens > 0 and tokens % 1024 == 0, f"{told}, expected a multiple of 1024"
        assert pays(tokens, *case), f"{told}, where the gate costs more than it saves"
        assert tokens == 1024 or not pays(tokens - 1024, *case), f"{told}, but {tokens - 1024} pay, too"
