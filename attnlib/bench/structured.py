"""Queries and keys with structure, as sparse attention wants them: a sink, recency and needles.

What scores of scaled products are about is set by hand; the rest is noise. Queries are strong for
- the first 4 keys (the sink),
- keys near them (recency: random Fourier features of the positions, whose products fall off like a bell),
- some earlier blocks of 128 keys, the needles: each block of keys has a code, which MARKED of its keys carry,
  and a block of 64 queries asks for one code for each of the scores in NEEDLES.
"""

import torch

from attnlib.bench.shapes import Shape

SINK, RECENT, NEEDLES = 11.0, 8.0, (14.0, 13.0, 12.0)
"""Scores that they reach."""
MARKED, WIDTH = 8, 64
FREQUENCIES, NOISE = 16, 0.12
ROWS, KEYS = 64, 128


def structured(shape: Shape, seed: int = 0, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """(q, k, v) of a self-attention shape, for a scale of 1/sqrt(D). Other seeds have other codes and noise,
    and the same strengths."""
    rng = torch.Generator(device).manual_seed(seed)
    B, H, S, D = shape.batch, shape.heads, shape.seqlen, shape.head_dim
    codes_from = 1 + 2 * FREQUENCIES

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=rng, device=device)

    unit = D**0.25  # products of two such numbers are scores of 1
    q, k = NOISE * unit * normal(B, H, S, D), NOISE * unit * normal(B, shape.kv_heads or H, S, D)
    q[..., 0], k[..., 0] = SINK**0.5 * unit, 0
    k[..., :4, 0] = SINK**0.5 * unit
    angles = torch.arange(S, device=device)[:, None] * normal(FREQUENCIES) / WIDTH  # [S, FREQUENCIES]
    near = (RECENT / FREQUENCIES) ** 0.5 * unit * torch.cat([angles.cos(), angles.sin()], 1)
    q[..., 1:codes_from] += near
    k[..., 1:codes_from] += near
    rows, blocks = -(-S // ROWS), -(-S // KEYS)
    codes = torch.nn.functional.normalize(normal(*k.shape[:2], blocks, D - codes_from), dim=-1)
    of_keys = codes.repeat_interleave(KEYS, 2)[:, :, :S]
    marked = (torch.arange(S, device=device) % (KEYS // MARKED) == 0)[:, None]
    k[..., codes_from:] += unit * marked * of_keys
    heads = torch.arange(H, device=device) // (H // k.shape[1])
    for score in NEEDLES:
        earlier = (torch.arange(rows, device=device) * ROWS // KEYS).clamp(min=1)
        asked = (torch.rand(B, H, rows, generator=rng, device=device) * earlier).long()
        found = codes[:, heads].gather(2, asked[..., None].expand(-1, -1, -1, D - codes_from))
        q[..., codes_from:] += score * unit * found.repeat_interleave(ROWS, 2)[:, :, :S]
    dtype = getattr(torch, shape.dtype)
    return q.to(dtype), k.to(dtype), normal(*k.shape).to(dtype)
