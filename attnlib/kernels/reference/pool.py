"""Pooled attention maps in PyTorch, in fp64: all weights written out."""

import math

import torch


def unsupported(where: torch.device) -> None:
    """Nothing is."""


def of_scores(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, causal: bool, sm_scale: float
) -> torch.Tensor:
    """The largest weight of each unit of 64 queries by 64 keys, (B, H, units of queries, units of keys)
    float32; 0 where nothing is seen. Of all scores anew: large ones magnify the rounding of `lse`."""
    (_, H, S_q, _), S_k = q.shape, k.shape[2]
    k = k.repeat_interleave(H // k.shape[1], 1)
    scores = sm_scale * q.double() @ k.double().mT
    if causal:
        hidden = torch.ones(S_q, S_k, dtype=torch.bool, device=q.device).triu(1 + S_k - S_q)
        scores = scores.masked_fill(hidden, -math.inf)
    weights = torch.softmax(scores, -1).masked_fill(scores == -math.inf, 0.0)
    weights = torch.nn.functional.pad(weights, (0, -S_k % 64, 0, -S_q % 64))
    return weights.unflatten(3, (-1, 64)).unflatten(2, (-1, 64)).amax((3, 5)).float()
