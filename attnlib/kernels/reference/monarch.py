"""MonarchAttention in PyTorch, in fp64: the equations with all scores written out, block by block."""

import math
from typing import NamedTuple

import torch

from attnlib.params import MonarchParams


class Factors(NamedTuple):
    """The fitted matrices and how well they fit.

    left: (batch, H, B, M, M), L as [p, m', m]. right: (batch, H, M, B, B), R as [m, p, b]. objective: (batch,
    H, rounds), after each round the sum, over the queries that count, of the mean score plus the entropy of
    the weights. Its largest value over all matrices is the sum of the LSE, which softmax reaches.
    """

    left: torch.Tensor
    right: torch.Tensor
    objective: torch.Tensor


def unsupported(q, params: MonarchParams) -> None:
    """Nothing is."""


def forward(q, k, v, params: MonarchParams) -> torch.Tensor:
    """The output in the dtype of q; computed in fp64."""
    return output(q, k, v, params).to(q.dtype)


def in_blocks(x: torch.Tensor, params: MonarchParams) -> torch.Tensor:
    """(batch, H, N, D) -> (batch, H, M, B, D), with zeros where no token is."""
    batch, heads, tokens, width = x.shape
    blocks = params.blocks(tokens)
    whole = x.new_zeros(batch, heads, blocks * params.block, width)
    whole[:, :, params.first : params.first + tokens] = x
    return whole.view(batch, heads, blocks, params.block, width)


def counting(q: torch.Tensor, params: MonarchParams) -> torch.Tensor:
    """(batch, 1, M, B) bool: the places of tokens that count."""
    ones = torch.ones(q.shape[0], 1, q.shape[2], 1, device=q.device)
    if params.key_mask is not None:
        ones = ones * params.key_mask[:, None, :, None]
    return in_blocks(ones, params)[..., 0] > 0


def factors(q, k, params: MonarchParams, dtype: torch.dtype = torch.float64) -> Factors:
    """The fit. dtype: of what products read and what one step hands to the next, between which all is float32
    or fp64: with that of a kernel, what its rounding costs."""
    counts = counting(q, params)
    q, k = (in_blocks(_rounded(x, dtype), params) for x in (q, k))
    # Set to 0, not multiplied by it: tokens that do not count may be NaN.
    seen, k = (x.masked_fill(~counts[..., None], 0.0) for x in (q, k))
    centers, objective = seen, []
    for _ in range(params.steps):
        scores = params.sm_scale * torch.einsum("...mpd,...mbd->...mpb", centers, k)
        right, lse = _softmax(scores.masked_fill(~counts[..., None, :], -math.inf))
        keys = _rounded(torch.einsum("...mpb,...mbd->...mpd", _rounded(right, dtype), k), dtype)
        entropy = lse - params.sm_scale * (centers * keys).sum(-1)
        scores = params.sm_scale * torch.einsum("...npd,...mpd->...pnm", q, keys)
        left, lse = _softmax(scores + entropy.mT[..., None, :])
        objective.append(torch.where(counts.mT, lse, 0.0).sum((-1, -2)))
        weights = torch.log(left).masked_fill(~counts.mT[..., None], -math.inf)
        weights = _rounded(_softmax(weights.mT)[0], dtype)  # [p, m, m']
        centers = _rounded(torch.einsum("...pmn,...npd->...mpd", weights, seen), dtype)
    return Factors(left, right, torch.stack(objective, -1))


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In float32 or fp64, with values that the dtype has."""
    return x.to(dtype).to(torch.promote_types(dtype, torch.float32))


def _softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights along the last dimension, their LSE); weights 0 and LSE -inf where there is nothing."""
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]), lse


def output(q, k, v, params: MonarchParams, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """(batch, H, N, D) in float32 or fp64. dtype: as in `factors`."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    found = factors(q, k, params, dtype)
    v = in_blocks(_rounded(v, dtype), params).masked_fill(~counting(q, params)[..., None], 0.0)
    values = _rounded(torch.einsum("...mpb,...mbd->...mpd", _rounded(found.right, dtype), v), dtype)
    out = torch.einsum("...pnm,...mpd->...npd", _rounded(found.left, dtype), values).flatten(2, 3)
    return out[:, :, params.first : params.first + q.shape[2]]


def matrix(q, k, params: MonarchParams) -> torch.Tensor:
    """(batch, H, N, N) in fp64: row (m', p), column (m, b) is L_p[m', m] * R_m[p, b]."""
    found = factors(q, k.repeat_interleave(q.shape[1] // k.shape[1], 1), params)
    whole = torch.einsum("...pnm,...mpb->...npmb", found.left, found.right).flatten(-2).flatten(-3, -2)
    tokens = slice(params.first, params.first + q.shape[2])
    return whole[..., tokens, tokens]
