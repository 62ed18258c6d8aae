"""How far MonarchAttention is from softmax, and what a trained model makes of that; without a GPU.

    python -m attnlib.bench.monarch_quality             some five minutes; figures/data/monarch_quality.json
    python -m attnlib.bench.monarch_quality --errors    the first table alone, no record

Two tables. `errors`: the matrix of weights against that of softmax, over rounds and blocks, for queries and
keys of four kinds: the relative Frobenius norm of the difference, and the mean over rows of the divergence
KL(Monarch || softmax), whose sum the fit makes small. `vision`: a small transformer that was trained with
softmax to tell shapes in noisy pictures, and then runs with other attention, without any further training.
Two controls: attention that weighs all tokens alike, and none across blocks.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attnlib.bench import records
from attnlib.kernels.reference import monarch as model
from attnlib.params import MonarchParams

Tensors = tuple[torch.Tensor, torch.Tensor]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

KINDS = "iid", "clustered", "smooth image", "sharp"
TOKENS, WIDTH, HEADS = 1024, 64, 2
BLOCKS = 4, 8, 16, 32, 64, 128, 256
ROUNDS = 1, 2, 3, 10


# ---------------------------------------------------------------- errors


def tensors_of(kind: str, seed: int = 0) -> Tensors:
    """Queries and keys (1, HEADS, TOKENS, WIDTH) in fp64.

    iid           N(0, 1)
    clustered     N(0, 1) around one of 16 centers, also N(0, 1); runs of some 16 tokens share a center
    smooth image  features of a picture of 32 x 32 tokens: each column a wave of low frequency, the same for
                  queries and keys, and noise
    sharp         iid, queries four times larger
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    shape = 1, HEADS, TOKENS, WIDTH
    if kind in ("iid", "sharp"):
        return randn(*shape) * (4 if kind == "sharp" else 1), randn(*shape)
    if kind == "clustered":
        centers = randn(HEADS, 16, WIDTH)
        runs = torch.randint(16, (TOKENS // 16,), generator=generator).repeat_interleave(16)
        return tuple(centers[:, runs][None] + 0.5 * randn(*shape) for _ in "qk")
    side = math.isqrt(TOKENS)
    axis = torch.arange(side).double()
    place = torch.stack(torch.meshgrid(axis, axis, indexing="ij")).flatten(1)  # (2, N)
    waves = torch.randint(-3, 4, (HEADS, WIDTH, 2), generator=generator).double()
    angle = 2 * math.pi / side * waves @ place + 2 * math.pi * torch.rand(
        HEADS, WIDTH, 1, generator=generator, dtype=torch.float64
    )
    features = math.sqrt(2) * angle.cos().mT[None]  # (1, HEADS, N, WIDTH)
    return features + 0.1 * randn(*shape), features + 0.1 * randn(*shape)


def distance(weights: torch.Tensor, softmax: torch.Tensor) -> tuple[float, float]:
    """(relative Frobenius norm of the difference, mean KL of the rows in nats)."""
    norm = torch.linalg.matrix_norm
    ratio = (weights * (weights.clamp_min(1e-300) / softmax.clamp_min(1e-300)).log()).sum(-1)
    return (norm(weights - softmax) / norm(softmax)).mean().item(), ratio.mean().item()


def error_rows() -> Iterator[dict[str, Any]]:
    for kind in KINDS:
        q, k = tensors_of(kind)
        softmax = torch.softmax(q @ k.mT * WIDTH**-0.5, -1)
        uniform, _ = distance(torch.full_like(softmax, 1 / TOKENS), softmax)
        largest = softmax.amax(-1).mean().item()
        for block in BLOCKS:
            for rounds in ROUNDS:
                weights = model.matrix(q, k, MonarchParams(block, rounds, 0, WIDTH**-0.5))
                frobenius, divergence = distance(weights, softmax)
                yield {"kind": kind, "tokens": TOKENS, "block": block, "rounds": rounds,
                       "frobenius": frobenius, "kl": divergence, "uniform": uniform,
                       "largest_weight": largest}  # fmt: skip


# ---------------------------------------------------------------- a model

SIDE, PATCH, CHANNELS, LAYERS, CLASSES = 48, 4, 64, 2, 8
PICTURE_TOKENS = (SIDE // PATCH) ** 2
SHAPES = "disk", "ring", "square", "frame", "cross", "plus", "stripes", "checks"


def pictures(number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(pictures (number, SIDE, SIDE), which of SHAPES each has): one shape of random place, size and
    contrast, a dozen specks, and noise."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (number,), generator=generator)

    def rand(*size: int) -> torch.Tensor:
        return torch.rand((number, *size), generator=generator)

    radius = 8 + 5 * rand(1, 1)
    at = radius + (SIDE - 1 - 2 * radius) * rand(2, 1)
    y = torch.arange(SIDE).view(1, -1, 1) - at[:, :1]
    x = torch.arange(SIDE).view(1, 1, -1) - at[:, 1:]
    u, w = y.abs() / radius, x.abs() / radius
    far, round_ = torch.maximum(u, w), (u**2 + w**2).sqrt()
    inside = far <= 1
    drawn = torch.stack([
        round_ <= 1, (round_ <= 1) & (round_ > 0.6), inside & (far <= 0.9), inside & (far > 0.6),
        inside & ((u - w).abs() < 0.35), inside & (torch.minimum(u, w) < 0.3),
        inside & (y.floor() % 6 < 3), inside & ((y.floor() % 8 < 4) ^ (x.floor() % 8 < 4)),
    ], 1)  # fmt: skip
    picture = drawn[torch.arange(number), label].float() * (0.6 + 0.8 * rand(1, 1))
    for _ in range(12):
        spot = (SIDE * rand(2)).long().clamp_max(SIDE - 2)
        picture[torch.arange(number), spot[:, 0], spot[:, 1]] = 1.0
    return picture + 0.3 * torch.randn(picture.shape, generator=generator), label


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class Vision(nn.Module):
    """A transformer over patches of a picture; the mean of all tokens says which shape it is."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.attention = heads, softmax_attention
        self.patches = nn.Linear(PATCH * PATCH, CHANNELS)
        self.places = nn.Parameter(0.1 * torch.randn(PICTURE_TOKENS, CHANNELS))
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS) for _ in range(2 * LAYERS + 1))
        self.qkv = nn.ModuleList(nn.Linear(CHANNELS, 3 * CHANNELS) for _ in range(LAYERS))
        self.mix = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(CHANNELS, 2 * CHANNELS), nn.GELU(), nn.Linear(2 * CHANNELS, CHANNELS))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        B, grid = len(picture), SIDE // PATCH
        cut = picture.view(B, grid, PATCH, grid, PATCH).transpose(2, 3).reshape(B, PICTURE_TOKENS, -1)
        x = self.patches(cut) + self.places
        for i in range(LAYERS):
            q, k, v = self.qkv[i](self.norms[2 * i](x)).view(B, PICTURE_TOKENS, 3, self.heads, -1).unbind(2)
            seen = self.attention(*(part.transpose(1, 2) for part in (q, k, v)))
            x = x + self.mix[i](seen.transpose(1, 2).flatten(2))
            x = x + self.mlp[i](self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x).mean(1))


def trained(steps: int, report: Callable[[str], None] = print) -> Vision:
    torch.manual_seed(0)
    vision = Vision()
    optimizer = torch.optim.AdamW(vision.parameters(), 3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    begin = time.perf_counter()
    for step in range(steps):
        picture, label = pictures(32, 1000 + step)
        loss = F.cross_entropy(vision(picture), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            report(f"step {step + 1}: loss {loss.item():.3f}, {time.perf_counter() - begin:.0f} s")
    return vision.eval()


def monarch_attention(block: int, rounds: int) -> Attention:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return model.output(q, k, v, MonarchParams(block, rounds, 0, q.shape[-1] ** -0.5), torch.float32)

    return attend


def uniform_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return v.mean(2, keepdim=True).expand_as(v)


def block_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int = 12) -> torch.Tensor:
    """Each token sees its own block alone."""
    return F.scaled_dot_product_attention(*(x.unflatten(2, (-1, block)) for x in (q, k, v))).flatten(2, 3)


@torch.no_grad()
def vision_rows(vision: Vision, tested: int) -> Iterator[dict[str, Any]]:
    picture, label = pictures(tested, 1)
    ways: list[tuple[dict[str, Any], Attention]] = [({"attention": "softmax"}, softmax_attention)]
    ways += [({"attention": "monarch", "block": block, "rounds": rounds}, monarch_attention(block, rounds))
             for block in (4, 12, 36) for rounds in (1, 2, 3)]  # fmt: skip
    ways += [({"attention": "all alike"}, uniform_attention), ({"attention": "own block"}, block_attention)]
    agreed: torch.Tensor | None = None
    for name, attend in ways:
        vision.attention = attend
        logits = torch.cat([vision(some) for some in picture.split(100)])
        found = logits.argmax(-1)
        agreed = found if agreed is None else agreed
        yield {**name, "accuracy": (found == label).double().mean().item(), "pictures": tested,
               "agrees": (found == agreed).double().mean().item(), "tokens": PICTURE_TOKENS}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="How far MonarchAttention is from softmax.")
    parser.add_argument("--errors", action="store_true", help="the table of errors alone, no record")
    parser.add_argument("--steps", type=int, default=600, help="of training")
    args = parser.parse_args()
    tables = {"errors": {"rows": list(error_rows())}}
    if args.errors:
        print(*tables["errors"]["rows"], sep="\n")
        return
    begin = time.perf_counter()
    vision = trained(args.steps)
    spent = time.perf_counter() - begin
    tables["vision"] = {"rows": list(vision_rows(vision, 1000))}
    print(*tables["vision"]["rows"], sep="\n", flush=True)
    how = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "where": "CPU, fp64; the model in float32",
        "training_steps": args.steps,
        "training_seconds": round(spent),
    }
    path = records.data_dir() / "monarch_quality.json"
    records.write_json(path, records.rounded({"schema": records.SCHEMA, "method": how, "tables": tables}))
    print(path)


if __name__ == "__main__":
    main()
