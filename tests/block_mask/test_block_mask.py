"""BlockMask: what is made of functions, tensors, blocks, lists and torch's masks is the mask that they say,
its lists cover it once, and what is malformed is an error that names it."""

from __future__ import annotations

import copy
import gc
import re
from itertools import product
from unittest import mock

import pytest
import torch
from sparse_cases import FUNCTIONS
from torch.nn.attention.flex_attention import BlockMask as TorchMask
from torch.nn.attention.flex_attention import create_block_mask

from attnlib import BlockMask, attention, explain
from attnlib.block_mask import lists, of_torch, tiles
from attnlib.block_mask.mask import by_handle, is_short
from attnlib.kernels.reference.gradients import visible
from attnlib.params import MaskWindow

LENGTHS = [(300, 400), (128, 128), (400, 129), (64, 65), (1, 1), (256, 400), (65, 192)]
NAMES = "causal", "band by both", "documents", "dots", "stripes", "rungs", "corner", "none", "all"


def dense(name: str, B: int, H: int, S_q: int, S_k: int) -> torch.Tensor:
    b, h, q, k = map(torch.arange, (B, H, S_q, S_k))
    return FUNCTIONS[name](b[:, None, None, None], h[:, None, None], q[:, None], k).expand(B, H, S_q, S_k)


@pytest.fixture(params=[False, True], ids=["whole", "in pieces"])
def pieces(request, monkeypatch):
    """Tiles at once: many, or three."""
    if request.param:
        monkeypatch.setitem(tiles._PIECE, "cpu", 3)


@pytest.mark.parametrize(("name", "lengths"), [*product(NAMES, LENGTHS)], ids=str)
def test_made_of_functions_and_tensors(name, lengths, pieces):
    expected = dense(name, 2, 3, *lengths)
    mask = BlockMask.from_function(FUNCTIONS[name], *lengths, B=2, H=3)
    assert mask.shape == (2, 3, *lengths)
    assert torch.equal(mask.to_dense(), expected)
    assert torch.equal(BlockMask.from_mask(expected).to_dense(), expected)
    theirs = create_block_mask(FUNCTIONS[name], 2, 3, *lengths, device="cpu", BLOCK_SIZE=(128, 64))
    assert torch.equal(BlockMask.from_torch(theirs).to_dense(), expected)
    assert mask.to("cpu") is mask and mask.to("meta").shape == mask.shape


def test_attention_takes_torchs_masks():
    """FlexAttention's users give theirs; it is made into ours once, and goes with it."""
    q, k, v = (torch.randn(1, 2, 200, 16) for _ in range(3))
    theirs = create_block_mask(FUNCTIONS["stripes"], None, None, 200, 200, device="cpu")
    expected = attention(q, k, v, block_mask=BlockMask.from_torch(theirs), impl="reference")
    with mock.patch.object(BlockMask, "from_torch", wraps=BlockMask.from_torch) as made:
        for _ in range(2):
            assert torch.equal(attention(q, k, v, block_mask=theirs, impl="reference"), expected)
        assert explain(q, k, v, block_mask=theirs, impl="reference").kernel == "reference"
    assert made.call_count == 1
    kept = len(of_torch._made)
    del theirs, made
    gc.collect()
    assert len(of_torch._made) == kept - 1


TOLD_APART = {
    "heads": lambda b, h, i, j: (i >= j) | (h == 1),
    "batch": lambda b, h, i, j: i >= j + b,
    "both": lambda b, h, i, j: i + TABLE[h] >= j + b,
    "neither": lambda b, h, i, j: (i >= j) & (h * 0 == 0),
}
TABLE = torch.tensor([0, 70, 3])


@pytest.mark.parametrize("name", TOLD_APART)
def test_a_function_that_tells_heads_apart_has_lists_that_they_share(name):
    """As FlexAttention has it, whose `create_block_mask` asks the function of head 0 of batch element 0."""
    q, k, v = torch.randn(3, 2, 3, 100, 16)
    every = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    theirs = TorchMask.from_kv_blocks(*every, mask_mod=TOLD_APART[name], seq_lengths=(100, 100))
    whole = BlockMask.from_function(TOLD_APART[name], 100, 100, B=2, H=3)
    expected = attention(q, k, v, block_mask=whole, impl="reference")
    assert torch.equal(attention(q, k, v, block_mask=theirs, impl="reference"), expected)
    fewer = attention(q[:1, :2], k[:1, :2], v[:1, :2], block_mask=theirs, impl="reference")
    assert torch.allclose(fewer, expected[:1, :2], atol=1e-6)
    assert torch.equal(BlockMask.from_torch(theirs, batch=2, heads=3).to_dense().expand(2, 3, -1, -1),
                       whole.to_dense())  # fmt: skip


@pytest.mark.parametrize("name", ["heads", "neither"])
def test_torchs_masks_and_no_batch(name):
    """Of a batch of 0 there is nothing to compute, and nothing wrong."""
    every = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    theirs = TorchMask.from_kv_blocks(*every, mask_mod=TOLD_APART[name], seq_lengths=(100, 100))
    q = torch.zeros(0, 2, 100, 16)
    assert attention(q, q, q, block_mask=theirs, impl="reference").shape == q.shape


def test_a_mask_for_one_head_is_not_shared():
    q = torch.randn(1, 2, 100, 16)
    every = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    theirs = TorchMask.from_kv_blocks(*every, mask_mod=TOLD_APART["heads"], seq_lengths=(100, 100))
    ours = BlockMask.from_torch(theirs)
    one = q[:, :1]
    expected = attention(one, one, one, causal=True, impl="reference")
    torch.testing.assert_close(attention(one, one, one, block_mask=ours, impl="reference"), expected)
    for mask in (ours, ours.to("cpu"), copy.deepcopy(ours)):
        with pytest.raises(ValueError, match="^block_mask: expected a number of heads of 2 as q has, got a"):
            attention(q, q, q, block_mask=mask)


def test_a_mask_of_torchs_that_was_changed_is_made_again():
    q, k, v = torch.randn(3, 1, 2, 100, 16)
    theirs = create_block_mask(FUNCTIONS["none"], None, None, 100, 100, device="cpu")
    assert not attention(q, k, v, block_mask=theirs, impl="reference").any()
    other = create_block_mask(TOLD_APART["heads"], 1, 2, 100, 100, device="cpu")
    for name in of_torch.PARTS:
        setattr(theirs, name, getattr(other, name))
    expected = attention(q, k, v, block_mask=other, impl="reference")
    assert torch.equal(attention(q, k, v, block_mask=theirs, impl="reference"), expected)


@pytest.fixture
def with_torchs_mask():
    """A call under a mask of torch's, its input, and the output under attnlib's."""
    theirs = create_block_mask(FUNCTIONS["stripes"], None, None, 200, 200, device="cpu")
    x = torch.randn(1, 2, 200, 16)
    expected = attention(x, x, x, block_mask=BlockMask.from_torch(theirs), impl="reference")
    torch._dynamo.reset()  # or a test with fullgraph=True runs what the one before it compiled
    return lambda x: attention(x, x, x, block_mask=theirs, impl="reference"), x, expected


def test_a_compiled_graph_breaks_for_a_mask_of_torchs(with_torchs_mask):
    call, x, expected = with_torchs_mask
    assert torch.equal(torch.compile(call, backend="eager")(x), expected)


def test_a_whole_graph_makes_no_mask_of_torchs(with_torchs_mask):
    call, x, _ = with_torchs_mask
    with pytest.raises(Exception, match="attnlib.BlockMask.from_torch makes one of it, outside of the graph"):
        torch.compile(call, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_graph_makes_no_mask_of_torchs(with_torchs_mask, strict):
    call, x, _ = with_torchs_mask
    module = torch.nn.Module()
    module.forward = call
    with pytest.raises(Exception, match="attnlib.BlockMask.from_torch makes one of it, outside of the graph"):
        torch.export.export(module, (x,), strict=strict)


def test_full_blocks_of_torch_are_full_whatever_the_function_says():
    full = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    none = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    theirs = TorchMask.from_kv_blocks(*none, *full, BLOCK_SIZE=128, mask_mod=FUNCTIONS["none"])
    assert bool(BlockMask.from_torch(theirs).to_dense().all())


@pytest.mark.parametrize("size", [64, 128, (64, 128), (128, 64), 256], ids=str)
def test_made_of_blocks_and_lists(size):
    rows, columns = size if isinstance(size, tuple) else (size, size)
    S_q, S_k = 450, 610
    grid = -(-S_q // rows), -(-S_k // columns)
    blocks = torch.rand(2, 3, *grid, generator=torch.Generator().manual_seed(0)) < 0.4
    expected = blocks.repeat_interleave(rows, 2).repeat_interleave(columns, 3)[:, :, :S_q, :S_k]
    assert torch.equal(BlockMask.from_blocks(blocks, S_q, S_k, block_size=size).to_dense(), expected)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), blocks.sum(3).flatten().cumsum(0)])
    starts = ends.unfold(0, grid[0] + 1, grid[0]).view(2, 3, grid[0] + 1)
    of_lists = BlockMask.from_csr(starts.int(), blocks.nonzero()[:, 3].int(), S_q, S_k, block_size=size)
    assert torch.equal(of_lists.to_dense(), expected)
    one = BlockMask.from_csr(starts[0, 0], blocks.nonzero()[:, 3], S_q, S_k, block_size=size)
    assert torch.equal(one.to_dense()[0, 0], expected[0, 0])


@pytest.mark.parametrize("bounds", [(None, 0), (30, 100), (3, None), (0, 0)], ids=str)
@pytest.mark.parametrize("name", ["all", "dots", "band by both", "stripes"])
@pytest.mark.parametrize("lengths", [(300, 400), (400, 129), (65, 192)], ids=str)
def test_the_part_within_a_window(name, lengths, bounds):
    mask, window = BlockMask.from_function(FUNCTIONS[name], *lengths, B=2, H=3), MaskWindow(*bounds)
    cut = mask.within(window)
    assert torch.equal(cut.to_dense(), dense(name, 2, 3, *lengths) & visible(*lengths, window))
    assert mask.within(window) is cut and mask.within(MaskWindow(None, None)) is mask


@pytest.mark.parametrize("name", NAMES)
def test_marked_lists_have_at_their_ends_what_64_queries_see_alone(name):
    """The same steps, in another order."""
    mask = BlockMask.from_function(FUNCTIONS[name], 390, 400, B=2, H=2)
    plain, marked = mask.lists(64), mask.marked_lists
    for same in ("starts", "middles", "order"):
        assert torch.equal(getattr(plain, same), getattr(marked, same))
    seen = tiles.by_tile(mask.tiles.kinds)  # (B, H, tiles down, across, 2, 2)
    seen = seen.permute(0, 1, 2, 4, 3, 5).flatten(4).flatten(0, 2)  # (rows of tiles, halves, units across)
    for row, (upper, lower) in enumerate(seen):
        first, middle, end = plain.starts[row], plain.middles[row], plain.starts[row + 1]
        steps, bits = marked.steps[first:end].tolist(), marked.bits[first:end].tolist()
        wanted = dict(zip(plain.steps[first:end].tolist(), plain.bits[first:end].tolist(), strict=True))
        slots = [x if x < 0 else x & (lists.SECOND_ALONE - 1) for x in bits]
        assert dict(zip(steps, slots, strict=True)) == wanted
        alone = [j for j in range(len(upper)) if upper[j] == tiles.FULL and lower[j] == tiles.ABSENT]
        behind = [j for j in range(len(upper)) if upper[j] == tiles.ABSENT and lower[j] != tiles.ABSENT]
        others = len(steps) > bool(alone) + bool(behind)
        marks = [(j, x & ~(lists.SECOND_ALONE - 1)) for j, x in enumerate(bits) if x >= lists.SECOND_ALONE]
        expected = [(int(middle - first), lists.FIRST_ALONE)] * bool(alone and others)
        expected += [(len(steps) - 1, lists.SECOND_ALONE)] * bool(behind and others)
        assert marks == expected
        for j, mark in marks:
            assert steps[j] in (alone if mark == lists.FIRST_ALONE else behind)


@pytest.mark.parametrize(("name", "step", "columns"), [*product(NAMES, (64, 128), (False, True))], ids=str)
def test_lists_cover_what_is_seen_once(name, step, columns):
    lengths = 300, 400
    mask, expected = BlockMask.from_function(FUNCTIONS[name], *lengths, B=2, H=2), dense(name, 2, 2, *lengths)
    expected = (expected.mT if columns else expected).flatten(0, 1)
    lists = mask.lists(step, columns)
    assert mask.lists(step, columns) is lists
    bits = tiles.unpack(mask.words_of_columns if columns else mask.words)
    halves = tiles.unpack(mask.words_of(64))
    rows, across = (-(-n // 128) for n in expected.shape[1:])
    found = torch.zeros(4, rows * 128, across * 128, dtype=torch.bool)
    visits = torch.zeros(4, rows, across * 128 // step, dtype=torch.int)
    for number in range(4 * rows):
        m, row = divmod(number, rows)
        first, end = lists.starts[number], lists.starts[number + 1]
        assert first < end, "no kernel knows a row without a step"
        for j in range(first, end):
            at, entry = lists.steps[j] * step, lists.bits[j]
            assert (entry < 0) == (j < lists.middles[number]), "steps without bits come first"
            here = found[m, row * 128 : row * 128 + 128, at : at + step]
            if entry < 0:
                here[:] = True
            else:
                own = bits[entry // 2][:, entry % 2 * 64 :][:, :step]
                here |= own
                if step == 64 and not columns:
                    assert torch.equal(halves[entry][:, :64], own) and not halves[entry][:, 64:].any()
            visits[m, row, lists.steps[j]] += 1
    assert torch.equal(found[:, : expected.shape[1], : expected.shape[2]], expected)
    assert visits.max() == 1
    wanted = found.view(4, rows, 128, -1, step).any(4).any(2)
    assert bool((visits.bool() == wanted)[wanted.any(2)].all()), "a step that nobody needs"
    lengths_of_rows = lists.starts.diff().view(4, rows)
    for m in range(4):
        order = lists.order.view(4, rows)[m].long()
        assert sorted(order.tolist()) == list(range(rows))
        assert bool((lengths_of_rows[m][order].diff() <= 0).all()), "not the longest first"


def test_words_are_bits_in_the_order_of_registers():
    seen = torch.rand(5, 128, 128, generator=torch.Generator().manual_seed(0)) < 0.5
    words = tiles.pack(seen)
    for row, column in ((0, 0), (3, 1), (17, 6), (127, 127), (64, 70)):
        bit = words[:, row, column % 8 // 2] >> (column // 8 * 2 + column % 2) & 1
        assert torch.equal(bit.bool(), seen[:, row, column])
    assert torch.equal(tiles.unpack(words), seen)
    assert torch.equal(tiles.unpack(tiles.transposed(words)), seen.mT)


def test_a_row_or_a_column_of_absent_blocks_needs_bits_where_it_is_walked():
    blocks = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    row, column = (0, 0, 2), (0, 0, slice(None), 2)
    for gone, expected in ((None, (False, False)), (row, (True, True)), (column, (True, False))):
        some = blocks.clone()
        if gone is not None:
            some[gone] = False
        form = BlockMask.from_blocks(some, 512, 512).form
        assert (form.partial, form.partial_rows) == expected


def test_full_and_absent_blocks_carry_no_bits():
    assert not BlockMask.from_function(FUNCTIONS["all"], 256, 256).form.partial
    assert len(BlockMask.from_function(FUNCTIONS["causal"], 1024, 1024).words) == 1 + 8
    assert BlockMask.from_function(FUNCTIONS["stripes"], 256, 256).density() == 0.5
    assert BlockMask.from_function(FUNCTIONS["stripes"], 256, 256).density(128) == 1.0
    assert not BlockMask.from_function(FUNCTIONS["stripes"], 256, 256).form.coarse


@pytest.mark.parametrize(
    "steps, fine, bits, short",
    [
        (4.92, 4.92, True, True), (5.88, 5.88, True, False),  # windows of 512 and 640
        (7.38, 6.84, True, True), (9.55, 9.05, True, True),  # documents of 700 and 1000
        (8.3, 6.1, True, True), (12.4, 8.6, True, False),  # S2 at 8192 and 16384 tokens
        (12, 12, False, True), (16, 16, False, False),  # blocks at random
    ],
)  # fmt: skip
def test_where_steps_of_64_keys_were_faster(steps, fine, bits, short):
    assert is_short(steps, fine, bits) == short


def test_tiles_with_the_same_full_units_share_their_words():
    blocks = torch.rand(2, 3, 20, 20, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = BlockMask.from_blocks(blocks, 1280, 1280, block_size=64)
    assert len(mask.words) == 1 + 14
    ragged = BlockMask.from_blocks(blocks, 1280, 1270, block_size=64)
    assert len(ragged.words) > 1 + 14, "the last column of tiles has words of its own"
    expected = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)
    assert torch.equal(mask.to_dense(), expected) and torch.equal(ragged.to_dense(), expected[..., :1270])


def test_what_is_held_at_once_does_not_grow_with_the_mask(monkeypatch):
    """A function sees a bounded piece of the mask at a time, and only mixed tiles twice."""
    sizes, whole = [], tiles._elements

    def counted(*args):
        found = whole(*args)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(tiles, "_elements", counted)
    BlockMask.from_function(FUNCTIONS["causal"], 4096, 4096)
    assert max(sizes) == 256 * 128 * 128 and sum(sizes) == 4096 * 4096 + 32 * 128 * 128


# ---------------------------------------------------------------- what is wrong

BLOCKS = torch.ones(2, 3, dtype=torch.bool)
STARTS, INDICES = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1])


def int32(*shape, value=0):
    return torch.full(shape, value, dtype=torch.int32)


def theirs(**changed):
    given = {"kv_num_blocks": int32(1, 1, 2, value=1), "kv_indices": int32(1, 1, 2, 2), "BLOCK_SIZE": 128}
    return TorchMask.from_kv_blocks(**given | changed, compute_q_blocks=False)


WRONG = [
    (lambda: BlockMask.from_blocks([[True]], 128, 128), TypeError,
     "blocks: expected a torch.Tensor, got list"),
    (lambda: BlockMask.from_blocks(BLOCKS.int(), 256, 300), TypeError,
     "blocks: expected dtype bool, got torch.int32"),
    (lambda: BlockMask.from_blocks(BLOCKS, 256, 128), ValueError,
     "blocks: expected shape (B, H, 2, 1) or (2, 1) for 256 queries and 128 keys in blocks of 128 x 128, got "
     "(2, 3)"),
    (lambda: BlockMask.from_blocks(BLOCKS, 256, 300, block_size=100), ValueError,
     "block_size: expected multiples of 64, such as 64 or 128, got 100"),
    (lambda: BlockMask.from_blocks(BLOCKS, 256, 300, block_size="128"), TypeError,
     "block_size: expected an int or a pair of ints, got str"),
    (lambda: BlockMask.from_blocks(BLOCKS, 0, 300), ValueError, "seqlen_q: expected 1 or more, got 0"),
    (lambda: BlockMask.from_blocks(BLOCKS, 256, 300.0), TypeError, "seqlen_k: expected an int, got float"),
    (lambda: BlockMask.from_csr(STARTS.float(), INDICES, 256, 300), TypeError,
     "starts: expected dtype int32 or int64, got torch.float32"),
    (lambda: BlockMask.from_csr(STARTS[:2], INDICES, 256, 300), ValueError,
     "starts: expected shape (B, H, 3) or (3,) for 256 queries in blocks of 128, got (2,)"),
    (lambda: BlockMask.from_csr(STARTS, INDICES[None], 256, 300), ValueError,
     "indices: expected 1 dimension, got shape (1, 3)"),
    (lambda: BlockMask.from_csr(STARTS, INDICES.to("meta"), 256, 300), ValueError,
     "indices: expected device cpu as starts has, got meta"),
    (lambda: BlockMask.from_csr(STARTS.flip(0), INDICES, 256, 300), ValueError,
     "starts: expected values from 0 to 3, the number of indices, that never go down"),
    (lambda: BlockMask.from_csr(STARTS + 1, INDICES, 256, 300), ValueError,
     "starts: expected values from 0 to 3, the number of indices, that never go down"),
    (lambda: BlockMask.from_csr(STARTS, torch.tensor([0, 3, 1]), 256, 300), ValueError,
     "indices: expected blocks of keys from 0 to 2, got 3"),
    (lambda: BlockMask.from_csr(STARTS, torch.tensor([0, -1, 1]), 256, 300), ValueError,
     "indices: expected blocks of keys from 0 to 2, got -1"),
    (lambda: BlockMask.from_csr(STARTS, torch.tensor([2, 0, 1]), 256, 300), ValueError,
     "indices: expected ascending order in each row, got row number 0 without"),
    (lambda: BlockMask.from_csr(STARTS, torch.tensor([2, 2, 1]), 256, 300), ValueError,
     "indices: expected no block twice in a row, got block number 0 of rows with one"),
    (lambda: BlockMask.from_function(3, 10, 10), TypeError,
     "function: expected a function mask(b, h, q, k), got int"),
    (lambda: BlockMask.from_function(lambda b, h, q, k: q - k, 10, 10), TypeError,
     "function: expected a bool tensor of mask(b, h, q, k), got dtype torch.int64"),
    (lambda: BlockMask.from_function(lambda b, h, q, k: True, 10, 10), TypeError,
     "function: expected a bool tensor of mask(b, h, q, k), got bool"),
    (lambda: BlockMask.from_function(lambda b, h, q, k: (q > k).expand(3), 10, 10), ValueError,
     "function: expected mask(b, h, q, k) without dimensions, got shape (3,)"),
    (lambda: BlockMask.from_function(FUNCTIONS["all"], 10, 10, B=0), ValueError,
     "B: expected 1 or more, or None for a mask that all share, got 0"),
    (lambda: BlockMask.from_function(FUNCTIONS["all"], 10, 10, H=True), TypeError,
     "H: expected an int or None, got bool"),
    (lambda: BlockMask.from_mask(torch.ones(3, 3)), TypeError,
     "mask: expected dtype bool, got torch.float32"),
    (lambda: BlockMask.from_mask(torch.ones(3, 3, 3, dtype=torch.bool)), ValueError,
     "mask: expected shape (B, H, S_q, S_k) or (S_q, S_k), got (3, 3, 3)"),
    (lambda: BlockMask.from_mask(torch.ones(4, 4, dtype=torch.bool).to_sparse()), TypeError,
     "mask: expected a dense tensor (layout torch.strided), got torch.sparse_coo"),
    (lambda: BlockMask.from_mask(torch.ones(4, 4, dtype=torch.bool, device="meta")), ValueError,
     "mask: expected a tensor with memory, got one without (meta or fake)"),
    (lambda: torch.vmap(lambda x: BlockMask.from_mask(x).to_dense())(torch.ones(2, 4, 4, dtype=torch.bool)),
     NotImplementedError, "mask: a block mask of what torch.vmap maps: not supported; make it outside"),
    (lambda: BlockMask.from_torch(theirs(), heads=0), ValueError, "heads: expected 1 or more, got 0"),
    (lambda: BlockMask.from_torch(BLOCKS), TypeError,
     "mask: expected a torch.nn.attention.flex_attention.BlockMask, got torch.Tensor"),
    (lambda: BlockMask.from_torch(theirs(BLOCK_SIZE=32)), ValueError,
     "block_size: expected multiples of 64, such as 64 or 128, got (32, 32)"),
    (lambda: BlockMask.from_torch(theirs(kv_num_blocks=int32(1, 1, 2, value=3))), ValueError,
     "kv_num_blocks: expected values from 0 to 2, the length of a list"),
    (lambda: BlockMask.from_torch(theirs(kv_num_blocks=int32(1, 1, 3))), ValueError,
     "kv_indices: expected 2 rows of lists, as many as kv_num_blocks counts, got shapes (1, 1, 2, 2) and "
     "(1, 1, 3)"),
    (lambda: BlockMask.from_torch(theirs(kv_indices=int32(1, 1, 2, 2, value=2))), ValueError,
     "kv_indices: expected blocks of keys from 0 to 1, got 2"),
    (lambda: BlockMask.from_torch(theirs(kv_indices=int32(1, 1, 2, 2, value=-1))), ValueError,
     "kv_indices: expected blocks of keys from 0 to 1, got -1"),
    (lambda: BlockMask.from_torch(theirs(kv_num_blocks=int32(1, 1, 2, value=2))), ValueError,
     "kv_indices: expected no block twice in a row"),
    (lambda: BlockMask.from_torch(theirs(kv_num_blocks=int32(1, 1, 2).to("meta"))), ValueError,
     "kv_num_blocks: expected device cpu as kv_indices has, got meta"),
    (lambda: BlockMask.from_torch(
        theirs(full_kv_num_blocks=int32(1, 1, 2, value=1), full_kv_indices=int32(1, 1, 2, 2))
    ), ValueError, "full_kv_indices: expected no block that kv_indices has too"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_what_is_wrong_is_named(make, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make()


def test_too_many_steps_are_an_error(monkeypatch):
    mask = BlockMask.from_function(FUNCTIONS["all"], 300, 300, H=2)
    monkeypatch.setattr(lists, "LIMIT", 2 * 3 * 5)
    expected = "^block_mask: expected fewer than 2\\^31 steps of 64 over all heads, got 30; use fewer"
    with pytest.raises(ValueError, match=expected):
        mask.lists(64)
    assert len(mask.lists(128).steps) == 18


def test_a_window_that_bounds_nothing_is_the_mask_itself():
    mask = BlockMask.from_function(FUNCTIONS["dots"], 40, 50)
    for bounds in ((2**70, None), (49, 39), (2**63 - 1, 2**63 - 1)):
        assert mask.within(MaskWindow(*bounds)) is mask
    assert mask.within(MaskWindow(2**63 - 1, 0)) is mask.within(MaskWindow(None, 0)) is not mask


def test_a_mask_that_is_gone_is_an_error():
    mask = BlockMask.from_function(FUNCTIONS["all"], 10, 10)
    handle = mask.handle
    assert by_handle(handle) is mask
    del mask
    gc.collect()
    with pytest.raises(ValueError, match="^block_mask: expected a mask that is alive"):
        by_handle(handle)


@pytest.mark.parametrize("name", ["words_of_columns", "_halves", "short_words_of_columns"])
def test_what_is_made_under_capture_is_not_kept(name, monkeypatch):
    mask = BlockMask.from_function(FUNCTIONS["documents"], 300, 300)
    with monkeypatch.context() as patch:
        patch.setattr(tiles, "under_capture", lambda device: True)
        captured = getattr(mask, name)
    kept = getattr(mask, name)
    assert kept is not captured and torch.equal(kept, captured) and getattr(mask, name) is kept
