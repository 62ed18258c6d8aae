"""A Llama-shaped model in plain PyTorch, randomly initialized, for chapter 41: its memory and its time are
measured, what it says does not matter."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from attnlib.book.training import LlamaShape

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention of q (B, H, S, D) to k, v (B, Hkv, S, D)."""


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        like = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        self.down = nn.Linear(base.in_features, rank, **like)
        self.up = nn.Linear(rank, base.out_features, **like)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Layer(nn.Module):
    def __init__(self, shape: LlamaShape, attend: Attend) -> None:
        super().__init__()
        self.shape, self.attend = shape, attend
        rows, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.norm_1, self.norm_2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.q, self.k, self.v, self.o = (
            nn.Linear(*sizes, bias=False)
            for sizes in ((shape.width, rows), (shape.width, keys), (shape.width, keys), (rows, shape.width))
        )
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        B, S, _ = x.shape
        y = self.norm_1(x)
        q, k, v = (part(y).view(B, S, -1, self.shape.head_dim) for part in (self.q, self.k, self.v))
        out = self.attend(*(each.transpose(1, 2) for each in (rotated(q, turn), rotated(k, turn), v)))
        x = x + self.o(out.transpose(1, 2).reshape(B, S, -1))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of (B, S, H, D): pairs of columns turned by angles that grow with the position."""
    cos, sin = turn
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Llama(nn.Module):
    """loss(tokens) of a model of this shape; `checkpointing` keeps a layer's input only and computes the
    layer again in the backward pass. The loss goes through the rows `loss_rows` at a time, each time with its
    logits computed again, so that they are never there for all rows."""

    def __init__(self, shape: LlamaShape, attend: Attend, checkpointing: bool, loss_rows: int = 1024) -> None:
        super().__init__()
        self.shape, self.checkpointing, self.loss_rows = shape, checkpointing, loss_rows
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(shape, attend) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def adapt(self, rank: int) -> None:
        """LoRA of this rank beside every linear layer; all else is frozen."""
        self.requires_grad_(False)
        for layer in self.layers:
            for name, part in list(layer.named_children()):
                if isinstance(part, nn.Linear):
                    setattr(layer, name, LoraLinear(part, rank))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.checkpointing and not x.requires_grad:  # a frozen embedding: else no layer would be kept
            x = x.detach().requires_grad_()
        turn = self.angles(tokens.shape[1], x)
        for layer in self.layers:
            x = checkpoint(layer, x, turn, use_reentrant=False) if self.checkpointing else layer(x, turn)
        x, wanted = self.norm(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        parts = zip(x.split(self.loss_rows), wanted.split(self.loss_rows), strict=True)
        sums = [checkpoint(self.loss_of, rows, right, use_reentrant=False) for rows, right in parts]
        return torch.stack(sums).sum() / len(wanted)

    def loss_of(self, rows: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(rows).float(), right, reduction="sum")

    def angles(self, length: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.shape.head_dim // 2
        rates = 10000.0 ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
        turns = torch.arange(length, device=x.device, dtype=torch.float32)[:, None, None] * rates
        return turns.cos().to(x.dtype), turns.sin().to(x.dtype)


class MasterAdamW:
    """AdamW on float32 copies of bfloat16 parameters: 12 bytes a trained parameter beside 2 for itself and 2
    for its gradient. One parameter at a time, so that nothing else of their size is needed."""

    def __init__(self, parameters: list[nn.Parameter], rate: float = 1e-4) -> None:
        self.parameters, self.rate, self.steps = [p for p in parameters if p.requires_grad], rate, 0
        self.state = [
            (p.detach().float(), *(torch.zeros_like(p, dtype=torch.float32) for _ in range(2)))
            for p in self.parameters
        ]

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        one, two = 1 - 0.9**self.steps, 1 - 0.95**self.steps
        for p, (master, mean, square) in zip(self.parameters, self.state, strict=True):
            grad = p.grad.float()
            mean.lerp_(grad, 0.1)
            square.mul_(0.95).addcmul_(grad, grad, value=0.05)
            master.mul_(1 - 0.01 * self.rate)
            master.addcdiv_(mean, grad.copy_(square).div_(two).sqrt_().add_(1e-8), value=-self.rate / one)
            p.copy_(master)
            p.grad = None
