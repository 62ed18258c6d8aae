"""What a loop's instructions say of one tile late: clocks by hand, and the two ends of the interval."""

from collections import namedtuple
from dataclasses import replace

import pytest

from attnlib.bench.inspect_sm90 import Stats
from attnlib.book import late_tile

Tile = namedtuple("Tile", "block_m block_n num_warps num_stages")
TILE = Tile(64, 64, 4, 2)
STATS = Stats(
    name="kernel", registers=128, spills=0, shared_bytes=0, num_warps=4, opcodes={},
    loops=({"FFMA": 284, "MUFU.EX2": 16},), loop_listings=((),), loop_stalls=((),), listing=(), warnings=(),
)  # fmt: skip


def test_pieces_are_half_of_the_products_and_the_slower_unit_of_the_softmax() -> None:
    assert late_tile.pieces(STATS, TILE, 64) == (128.0, 300.0)  # 4 * 64^3 FLOP at 4096 a clock, 300 issued
    bound_by_exp = replace(STATS, loops=({"FFMA": 10, "MUFU.EX2": 64},))
    assert late_tile.pieces(bound_by_exp, TILE, 64)[1] == 8 * 64


@pytest.mark.parametrize(
    ("head_dim", "most"),
    [(64, (300 + 256) / (128 + 300)), (256, (300 + 1024) / (512 + 512))],
)
def test_the_second_product_hides_under_the_softmax_or_the_softmax_under_it(head_dim, most) -> None:
    assert late_tile.bounds(STATS, TILE, head_dim) == (1.0, pytest.approx(most))
