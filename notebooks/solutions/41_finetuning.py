"""Solutions of chapter 41."""

from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

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
    """With LoRA and 135 GB, the 8B model: 241,664 tokens with checkpointing of layers, 105,472 with the
    selective one, 21,504 with none."""
    low, high = 0, 1  # in 1024 tokens: low fits, high does not

    def fits(count):
        return memory(shape, replace(how, context=1024 * count)).peak <= room

    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 1024 * low


@triton.jit
def adam_kernel(grad_ptr, master_ptr, mean_ptr, square_ptr, new_param, new_master, new_mean, new_square, n,
                rate, one, two, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = at < n
    b_g = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    b_m = 0.9 * tl.load(mean_ptr + at, mask=inside, other=0.0) + 0.1 * b_g  # [BLOCK]
    b_u = 0.95 * tl.load(square_ptr + at, mask=inside, other=0.0) + 0.05 * b_g * b_g  # [BLOCK]
    b_w = tl.load(master_ptr + at, mask=inside, other=0.0) * (1 - 0.01 * rate)  # [BLOCK]
    b_w -= rate * (b_m / one) / (tl.sqrt(b_u / two) + 1e-8)
    tl.store(new_mean + at, b_m, mask=inside)
    tl.store(new_square + at, b_u, mask=inside)
    tl.store(new_master + at, b_w, mask=inside)
    tl.store(new_param + at, b_w.to(new_param.dtype.element_ty), mask=inside)


def adam(grad, master, mean, square, step, rate=1e-4):
    param, *state = (torch.empty_like(x) for x in (grad, master, mean, square))
    adam_kernel[(triton.cdiv(grad.numel(), 1024),)](
        grad, master, mean, square, param, *state, grad.numel(), rate, 1 - 0.9**step, 1 - 0.95**step, 1024
    )
    return param, *state
