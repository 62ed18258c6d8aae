"""In which order the programs before and after the backward kernel take blocks and heads."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from attnlib import attention
from attnlib.kernels.common.program_order import in_memory

BLOCKS, HEADS = 3, 4


@triton.jit
def write_order(out_ptr, num_blocks, H, CLOSE: tl.constexpr):
    block, head = in_memory(num_blocks, H, CLOSE)
    tl.store(out_ptr + 2 * tl.program_id(0), block)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, head)


def order(close: bool, batch: int, device: str) -> list[list[int]]:
    programs = BLOCKS * HEADS * batch
    out = torch.empty(programs, 2, dtype=torch.int32, device=device)
    write_order[(programs,)](out, BLOCKS, HEADS, close)
    return out.tolist()


@pytest.mark.parametrize("close", [False, True])
def test_every_block_of_every_head_once(close, device):
    found = sorted(map(tuple, order(close, 2, device)))
    assert found == [(block, head) for block in range(BLOCKS) for head in range(2 * HEADS)]


def test_neighbors_are_neighbors_in_memory(device):
    assert order(False, 2, device)[:BLOCKS] == [[block, 0] for block in range(BLOCKS)]
    assert order(True, 2, device)[: HEADS + 1] == [*([0, head] for head in range(HEADS)), [1, 0]]
    assert order(True, 2, device)[BLOCKS * HEADS] == [0, HEADS]  # the second batch element begins


def test_gradients_do_not_depend_on_the_layout(device):
    """Rows of all heads side by side, of every second head, and head by head."""
    torch.manual_seed(0)
    whole = [torch.randn(2, 40, 6, 16, device=device, dtype=torch.float16) for _ in range(4)]
    found = []
    for layout in (
        lambda x: x[:, :, ::2].transpose(1, 2), lambda x: x[:, :, ::2].contiguous().transpose(1, 2),
        lambda x: x[:, :, ::2].transpose(1, 2).contiguous(),
    ):  # fmt: skip
        q, k, v, d_out = (layout(x) for x in whole)
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*inputs, causal=True, impl="triton")
        found.append(torch.autograd.grad(out, inputs, d_out))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))
