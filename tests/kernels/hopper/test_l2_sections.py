"""Sections of heads: how evenly a pass is divided among SMs, in a model without a cache."""

import heapq
import random
from collections.abc import Iterable

import pytest
import torch

from attnlib import S2Pattern
from attnlib.kernels.common import device, l2_sections
from attnlib.kernels.common.signature import Signature
from attnlib.kernels.hopper import launch
from attnlib.kernels.hopper.configs import SPLIT, HopperConfig, hopper_config
from attnlib.kernels.hopper.configs_backward import hopper_backward_config
from attnlib.params import MaskWindow


def last_end(costs: Iterable[float]) -> float:
    """Of work in this order on whichever SM is free."""
    sms = [0.0] * l2_sections.SMS
    for cost in costs:
        heapq.heapreplace(sms, sms[0] + cost)
    return max(sms)


def busiest_over_mean(heads: int, group: int, length: int, section: int) -> float:
    """Of causal programs of 128 keys that start in the order of `by_sections` on whichever SM is free; the
    mean is no shorter than the longest program."""
    blocks = -(-length // 128)
    # A step is 64 queries; a program has about three more at its beginning and end.
    work = [(-(-length // 64) - 2 * block) * group + 3 for block in range(blocks)]
    order = (
        steps
        for first in range(0, heads, section)
        for steps in work
        for _ in range(min(section, heads - first))
    )
    return last_end(order) / max(sum(work) * heads / l2_sections.SMS, work[0])


def shapes() -> list[tuple[int, int, int]]:
    """(key heads of all batches, group, length)."""
    draw = random.Random(0)
    return [(draw.randint(1, 40), draw.choice((1, 1, 2, 4, 8)), draw.randint(300, 9000)) for _ in range(60)]


def section_of(heads: int, length: int) -> int:
    return hopper_backward_config(128).heads_per_section(heads, 8, -(-length // 128), length, 128)


@pytest.mark.parametrize(("heads", "group", "length"), shapes())
def test_few_programs_end_together(heads: int, group: int, length: int) -> None:
    section = section_of(heads, length)
    assert 1 <= section <= heads
    assert busiest_over_mean(heads, group, length, section) < 1.16


def test_sections_by_the_cache_alone_do_not() -> None:
    """So the test above can fail: eight key heads with 32 blocks each, one after the other."""
    assert busiest_over_mean(8, 8, 4096, 1) > 1.5
    assert section_of(8, 4096) == 8


@pytest.mark.parametrize(("heads", "length"), [(64, 4096), (32, 8192), (16, 16384)])
def test_of_many_programs_the_cache_decides(heads: int, length: int) -> None:
    section = section_of(heads, length)
    assert 8 * length * 128 * section <= hopper_backward_config(128).l2_bytes < 16 * length * 128 * section


def s2_over_mean(seqlen: int, leads: bool) -> float:
    """Of the backward programs of 4 sequences under the published S2 pattern, by their lists."""
    pattern, heads = S2Pattern(16), 4 * 16
    mask = pattern.mask(seqlen)
    mask = mask.gathered or mask
    lengths = mask.lists(64, columns=True).starts.diff().view(16, -1).sort(dim=1, descending=True).values
    steps = (lengths + 1.5).tolist()
    blocks = len(steps[0])
    section = l2_sections.key_heads(heads, blocks, seqlen, 128, 16 << 20)
    leading = l2_sections.leading_programs(heads, blocks, mask.form.leading) if leads else 0
    order = (
        steps[head % 16][block]
        for part in (range(leading), range(leading, blocks))
        for first in range(0, heads, section)
        for block in part
        for head in range(first, min(first + section, heads))
    )
    return last_end(order) / (sum(map(sum, steps)) * 4 / l2_sections.SMS)


def test_neither_few_programs_have_leading_ones_nor_very_many() -> None:
    found = [l2_sections.leading_programs(64, n // 128, 5) for n in (1024, 2048, 4096, 65536, 131072)]
    assert found == [0, 0, 5, 5, 0]


@pytest.mark.parametrize(("seqlen", "without"), [(2048, 1.05), (4096, 1.2), (8192, 1.2), (16384, 1.15)])
def test_long_columns_do_not_come_last(seqlen: int, without: float) -> None:
    """So few programs as at 2048 tokens are divided evenly by their sections alone."""
    assert s2_over_mean(seqlen, leads=False) > without
    assert s2_over_mean(seqlen, leads=True) < (1.08 if seqlen == 2048 else 1.04)


@pytest.mark.parametrize(("group", "section"), [(1, 4), (4, 1), (8, 1)])
def test_at_256_columns_all_query_heads_of_a_group_count(group: int, section: int) -> None:
    assert hopper_backward_config(256).heads_per_section(64, group, 64, 2048, 256) == section


# ---------------------------------------------------------------- forward


CAUSAL = MaskWindow(None, 0)


def numbers_of(
    config: HopperConfig, D: int, heads: int, length: int, heads_kv: int | None = None,
    window: MaskWindow = CAUSAL,
) -> dict:  # fmt: skip
    """What the launcher tells the kernel."""
    shapes = (1, heads, length, D), (1, heads_kv or heads, length, D)
    call = Signature(*shapes, (), torch.float16, 0, window, 0.1, None, False, config)
    return launch.shared_out(call, config.width(D))[1]


def forward_over_mean(config: HopperConfig, numbers: dict) -> float:
    """Of causal tiles in that order; a tile costs its blocks of keys and as much as 192 keys more."""
    rows, costs = 64 * config.warpgroups, []
    heads, first = numbers["HEADS"], 0
    last = heads if numbers["LAST"] is None else numbers["LAST"]
    while first < heads:
        together = heads - first if first >= last else min(numbers["SECTION"], heads - first)
        for row in reversed(range(0, numbers["S_q"], rows)):
            steps = -(-min(row + rows, numbers["S_k"]) // config.block_n) + 192 / config.block_n
            costs += [steps] * together
        first += together
    return last_end(costs) / (sum(costs) / l2_sections.SMS)


@pytest.fixture
def sms(monkeypatch) -> None:
    monkeypatch.setattr(device, "num_sms", lambda index: l2_sections.SMS)


@pytest.mark.parametrize(("head_dim", "heads", "length"), [
    (192, 32, 3000), (192, 64, 2048), (256, 40, 3000), (256, 128, 1024), (80, 16, 16384), (96, 32, 4000),
])  # fmt: skip
def test_tiles_under_a_diagonal_end_together(sms, head_dim: int, heads: int, length: int) -> None:
    config = hopper_config(head_dim)
    numbers = numbers_of(config, head_dim, heads, length)
    assert 0 <= numbers["LAST"] < heads and numbers["LAST"] % numbers["SECTION"] == 0
    assert forward_over_mean(config, numbers) < 1.05
    if (head_dim, length) == (192, 3000):  # so this can fail
        assert forward_over_mean(config, numbers | {"LAST": None}) > 1.09


def test_other_tiles_have_equal_sections(sms) -> None:
    config = hopper_config(192)
    for window in MaskWindow(None, None), MaskWindow(1023, 0):
        numbers = numbers_of(config, 192, 32, 4096, window=window)
        assert numbers["LAST"] is None
        assert numbers["SECTION"] == config.heads_per_section(32, 1, 4096, 192)
    assert numbers_of(hopper_config(64), 64, 32, 4096)["LAST"] is None


def test_sections_of_grouped_heads_are_those_of_the_other_calls(sms) -> None:
    config = SPLIT[192]
    grouped = numbers_of(config, 192, 64, 4096, heads_kv=16)
    assert grouped["SECTION"] == config.heads_per_section(64, 4, 4096, 192) and grouped["LAST"] is not None
    alone = numbers_of(config, 192, 64, 4096)
    assert alone["SECTION"] == config.heads_per_section(64, 1, 4096, 192) // 2
