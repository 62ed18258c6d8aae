"""How a program finds its varlen sequence. Forward the row blocks are counted, backward the blocks of all are
counted through with one to spare for each sequence.

Every block that a sequence needs has to be its own, whatever the lengths are; what is left over is nobody's.
"""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl
from cases import INTERPRETER_REMARKS
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.emulator import run
from attnlib.kernels.common import tile_scheduler as tiling
from attnlib.kernels.common.varlen_rows import row_of
from attnlib.kernels.hopper import backward_tiles, launch, launch_backward
from attnlib.kernels.hopper.configs import M256N64
from attnlib.kernels.hopper.configs_backward import hopper_backward_config

pytestmark = INTERPRETER_REMARKS
LENGTHS = st.lists(st.sampled_from([0, 0, 1, 63, 64, 65, 127, 128, 129, 300, 1000]), min_size=1, max_size=20)


@gluon.jit
def owners(found, numbers, count, cu, B, blocks, H, plan: gl.constexpr):
    """The sequence of each of `count` blocks of keys, and 1 if it has keys of this."""
    for i in range(count):
        i_b, any_keys = backward_tiles.sequence(gl.load(numbers + i), cu, B, blocks, H, H, None, plan)
        gl.store(found + 2 * i, i_b)
        gl.store(found + 2 * i + 1, gl.where(any_keys, 1, 0))


def offsets(lengths: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def needed(lengths: list[int], block: int) -> list[tuple[int, int, int]]:
    """(block, sequence, first row within it) of all rows."""
    starts = offsets(lengths).tolist()
    return [
        (starts[b] // block + b + row // block, b, row)
        for b, length in enumerate(lengths)
        for row in range(0, length, block)
    ]


@gluon.jit
def places(found, cu, B, H, SECTION, plan: gl.constexpr):
    """Row, sequence and head of all tiles of all programs, as the forward kernel's producer finds them."""
    work = tiling.Work(0, 0, H, 1, 0, SECTION, 0, 0, 0, 0, cu, cu, 0, B, None)
    blocks = tiling.row_blocks(work, plan)
    cursor = 0, 0
    for number in range(gl.program_id(0), tiling.tiles(blocks, work, plan), gl.num_programs(0)):
        row, i_b, i_h, _, cursor = tiling.locate(number, blocks, cursor, work, plan)
        gl.store(found + 3 * number, row)
        gl.store(found + 3 * number + 1, i_b)
        gl.store(found + 3 * number + 2, i_h)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 255, 256, 257, 700]), min_size=1, max_size=100),
    heads=st.sampled_from([(1, 1), (3, 2), (4, 4)]),
    programs=st.sampled_from([1, 2, 7]),
)
def test_every_tile_is_located_once(lengths: list[int], heads: tuple[int, int], programs: int) -> None:
    """By programs that draw every so many of them, with one section of heads or two; the last rows first."""
    mask = {"causal": False, "shifted": False, "left": False, "blocks": 1, "skip": True}
    plan = launch.make_plan(64, M256N64, mask, flip=False, store_lse=False, varlen=True)
    H, section = heads
    cu = offsets(lengths)
    wanted = {
        (row, b, h) for b, length in enumerate(lengths) for row in range(0, length, 256) for h in range(H)
    }
    found = torch.full((len(wanted), 3), -1, dtype=torch.int32)
    run(places, (programs,), found, cu, len(lengths), H, section, plan)
    rows = [tuple(row) for row in found.tolist()]
    assert set(rows) == wanted and len(rows) == len(wanted)
    order = [(b, row) for row, b, h in rows if h == 0]
    assert order == sorted(order, reverse=True)


def found_owners(lengths: list[int], width: int, numbers: list[int]) -> list[list[int]]:
    """What the backward kernel for `width` columns finds for blocks of these numbers."""
    config = hopper_backward_config(width)
    mask = {"causal": True, "shifted": False, "left": False, "tail": False}
    plan = launch_backward.make_plan(width, config, mask, varlen=True)
    found = torch.full((len(numbers), 2), -1, dtype=torch.int32)
    blocks = sum(lengths) // config.block_n + len(lengths)
    given = torch.tensor(numbers).int()
    run(owners, (1,), found, given, len(numbers), offsets(lengths), len(lengths), blocks, 1, plan)
    return found.tolist()


@pytest.mark.parametrize(("width", "block"), [(128, 128), (256, 64)])
@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS)
def test_every_block_has_its_owner(width: int, block: int, lengths: list[int]) -> None:
    wanted = {i: b for i, b, _ in needed(lengths, block)}
    assert len(wanted) == len(needed(lengths, block)), "one block for two sequences"
    numbers = list(range(sum(lengths) // block + len(lengths)))
    for i, (b, any_keys) in zip(numbers, found_owners(lengths, width, numbers), strict=True):
        assert 0 <= b < len(lengths)
        assert any_keys == (i in wanted)
        assert i not in wanted or b == wanted[i]


@pytest.mark.parametrize("count", [127, 128, 129, 300, 17000])
def test_many_sequences_have_their_blocks(count: int) -> None:
    """Fewer sequences than the search has arms, as many, more, and more than their square."""
    rng = random.Random(count)
    lengths = [rng.choice([0, 1, 65]) for _ in range(count)]
    every = needed(lengths, 64)
    blocks = [every[0], *rng.sample(every, 4), every[-1]]
    found = found_owners(lengths, 256, [i for i, _, _ in blocks])
    assert found == [[b, 1] for _, b, _ in blocks]


@triton.jit
def rows(found, numbers, count, cu, B, BLOCK: tl.constexpr):
    """What is found for the first row of each of `count` blocks."""
    for i in range(count):
        place, end, length = row_of(tl.load(numbers + i) * BLOCK, cu, B, BLOCK)
        tl.store(found + 3 * i, place)
        tl.store(found + 3 * i + 1, end)
        tl.store(found + 3 * i + 2, length)


@pytest.mark.parametrize("padding", [32, 64, 128])
@pytest.mark.parametrize("count", [1, 2, 33, 128, 129, 300])
def test_every_row_has_its_sequence(count: int, padding: int, device: str) -> None:
    """In the order of LSE2, delta and the sums of dQ, where the rows of each sequence are padded."""
    rng = random.Random(count)
    lengths = [rng.choice([0, 1, 30, 127, 128, 129, 500][: 7 if count < 100 else 3]) for _ in range(count)]
    blocks, cu = needed(lengths, padding), offsets(lengths, device)
    numbers = torch.tensor([i for i, _, _ in blocks], dtype=torch.int32, device=device)
    found = torch.full((len(blocks), 3), -1, dtype=torch.int32, device=device)
    rows[(1,)](found, numbers, len(blocks), cu, len(lengths), padding)
    assert found.tolist() == [[row, cu[b + 1].item(), lengths[b]] for _, b, row in blocks]
