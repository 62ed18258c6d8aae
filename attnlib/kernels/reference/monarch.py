"""MonarchAttention in PyTorch, in fp64: the equations with all scores written out, block by block."""

import math
from typing import NamedTuple

import torch

from attnlib.params import MonarchParams


class Factors(NamedTuple):
    """L (batch, H, B, M, M) as [p, m', m], R (batch, H, M, B, B) as [m, p, b], and what each row of L and R
    gives to the objective is kept in `objective` (batch, H, rounds): after each round, the sum over queries
    that count of (mean score + entropy of the weights)."""

    left: torch.Tensor
    right: torch.Tensor
    objective: torch.Tensor


def unsupported(q, params: MonarchParams) -> None:
    """Nothing is."""


def forward(q, k, v, params: MonarchParams) -> torch.Tensor:
    """The output in the dtype of q; computed in fp64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    found = factors(q, k, params)
    out = apply(found, in_blocks(v.double(), params))
    return torch.empty_like(q).copy_(out[:, :, params.first : params.first + q.shape[2]])


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
    """The fit. dtype: of queries, keys, mean keys and centers, between two of which all is float32 or fp64:
    with that of a kernel, what rounding costs."""
    exact = torch.promote_types(dtype, torch.float32)
    counts = counting(q, params)
    q, k = (in_blocks(x.to(exact), params) for x in (q, k))
    centers, objective = q * counts[..., None], []
    for _ in range(params.steps):
        scores = params.sm_scale * torch.einsum("...mpd,...mbd->...mpb", centers, k)
        scores = scores.masked_fill(~counts[..., None, :], -math.inf)
        right, lse = _softmax(scores)
        keys = torch.einsum("...mpb,...mbd->...mpd", right, k).to(dtype).to(exact)
        entropy = lse - params.sm_scale * (centers * keys).sum(-1)
        scores = params.sm_scale * torch.einsum("...npd,...mpd->...pnm", q, keys)
        left, lse = _softmax(scores + entropy.transpose(-1, -2)[..., None, :])
        objective.append(torch.where(counts.mT, lse, 0.0).sum((-1, -2)))
        weights = torch.log(left).masked_fill(~counts.mT[..., None], -math.inf)
        weights, _ = _softmax(weights.mT)  # [p, m, m']
        centers = torch.einsum("...pmn,...npd->...mpd", weights, q).to(dtype).to(exact)
    return Factors(left, right, torch.stack(objective, -1))


def _softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights along the last dimension, their LSE); weights 0 and LSE -inf where there is nothing."""
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]), lse


def apply(found: Factors, v: torch.Tensor) -> torch.Tensor:
    """The matrix times v (batch, H, M, B, D): (batch, H, M * B, D)."""
    values = torch.einsum("...mpb,...mbd->...mpd", found.right.to(v.dtype), v)
    return torch.einsum("...pnm,...mpd->...npd", found.left.to(v.dtype), values).flatten(2, 3)


def matrix(q, k, params: MonarchParams) -> torch.Tensor:
    """(batch, H, N, N) in fp64: row (m', p), column (m, b) is L_p[m', m] * R_m[p, b]."""
    found = factors(q, k.repeat_interleave(q.shape[1] // k.shape[1], 1), params)
    whole = torch.einsum("...pnm,...mpb->...npmb", found.left, found.right).flatten(-2).flatten(-3, -2)
    tokens = slice(params.first, params.first + q.shape[2])
    return whole[..., tokens, tokens]
