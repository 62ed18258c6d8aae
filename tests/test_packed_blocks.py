"""How a program finds its packed sequence: the blocks of all are counted through, with one to spare for each.

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
from attnlib.kernels.backward import PADDING, _packed_rows
from attnlib.kernels.hopper_tiles import owner

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
