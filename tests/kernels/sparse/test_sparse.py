"""attention(block_mask=) by the portable kernels, forward and backward, against fp64: every kind of mask."""

from __future__ import annotations

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import with_more
from sparse_cases import CASES, FUNCTIONS, check_backward, check_forward

from attnlib import BlockMask, attention
from attnlib.kernels.reference.dense import attention_fp64
from attnlib.kernels.reference.gradients import gradient_fp64

pytestmark = INTERPRETER_REMARKS


@pytest.mark.parametrize("label", CASES)
def test_forward(label, device):
    check_forward(CASES[label], device)


ALIKE = "band by head", "band by batch", "stripes", "outlier", "sink"
"""Masks whose kinds of tiles others have, and kinds of inputs; each goes forward."""
BACKWARD = [label for label, case in CASES.items() if case.mask not in ALIKE and case.kind not in ALIKE]


@pytest.mark.parametrize("label", with_more(BACKWARD, CASES))
def test_backward(label, device):
    check_backward(CASES[label], device)


def tensors(*shape, device, S_k=None):
    B, H, S_q, D = shape
    rng = torch.Generator().manual_seed(0)
    sizes = shape, (B, H, S_k or S_q, D), (B, H, S_k or S_q, D)
    return [torch.randn(size, generator=rng).half().to(device) for size in sizes]


def test_the_reference_is_a_softmax_of_what_is_seen(device):
    """The fp64 reference beside PyTorch's own attention with a dense mask, forward and gradients."""
    q, k, v = (x.double().requires_grad_() for x in tensors(2, 2, 30, 16, device=device, S_k=40))
    mask = torch.rand(2, 2, 30, 40, generator=torch.Generator().manual_seed(1)).to(device) < 0.3
    mask[:, :, 5] = True
    mask[:, :, 6] = False  # and a row that sees nothing
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    d_out = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2)).to(q)
    d_out[:, :, 6] = 0  # of which PyTorch says NaN or 0, by its version
    out, lse = attention_fp64(q.detach(), k.detach(), v.detach(), mask=mask)
    rows = torch.arange(30) != 6
    torch.testing.assert_close(out[:, :, rows], theirs.detach()[:, :, rows])
    assert not out[:, :, 6].any() and bool((lse[:, :, 6] == -torch.inf).all())
    expected = torch.autograd.grad(theirs[:, :, rows], (q, k, v), d_out[:, :, rows])
    found = gradient_fp64(d_out, q.detach(), k.detach(), v.detach(), mask=mask)
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other.nan_to_num(0.0))


def test_a_block_that_is_absent_is_not_read(device):
    """NaN in keys and values that nobody sees reaches nobody: their blocks are not computed and masked."""
    q, k, v = tensors(1, 1, 128, 64, device=device, S_k=384)
    k[:, :, 128:256] = torch.nan
    v[:, :, 128:256] = torch.nan
    blocks = torch.tensor([[True, False, True]], device=device)
    mask = BlockMask.from_blocks(blocks, 128, 384)
    rest = torch.cat([torch.arange(128), torch.arange(256, 384)]).to(device)
    out = attention(q, k, v, block_mask=mask, impl="triton")
    plain = attention(q, k[:, :, rest], v[:, :, rest], impl="triton")
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-3)


def test_inputs_that_no_descriptor_expresses(device):
    q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in tensors(1, 2, 70, 64, device=device))
    mask = BlockMask.from_function(FUNCTIONS["dots"], 70, 70, device=device)
    x = [y.clone().requires_grad_() for y in (q, k, v)]
    out = attention(*x, block_mask=mask, impl="triton")
    expected, _ = attention_fp64(q, k, v, mask=mask.to_dense())
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
    found = torch.autograd.grad(out, x, torch.ones_like(out))
    truth = gradient_fp64(torch.ones_like(out), q, k, v, mask=mask.to_dense())
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-3, atol=2e-3)


def test_gradients_are_the_same_bits_each_time(device):
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 140, 64, device=device))
    mask = BlockMask.from_function(FUNCTIONS["documents"], 140, 140, device=device)
    runs = []
    for _ in range(2):
        out = attention(q, k, v, block_mask=mask, deterministic=True)
        runs.append(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
