"""Sections of heads: how evenly a pass is divided among SMs, in a model without a cache."""

import heapq
import random
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib import S2Pattern
from attnlib.kernels.common import device, l2_sections
from attnlib.kernels.common.l2_sections import Heads, Sections
from attnlib.kernels.common.signature import Signature
from attnlib.kernels.hopper import launch
from attnlib.kernels.hopper.configs import SPLIT, HopperConfig, hopper_config
from attnlib.kernels.hopper.configs_backward import CROWDING, BackwardKind, hopper_backward_config
from attnlib.kernels.hopper.sharing import Launched
from attnlib.params import MaskWindow


def last_end(costs: Iterable[float]) -> float:
    """Of work in this order on whichever SM is free."""
    sms = [0.0] * l2_sections.SMS
    for cost in costs:
        heapq.heapreplace(sms, sms[0] + cost)
    return max(sms)


def heads_of(heads: int, group: int, length: int, *, width: int = 128, left: int | None = None) -> Heads:
    """Key heads under a diagonal, with the work of programs that visit the whole group and stay."""
    config = hopper_backward_config(width, stays=True, kind=BackwardKind(masked=True))
    return Launched(config, heads, group, length, length, width, width, left, 0).key_heads(group)


def busiest_over_mean(heads: Heads, sections: Sections) -> float:
    """Of programs that start in the order of `by_sections` on whichever SM is free, each with as much work as
    it says; the mean is no shorter than the longest program."""
    order = (
        work for first, end in sections.spans(heads.number) for work in heads.work for _ in range(end - first)
    )
    return last_end(order) / max(sum(heads.work) * heads.number / l2_sections.SMS, max(heads.work))


def shapes() -> list[tuple[int, int, int]]:
    """(key heads of all batches, group, length)."""
    draw = random.Random(0)
    return [(draw.randint(1, 40), draw.choice((1, 1, 2, 4, 8)), draw.randint(300, 9000)) for _ in range(60)]


def chosen(heads: Heads, l2_bytes: int = 16 << 20) -> Sections:
    return l2_sections.balanced(heads, l2_bytes, CROWDING)


@pytest.mark.parametrize(("heads", "group", "length"), shapes())
def test_programs_end_together(heads: int, group: int, length: int) -> None:
    launched = heads_of(heads, group, length)
    sections = chosen(launched)
    assert 1 <= sections.size <= heads and sections.size & (sections.size - 1) == 0
    assert sections.last % sections.size == 0 and 0 <= sections.last < heads
    assert busiest_over_mean(launched, sections) < 1.16


def test_sections_by_the_cache_alone_do_not() -> None:
    """So the test above can fail: eight key heads with 32 blocks each, one after the other."""
    launched = heads_of(8, 8, 4096)
    assert busiest_over_mean(launched, Sections(1)) > 1.5
    assert busiest_over_mean(launched, chosen(launched)) < 1.05


@pytest.mark.parametrize(
    ("width", "heads", "length", "left", "expected"),
    [
        (128, 64, 4096, None, (4, 4)), (128, 32, 4000, None, (4, 4)), (96, 64, 4096, None, (4, 8)),
        (128, 16, 8192, None, (2, 2)), (128, 64, 4096, 1023, (8, 16)),
    ],
)  # fmt: skip
def test_sections_that_were_the_fastest_or_nearly(width, heads, length, left, expected) -> None:
    """Heads of a section and of the last one, beside others on an H200 (docs/lab/hopper-backward.md)."""
    sections = chosen(heads_of(heads, 1, length, width=width, left=left))
    assert (sections.size, heads - sections.last) == expected


@pytest.mark.parametrize(("heads", "length"), [(64, 4096), (32, 8192), (16, 16384)])
def test_the_cache_decides_how_many_are_together(heads: int, length: int) -> None:
    launched = heads_of(heads, 1, length)
    size = launched.together(16 << 20)
    assert launched.nbytes * size <= 16 << 20 < launched.nbytes * 2 * size
    assert launched.together(0) == 1 and launched.together(1 << 40) == heads


def test_what_a_section_has_beyond_the_cache_costs() -> None:
    """Programs of 100 heads in three blocks: the last section has more than fits where that is free."""
    heads = Heads(100, (9.0, 5.0, 1.0), 1 << 20)
    free, costly = (l2_sections.balanced(heads, 4 << 20, crowding) for crowding in (0.0, 1.0))
    assert heads.number - free.last > 4 >= heads.number - costly.last


@pytest.mark.parametrize("visited", [1, 4])
def test_how_many_heads_the_last_section_has_at_most(visited: int) -> None:
    """96 MiB of them, and twice as many as the others where programs visit several query heads."""
    sizes = set()
    for number in range(1, 160):
        heads = Heads(number, (9.0, 5.0, 1.0), 1 << 20, visited)
        sections = l2_sections.balanced(heads, 4 << 20, 0.0)
        assert number - sections.last <= (96 if visited == 1 else 2 * sections.size)
        sizes.add(sections.size)
    assert sizes <= ({1, 2, 4} if visited == 1 else {1, 2, 4, 8, 16})


def test_the_model_is_the_launch_in_its_order() -> None:
    """Whose programs take what their work says here, and up to 5% more or less there."""
    for heads in (heads_of(12, 1, 3000), heads_of(200, 1, 3000)):
        for sections in Sections(4), Sections(4, heads.number - 8):
            work = busiest_over_mean(heads, sections) * sum(heads.work) * heads.number / l2_sections.SMS
            assert l2_sections.finished(heads, sections) == pytest.approx(work, rel=0.04)


@given(number=st.integers(1, 60), size=st.integers(1, 12), last=st.none() | st.integers(0, 8))
def test_spans_have_each_head_once(number: int, size: int, last: int | None) -> None:
    sections = Sections(size, None if last is None else min(last * size, (number - 1) // size * size))
    spans = list(sections.spans(number))
    assert [head for first, end in spans for head in range(first, end)] == list(range(number))
    assert all(end - first == size for first, end in spans[:-1])
    assert last is None or spans[-1][0] == sections.last


def test_sequences_of_any_lengths_have_equal_sections_where_they_are_few() -> None:
    """The model knows nothing of varlen sequences: what decides is the number of blocks of keys."""
    assert l2_sections.key_heads(8, 32, 4096, 128, 16 << 20) == 8
    assert l2_sections.key_heads(64, 32, 4096, 128, 16 << 20) == 4


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
    launched = Launched(hopper_backward_config(256), 64, group, 2048, 2048, 256, 256, None, None)
    heads = launched.key_heads(group)
    assert heads.together(16 << 20) == section and heads.visited == 1
    assert launched._replace(config=hopper_backward_config(128)).key_heads(group).visited == group


@pytest.mark.parametrize(
    ("left", "right", "rows"),
    [
        (None, 0, 16384), (1023, 0, 1023 + 128), (1023, 500, 1523 + 128), (1023, None, 16384),
        (16300, 0, 16384),
    ],
)  # fmt: skip
def test_of_a_window_the_rows_that_it_reaches_count(left: int | None, right: int | None, rows: int) -> None:
    """A bound on one side alone leaves a key with queries up to the sequence's end."""
    config = hopper_backward_config(128)
    launched = Launched(config, 8, 1, 16384, 16384, 128, 128, left, right)
    assert launched.key_heads(1).nbytes == 8 * rows * 128


def test_very_long_heads_have_sections_of_one() -> None:
    """One head has more programs than the model follows."""
    assert chosen(heads_of(4, 1, 1 << 20)) == Sections(1, 3)
    heads = heads_of(4, 1, 1 << 20)
    assert l2_sections.finished(heads, Sections(1)) == pytest.approx(4 * sum(heads.work) / l2_sections.SMS)


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
