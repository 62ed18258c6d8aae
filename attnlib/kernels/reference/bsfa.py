"""Block-Sparse FlashAttention in PyTorch, in fp64: maxima of blocks of scores, and attention to what is kept.
It takes memory for all scores."""

import torch
import torch.nn.functional as F

from attnlib.kernels.common.bsfa import KEYS, ROWS, always_kept, element_mask, grid_of
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.params import BsfaParams


def unsupported(q, k, v, params: BsfaParams) -> None:
    """Nothing is."""


def maxima(q: torch.Tensor, k: torch.Tensor, params: BsfaParams) -> torch.Tensor:
    """(B, H, blocks of queries, blocks of keys) float64: the largest score of each block that is decided on,
    elsewhere -inf. A NaN is no score."""
    (B, H, S_q, _), S_k = q.shape, k.shape[2]
    rows, columns = grid_of(S_q, S_k)
    keys = k.double().repeat_interleave(H // k.shape[1], 1)
    first, _ = always_kept(S_q, S_k, params.causal, q.device)
    found = torch.full((B, H, rows, columns), -torch.inf, dtype=torch.float64, device=q.device)
    for i in range(rows):
        scores = params.sm_scale * q[:, :, i * ROWS : (i + 1) * ROWS].double() @ keys.mT
        scores = F.pad(scores.nan_to_num(-torch.inf, torch.inf, -torch.inf), (0, columns * KEYS - S_k))
        top = scores.amax(2).unflatten(2, (columns, KEYS)).amax(3)
        found[:, :, i, : first[i]] = top[:, :, : first[i]]
    return found


def decided(found: torch.Tensor, S_q: int, S_k: int, params: BsfaParams) -> torch.Tensor:
    """Which blocks are kept, bool, of the maxima of all blocks."""
    first, end = always_kept(S_q, S_k, params.causal, found.device)
    threshold = params.threshold.double()[..., :, None]
    missing = found.shape[2] - threshold.shape[2]
    if missing > 0:  # the last one counts for all after it
        threshold = torch.cat([threshold, threshold[:, :, -1:].expand(-1, -1, missing, -1)], 2)
    number = torch.arange(found.shape[3], device=found.device)
    above = ~(found < threshold[:, :, : found.shape[2]]) & (number < first[:, None])
    return above | ((number >= first[:, None]) & (number < end[:, None]))


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: BsfaParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out in the dtype of q, lse float32, kept bool)."""
    S_q, S_k = q.shape[2], k.shape[2]
    kept = decided(maxima(q, k, params), S_q, S_k, params)
    mask = element_mask(kept, S_q, S_k, params.causal)
    out, lse = attention_fp64(q, k, v, sm_scale=params.sm_scale, mask=mask)
    return out.to(q.dtype), lse.float(), kept
