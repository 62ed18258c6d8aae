"""How a program finds its packed sequence. Forward the row blocks are counted, backward the blocks of all are
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

from attnlib import launch_hopper
from attnlib.configs import TALL
from attnlib.emulator import run
from attnlib.kernels import hopper_tiles as tiling
from attnlib.kernels.backward import PADDING, _packed_rows
from attnlib.kernels.hopper import Plan
from attnlib.kernels.hopper_backward_tiles import owner

pytestmark = INTERPRETER_REMARKS
LENGTHS = st.lists(st.sampled_from([0, 0, 1, 63, 64, 65, 127, 128, 129, 300, 1000]), min_size=1, max_size=20)


@gluon.jit
def owners(found, cu, B, blocks, BLOCK: gl.constexpr):
    for i in range(blocks):
        gl.store(found + i, owner(i, cu, B, BLOCK))


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
    work = tiling.Work(0, 0, H, 1, 0, SECTION, 0, 0, 0, 0, cu, cu, 0, B)
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
    plan = launch_hopper.make_plan(Plan, 64, False, 1, True, False, False, TALL, packed=True)
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


@pytest.mark.parametrize("block", [64, 128, 256])
@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS)
def test_every_block_has_its_owner(block: int, lengths: list[int]) -> None:
    cu, blocks = offsets(lengths), sum(lengths) // block + len(lengths)
    found = torch.full((blocks,), -1, dtype=torch.int32)
    run(owners, (1,), found, cu, len(lengths), blocks, block)
    wanted = needed(lengths, block)
    assert [found[i].item() for i, _, _ in wanted] == [b for _, b, _ in wanted]
    assert len({i for i, _, _ in wanted}) == len(wanted), "one block for two sequences"
    assert ((found >= 0) & (found < len(lengths))).all()


@triton.jit
def rows(found, cu, B, blocks, BLOCK: tl.constexpr):
    for i in range(blocks):
        place, end, length = _packed_rows(i * BLOCK, cu, B)
        tl.store(found + 3 * i, place)
        tl.store(found + 3 * i + 1, end)
        tl.store(found + 3 * i + 2, length)


@pytest.mark.parametrize("seed", range(4))
def test_every_row_has_its_sequence(seed: int, device: str) -> None:
    """In the order of LSE2, delta and the sums of dQ, where the rows of each sequence are padded."""
    rng, padding = random.Random(seed), PADDING.value
    lengths = [rng.choice([0, 1, 30, 127, 128, 129, 500]) for _ in range(rng.choice([1, 2, 5, 33]))]
    cu, blocks = offsets(lengths, device), sum(lengths) // padding + len(lengths)
    found = torch.full((blocks, 3), -1, dtype=torch.int32, device=device)
    rows[(1,)](found, cu, len(lengths), blocks, padding)
    for i, b, row in needed(lengths, padding):
        assert found[i].tolist() == [row, cu[b + 1].item(), lengths[b]]
