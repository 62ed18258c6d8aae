"""`SeerGate`: the scores of blocks, from pooled queries and keys."""

from __future__ import annotations

import math

import torch
from torch import nn

from attnlib.arguments.seer import check_gate, check_gate_call, check_loss


class SeerGate(nn.Module):
    """A score for each block of queries and block of keys of each head, as arXiv 2410.13276 computes it,
    but for an RMS norm after the linear maps.

    Queries are averaged over a block; of the keys of a block the largest, the smallest and the mean of each
    column stand side by side. Both are taken before rotary embeddings, which would blur what is pooled: a
    block has a direction as a whole, its tokens turn. Each head has a linear map of its own for its queries,
    each key head one for its keys; the results, `width` numbers each, get rotary embeddings at the numbers of
    their blocks. The score is their product over sqrt(width), and what it predicts is log(pooled), up to a
    number for each row, where pooled is the map of `attnlib.attention_pooled`.

        gate = SeerGate(heads=32, kv_heads=8, head_dim=128)
        out, pooled = attnlib.attention_pooled(q, k, v, causal=True, block=128)
        loss = gate.loss(gate(q_before, k_before), pooled)
        mask = mask_of(top(gate(q_before, k_before), 16), q.shape[2], 128)
        out = attnlib.attention(q, k, v, block_mask=mask)

    For decoding (arXiv 2506.08889) `decode=True`: a query is not pooled, and the query heads of a key head go
    through one linear map together, so that they choose the same blocks.

    Attributes:
        heads, kv_heads, head_dim: of the queries and keys.
        block: tokens of a block, 64 or 128.
        width: of what is compared.
        theta: of the rotary embeddings, 10000.
        decode: one score for each query and key head.
    """

    theta = 10000.0

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, *, block: int = 128, width: int | None = None,
        decode: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        width = head_dim if width is None else width
        check_gate(heads, kv_heads, head_dim, block, width)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.block, self.width, self.decode = block, width, decode
        group = heads // kv_heads
        maps, columns = (kv_heads, group * head_dim) if decode else (heads, head_dim)
        # It begins with the products of mean queries and mean keys, seen through `width` random directions.
        seen = nn.init.orthogonal_(torch.empty(head_dim, width))
        self.q_map = nn.Parameter(
            (seen.repeat(columns // head_dim, 1) * head_dim / columns).repeat(maps, 1, 1)
        )
        self.k_map = nn.Parameter(torch.cat([0 * seen, 0 * seen, seen]).repeat(kv_heads, 1, 1))

    def extra_repr(self) -> str:
        names = "heads", "kv_heads", "head_dim", "block", "width", "decode"
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The scores (B, H, n, n) float32 of a causal sequence with itself, -inf above the diagonal; with
        `decode` (B, Hkv, S, n), -inf for blocks that begin after the query.

        q: (B, H, S, D), k: (B, Hkv, S, D), before rotary embeddings.
        """
        check_gate_call(self, q, k)
        keys = self.keys(k)
        queries = self.queries(q)
        if not self.decode:
            keys = keys.repeat_interleave(self.heads // self.kv_heads, 1)
        found = (queries @ keys.mT).float() / math.sqrt(self.width)
        row = torch.arange(queries.shape[2], device=q.device)[:, None] // (self.block if self.decode else 1)
        return found.masked_fill(torch.arange(keys.shape[2], device=q.device) > row, -math.inf)

    def keys(self, k: torch.Tensor) -> torch.Tensor:
        """What queries are compared with, (B, Hkv, n, width), of keys (B, Hkv, S, D). The last block may be
        short; those of full blocks never change, so that decoding keeps them."""
        parts = [(x.amax(3), x.amin(3), x.mean(3)) for x in self._blocks(k)]
        pooled = torch.cat([torch.cat(part, -1) for part in parts], 2)  # (B, Hkv, n, 3 D)
        return self._placed(pooled.to(self.k_map.dtype) @ self.k_map, 0, 1)

    def queries(self, q: torch.Tensor, first: int = 0) -> torch.Tensor:
        """(B, H, n, width) of queries (B, H, S, D); with `decode` (B, Hkv, S, width), of which the first is
        token number `first`."""
        if self.decode:
            joined = q.unflatten(1, (self.kv_heads, -1)).transpose(2, 3).flatten(3)  # (B, Hkv, S, group D)
            return self._placed(joined.to(self.q_map.dtype) @ self.q_map, first, self.block)
        if first:
            raise ValueError(f"first: expected 0 of a gate without decode, got {first}")
        pooled = torch.cat([x.mean(3) for x in self._blocks(q)], 2)
        return self._placed(pooled.to(self.q_map.dtype) @ self.q_map, 0, 1)

    def loss(self, scores: torch.Tensor, pooled: torch.Tensor, skip: float = 0.25) -> torch.Tensor:
        """The mean over rows of KL(pooled / its row sum || softmax(scores)), in nats; without the first
        `skip` of the rows, which have few blocks to choose from. It is infinite where `pooled` has a weight
        and the score is -inf: a map for this gate is that of causal attention. TypeError, ValueError: one of
        the two is no such tensor, or not 0 <= skip < 1."""
        check_loss(scores, pooled, skip)
        first = int(skip * scores.shape[2])
        scores, pooled = scores[:, :, first:], pooled[:, :, first:].float()
        wanted = pooled / pooled.sum(-1, keepdim=True).clamp_min(1e-30)
        found = torch.log_softmax(scores, -1).masked_fill(wanted == 0, 0.0)  # it may be -inf there
        return (torch.xlogy(wanted, wanted) - wanted * found).sum(-1).mean()

    def _blocks(self, x: torch.Tensor) -> list[torch.Tensor]:
        """(B, heads, n, block, D) of full blocks, and of the last one if it is short."""
        whole = x.shape[2] // self.block * self.block
        parts = [x[:, :, :whole].unflatten(2, (whole // self.block, self.block)), x[:, :, None, whole:]]
        return [part for part in parts if part.numel()]

    def _placed(self, x: torch.Tensor, first: int, tokens: int) -> torch.Tensor:
        """Each row at a mean square of 1, whatever pooling has left, and with rotary embeddings, of rows that
        are `tokens` to a block; row 0 is number `first`."""
        x = nn.functional.rms_norm(x, (self.width,))
        half = self.width // 2
        place = (torch.arange(x.shape[2], device=x.device) + first) // tokens
        angle = place[:, None] * self.theta ** (-torch.arange(half, device=x.device) / half)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
