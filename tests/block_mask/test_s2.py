"""S2Pattern: its mask is the definition, its heads together see everything, attention under it is right
forward and backward, and a cache without the blocks that it drops decodes the same."""

from __future__ import annotations

import re
import time

import pytest
import torch
from cases import INTERPRETER_REMARKS, judge_forward
from chosen import in_turn
from s2_cases import GROUPED, HYBRID, PATTERNS, SMALL, defined

from attnlib import BlockMask, S2Pattern, attention, attention_decode
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Oracle
from attnlib.block_mask import tiles
from attnlib.block_mask.gathered import gathered_tiles
from attnlib.block_mask.lists import lists_of
from attnlib.block_mask.mask import GatheredMask
from attnlib.params import MaskWindow

LENGTHS = 1, 64, 65, 700, 1024
pytestmark = INTERPRETER_REMARKS


@pytest.mark.parametrize("seqlen", LENGTHS)
@pytest.mark.parametrize("name", PATTERNS)
def test_the_mask_is_the_definition(name: str, seqlen: int) -> None:
    pattern = PATTERNS[name]
    mask = pattern.mask(seqlen)
    assert mask.shape == (1, pattern.heads, seqlen, seqlen)
    assert torch.equal(mask.to_dense()[0], defined(pattern, seqlen))


def in_units(mask: BlockMask) -> torch.Tensor:
    """Bool (H, S, units across, 64) of a mask of one batch element, False past the last key."""
    dense = mask.to_dense()[0]
    missing = mask.tiles.kinds.shape[3] * tiles.UNIT - dense.shape[2]
    return torch.nn.functional.pad(dense, (0, missing)).unflatten(2, (-1, tiles.UNIT))


@pytest.mark.parametrize(("name", "seqlen"), in_turn(PATTERNS, [700, 1024, 3000]))
def test_gathered_keys_are_the_same_in_another_order(name: str, seqlen: int) -> None:
    mask = PATTERNS[name].mask(seqlen)
    gathered = GatheredMask(gathered_tiles(mask.tiles, mask._order), mask._grid, mask._order)
    units = torch.stack([gathered.units & 0xFFFF, gathered.units >> 16 & 0xFFFF], 3)[0].flatten(1)
    assert torch.equal(units.sort(1).values, torch.arange(units.shape[1]).expand_as(units)), "each once"
    slots, kinds = gathered.tiles.slots[0], tiles.by_tile(gathered.tiles.kinds)[0]
    words = gathered.tiles.words[slots.clamp(min=0).long()]
    bits = tiles.unpack(words.flatten(0, 2)).unflatten(0, slots.shape)
    full = (kinds[..., 0, 0] == tiles.FULL)[..., None, None]
    found = torch.where((slots < 0)[..., None, None], full, bits)  # (H, down, across, 128, 128)
    found = found.transpose(2, 3).flatten(1, 2)[:, :seqlen].flatten(2).unflatten(2, (-1, tiles.UNIT))
    for own, theirs, order in zip(found, in_units(mask), units, strict=True):
        assert torch.equal(own, theirs[:, order.long()])


def test_keys_are_gathered_where_that_leaves_fewer_tiles() -> None:
    published = S2Pattern(16)
    assert published.mask(2048).gathered is None
    mask = published.mask(8192)
    steps = [len(each.lists(64, columns=True).steps) for each in (mask, mask.gathered)]
    assert steps[0] > 1.2 * steps[1]
    assert mask.form.gathered == mask.gathered.form and mask.gathered.form.gathered is None
    assert mask.within(MaskWindow(2000, 0)).gathered is not None, "a part of it has the same order"
    assert BlockMask.from_function(lambda b, h, q, k: q >= k, 500, 500).gathered is None


def test_programs_begin_with_the_last_queries() -> None:
    mask = S2Pattern(16).mask(4096)
    lists, before = mask.gathered.lists(64, columns=True), lists_of(mask.gathered.tiles, 64, True)
    for number in (0, 5, len(lists.starts) - 2):
        own = slice(*lists.starts[number : number + 2].tolist())
        steps = lists.steps[own].tolist()
        assert steps == sorted(steps, reverse=True)
        pairs = [set(zip(x.steps[own].tolist(), x.bits[own].tolist(), strict=True)) for x in (lists, before)]
        assert pairs[0] == pairs[1]


def test_columns_that_lead_are_those_with_more_than_twice_the_average_steps() -> None:
    causal = BlockMask.from_function(lambda b, h, q, k: q >= k, 4096, 4096)
    published = S2Pattern(16).mask(4096)
    for mask in (published, published.gathered, causal):
        lengths = mask.lists(64, columns=True).starts.diff().float()
        long = (lengths > 2 * lengths.mean()).sum().item()
        assert mask.form.leading == round(long / mask.shape[1])
    assert published.form.leading == 3 and published.gathered.form.leading == 2 and causal.form.leading == 0
    blocks = torch.eye(8, dtype=torch.bool)[None, None].repeat(1, 3, 1, 1)
    blocks[:, 1, :, :3] = True  # of one head alone: one of each on average
    assert BlockMask.from_blocks(blocks, 1024, 1024).form.leading == 1
    assert BlockMask.from_blocks(torch.zeros(1, 1, 2, 2, dtype=torch.bool), 256, 256).form.leading == 0


@pytest.mark.parametrize("name", PATTERNS)
def test_the_heads_together_see_every_key(name: str) -> None:
    pattern = PATTERNS[name]
    seen = pattern.mask(1024).to_dense()[0].any(0)
    assert torch.equal(seen, torch.ones(1024, 1024).tril().bool())
    sparse = pattern.mask(1024).to_dense()[0, : pattern.heads // pattern.key_heads].any(0)
    assert not torch.equal(sparse, seen), "one head alone does not"


@pytest.mark.parametrize("name", PATTERNS)
def test_blocks_are_counted(name: str) -> None:
    pattern, size = PATTERNS[name], PATTERNS[name].block_size
    for seqlen in LENGTHS:
        dense = defined(pattern, seqlen)
        blocks = dense[:, ::size, ::size]  # the first element of a block is seen where any is
        assert pattern.kept(seqlen) == int(blocks.sum())
        assert pattern.share(seqlen) == int(blocks.sum()) / (pattern.heads * int(blocks[0].shape[0] *
                                                             (blocks[0].shape[0] + 1) / 2))  # fmt: skip
    assert 1 / S2Pattern(16).share(65536) == pytest.approx(13.0, abs=0.1), "the published pattern"


def test_a_mask_of_128k_is_made_of_units() -> None:
    """No elements but those of the diagonal are looked at, for their kinds and for their words, and blocks
    that are cut share their words."""
    looked = []
    whole = tiles._elements

    def counted(kinds, *rest):
        looked.append(len(kinds))
        return whole(kinds, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_elements", counted)
        start = time.perf_counter()
        mask = S2Pattern(heads=2, stride=2, local_blocks=8).mask(131072)
        taken = time.perf_counter() - start
    assert sum(looked) == 2 * 2 * 1024
    assert len(mask.words) <= 1 + 14 + 2 * 1024
    assert taken < 20, "seconds on a CPU; S x S elements would take minutes"


# ---------------------------------------------------------------- attention under it


@pytest.mark.parametrize("pattern", [GROUPED, HYBRID], ids=["heads share keys", "a dense head"])
def test_attention_forward_and_backward(pattern: S2Pattern, device: str) -> None:
    S, D, rng = 200, 16, torch.Generator().manual_seed(0)
    heads = pattern.heads, pattern.key_heads, pattern.key_heads, pattern.heads
    q, k, v, d_out = (torch.randn(1, h, S, D, generator=rng).half().to(device) for h in heads)
    mask = pattern.mask(S, device)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = attention(q, k, v, block_mask=mask, return_lse=True, impl="triton")
    gradients = torch.autograd.grad(out, (q, k, v), d_out)
    q, k, v = (x.detach() for x in (q, k, v))
    dense = defined(pattern, S)[None].to(device)
    judge_forward(out.detach(), lse, Oracle(q, k, v, mask=dense), "S2")
    for verdict in GradientOracle(d_out, q, k, v, mask=dense).judge(*gradients).values():
        verdict.raise_if_bad("S2")


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("name", PATTERNS)
def test_what_is_dropped_is_never_needed_again(name: str) -> None:
    pattern, size = PATTERNS[name], PATTERNS[name].block_size
    length = 16 * size
    group = pattern.heads // pattern.key_heads
    needed = defined(pattern, length)[::group, ::size, ::size]  # (key heads, blocks, blocks)
    for head in range(pattern.key_heads):
        kept: set[int] = set()
        for block in range(16):
            now = set(pattern.cached(block * size + 1, head))
            assert now == set(pattern.cached((block + 1) * size, head)), "within a block nothing changes"
            assert now <= kept | {block}, "nothing comes back"
            later = needed[head, block:, : block + 1].any(0)
            assert now >= set(later.nonzero().flatten().tolist())
            assert now == set(needed[head, block].nonzero().flatten().tolist()), "and nothing is kept in vain"
            kept = now


def test_bytes_of_a_cache() -> None:
    """Of 16 heads with 8 near blocks and one in 16 of 1016 far ones."""
    pattern = S2Pattern(heads=16)
    blocks = [len(pattern.cached(65536, head)) for head in range(16)]
    assert blocks == [8 + 64] + [8 + 63] * 8 + [8 + 64] * 7
    assert pattern.cache_bytes(65536, 128) == 2 * sum(blocks) * 64 * 128 * 2
    dense = S2Pattern(heads=16, dense_heads=16)
    assert dense.cache_bytes(65536, 128) == 2 * 16 * 65536 * 128 * 2


@pytest.mark.parametrize("length", [300, 512])
def test_a_cache_of_kept_blocks_decodes_the_same(length: int, device: str) -> None:
    """Each key head as a sequence of its own, with its own pages."""
    pattern, D, rng = GROUPED, 16, torch.Generator().manual_seed(1)
    B, H, heads, size = 2, pattern.heads, pattern.key_heads, pattern.block_size
    q = torch.randn(B, H, 1, D, generator=rng).half().to(device)
    k, v = (torch.randn(B, heads, length, D, generator=rng).half().to(device) for _ in range(2))
    pages = pattern.paged(k, v)
    assert 2 * pages.k_cache.nbytes == B * pattern.cache_bytes(length, D) and pages.k_cache.shape[2] == size
    cache = pages.k_cache, pages.v_cache
    told = {"lengths": pages.lengths, "page_table": pages.page_table}
    found = attention_decode(q.view(B * heads, H // heads, 1, D), *cache, **told)
    row = defined(pattern, length)[None, :, -1:, :].expand(B, -1, -1, -1).to(device)
    Oracle(q, k, v, mask=row).judge(found.view(B, H, 1, D)).raise_if_bad("a cache of kept blocks")


# ---------------------------------------------------------------- what is wrong

WRONG = [
    ({"heads": 0}, ValueError, "heads: expected 1 or more, got 0"),
    ({"heads": 16.0}, TypeError, "heads: expected an int, got float"),
    ({"heads": 16, "kv_heads": 5}, ValueError, "kv_heads: expected a divisor of heads, 16, got 5"),
    ({"heads": 16, "block_size": 32}, ValueError, "block_size: expected a multiple of 64, got 32"),
    ({"heads": 16, "local_blocks": 0}, ValueError, "local_blocks: expected 1 or more, got 0"),
    ({"heads": 16, "local_blocks": True}, TypeError, "local_blocks: expected an int, got bool"),
    ({"heads": 16, "stride": -1}, ValueError, "stride: expected 1 or more, got -1"),
    ({"heads": 16, "dense_heads": 17}, ValueError, "dense_heads: expected at most 16 key heads, got 17"),
    ({"heads": 16, "dense_heads": -1}, ValueError, "dense_heads: expected 0 or more, got -1"),
    ({"heads": 32, "kv_heads": 8}, ValueError,
     "stride: expected at most 8, the number of key heads, or a dense head, so that all heads together see "
     "every block, got 16"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_what_is_wrong_is_named(fields, error, message) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        S2Pattern(**fields)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: SMALL.mask(0), "seqlen: expected 1 or more, got 0"),
    (lambda: SMALL.cached(0, 0), "length: expected 1 or more, got 0"),
    (lambda: SMALL.cached(64, 4), "head: expected an int from 0 to 3, got 4"),
    (lambda: SMALL.paged(torch.zeros(1, 3, 9, 8), torch.zeros(1, 3, 9, 8)),
     "k: expected shape (B, 4, S, D), got (1, 3, 9, 8)"),
    (lambda: SMALL.paged(torch.zeros(1, 4, 9, 8), torch.zeros(1, 4, 8, 8)),
     "v: expected shape (1, 4, 9, 8) on cpu as k has, got (1, 4, 8, 8) on cpu"),
])  # fmt: skip
def test_what_is_asked_of_it_is_checked(call, message) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()
