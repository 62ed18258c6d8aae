"""What becomes of scores before the softmax (`attnlib.Score`), in PyTorch, in the dtype of the scores."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnlib.arguments.common import type_name
from attnlib.arguments.scores import NO_REFERENCE
from attnlib.scores import ScoreParts


def scored(
    scores: torch.Tensor, score: ScoreParts, first_row: int, sizes: tuple[int, int], derivative: bool = True
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Scores (B, H, rows, Sk) times sm_scale, of rows from `first_row` on, as the softmax takes them; and
    their derivative by what they were, without `derivative` not that of a function. sizes: (Sq, Sk)."""
    slope = 1.0
    if score.function is not None:
        scores, slope = _by_function(scores, score.reference, first_row, derivative)
    if score.soft_cap is not None:
        t = torch.tanh(scores / score.soft_cap)
        scores, slope = t * score.soft_cap, slope * (1 - t * t)
    rows = slice(first_row, first_row + scores.shape[2])
    if score.alibi is not None:
        place = torch.arange(rows.start, rows.stop, device=scores.device)[:, None] + (sizes[1] - sizes[0])
        distance = (place - torch.arange(sizes[1], device=scores.device)).abs()
        scores = scores - score.alibi.to(scores.dtype)[:, None, None] * distance.to(scores.dtype)
    if score.bias is not None:
        scores = scores + score.bias_of(rows).to(scores.dtype)
    return scores, slope


def _by_function(
    scores: torch.Tensor, reference: Callable | None, first_row: int, derivative: bool
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Scores after a function of the user's own, and with `derivative` that, by autograd, which inference
    mode and operators do not have; else 1. Where a key is hidden the derivative is 0, as kernels have it."""
    if reference is None:
        raise ValueError(NO_REFERENCE)
    B, H, rows, S_k = scores.shape
    b, h, j = (torch.arange(n, device=scores.device) for n in (B, H, S_k))
    i = torch.arange(first_row, first_row + rows, device=scores.device)[:, None]
    with torch.set_grad_enabled(derivative):
        s = scores.detach().requires_grad_(derivative)
        given = s * 1 if derivative else s  # autograd allows a function to write into what is no leaf
        if derivative and not given.requires_grad:
            raise NotImplementedError(
                "the gradient of score.reference under torch.compile, torch.export or a dispatch mode: not "
                "supported, as operators have no autograd; call attention outside, or where the kernels run"
            )
        changed = reference(given, i, j, h[:, None, None], b[:, None, None, None])
        if not isinstance(changed, torch.Tensor):
            raise TypeError(f"score.reference: expected a torch.Tensor, got {type_name(changed)}")
        if changed.shape != s.shape:
            raise ValueError(
                f"score.reference: expected shape {tuple(s.shape)}, as it was given, "
                f"got {tuple(changed.shape)}"
            )
        slope = 1.0
        if derivative and changed.requires_grad:
            slope = torch.autograd.grad(changed.sum(), s, materialize_grads=True)[0]
            slope = slope.masked_fill(~changed.isfinite(), 0.0)
        elif derivative:  # it does not depend on the scores
            slope = 0.0
    return changed.detach().to(scores.dtype), slope


def with_sinks(scores: torch.Tensor, score: ScoreParts | None) -> torch.Tensor:
    """Scores (B, H, rows, Sk) and, behind the last key, the sink of each head."""
    if score is None or score.sinks is None:
        return scores
    sinks = score.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1)


def by_diagonals(terms: torch.Tensor) -> torch.Tensor:
    """(1, H, Sq, Sk) added up to the places of `ScoreParts` with a bias of diagonals."""
    _, H, S_q, S_k = terms.shape
    i, j = (torch.arange(n, device=terms.device) for n in (S_q, S_k))
    places = S_q - 1 - i[:, None] + j
    found = terms.new_zeros(H, max(0, S_q + S_k - 1))
    return found.index_add_(1, places.flatten(), terms[0].flatten(1))


def summed(terms: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """(B, H, Sq, Sk) added up to where `sizes` has a 1."""
    dims = [dim for dim, size in enumerate(sizes) if size == 1 < terms.shape[dim]]
    return terms.sum(dims, keepdim=True) if dims else terms
