"""Checks of the exercises of chapter 31."""

from collections.abc import Callable

import numpy as np
import torch

from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape

BLOCK = 64


def kept_by_running_maximum(scores: torch.Tensor, causal: bool, margin: float) -> torch.Tensor:
    """Which keys each query sees, bool (B, H, S, S), of scaled scores in fp64."""
    S = scores.shape[-1]
    seen = torch.ones(S, S, dtype=torch.bool, device=scores.device)
    scores, mask = (scores.masked_fill(~seen.tril(), -torch.inf) if causal else scores), seen.tril()
    mask = (mask if causal else seen).expand_as(scores).clone()
    for b, h in np.ndindex(*scores.shape[:2]):
        for start in range(0, S, BLOCK):
            rows = slice(start, min(S, start + BLOCK))
            last = (start if causal else S - 1) // BLOCK
            block = scores[b, h, rows, last * BLOCK : (last + 1) * BLOCK]
            top = block.amax(1)
            for j in range(last - 1, -1, -1):
                columns = slice(j * BLOCK, (j + 1) * BLOCK)
                own = scores[b, h, rows, columns].amax(1)
                if bool((own - top < -margin).all()):
                    mask[b, h, rows, columns] = False
                else:
                    top = torch.maximum(top, own)
    return mask


def coded_inputs(S: int, causal: bool) -> tuple[torch.Tensor, ...]:
    """Scores of queries and keys whose blocks are both odd, or both even, are some 9 above the others."""
    q, k, v = make_inputs(Shape(1, 2, S, 32, causal))
    odd = (torch.arange(S, device=q.device) // BLOCK % 2 == 1)[:, None]
    code = torch.cat([odd, ~odd], 1).to(q.dtype) * 7
    q[..., :2], k[..., :2] = code, code
    return q, k, v


def check_running_attention(attention: Callable) -> None:
    """Margins that skip nothing, some blocks, and nearly all; one block and several, a part of a block."""
    skipped = 0
    for S, causal, margin in ((290, True, 1.0), (256, False, 4.0), (64, True, 1.0), (200, True, 1e9)):
        q, k, v = coded_inputs(S, causal)
        scale = 32**-0.5
        mask = kept_by_running_maximum(scale * q.double() @ k.double().mT, causal, margin)
        skipped += int((~mask).sum()) - (S * (S - 1) if causal else 0)
        with np.errstate(all="ignore"):
            out = attention(q, k, v, causal, scale, margin)
        verdict = Oracle(q, k, v, sm_scale=scale, mask=mask).judge(out)
        assert verdict.ok, f"S={S}, causal={causal}, margin={margin:g}: {verdict.reason}"
    assert skipped > 290 * 64, "no case skips a block"


def check_bytes_of(bytes_of: Callable) -> None:
    """By counting the blocks of two consumers, one by one."""
    rng = np.random.default_rng(0)
    for d, share in ((128, 0.1), (128, 0.5), (64, 1.0), (64, 0.0)):
        kept = rng.permuted(np.tile(np.arange(100) < 100 * share, (2, 1)), axis=1)
        keys = 128 * d * 2
        wanted = keys * (1 + kept.mean(1).sum()), keys * (1 + kept.any(0).mean())
        got = bytes_of(float(kept.mean()), float(kept.all(0).mean()), d)
        assert len(got) == 2, f"expected two numbers, got {got!r}"
        assert np.allclose(got, wanted), f"bytes_of({share:g}, ..., {d}): expected {wanted}, got {got}"
