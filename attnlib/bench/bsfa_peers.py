"""Skip-softmax (BLASST) of nvidia-modelopt, to time beside attnlib's BSFA: its file of kernels, in the folder
that ATTNLIB_PEERS names, or installed. ImportError: it is not there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnlib.bench.decode_peers import package


def skip_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, threshold: float | None) -> Callable:
    """A causal call, fp16, in Triton. A tile is skipped whose maximum lies ln(threshold) below the running
    one; None is the dense kernel. It takes (B * S, H, D), and is given such."""
    attention = package("modelopt.torch.kernels.common.attention.triton_fa").attention
    B, H, S, D = q.shape
    rows, keys, values = (x.transpose(1, 2).contiguous().flatten(0, 1) for x in (q, k, v))
    starts = torch.arange(0, B * S, S, device=q.device, dtype=torch.int32)
    lengths = torch.full((B,), S, device=q.device, dtype=torch.int32)

    def call() -> torch.Tensor:
        out = attention(
            rows, keys, values, starts, lengths, S, is_causal=True, skip_softmax_threshold=threshold
        )
        return out.view(B, S, H, D).transpose(1, 2)

    return call
