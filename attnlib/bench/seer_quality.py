"""What the gate of SeerAttention finds in a small language model that cannot do without attention.

The model learns to copy. A text is N / 2 tokens in random order, none of them twice, and then pieces of SPAN
tokens out of them, from random places: whoever finds the one place where the last token stood before knows
the next one. `train` trains it, from short texts to long ones; `distill` trains a gate for each of its layers
with the model as it is; `evaluate` compares what the model says under all keys and under chosen blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attnlib import attention, attention_pooled
from attnlib.seer import SeerGate, mask_of, top, top_of_density

DENSITIES = 0.05, 0.1, 0.2, 0.5
SIGNIFICANT = 0.1
CHOICES = "gate", "oracle", "random"
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q, k, v, q and k before rotary embeddings) -> the output of attention, all (B, H, N, D)."""


@dataclass(frozen=True)
class Setup:
    """How large all of it is.

    lessons: (tokens of a text, texts at once, steps) of the model's training, one after the other. block: of
    the gate. distilled: the same of the gate's, one text at once. lengths: at which it is judged.
    """

    vocabulary: int = 16384
    width: int = 256
    heads: int = 2
    layers: int = 2
    span: int = 256
    block: int = 128
    lessons: tuple[tuple[int, int, int], ...] = ((2048, 8, 300), (8192, 2, 100), (32768, 1, 60))
    distilled: tuple[tuple[int, int], ...] = ((8192, 400), (32768, 60))
    lengths: tuple[int, ...] = (8192, 16384, 32768)
    texts: int = 2
    rate: float = 2e-3


TINY = Setup(
    vocabulary=256, width=64, heads=1, layers=1, span=64, block=64, lessons=((256, 4, 30),),
    distilled=((256, 1),), lengths=(256,), texts=1,
)  # fmt: skip


def texts(
    setup: Setup, tokens: int, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [count, N], whether the next one is known [count, N - 1]) on the CPU."""
    half, span = tokens // 2, setup.span
    found = []
    for _ in range(count):
        first = torch.randperm(setup.vocabulary, generator=generator)[:half]
        starts = torch.randint(half - span + 1, (half // span,), generator=generator)
        found.append(torch.cat([first, first[(starts[:, None] + torch.arange(span)).flatten()]]))
    place = torch.arange(1, tokens)
    known = (place >= half) & ((place - half) % span > 0)
    return torch.stack(found), known.expand(count, -1)


class Layer(nn.Module):
    """Attention and an MLP. A key knows the token before its own, too: so one layer can find what followed
    a token ("smeared keys", arXiv 2209.11895). The maps begin where a query is like the key of the token
    after its own, and the output like the value, so that training takes seconds; it has to sharpen what
    they find, and to get rid of the token itself."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        width, self.heads = setup.width, setup.heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(2 * width, width), nn.Linear(width, width)
        self.out, self.stays = nn.Linear(width, width), nn.Parameter(torch.ones(()))
        with torch.no_grad():
            for linear in (self.q, self.v):
                nn.init.orthogonal_(linear.weight)
            self.k.weight.copy_(torch.cat([torch.zeros_like(self.q.weight), self.q.weight], 1))
            self.out.weight.copy_(self.v.weight.mT)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, number: int, attend: Attend) -> torch.Tensor:
        h = self.norms[0](x)  # [B, N, width]
        before = F.pad(h[:, :-1], (0, 0, 1, 0))
        split = (self.q(h), self.k(torch.cat([h, before], -1)), self.v(h))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous() for y in split)
        out = attend(number, rotated(q), rotated(k), v, q, k)
        x = self.stays * x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class CopyModel(nn.Module):
    """Token numbers [B, N] -> the loss of each next token in nats [B, N - 1]. The embeddings are random and
    stay so, and the output has the same ones: so what is learned for some tokens holds for all."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.register_buffer("tokens", F.normalize(torch.randn(setup.vocabulary, setup.width), dim=-1))
        self.layers = nn.ModuleList(Layer(setup) for _ in range(setup.layers))
        self.norm, self.scale = nn.RMSNorm(setup.width), nn.Parameter(torch.tensor(10.0))

    def forward(self, text: torch.Tensor, attend: Attend, known: torch.Tensor) -> torch.Tensor:
        """The mean loss of the tokens that are known."""
        x = self.tokens[text[:, :-1]] * math.sqrt(self.tokens.shape[1])
        for number, layer in enumerate(self.layers):
            x = layer(x, number, attend)
        guesses = F.linear(F.normalize(self.norm(x)[known], dim=-1), self.tokens) * self.scale
        return F.cross_entropy(guesses.float(), text[:, 1:][known])


def rotated(x: torch.Tensor, theta: float = 1e5) -> torch.Tensor:
    """Rotary embeddings on the first half of the columns; by the others content is found at any distance."""
    quarter = x.shape[-1] // 4
    place = torch.arange(x.shape[2], device=x.device)[:, None]
    angle = place * theta ** (-torch.arange(quarter, device=x.device) / quarter)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right, rest = x.split((quarter, quarter, x.shape[-1] - 2 * quarter), -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)


# ---------------------------------------------------------------- training


def dense(number: int, q, k, v, *_) -> torch.Tensor:
    return attention(q, k, v, causal=True)


def in_half(device: str) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def train(setup: Setup, device: str, say: Callable[[str], None] = lambda text: None) -> CopyModel:
    """A model that was trained with causal attention."""
    torch.manual_seed(0)
    model, source = CopyModel(setup).to(device), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), setup.rate, (0.9, 0.95), weight_decay=0.01)
    steps = sum(lesson[2] for lesson in setup.lessons)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, setup.rate, steps, pct_start=0.1)
    for tokens, count, repeats in setup.lessons:
        for step in range(repeats):
            text, known = (x.to(device) for x in texts(setup, tokens, count, source))
            with in_half(device):
                loss = model(text, dense, known)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 20 == 19 or step == repeats - 1:
                say(f"{tokens} tokens, step {step + 1}: {loss.item():.3f} nats")
    return model.requires_grad_(False)


def distill(
    model: CopyModel, setup: Setup, device: str, say: Callable[[str], None] = lambda text: None
) -> nn.ModuleList:
    """A gate for each layer, trained with the pooled maps of the model's own attention."""
    torch.manual_seed(2)
    width = setup.width // setup.heads
    gates = nn.ModuleList(SeerGate(setup.heads, setup.heads, width, block=setup.block) for _ in model.layers)
    gates, source = gates.to(device), torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(gates.parameters(), 3e-3, weight_decay=0.0)
    steps = sum(steps for _, steps in setup.distilled)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    for tokens, repeats in setup.distilled:
        for step in range(repeats):
            text, known = (x.to(device) for x in texts(setup, tokens, 1, source))
            seen: list = []
            with torch.no_grad(), in_half(device):
                model(text, watched(seen, setup), known)
            loss = sum(
                gate.loss(gate(q.float(), k.float()), map_)
                for gate, (q, k, map_) in zip(gates, seen, strict=True)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 20 == 19 or step == repeats - 1:
                say(f"gates, {tokens} tokens, step {step + 1}: KL {loss.item() / len(gates):.3f} nats")
    return gates.requires_grad_(False)


def watched(seen: list, setup: Setup) -> Attend:
    """Causal attention that leaves (q, k before rotary embeddings, the pooled map) of each layer."""

    def attend(number, q, k, v, q_before, k_before) -> torch.Tensor:
        out, pooled = attention_pooled(q, k, v, causal=True, block=setup.block)
        seen.append((q_before, k_before, pooled))
        return out

    return attend


# ---------------------------------------------------------------- what it is worth


class Choosing:
    """Attention that chooses its blocks as it comes to them, and counts what it has found.

    choice: "gate", "oracle" (the largest of the pooled map), or "random". kept: parts of the blocks of the
    triangle; found: of the blocks off the diagonal in which somebody's weight is SIGNIFICANT or more; mass:
    of the sum of the pooled map.
    """

    def __init__(self, choice: str, density: float, gates: nn.ModuleList, setup: Setup) -> None:
        self.choice, self.density, self.gates, self.setup = choice, density, gates, setup
        self.kept: list[torch.Tensor] = []
        self.found: list[torch.Tensor] = []
        self.mass: list[torch.Tensor] = []

    def __call__(self, number, q, k, v, q_before, k_before) -> torch.Tensor:
        block, tokens = self.setup.block, q.shape[2]
        _, pooled = attention_pooled(q, k, v, causal=True, block=block)
        n = pooled.shape[-1]
        count = top_of_density(n, self.density)
        below = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        truth = pooled.masked_fill(~below, -math.inf)
        if self.choice == "gate":
            scores = self.gates[number](q_before.float(), k_before.float())
        else:
            scores = (
                truth if self.choice == "oracle" else torch.rand_like(truth).masked_fill(~below, -math.inf)
            )
        chosen = top(scores, count) & below
        true = (pooled >= SIGNIFICANT) & ~torch.eye(n, dtype=torch.bool, device=q.device)
        self.kept.append(chosen.float().sum() / (chosen.shape[0] * chosen.shape[1] * n * (n + 1) / 2))
        self.found.append((chosen & true).sum() / true.sum().clamp_min(1))
        self.mass.append((pooled * chosen).sum() / pooled.sum())
        return attention(q, k, v, block_mask=mask_of(chosen, tokens, block))


@torch.no_grad()
def evaluate(model: CopyModel, gates: nn.ModuleList, setup: Setup, device: str) -> Iterator[dict[str, Any]]:
    """Rows: loss of the model at a length, with all keys and with chosen blocks."""
    for tokens in setup.lengths:
        given = [tuple(x.to(device) for x in texts(setup, tokens, 1, torch.Generator().manual_seed(100 + n)))
                 for n in range(setup.texts)]  # fmt: skip

        def loss_of(attend: Attend, given=given) -> float:
            with in_half(device):
                return sum(model(text, attend, known).item() for text, known in given) / len(given)

        yield {"seqlen": tokens, "choice": "all keys", "density": 1.0, "loss": loss_of(dense)}
        for choice in CHOICES:
            for density in DENSITIES:
                attend = Choosing(choice, density, gates, setup)
                row = {"seqlen": tokens, "choice": choice, "density": density, "loss": loss_of(attend)}
                for name in ("kept", "found", "mass"):
                    row[name] = torch.stack(getattr(attend, name)).mean().item()
                yield row


def quality(
    setup: Setup, device: str, say: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """All of it."""
    start = time.perf_counter()
    model = train(setup, device, say)
    taken = time.perf_counter() - start
    gates = distill(model, setup, device, say)
    rows = list(evaluate(model, gates, setup, device))
    rows[0] |= {"training_s": taken, "all_s": time.perf_counter() - start}
    return rows
