"""Solutions of chapter 41."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from attnlib.book.training import memory


def selective_bytes(tokens, width, heads, kv_heads, head_dim):
    """14,464 bytes a token and layer for the 1B model: 16 layers of them reach its 19.8 GB at 85,440."""
    rows, keys = heads * head_dim, kv_heads * head_dim
    return tokens * (2 * width + 2 * (rows + 2 * keys) + 2 * rows + 4 * heads)


class LeanMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down):
        ctx.save_for_backward(x, gate, up, down)
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    @staticmethod
    def backward(ctx, d_out):
        x, gate, up, down = ctx.saved_tensors
        a, b = x @ gate.T, x @ up.T  # [T, F]
        sigma = torch.sigmoid(a)
        silu = a * sigma
        d_h = d_out @ down  # [T, F]
        d_a = d_h * b * sigma * (1 + a * (1 - sigma))
        d_b = d_h * silu
        return d_a @ gate + d_b @ up, d_a.T @ x, d_b.T @ x, d_out.T @ (silu * b)


def longest(shape, how, room):
    """With LoRA and 135 GB, the 8B model: 241,664 tokens with checkpointing of layers, 105,472 with"""
    low, high = 0, 1  # in 1024 tokens: low fits, high does not

    def fits(count):
        return memory(shape, replace(how, context=1024 * count)).peak <= room

    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 1024 * low
