"""BlockMask.from_chosen: its elements are those of the chosen blocks, its lists those of any mask with these
elements, and attention under it is right, forward and backward."""

from __future__ import annotations

import pytest
import torch
from cases import INTERPRETER_REMARKS, judge_forward

from attnlib import BlockMask, attention
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Oracle
from attnlib.block_mask import chosen as making
from attnlib.block_mask.chosen import SLOTS
from attnlib.block_mask.lists import Lists, lists_of

pytestmark = INTERPRETER_REMARKS
CASES = [(1, 64), (64, 64), (65, 64), (128, 128), (129, 128), (700, 64), (700, 128), (1000, 128), (960, 64)]


def chosen(seqlen: int, size: int, share: float = 0.4) -> torch.Tensor:
    n = -(-seqlen // size)
    return torch.rand(2, 3, n, n, generator=torch.Generator().manual_seed(seqlen)) < share


def defined(blocks: torch.Tensor, seqlen: int, size: int) -> torch.Tensor:
    """Bool (B, H, S, S), from the definition."""
    token = torch.arange(seqlen)
    i, j = token[:, None] // size, token[None, :] // size
    return (blocks[:, :, i, j] | (i == j)) & (token[:, None] >= token)


def walked(lists: Lists, mask: BlockMask, step: int) -> list:
    """What a kernel meets: of each row of tiles its steps, whether they are whole, and their words."""
    starts, middles, steps, bits, _ = (x.tolist() for x in lists)
    words, found = mask.words_of(step), []
    for row, middle in enumerate(middles):
        own = {}
        for place in range(starts[row], starts[row + 1]):
            assert (bits[place] == -1) == (place < middle)
            slot = bits[place] if step == 64 else bits[place] // 2
            own[steps[place]] = None if place < middle else words[slot]
        found.append(own)
    return found


@pytest.mark.parametrize("seqlen, size", CASES)
def test_elements(seqlen, size):
    blocks = chosen(seqlen, size)
    mask = BlockMask.from_chosen(blocks, seqlen, block_size=size)
    assert torch.equal(mask.to_dense(), defined(blocks, seqlen, size))
    assert mask.form.slots == SLOTS == len(mask.words) and mask.shape == (2, 3, seqlen, seqlen)


@pytest.mark.parametrize("size, density, steps", [(128, None, 10.5), (128, 0.1, 1.05), (64, 0.1, 2.1)])
def test_what_is_known_of_the_density(size, density, steps):
    """20 tiles; one of 128 queries sees what either unit of it sees. The mask does not depend on it."""
    blocks = chosen(2500, size)
    mask = BlockMask.from_chosen(blocks, 2500, block_size=size, density=density)
    assert mask._chosen.steps == pytest.approx(steps) and mask.form.short == (density is not None)
    other = BlockMask.from_chosen(blocks, 2500, block_size=size)
    assert all(torch.equal(x, y) for x, y in zip(mask.tiles, other.tiles, strict=True))


@pytest.mark.parametrize("step", [64, 128])
@pytest.mark.parametrize("seqlen, size", CASES)
def test_lists(seqlen, size, step):
    """The kernel's lists say what those say that any mask gets."""
    mask = BlockMask.from_chosen(chosen(seqlen, size), seqlen, block_size=size)
    found, wanted = mask.lists(step), lists_of(mask._tiles, step, columns=False)
    assert torch.equal(found.starts, wanted.starts) and torch.equal(found.middles, wanted.middles)
    assert torch.equal(found.order, wanted.order)
    for one, other in zip(walked(found, mask, step), walked(wanted, mask, step), strict=True):
        assert list(one) == list(other)
        for x, y in zip(one.values(), other.values(), strict=True):
            assert x is y is None or torch.equal(x, y)


def test_words_stay_where_a_graph_has_their_addresses_but_not_those_made_under_its_capture(monkeypatch):
    monkeypatch.setattr(making, "_made", {})
    mask = BlockMask.from_chosen(chosen(300, 64), 300, block_size=64)
    with monkeypatch.context() as patch:
        patch.setattr(making.tiling, "under_capture", lambda device: True)
        captured = mask.words
    assert mask.words is not captured and torch.equal(mask.words, captured)
    words = mask.words
    for seqlen in range(1, 129):
        assert BlockMask.from_chosen(chosen(seqlen, 128), seqlen).words.shape == words.shape
    assert mask.words is words


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_and_everything(share):
    mask = BlockMask.from_chosen(chosen(300, 64, share), 300, block_size=64)
    token = torch.arange(300)
    near = token[:, None] // 64 == token // 64 if share == 0 else token[:, None] >= 0
    assert torch.equal(mask.to_dense(), (near & (token[:, None] >= token)).expand(2, 3, -1, -1))


def test_attention_forward_and_backward(device):
    S, rng = 200, torch.Generator().manual_seed(0)
    blocks = chosen(S, 64)[:1, :2]
    q, k, v, d_out = (torch.randn(1, h, S, 16, generator=rng).half().to(device) for h in (2, 1, 1, 2))
    mask = BlockMask.from_chosen(blocks.to(device), S, block_size=64)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = attention(q, k, v, block_mask=mask, return_lse=True, impl="triton")
    gradients = torch.autograd.grad(out, (q, k, v), d_out)
    q, k, v = (x.detach() for x in (q, k, v))
    dense = defined(blocks, S, 64).to(device)
    judge_forward(out.detach(), lse, Oracle(q, k, v, mask=dense), "chosen")
    for verdict in GradientOracle(d_out, q, k, v, mask=dense).judge(*gradients).values():
        verdict.raise_if_bad("chosen")
