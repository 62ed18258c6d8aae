"""A Llama-shaped model in plain PyTorch, randomly initialized, for chapters 41 and 42: its memory and its
time are measured, what it says does not matter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from attnlib import attention
from attnlib.book.training import LlamaShape, Training

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention of q (B, H, S, D) to k, v (B, Hkv, S, D)."""


def by_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backends: list) -> torch.Tensor:
    """By the first of these backends that can."""
    with sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


ATTEND: dict[str, Attend] = {
    "math": partial(by_pytorch, backends=[SDPBackend.MATH]),
    "sdpa": partial(by_pytorch, backends=[SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]),
    "attnlib": partial(attention, causal=True),
}


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


again = partial(checkpoint, use_reentrant=False)
"""Call a function without what its backward pass needs, and once more when that is needed."""


class Layer(nn.Module):
    """checkpointing: "none"; "layer": the backward pass computes the layer again from its input; "selective":
    all of it but attention, whose inputs and output stay."""

    def __init__(self, shape: LlamaShape, attend: Attend, checkpointing: str) -> None:
        super().__init__()
        self.shape, self.attend, self.checkpointing = shape, attend, checkpointing
        rows, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.norm_1, self.norm_2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.q, self.k, self.v, self.o = (
            nn.Linear(*sizes, bias=False)
            for sizes in ((shape.width, rows), (shape.width, keys), (shape.width, keys), (rows, shape.width))
        )
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return again(self.whole, x, turn) if self.checkpointing == "layer" else self.whole(x, turn)

    def whole(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        selective = self.checkpointing == "selective"
        q, k, v = again(self.before, x) if selective else self.before(x)
        out = self.attend(*(each.transpose(1, 2) for each in (rotated(q, turn), rotated(k, turn), v)))
        return again(self.after, x, out) if selective else self.after(x, out)

    def before(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v as (B, S, H, D)."""
        y = self.norm_1(x)
        return tuple(part(y).unflatten(2, (-1, self.shape.head_dim)) for part in (self.q, self.k, self.v))

    def after(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        x = x + self.o(out.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of (B, S, H, D): pairs of columns turned by angles that grow with the position."""
    cos, sin = turn
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Rows(NamedTuple):
    """Which tokens of a longer sequence a rank has: their positions (S); the token after each, (B, S), `LAST`
    after the last one; and the number by which the sum of their losses is divided."""

    positions: torch.Tensor
    wanted: torch.Tensor
    count: float


LAST = -100
"""What cross_entropy leaves out."""


class Llama(nn.Module):
    """loss(tokens) of a model of this shape, with the attention and the checkpointing of `how`, before LoRA
    and without a spread over GPUs; of some tokens of a sequence with `rows`, and an `attend` that knows the
    others. The loss goes through the rows `how.loss_rows` at a time, each time with its logits computed
    again, so that they are never there for all rows."""

    def __init__(self, shape: LlamaShape, how: Training, attend: Attend | None = None) -> None:
        super().__init__()
        self.shape, self.how = shape, how
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        attend = attend or ATTEND[how.attention]
        self.layers = nn.ModuleList(Layer(shape, attend, how.checkpointing) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def adapt(self, rank: int) -> None:
        """LoRA of this rank beside every linear layer of the layers; all else is frozen."""
        self.requires_grad_(False)
        for layer in self.layers:
            for name, part in list(layer.named_children()):
                if isinstance(part, nn.Linear):
                    setattr(layer, name, LoraLinear(part, rank))

    def adapt_by_peft(self, rank: int) -> None:
        """The same by the library peft, with adapters of the model's dtype, which not every version makes."""
        from peft import LoraConfig, inject_adapter_in_model

        dtype = self.tokens.weight.dtype
        names = ["q", "k", "v", "o", "gate", "up", "down"]
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=names), self)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
        x = self.tokens(tokens)
        if not x.requires_grad:  # a frozen embedding: checkpoints need an input that a gradient flows to
            x = x.detach().requires_grad_()
        turn = self.angles(None if rows is None else rows.positions, x)
        for layer in self.layers:
            x = layer(x, turn)
        x = self.norm(x)
        if rows is None:
            x, wanted = x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
            count = len(wanted)
        else:
            x, wanted, count = x.flatten(0, 1), rows.wanted.flatten(), rows.count
        size = self.how.loss_rows
        parts = zip(x.split(size), wanted.split(size), strict=True)
        return torch.stack([again(self.loss_of, *part) for part in parts]).sum() / count

    def loss_of(self, rows: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(rows).float(), right, reduction="sum")

    def angles(self, positions: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of these positions; None: of the first, and so on."""
        half = self.shape.head_dim // 2
        rates = 10000.0 ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
        first = partial(torch.arange, x.shape[1], device=x.device, dtype=torch.float32)
        turns = (first() if positions is None else positions)[:, None, None] * rates
        return turns.cos().to(x.dtype), turns.sin().to(x.dtype)
