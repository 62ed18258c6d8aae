"""The kernels and the gallery of chapter 30 on a CPU."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from attnlib import BlockMask
from attnlib.bench import sources
from attnlib.bench.changes import changed
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape

STEP = "30_block_masks"
BRANCH, GALLERY = sources.cells_tagged(sources.notebook_of(STEP), "variant")


def kernel(*changes: tuple[str, str]) -> ModuleType:
    """The chapter's kernel, some texts of it replaced."""
    text = sources.kernel_source(sources.notebook_of(STEP))
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return sources.load_source("30", text)


def check(module: ModuleType, mask: BlockMask, heads: int = 2, batch: int = 1, D: int = 16) -> None:
    q, k, v = make_inputs(Shape(batch, heads, mask.shape[2], D), device="cpu")
    with np.errstate(all="ignore"):
        out = module.attention(q, k, v, mask=mask)
    Oracle(q, k, v, mask=mask.to_dense()).judge(out).raise_if_bad("chapter 30")


def dots(b, h, i, j):
    """Rows that see nothing, and partial steps whose first rows have seen no key yet."""
    return (i > 70) & ((3 * i + 5 * j) % 7 < 3) & (j > 90)


MASKS = {
    "causal": lambda: BlockMask.from_function(lambda b, h, i, j: i >= j, 200, 200, device="cpu"),
    "dots": lambda: BlockMask.from_function(dots, 150, 150, device="cpu"),
    "by head": lambda: BlockMask.from_function(
        lambda b, h, i, j: (i - j).abs() < 9 + 50 * h, 200, 200, H=2, device="cpu"
    ),
    "halves of tiles": lambda: BlockMask.from_blocks(
        torch.tensor([[0, 1, 0], [1, 1, 0], [0, 0, 1]]).bool(), 192, 192, block_size=64
    ),
    "one token": lambda: BlockMask.from_mask(torch.ones(1, 1, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", MASKS)
def test_kernel(name):
    check(kernel(), MASKS[name]())


def test_masks_by_head_of_two_sequences():
    check(kernel(), MASKS["by head"](), batch=2)


@pytest.mark.parametrize(
    ("old", "new", "mask"),
    [
        ("o_c = bits % 2 * BLOCK_N", "o_c = bits * 0", "causal"),
        ("(o_c // 8 * 2 + o_c % 2)", "(o_c // 8 * 2)", "dots"),
        ("o_r[:, None] * 4", "o_r[:, None] * 0", "causal"),
        ("middles_ptr + rows + tile", "starts_ptr + rows + tile + 1", "causal"),
        ("i_h % MASKS", "i_h * 0", "by head"),
        ('float("-inf"), 0.0, b_m_new)', 'float("-inf"), b_m_new, b_m_new)', "dots"),
        ("tl.where(b_l == 0.0, 1.0, b_l)", "b_l", "dots"),
        ("tile = tl.load(order_ptr + rows + i_m // parts)", "tile = i_m * 0", "causal"),
    ],
)
def test_a_planted_bug_is_noticed(old, new, mask):
    broken = kernel((old, new))
    with pytest.raises(AssertionError, match="error|not finite"):
        check(broken, MASKS[mask]())


@pytest.mark.parametrize("seed", range(2))
def test_branch(seed):
    keep = torch.rand(2, 2, 4, generator=torch.Generator().manual_seed(seed)) < 0.6
    keep[:, :, 0] = True  # its rows have to see something
    text = changed(sources.kernel_source(sources.notebook_of(STEP)), BRANCH)
    module = sources.load_source("30_branch", text)
    q, k, v = make_inputs(Shape(1, 2, 256, 16), device="cpu")
    out = module.attention(q, k, v, keep=keep)
    mask = BlockMask.from_blocks(keep[None], 256, 256, block_size=(128, 64))
    Oracle(q, k, v, mask=mask.to_dense()).judge(out).raise_if_bad("the branch")


def test_gallery():
    """What the masks see, counted by hand; and FlexAttention makes the same of them."""
    from torch.nn.attention.flex_attention import create_block_mask

    S = 256
    masks = sources.load_source("gallery", GALLERY).gallery(S, "cpu")
    seen = {
        name: BlockMask.from_function(function, S, S, device="cpu").to_dense()[0, 0]
        for name, function in masks.items()
    }
    rows = {name: found.sum(1).tolist() for name, found in seen.items()}
    assert rows["sliding window"] == [min(i + 1, 16) for i in range(S)]
    assert rows["dilated"] == [min(i // 4 + 1, 16) for i in range(S)]
    assert rows["prefix-LM"] == [max(i + 1, 64) for i in range(S)]
    assert rows["sinks"] == [min(i + 1, 16) + max(0, min(4, i - 15)) for i in range(S)]
    assert (seen["documents"] <= torch.ones(S, S).tril().bool()).all() and seen["documents"].diagonal().all()
    assert rows["documents"].count(1) == 16  # a document begins where a token sees itself alone
    tree = seen["tree"]
    assert rows["tree"][:128] == list(range(1, 129)) and tree[:, :128].tril().sum() == tree[:, :128].sum()
    node = [0] * 128 + [1 + i * 14 // 128 for i in range(128)]
    for i in range(128, S):
        above, n = {0, node[i]}, node[i]
        while n:
            n = (n - 1) // 2
            above.add(n)
        assert set(np.array(node)[tree[i].nonzero()[:, 0].numpy()]) == above
    for name, function in masks.items():
        theirs = create_block_mask(function, None, None, S, S, device="cpu")
        assert torch.equal(BlockMask.from_torch(theirs).to_dense()[0, 0], seen[name]), name
