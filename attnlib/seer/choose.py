"""Which blocks are seen, by their scores; nothing here waits for the GPU."""

from __future__ import annotations

import torch

from attnlib.api.decode import attention_decode
from attnlib.arguments.masks import check_chosen_size
from attnlib.arguments.seer import check_above, check_decode_chosen, check_top, check_top_of_density
from attnlib.block_mask import BlockMask


def top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Bool, like the scores (..., n, n) of a causal sequence: of each row its block on the diagonal, the
    largest of the others up to `count` in all, and what is equal to the last of them. Rows with fewer than
    `count` blocks have all, those above the diagonal, too, which `mask_of` leaves out. A score that is NaN
    counts as infinite.

    Raises:
        TypeError: the scores are no tensor of a floating-point dtype, or `count` is no int.
        ValueError: the scores are not square, or `count` is below 1.
    """
    check_top(scores, count)
    own = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
    scores = scores.masked_fill(own | scores.isnan(), torch.inf)
    least = scores.topk(min(count, scores.shape[-1]), -1, sorted=False).values.amin(-1, keepdim=True)
    return scores >= least


def above(scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Bool, like `scores` (..., n): where softmax(scores) is above the threshold; in a row with NaN nowhere.

    Raises:
        TypeError: the scores are no tensor of a floating-point dtype, or the threshold is no number.
        ValueError: the scores have no dimension.
    """
    check_above(scores, threshold)
    return torch.softmax(scores, -1) > threshold


def top_of_density(blocks: int, density: float) -> int:
    """How many blocks each of so many causal rows has to keep, at most, that all together keep no more than
    this part of the triangle, diagonal included; at least 1.

    Raises:
        TypeError: `blocks` is no int, or `density` no number.
        ValueError: `blocks` is below 1, or `density` not above 0, up to 1.
    """
    check_top_of_density(blocks, density)
    count, most = 1, density * blocks * (blocks + 1) / 2
    while count < blocks and (count + 1) * blocks - count * (count + 1) / 2 <= most:
        count += 1
    return count


def mask_of(blocks: torch.Tensor, seqlen: int, block: int, density: float | None = None) -> BlockMask:
    """The causal mask of chosen blocks, for `attnlib.attention(..., block_mask=)`. The block on the diagonal
    is always seen. `blocks` must not change afterwards. density: what `top_of_density` was given; where rows
    have few blocks, a call that knows it is faster.

    Raises:
        TypeError, ValueError: as `BlockMask.from_chosen`, whose arguments these are.
    """
    check_chosen_size(block, "block")
    return BlockMask.from_chosen(blocks, seqlen, block_size=block, density=density)


def decode_chosen(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scores: torch.Tensor,
    count: int,
    *,
    lengths: torch.Tensor | None = None,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """`attnlib.attention_decode` of one token against `count` blocks of its cache, for each key head its own.

    Each key head counts as a sequence, and the blocks that it chose are that sequence's pages: so the kernel
    that reads caches in pages reads nothing else. Softmax does not depend on the order of keys. The newest
    block, which may be short, is always seen and comes last.

    Args:
        q: (B, H, 1, D).
        k_cache, v_cache: (B, Hkv, S, D), contiguous.
        scores: (B, Hkv, n), of a gate with `decode`, in a floating-point dtype; n divides S, and S / n, the
            block, is a power of two from 16 on. Those of the newest block and of later ones do not matter. A
            block with -inf is seen where less than `count` others are there; one with NaN before all others.
        count: blocks, the newest one among them; fewer where a sequence has fewer.
        lengths: (B) int32 on the device of `q`; None where the sequences fill the cache.

    Returns:
        out, (B, H, 1, D).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit.
        RuntimeError, NotImplementedError: as `attnlib.attention_decode`.
    """
    check_decode_chosen(q, k_cache, v_cache, scores, count, lengths)
    (B, heads, S, D), (H, n) = k_cache.shape, (q.shape[1], scores.shape[-1])
    block = S // n
    filled = torch.full((B,), S, device=q.device) if lengths is None else lengths.clamp(0, S).long()
    newest = ((filled - 1).clamp_min(0) // block)[:, None, None].expand(B, heads, 1)
    older = torch.arange(n, device=q.device) < newest  # (B, Hkv, n)
    chosen = min(count, n) - 1
    scores = scores.clamp_min(torch.finfo(scores.dtype).min)  # above those that are not there
    places = scores.masked_fill(~older, -torch.inf).topk(chosen, -1).indices  # those there are come first
    there = newest.clamp_max(chosen)
    table = torch.cat([places, newest], -1).scatter_(-1, there, newest)
    table += torch.arange(B * heads, device=q.device).view(B, heads, 1) * n
    seen = there[..., 0] * block + (filled - newest[:, 0, 0] * block)[:, None]
    pages = (x.view(B * heads * n, 1, block, D) for x in (k_cache, v_cache))
    out = attention_decode(
        q.view(B * heads, H // heads, 1, D), *pages, lengths=seen.flatten().int(),
        page_table=table.flatten(0, 1).int(), sm_scale=sm_scale,
    )  # fmt: skip
    return out.view(q.shape)
