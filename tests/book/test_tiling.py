"""What tiles and their order make of a length, held against cases that can be counted by hand."""

from dataclasses import replace

import pytest

from attnlib.bench.shapes import Shape
from attnlib.book import tiling

DENSE = Shape(4, 16, 4096, 128, False)


def test_whole_tiles_are_useful():
    assert tiling.useful_share(DENSE) == 1
    tiles = 32  # of 128 rows; with its diagonal a row of tiles computes half a tile that is masked
    assert tiling.useful_share(replace(DENSE, causal=True)) == pytest.approx(tiles / (tiles + 1))


def test_a_key_beyond_the_last_tile():
    """33 blocks of keys for 32, 64 warpgroups with rows for 64; one more has a row, and one none: it visits
    one block."""
    share = tiling.useful_share(replace(DENSE, seqlen=4097))
    assert share == pytest.approx(4097**2 / (64 * 128 * (65 * 33 + 1)))


def test_scheduled_by_hand():
    """64 heads of 32 equal tiles on 128 SMs are 16 full waves; on 132 SMs, too, and four SMs rest."""
    per_wave = 128 * 4096
    assert tiling.scheduled(DENSE, sms=128) == 64 * 4096**2 / (16 * per_wave)
    assert tiling.scheduled(DENSE) == tiling.scheduled(DENSE, sms=128)


def test_a_section_with_fewer_tiles_than_sms_ends_unevenly():
    """At D = 256 one key more than 4096 halves a section's heads, and loses more than the tiles do."""
    even, odd = (Shape(4, 8, seqlen, 256, True) for seqlen in (4096, 4097))
    heads = [tiling.config_of(shape).heads_per_section(32, 1, shape.seqlen, 256) for shape in (even, odd)]
    assert heads == [4, 2]
    by_tiles = tiling.useful_share(odd) / tiling.useful_share(even)
    by_order = tiling.scheduled(odd) / tiling.scheduled(even)
    assert by_order < 0.95 * by_tiles < 0.95
