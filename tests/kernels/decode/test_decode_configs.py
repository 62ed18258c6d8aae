"""Configurations of decoding: every call has one, it fits the GPU, and the arguments alone decide it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.decode.configs import (
    FEW_TILES,
    ITEMSIZE,
    MERGE_REGISTERS,
    REGISTERS,
    DecodeConfig,
    Work,
    decode_config,
    fewest_whole,
    fixed_splits,
    merge_config,
    residency,
)

SHARED_MEMORY = 227 * 1024


def work(**changes) -> Work:
    usual = {"rows": 4, "head_dim": 128, "dtype": "float16", "pairs": 8, "keys": 8192, "sms": 132}
    return Work(**usual | changes)


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_call_has_a_configuration_that_fits(dtype):
    for head_dim, rows in product(range(8, 257, 8), (1, 4, 16, 17, 33, 64, 65, 512)):
        asked = work(head_dim=head_dim, rows=rows, dtype=dtype)
        config = decode_config(asked)
        for n in (config.block_m, config.block_n):
            assert n >= 16 and n & (n - 1) == 0
        row_bytes = block_d(head_dim) * ITEMSIZE[dtype]
        tiles = 2 * (config.num_stages - 1) * config.block_n * row_bytes
        programs = residency(config.block_m, asked).programs
        assert programs * (tiles + config.block_m * row_bytes) <= SHARED_MEMORY
        assert config.block_m >= min(rows, 64)


def test_how_keys_are_shared_out():
    assert decode_config(work()) == DecodeConfig(16, 64, 4, 2, "stream_k", 396, registers=144)
    assert decode_config(work(), "fixed").split == "fixed"
    assert decode_config(work(), "none") == decode_config(work(), 1) == DecodeConfig(16, 128, 4, 3, "none", 1)
    assert decode_config(work(), 5).shares == 5
    assert decode_config(work(keys=64 * 3), 5).shares == 3, "no more splits than tiles"
    assert decode_config(work(pairs=2, keys=64 * 3), "stream_k").shares == 6, "no more programs than tiles"
    for keys in (0, 1, 64 * FEW_TILES):
        assert decode_config(work(keys=keys)).split == "none"
    assert decode_config(work(keys=64 * FEW_TILES + 1)).split == "stream_k"


def test_slow_memory_is_read_by_one_program_a_multiprocessor_where_sequences_are_equal():
    slow = {"equal": True, "bandwidth": 3352 / 132}
    assert decode_config(work(**slow)) == DecodeConfig(16, 64, 4, 3, "stream_k", 132)
    for other in ({"equal": False}, {"bandwidth": 4917 / 132}):
        assert decode_config(work(**slow | other)) == decode_config(work(**other))
        assert decode_config(work(**slow | other)).shares == 396
    assert decode_config(work(**slow, head_dim=64)) == decode_config(work(head_dim=64))


@pytest.mark.parametrize("page_scales", [False, True])
def test_every_call_with_a_cache_in_fp8_has_a_configuration_that_fits(page_scales):
    for head_dim, rows in product(range(8, 257, 8), (1, 4, 16, 17, 33, 64, 65, 512)):
        asked = work(head_dim=head_dim, rows=rows, fp8=True, page_scales=page_scales)
        config = decode_config(asked)
        for n in (config.block_m, config.block_n):
            assert n >= 16 and n & (n - 1) == 0
        programs = residency(config.block_m, asked).programs
        assert config.shares <= 132 * programs and config.split == "stream_k"
        assert 32 * config.num_warps * config.registers * programs <= REGISTERS
        tiles = 2 * (config.num_stages - 1) * config.block_n * block_d(head_dim)
        assert programs * (tiles + 2 * config.block_m * block_d(head_dim)) <= SHARED_MEMORY
        assert config.block_m >= min(rows, 32)
        assert config.late_sums == (config.block_m == 16)


def test_pairs_in_fp8_are_split_even_where_they_fill_the_gpu():
    assert decode_config(work(pairs=132, equal=True, fp8=True)).split == "stream_k"
    assert decode_config(work(keys=32 * FEW_TILES, fp8=True)).split == "none"
    asked = decode_config(work(fp8=True), "none")
    assert (asked.split, asked.registers, asked.late_sums) == ("none", None, False)


def test_registers_leave_room_for_a_program_that_merges():
    for head_dim, dtype in ((128, "float16"), (128, "bfloat16"), (64, "float32")):
        asked = work(head_dim=head_dim, dtype=dtype)
        config = decode_config(asked)
        taken = 32 * config.num_warps * config.registers * residency(config.block_m, asked).programs
        assert taken + MERGE_REGISTERS <= REGISTERS
    assert decode_config(work(dtype="float32", head_dim=256)).registers is None, "eight warps"
    assert decode_config(work(head_dim=64)).registers is None, "two programs leave enough"


def test_how_a_merge_is_cut():
    assert merge_config(32, 128, 396, 132) == (256, 32), "few rows in narrow slices"
    assert merge_config(1000, 128, 396, 132) == (64, 128)
    assert merge_config(32, 128, 396, 132, 128) == (64, 128), "as asked"
    assert merge_config(32, 64, 396, 132, 128) == (128, 64), "no more than there are"


@pytest.mark.parametrize(("pairs", "full"), [(8, False), (125, False), (126, True), (132, True), (133, False),
                                             (200, False), (264, True), (10000, True)])  # fmt: skip
def test_equal_pairs_that_fill_the_gpu_are_not_split(pairs, full):
    assert decode_config(work(pairs=pairs, equal=True)).split == ("none" if full else "stream_k")
    assert decode_config(work(pairs=pairs)).split == "stream_k", "one may be longer than all others"


@pytest.mark.parametrize(
    ("pairs", "whole"), [(8, 0), (125, 0), (126, 126), (132, 126), (133, 0), (264, 0)]
)
def test_pairs_that_may_be_equal_are_left_whole_where_they_are(pairs, whole):
    """The kernels see that. A program on each multiprocessor has the tiles of pairs that are known to be."""
    config, known = decode_config(work(pairs=pairs)), decode_config(work(pairs=pairs, equal=True))
    assert config.whole == whole and config.split == "stream_k"
    if whole:
        assert (config.block_n, config.num_stages) == (known.block_n, known.num_stages) == (128, 3)
        assert config.shares == 132 and config.registers is None and known.split == "none"
    for split in ("stream_k", "fixed", "none", 2):
        assert decode_config(work(pairs=pairs), split).whole == 0, "as it was asked for"
    others = {"fp8": True}, {"rows": 32}, {"keys": 64 * FEW_TILES}
    assert not any(decode_config(work(pairs=pairs, **other)).whole for other in others)
    alone = work(pairs=pairs, rows=64)  # one program a multiprocessor in any case
    assert decode_config(alone) == replace(decode_config(alone, "stream_k"), whole=whole)


@pytest.mark.parametrize("sms", range(1, 200))
def test_host_and_kernels_have_one_rule_for_whole_pairs(sms):
    """`line.are_whole` on numbers, for pairs of equal length."""
    least = fewest_whole(sms)
    assert least - 1 < 0.95 * sms <= least <= sms
    for pairs, tiles in product((1, least - 1, least, sms), (1, 2, 63, 64, 1000)):
        assert (pairs * tiles // least >= tiles) == (pairs >= least) == (pairs >= 0.95 * sms)


@pytest.mark.parametrize("pairs", [1, 8, 56, 132, 133, 200, 264, 265, 10000])
def test_a_fixed_number_of_splits_fills_the_last_wave(pairs):
    splits = fixed_splits(pairs, 1000, 264)
    waves = pairs * splits / 264
    assert waves / -(-pairs * splits // 264) >= 0.75
    assert fixed_splits(pairs, 1, 264) == 1
    if pairs == 264:
        assert splits == 1
