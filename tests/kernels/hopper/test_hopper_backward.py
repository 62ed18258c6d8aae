"""Around the Hopper backward kernel: the conversion of dQ, in the interpreter, and what it refuses.

The kernel itself runs in test_emulated_kernels, and on a GPU in tests/gpu."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.emulator import run
from attnlib.emulator.values import Int, Pointer
from attnlib.kernels import hopper
from attnlib.kernels.common import device, hopper_gpu
from attnlib.kernels.common.l2_sections import SMS, last_section
from attnlib.kernels.common.launch_preprocess import CHUNK, preprocess
from attnlib.kernels.common.launcher import Launches, Part
from attnlib.kernels.common.signature import Signature
from attnlib.kernels.common.tile_order import by_sections, leading_first
from attnlib.kernels.hopper import backward_tiles, launch_backward, sharing
from attnlib.kernels.hopper.configs_backward import (
    CROWDING,
    GROUPS_CROWDING,
    KEYS_96,
    KEYS_96_WIDTHS,
    SPLIT,
    BackwardKind,
    HopperBackwardConfig,
    backward_config,
    hopper_backward_config,
)
from attnlib.params import MaskWindow, Params, Varlen

SCALE = 0.3
MB = 1 << 20


def in_registers(x: np.ndarray) -> np.ndarray:
    """[64, C] as the accumulator lies in a warpgroup's registers, the order in memory. The other way round
    from the conversion kernel: from the rows and columns that each of 128 threads has."""
    t, i = np.arange(128)[None, :, None], np.arange(x.shape[1] // 8)[:, None, None]
    four = np.arange(4)[None, None, :]
    rows = 16 * (t // 32) + t % 32 // 4 + 8 * (four // 2)
    return x[rows + 0 * i, 8 * i + 2 * (t % 4) + four % 2].reshape(-1)


@pytest.mark.parametrize(("head_dim", "width"), [(40, 64), (72, 80)])
def test_conversion_keeps_to_the_rows_and_columns_of_dq(device: str, head_dim: int, width: int) -> None:
    """A head dimension between the widths, memory with more around it."""
    if device != "cpu":
        pytest.skip("the conversion runs in the interpreter")
    more = torch.full((1, 2, 134, head_dim + 8), 7.0)
    dq = more[:, :, 2:132, 4 : head_dim + 4]
    shape, config = (1, 2, 130, head_dim), hopper_backward_config(head_dim)
    window = shape, more.stride()
    call = Signature(
        shape, shape, (more.stride(),) * 5, torch.float32, -1, MaskWindow(None, 0), SCALE, None, False, config
    )
    rows = preprocess(call, window, window, config.block_m, width)
    sums = torch.arange(rows.elements, dtype=torch.float32)
    launches = [launch_backward.postprocess(call, window, rows, width)]
    Launches(launches, -1, ("buffer", "dq", "cu_q"))(sums, dq, None)
    sums = sums[: rows.rows.start]
    blocks = sums.numpy().reshape(2, -1, 64 * width) * np.float32(SCALE)
    for h, i in ((0, 0), (1, 1), (1, 2)):
        rows = dq[0, h, 64 * i : 64 * i + 64].numpy()
        full = np.zeros((64, width), np.float32)
        numbers = in_registers(np.arange(64 * width).reshape(64, width))  # which element lies at each place
        full.reshape(-1)[numbers] = blocks[h, i]
        np.testing.assert_array_equal(rows, full[: len(rows), :head_dim])
    dq.fill_(7.0)
    assert bool((more == 7.0).all()), "written outside of dq"


@pytest.mark.parametrize(("width", "clocks"), [(64, 1200), (128, 0)])
def test_the_second_consumer_begins_later_where_no_diagonal_ends_the_keys(width: int, clocks: int) -> None:
    config = hopper_backward_config(width)
    for causal, left in product((False, True), repeat=2):
        mask = {"causal": causal, "shifted": False, "left": left, "tail": True}
        plan = launch_backward.make_plan(width, config, mask, varlen=False)
        assert plan.delay.value == (0 if causal or left else clocks)


def test_head_dimensions_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest width that holds one, in parts where that is no power of two; padded without its line."""
    widths = {D: hopper_backward_config(D).width(D) for D in range(8, 257, 8)}
    assert {width: [D for D in widths if widths[D] == width] for width in (*SPLIT, *KEYS_96_WIDTHS)} == {
        80: [72, 80], 96: [88, 96], 160: [136, 144, 152, 160], 192: [168, 176, 184, 192],
    }  # fmt: skip
    assert set(widths.values()) == {64, 128, 256} | set(SPLIT) | set(KEYS_96_WIDTHS)
    for width, config in SPLIT.items():
        left, right = config.columns
        assert left + right == width and left & (left - 1) == right & (right - 1) == 0 and right >= 16
        with pytest.raises(ValueError, match=f"^config: expected columns .* for head dimension {left}, got"):
            config.width(left)
    monkeypatch.delitem(SPLIT, 80)
    assert hopper_backward_config(72) == replace(SPLIT[96], l2_bytes=8 * MB)


SWIZZLES = [(80, [64, 32]), (96, [64, 32]), (128, [128]), (192, [128])]


@pytest.mark.parametrize(("width", "swizzles"), SWIZZLES)
def test_a_consumers_half_of_the_columns_is_whole_swizzles_of_k(width: int, swizzles: list[int]) -> None:
    """A product reads 16 keys of the columns that one swizzle of shared memory goes round in."""
    shape, config = (1, 1, 64, width), SPLIT.get(width) or hopper_backward_config(width)
    strides = torch.empty(shape, device="meta").stride()
    call = Signature(
        shape, shape, (strides,) * 5, torch.float16, 0, MaskWindow(None, 0), SCALE, None, False, config
    )
    window = shape, strides
    rows = preprocess(call, window, window, config.block_m, width)
    found = launch_backward.descriptors((window,) * 6, rows, width, call)
    keys = [found[name].layout.swizzle_byte_width for name in ("desc_k", "desc_k_right") if name in found]
    assert keys == swizzles


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_it_runs_calls_that_want_the_same_bits(head_dim, deterministic, monkeypatch) -> None:
    """With a configuration that keeps the additions to dQ in order, and counters behind everything else."""
    monkeypatch.setattr(hopper_gpu, "unsupported_here", lambda q: None)
    monkeypatch.setattr(device, "num_sms", lambda index: 132)
    q = torch.zeros(1, 2, 130, head_dim, dtype=torch.float16)
    params = Params(MaskWindow(None, None), SCALE, deterministic=deterministic)
    assert hopper.unsupported(q, q, q, params, backward=True) is None
    config = hopper.configuration(q, q, q, params, backward=True)
    kind = BackwardKind(tail=True, float16=True)
    assert config == hopper_backward_config(head_dim, deterministic, True, kind)
    assert config.deterministic is deterministic
    mask = {"causal": False, "shifted": False, "left": False, "tail": True}
    width = config.width(head_dim)
    assert launch_backward.make_plan(width, config, mask, varlen=False).deterministic.value is deterministic
    shape, strides = tuple(q.shape), (q.stride(),) * 5
    call = Signature(shape, shape, strides, q.dtype, -1, params.window, SCALE, None, False, config)
    plan = launch_backward.prepare(call)
    blocks = 2 * -(-130 // config.block_m)
    elements = blocks * config.block_m * (width + 2)
    words = blocks * config.block_m // 64 * 16
    drawn = CHUNK if config.persistent else 0  # a counter of tiles
    assert plan.elements == elements + (words if deterministic else 0) + drawn
    before, launch, _ = plan.launches.launches
    for one in (before, launch):
        assert one.pointers["turns_ptr"] == (Part("buffer", elements) if deterministic else Part("none"))


def test_which_programs_stay_on_their_sm() -> None:
    """Not of two grouped heads with few rows, nor beyond 128 columns. Where sums of so short sequences have
    an order, not of varlen ones, and not of 65 to 96 columns without a mask. Consumers alternate, but for
    kinds that were faster without."""
    dtypes, windows = (torch.float16, torch.bfloat16), (MaskWindow(None, None), MaskWindow(None, 0))
    for head_dim, dtype in product(range(8, 257, 8), dtypes):
        q, k = (torch.zeros(1, heads, 130, head_dim, dtype=dtype) for heads in (4, 2))
        for window, deterministic in product(windows, (False, True)):
            params = Params(window, SCALE, deterministic=deterministic)
            config = hopper.configuration(q, q, q, params, backward=True)
            few = window == windows[0] and 64 < head_dim <= 96
            in_order = deterministic and head_dim <= 128 and not few
            assert config.persistent is (in_order or (head_dim <= 128 and not deterministic))
            assert config.bulk is (head_dim <= 64)
            drift = window == windows[0] and head_dim <= 64 and dtype == torch.bfloat16
            in_turns = config.persistent and not drift
            if deterministic:  # both consumers of 65 to 80 columns would add to the same 16, so they have 96
                in_turns = 64 < head_dim <= 128 or (head_dim <= 64 and not drift)
            assert config.alternate is in_turns
            assert hopper.configuration(q, k, k, params, backward=True).persistent is in_order
            tokens, starts = q[0].transpose(0, 1), torch.tensor([0, 130], dtype=torch.int32)
            varlen = params._replace(varlen=Varlen(starts, starts, 130, 130))
            config = hopper.configuration(tokens, tokens, tokens, varlen, backward=True)
            assert config.persistent is (head_dim <= 128 and not deterministic)
            turns = head_dim <= 128 and not (64 < head_dim <= 96 and window == windows[0])
            assert config.alternate is (head_dim <= 96 if deterministic else turns)


@pytest.mark.parametrize(
    "head_dim, S, window, stays",
    [
        (128, 8192, None, True), (128, 16384, None, False), (112, 16384, None, False), (128, 65536, 0, True),
        (96, 65536, None, True), (64, 1 << 20, None, True),
    ],
)  # fmt: skip
def test_long_dense_calls_of_128_columns_have_programs_of_one_tile(head_dim, S, window, stays) -> None:
    q = torch.empty(1, 1, S, head_dim, dtype=torch.float16, device="meta")
    config = hopper.configuration(q, q, q, Params(MaskWindow(None, window), SCALE), backward=True)
    assert config.persistent is stays
    assert stays or config == HopperBackwardConfig(64, stagger=1200, rotated=True, l2_bytes=8 * MB)


@pytest.mark.parametrize(
    "head_dim, group, S, visited",
    [
        (128, 8, 4096, 1), (128, 8, 16384, 1), (128, 4, 4096, 1), (128, 4, 16384, 1), (128, 2, 4096, 2),
        (128, 8, 512, 1), (128, 8, 256, None), (128, 2, 512, None), (128, 3, 2048, 3),
        (112, 8, 4096, 1), (96, 8, 4096, 2), (96, 8, 16384, 2), (96, 4, 4096, 4), (80, 8, 4096, 2),
        (80, 4, 16384, 4), (64, 8, 4096, 2), (64, 8, 16384, 2), (64, 8, 512, None), (64, 4, 4096, 4),
        (64, 4, 16384, 4), (64, 2, 16384, 2), (64, 12, 4096, 3), (64, 11, 4096, 1), (64, 16, 4096, 4),
        (40, 8, 16384, 2),
    ],
)  # fmt: skip
def test_which_grouped_heads_stay_on_their_sm(head_dim, group, S, visited) -> None:
    """As docs/lab/hopper-backward.md has measured it, under a diagonal; of windows and dense calls, which see
    every key with more rows, some. Where sums have an order they all stay, and visit one
    query head, or with few rows the group."""
    q, k = (torch.empty(1, heads, S, head_dim, dtype=torch.float16, device="meta") for heads in (group, 1))
    params = Params(MaskWindow(None, 0), SCALE)
    config = hopper.configuration(q, k, k, params, backward=True)
    expected = hopper_backward_config(head_dim, kind=BackwardKind(masked=True))
    if visited is not None:
        stays = hopper_backward_config(head_dim, stays=True, kind=BackwardKind(masked=True))
        expected = replace(stays, visited=visited)
    assert config == expected
    for window, most in ((MaskWindow(1023, 0), 64), (MaskWindow(None, None), 96)):
        config = hopper.configuration(q, k, k, params._replace(window=window), backward=True)
        if visited is not None and S > 1024:
            assert config.persistent and config.visited == (group if head_dim <= most else visited)
    config = hopper.configuration(q, k, k, params._replace(deterministic=True), backward=True)
    assert config.persistent and config.visited == (1 if S > 512 else None)


@pytest.mark.parametrize("columns", [(64, 64), (128, 128), (192, 192), (192, 128), (256, 256)], ids=str)
def test_grouped_heads_in_order_have_sums_of_their_own(columns: tuple[int, int]) -> None:
    """Under a diagonal with many rows; whole groups under a window, without a mask, and with few rows."""
    own, values = columns

    def visited(S: int, window: MaskWindow) -> tuple[int | None, bool]:
        q, k = (torch.empty(1, heads, S, own, dtype=torch.float16, device="meta") for heads in (4, 1))
        v = torch.empty(1, 1, S, values, dtype=torch.float16, device="meta")
        config = hopper.configuration(q, k, v, Params(window, SCALE, deterministic=True), backward=True)
        return config.visited, config.added

    whole = None, True
    assert visited(1024, MaskWindow(None, 0)) == (1, False) and visited(1000, MaskWindow(None, 0)) == whole
    assert visited(4096, MaskWindow(1023, 0)) == visited(4096, MaskWindow(None, None)) == whole


@pytest.mark.parametrize(("dtype", "keys", "stays"), [
    (torch.float16, 16384, True), (torch.bfloat16, 2047, True), (torch.bfloat16, 2048, False)
])  # fmt: skip
def test_which_dense_calls_of_64_columns_stay_in_order(dtype: torch.dtype, keys: int, stays: bool) -> None:
    """With dQ in bulk, as without an order but for the sections, where they stay."""
    q = torch.empty(1, 1, keys, 64, dtype=dtype, device="meta")
    free, ordered = (
        hopper.configuration(q, q, q, Params(MaskWindow(None, None), SCALE, deterministic=d), backward=True)
        for d in (False, True)
    )
    assert ordered.bulk and ordered.persistent is stays
    if stays:
        assert ordered == replace(free, deterministic=True, l2_bytes=16 * MB)


def varlen_config(columns: int, group: int, S: int, deterministic: bool, mask: tuple) -> HopperBackwardConfig:
    """Of two sequences of S and S tokens, with the configuration's own columns."""
    starts = torch.tensor([0, S, 2 * S], dtype=torch.int32)
    q, k = (torch.empty(2 * S, n, columns, dtype=torch.float16, device="meta") for n in (group, 1))
    params = Params(MaskWindow(*mask), SCALE, Varlen(starts, starts, S, S), deterministic=deterministic)
    return hopper.configuration(q, k, k, params, backward=True)


@pytest.mark.parametrize(
    ("columns", "group", "visited", "in_order"),
    [
        (64, 8, 2, None), (96, 8, 2, None), (128, 8, 2, 1), (128, 16, 4, 1), (64, 4, None, None),
        (128, 4, None, None), (192, 8, None, 1), (192, 4, None, 1), (256, 4, 2, 1), (256, 2, None, 1),
    ],
)  # fmt: skip
def test_how_many_query_heads_of_varlen_sequences_programs_visit(columns, group, visited, in_order) -> None:
    """As docs/lab/hopper-backward.md has measured it, under a diagonal; whole groups of short sequences, of
    windows and without a mask."""
    long = [varlen_config(columns, group, 1024, d, (None, 0)) for d in (False, True)]
    assert [config.visited for config in long] == [visited, in_order]
    assert long[1].added is (in_order is None)
    for S, mask in ((500, (None, 0)), (1024, (300, 0)), (1024, (None, None))):
        for deterministic in (False, True):
            assert varlen_config(columns, group, S, deterministic, mask).visited is None


@pytest.mark.parametrize(
    ("width", "varlen", "stays"),
    [(64, False, False), (64, False, True), (64, True, False), *product((192, 256), (False, True), [False])],
)
def test_turns_count_the_programs_that_visit_a_block(width: int, varlen: bool, stays: bool) -> None:
    """For each block of queries: as many as have come before in the order of programs, over windows of all
    kinds, with the functions that the kernels use. Blocks that a tile visits only to have two have none."""
    config = replace(hopper_backward_config(width, deterministic=True), persistent=stays)
    windows = [(None, 0), (None, None), (None, 30), (100, 0), (100, 50), (70, None), (0, 0), (200, 300)]
    lengths = [(300, 300), (130, 700), (700, 130), (500, 1), *([] if stays else [(1, 400)])]
    for (left, right), (S_q, S_k) in product(windows, lengths):
        left, right = MaskWindow(left, right).clipped(S_q, S_k)
        mask = {"causal": right is not None, "shifted": bool(right), "left": left is not None, "tail": True}
        plan = launch_backward.make_plan(width, config, mask, varlen, persistent=stays)
        visits = visits_of(plan, S_q, S_k, left, right or None)
        seen: Counter[int] = Counter()
        for m_start, m_end, turns in visits:
            counted = [(m, turn) for m, turn in zip(range(m_start, m_end), turns, strict=True) if turn >= 0]
            assert stays or len(counted) == m_end - m_start
            assert counted == [(m, seen[m]) for m, _ in counted]
            seen.update(m for m, _ in counted)


@gluon.jit
def _visits(found_ptr, work, plan: gl.constexpr):
    for number in range(work.num_n):
        i_b, any_keys = work.i_b, True
        if plan.varlen:
            i_b, any_keys = backward_tiles.sequence(
                number, work.cu_k, work.H, work.num_n, work.HEADS_KV, work.SECTION, work.LAST, plan
            )
        tile = backward_tiles.locate(number, work, plan)
        row = found_ptr + number * 64
        gl.store(row, tile.m_start)
        gl.store(row + 1, tile.m_end if any_keys else tile.m_start)
        for m in range(tile.m_start, tile.m_end):
            counted = backward_tiles.counted(tile, m, work, plan)
            gl.store(row + 2 + m, backward_tiles.turn(tile, m, work, plan) if counted else -1)


def visits_of(plan, S_q: int, S_k: int, left, right) -> list[tuple[int, int, list[int]]]:
    """(first block of queries, the one after the last, turn at each) of every program, in their order."""
    block_m, block_n = plan.block_m.value, plan.block_n.value
    num_n = S_k // block_n + 1 if plan.varlen.value else -(-S_k // block_n)
    found = torch.zeros(num_n, 64, dtype=torch.int32)
    cu = [torch.tensor([0, n], dtype=torch.int32) if plan.varlen.value else None for n in (S_q, S_k)]
    numbers = [Int(x) for x in (S_q, S_k, 1, 1, 1, 1, 0, -(-S_q // block_m), num_n)]
    bounds = [None if x is None else Int(x) for x in (right, left)]
    cu = [x if x is None else Pointer.to_tensor(x) for x in cu]
    run(_visits, (1,), found, backward_tiles.Work(*numbers, *bounds, *cu, Int(0)), plan)
    rows = [row.tolist() for row in found]
    return [(row[0], row[1], row[2 + row[0] : 2 + row[1]]) for row in rows if row[0] < row[1]]


def test_only_two_equal_consumers_alternate() -> None:
    assert replace(hopper_backward_config(80), alternate=True).alternate
    expected = r"^alternate: expected False with block_n=64, got True$"
    with pytest.raises(ValueError, match=expected):
        replace(hopper_backward_config(256), alternate=True)


@pytest.mark.parametrize("option", ["bulk", "persistent", "tail_apart", "rotated"])
def test_the_wide_kernel_does_without(option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}: expected False with block_n=64, got True$"):
        replace(hopper_backward_config(256), **{option: True})


def test_which_calls_have_their_tail_apart() -> None:
    """Without a mask: batches of 81 to 96 columns, whose keys end within a block, which alternate there, too;
    and varlen sequences of bfloat16 up to 64 columns. float16 of these keeps P in half the registers."""

    def apart(columns: int, **kind: bool) -> bool:
        config = hopper_backward_config(columns, stays=True, kind=BackwardKind(**kind))
        assert not config.tail_apart or config.alternate
        return config.tail_apart

    for columns in (64, 80, 96, 112, 128):
        assert apart(columns, tail=True) is apart(columns, tail=True, float16=True) is (columns == 96)
        assert apart(columns, varlen=True) is (columns == 64)
        assert not any(apart(columns, **{how: True}) for how in ("masked", "float16"))
        assert not apart(columns, varlen=True, float16=True) and not apart(columns, tail=True, masked=True)
    varlen = {dtype: BackwardKind(varlen=True, float16=dtype) for dtype in (False, True)}
    assert [hopper_backward_config(64, False, True, kind).half_p for kind in varlen.values()] == [False, True]
    assert not hopper_backward_config(96, False, True).alternate


def test_which_calls_are_rotated() -> None:
    """Without a mask: batches of 65 to 80 and of 97 to 128 columns; those of 81 to 96 where keys end within a
    block or there are many; varlen sequences but of 81 to 96 columns, up to 64 in bfloat16."""

    def rotated(columns: int, **kind: bool) -> bool:
        return hopper_backward_config(columns, stays=True, kind=BackwardKind(**kind)).rotated

    for columns in (64, 80, 96, 112, 128):
        assert rotated(columns) is rotated(columns, float16=True) is (columns in (80, 112, 128))
        assert rotated(columns, tail=True) is rotated(columns, long=True) is (columns > 64)
        assert rotated(columns, varlen=True) is (columns != 96)
        assert not rotated(columns, masked=True) and not rotated(columns, masked=True, varlen=True)
    assert not rotated(64, varlen=True, float16=True) and not rotated(192) and not rotated(256)


def test_a_plan_is_rotated_where_all_queries_see_all_keys() -> None:
    config = replace(hopper_backward_config(128), rotated=True)
    for causal, left, deterministic in product((False, True), repeat=3):
        mask = {"causal": causal, "shifted": causal, "left": left, "tail": True}
        asked = replace(config, deterministic=deterministic)
        plan = launch_backward.make_plan(128, asked, mask, varlen=False)
        assert plan.rotated.value is not (causal or left or deterministic)


@pytest.mark.parametrize("visited", [1, 2])
def test_programs_that_visit_several_heads_are_not_rotated(visited: int) -> None:
    shape, strides = (1, 2, 300, 128), (2 * 300 * 128, 300 * 128, 128, 1)
    config = replace(hopper_backward_config(128), rotated=True, visited=visited)
    dense, keys = MaskWindow(None, None), (1, 1, 300, 128)
    call = Signature(shape, keys, (strides,) * 5, torch.float16, 0, dense, 1.0, None, False, config)
    launch = launch_backward.prepare(call).launches.launches[1]
    assert launch.constants["plan"].rotated.value is (visited == 1)


def test_a_mask_has_no_tail_apart() -> None:
    config = replace(hopper_backward_config(96), tail_apart=True)
    for causal, left, tail in product((False, True), repeat=3):
        mask = {"causal": causal, "shifted": causal, "left": left, "tail": tail}
        plan = launch_backward.make_plan(96, config, mask, varlen=False)
        assert plan.tail_apart.value is (tail and not causal and not left)


def test_which_wide_calls_mask_early() -> None:
    """In float16 under a mask, with a key head for each query head, beside values of 256 columns."""

    def early(*columns: int, deterministic: bool = False, **kind: bool) -> bool:
        return backward_config(*columns, deterministic, BackwardKind(**kind)).early_mask

    for columns in ((64, 256), (40, 136), (128, 256), (112, 200)):
        assert early(*columns, masked=True, float16=True)
        assert early(*columns, masked=True, left_bound=True, float16=True)
        assert not early(*columns, masked=True) and not early(*columns, float16=True)
        assert not early(*columns, masked=True, float16=True, deterministic=True)
        for other in ({"alone": False}, {"varlen": True}):
            assert not early(*columns, masked=True, float16=True, **other)
    assert not early(256, 256, masked=True, float16=True)


def test_who_adds_in_bulk_does_not_pause() -> None:
    with pytest.raises(ValueError, match="^pause_every: expected 0 with bulk=True, got 2$"):
        replace(hopper_backward_config(64, stays=True), pause_every=2)


def test_how_often_calls_pause() -> None:
    """A thread has 32 additions in a step of 256 columns, 24 of 192, 20 of 160 and 8 of 128."""

    def every(columns: int, deterministic: bool = False, **kind: bool) -> int:
        how = {"stays": columns <= 128, "kind": BackwardKind(**kind)}
        return hopper_backward_config(columns, deterministic, **how).pause_every

    assert {every(256, masked=m, varlen=v) for m in (False, True) for v in (False, True)} == {1}
    assert every(128, masked=True) == every(128, masked=True, tail=True) == 4
    assert every(128) == 8 and every(128, tail=True) == every(64) == every(96, masked=True) == 0
    assert every(128, masked=True, varlen=True) == 4 and every(128, varlen=True, alone=False) == 0
    for columns in (160, 192):
        assert every(columns) == every(columns, masked=True, alone=False) == 4
        window = every(columns, masked=True, left_bound=True, alone=False)
        assert every(columns, masked=True) == window == (3 if columns == 192 else 2)
        assert every(columns, varlen=True) == every(columns, varlen=True, masked=True, alone=False) == 2
    assert {every(columns, deterministic=True) for columns in (64, 96, 128)} == {0}
    assert every(256, deterministic=True) == 1
    for columns in (160, 192):
        assert every(columns, deterministic=True) == 0
        assert every(columns, deterministic=True, masked=True) == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"value_columns": 64}, "value_columns: expected 128 or 192, got 64"),
        ({"query_columns": 176}, "query_columns: expected 160 or 192, got 176"),
        ({"query_columns": 160}, "value_columns: expected 128 or 160, got 192"),
        ({"alternate": True}, r"alternate: expected False with block_n=96, got True"),
        ({"persistent": True}, "persistent: expected False with block_n=96, got True"),
    ],
)  # fmt: skip
def test_what_96_keys_a_program_do_without(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}$"):
        replace(KEYS_96, **changes)


def test_which_calls_have_96_keys_a_program() -> None:
    """Of three parts of 64 columns, whether sums have an order or not."""
    narrow = replace(KEYS_96, query_columns=160, value_columns=160)
    assert {KEYS_96.width(D) for D in range(136, 193, 8)} == {192} and narrow.width(136) == 160
    assert KEYS_96.sums_widths(160) == narrow.sums_widths(160) == (192, 192), "whole parts"
    for config, head_dim in ((KEYS_96, 128), (KEYS_96, 200), (narrow, 168)):
        most = config.query_columns
        with pytest.raises(ValueError, match=f"^head_dim: expected 129 to {most} with .*, got {head_dim}$"):
            config.width(head_dim)
    for varlen, in_order in product((False, True), repeat=2):
        how = {"deterministic": in_order, "kind": BackwardKind(varlen=varlen)}
        assert backward_config(192, 128, **how).block_n == 96
        for head_dim in range(8, 257, 8):
            config = hopper_backward_config(head_dim, **how)
            assert (config.block_n == 96) is (128 < head_dim <= 192) and config.deterministic is in_order


DENSE = {"l2_bytes": 8 * MB}
ALONE = {"crowding": CROWDING}
SHORT = {"l2_bytes": 8 * MB, **ALONE}
EARLY, THIRD = {"early_mask": True}, {"early_mask": True, "pause_every": 3}
FORMS = {  # no mask, a diagonal, a window with a left bound
    (160, 160): ({"pause_every": 4, **DENSE}, SHORT, ALONE),
    (192, 192): ({"pause_every": 4, **DENSE}, SHORT | THIRD, ALONE | THIRD),
    (192, 128): (DENSE, SHORT | EARLY, ALONE | EARLY),
}
"""Columns of queries and of values -> what differs from `KEYS_96`."""


@pytest.mark.parametrize("columns", FORMS, ids=str)
def test_which_form_of_96_keys_calls_get(columns: tuple[int, int]) -> None:
    """By the call itself, with two heads of 256 rows and keys; varlen sequences have one form."""
    own, values = columns
    q, v = (torch.empty(1, 2, 256, n, dtype=torch.float16, device="meta") for n in columns)
    base = replace(KEYS_96, query_columns=own, value_columns=values)
    windows = MaskWindow(None, None), MaskWindow(None, 0), MaskWindow(100, 0)
    for window, changes in zip(windows, FORMS[columns], strict=True):
        found = hopper.configuration(q, q, v, Params(window, SCALE), backward=True)
        assert found == replace(base, **changes)
        in_order = hopper.configuration(q, q, v, Params(window, SCALE, deterministic=True), backward=True)
        masked = window != windows[0]
        assert in_order == replace(
            found, deterministic=True, pause_every=4 if masked else 0, early_mask=masked and values < own,
            l2_bytes=(16 if masked else 40) * MB, crowding=CROWDING if window == windows[1] else None,
        )  # fmt: skip
    tokens, last = (x[0].transpose(0, 1) for x in (q, v))
    starts = torch.tensor([0, 256], dtype=torch.int32)
    for window in windows:
        params = Params(window, SCALE, Varlen(starts, starts, 256, 256))
        found = hopper.configuration(tokens, tokens, last, params, backward=True)
        assert found == replace(base, early_mask=own != columns[1] and window != windows[0])


def test_what_heads_of_256_columns_may_take_of_l2() -> None:
    def megabytes(deterministic: bool = False, **kind: bool) -> float:
        return hopper_backward_config(256, deterministic, kind=BackwardKind(**kind)).l2_bytes / MB

    for mask, most in (({}, 16), ({"masked": True}, 40), ({"masked": True, "left_bound": True}, 16)):
        few = 8 if most == 40 else 16
        assert megabytes(alone=False, **mask) == megabytes(alone=False, short=True, **mask) == most
        assert megabytes(**mask) == megabytes(short=True, **mask) == few
        assert megabytes(varlen=True, **mask) == megabytes(True, varlen=True, **mask) == 16
        assert megabytes(True, **mask) == (16 if mask else 40)


@pytest.mark.parametrize("columns", [160, 192, 256])
@pytest.mark.parametrize(
    ("keys", "heads", "megabytes"), [(2047, 2, 8), (2048, 2, 24), (1023, 1, 8), (1024, 1, 24)]
)
def test_few_keys_are_short(columns: int, keys: int, heads: int, megabytes: int) -> None:
    q, k = (torch.empty(1, n, keys, columns, dtype=torch.float16, device="meta") for n in (2, heads))
    found = hopper.configuration(q, k, k, Params(MaskWindow(None, 0), SCALE), backward=True)
    if columns == 256:  # the wide kernel has few where no keys are shared, however long they are
        megabytes = 8 if heads == 2 else 40
    assert found.l2_bytes == megabytes * MB
    assert found.crowding == (CROWDING if heads == 2 else GROUPS_CROWDING)


@pytest.mark.parametrize("columns", [64, 96, 128])
def test_what_decides_about_sections_up_to_128_columns(columns: int) -> None:
    """Without a mask a section is small, and the last one like the others; groups count like other heads."""

    def found(deterministic: bool = False, **kind: bool) -> tuple[float, float | None]:
        config = hopper_backward_config(columns, deterministic, stays=True, kind=BackwardKind(**kind))
        return config.l2_bytes / MB, config.crowding

    assert found() == found(alone=False) == (8, None)
    assert found(masked=True) == found(masked=True, alone=False) == (16, CROWDING)
    assert found(masked=True, left_bound=True) == found(True, masked=True) == (16, CROWDING)
    assert found(True) == found(True, masked=True, left_bound=True) == (16, None)
    assert found(varlen=True) == found(varlen=True, alone=False) == (8, None)
    assert found(varlen=True, masked=True) == found(True, varlen=True) == (16, None)


@pytest.mark.parametrize(("columns", "of", "keys"), [(256, 64, 64), (128, 256, 128), (64, 256, 128)])
def test_a_configuration_of_another_kernel_is_refused(columns: int, of: int, keys: int) -> None:
    """Its number of keys a program would leave some of them out."""
    shape = (1, 1, 1024, columns)
    strides = (torch.empty(shape, device="meta").stride(),) * 5
    config, window = hopper_backward_config(of), MaskWindow(None, None)
    call = Signature(shape, shape, strides, torch.float16, -1, window, SCALE, None, False, config)
    with pytest.raises(ValueError, match=f"^block_n: expected {keys} for {columns} columns, got"):
        launch_backward.prepare(call)


def test_values_that_do_not_fit_are_refused() -> None:
    q = torch.zeros(1, 1, 100, 192, dtype=torch.float16)
    config, shape = replace(KEYS_96, value_columns=128), tuple(q.shape)
    window, strides = MaskWindow(None, None), (q.stride(),) * 5
    call = Signature(shape, shape, strides, q.dtype, -1, window, SCALE, None, False, config)
    with pytest.raises(ValueError, match="^value_columns: expected 192 or more, got 128$"):
        launch_backward.prepare(call)
    reasons = {
        (128, 256): "block_n: expected 64 for 256 columns, got 128",
        (96, 64): "config: expected columns .* for head dimension 64, got ",
    }
    for (columns, values), reason in reasons.items():
        k, v = (torch.zeros(1, 1, 100, n, dtype=torch.float16) for n in (columns, values))
        strides, config = (k.stride(), k.stride(), v.stride(), v.stride(), v.stride()), hopper_backward_config
        call = Signature(
            tuple(k.shape), tuple(k.shape), strides, k.dtype, -1, window, SCALE, None, True,
            config(columns, True), own_value_dim=values,
        )  # fmt: skip
        with pytest.raises(ValueError, match=f"^{reason}"):
            launch_backward.prepare(call)


@pytest.mark.parametrize("added", [True, False], ids=["added", "apart"])
def test_sums_of_transposed_gradients_become_rows(device: str, added: bool) -> None:
    """dK and dV of 96 keys, whose columns are keys in memory."""
    if device != "cpu":
        pytest.skip("the conversion runs in the interpreter")
    shape, keys, parts = (1, 2, 130, 192), (1, 1, 200, 192), 1 if added else 2
    strides = [torch.empty(tensor, device="meta").stride() for tensor in (shape, keys)]
    config = replace(KEYS_96, visited=1, added=added)
    call = Signature(
        shape, keys, (strides[0], *strides[1:] * 2, *strides[:1] * 2), torch.float32, -1, MaskWindow(None, 0),
        SCALE, None, False, config,
    )  # fmt: skip
    held = sharing.SharedKeys(call, 2, 1, 3 * 96)
    sums = torch.randn(held.elements)
    found = [torch.full(keys, 7.0) for _ in range(2)]
    made = held.conversions(0, (keys, strides[1]), (keys, strides[1]))
    Launches(made, -1, ("buffer", "dk", "dv", "cu_k"))(sums, *found, None)
    # Of each part [64 columns, 8 keys] after the other.
    parts_of = sums.numpy().reshape(parts, 3, 2, 3, 12, 512).sum(0)
    for which, scale in enumerate((SCALE, 1.0)):
        for block in range(3):
            for part in range(3):
                turned = np.zeros((64, 96), np.float32)
                places = in_registers(np.arange(64 * 96).reshape(64, 96))
                turned.reshape(-1)[places] = parts_of[block, which, part].reshape(-1)
                rows = found[which][0, 0, 96 * block : 96 * block + 96, 64 * part : 64 * part + 64].numpy()
                np.testing.assert_allclose(rows, turned.T[: len(rows)] * np.float32(scale), rtol=1e-6)


@pytest.mark.parametrize("head_dim", [0, 264])
def test_a_head_dimension_out_of_range_has_no_configuration(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"^head_dim: expected 1 to 256, got {head_dim}$"):
        hopper_backward_config(head_dim)


def test_a_cpu_is_refused_as_by_the_forward() -> None:
    q = torch.zeros(1, 1, 4, 64, dtype=torch.float16)
    params = Params(MaskWindow(None, None), SCALE)
    for backward in (False, True):
        assert hopper.unsupported(q, q, q, params, backward) == "needs CUDA tensors; q is on cpu"


@gluon.jit
def _in_order(found_ptr, blocks, HEADS, SECTION, MORE, ORDER: gl.constexpr):
    for number in range(blocks * HEADS):
        block, head = ORDER(number, blocks, HEADS, SECTION, MORE)
        gl.store(found_ptr + 2 * number, block)
        gl.store(found_ptr + 2 * number + 1, head)


@given(blocks=st.integers(1, 9), heads=st.integers(1, 40), section=st.integers(1, 12), waves=st.floats(0, 3))
def test_last_section_has_all_heads_that_are_left(blocks, heads, section, waves) -> None:
    last = last_section(heads, blocks, section, waves)
    found = torch.zeros(blocks * heads, 2, dtype=torch.int32)
    run(_in_order, (1,), found, Int(blocks), Int(heads), Int(section), Int(last), by_sections)
    firsts = [*range(0, last, section), last]
    expected = [
        (block, head)
        for first, end in zip(firsts, [*firsts[1:], heads], strict=True)
        for block in range(blocks)
        for head in range(first, end)
    ]
    assert [tuple(row) for row in found.tolist()] == expected
    assert last == 0 or (heads - last + 0.5) * blocks >= waves * SMS


@given(blocks=st.integers(1, 9), heads=st.integers(1, 20), section=st.integers(1, 12), data=st.data())
def test_leading_blocks_of_all_heads_come_first(blocks, heads, section, data) -> None:
    leading = data.draw(st.integers(0, blocks - 1))
    found = torch.zeros(blocks * heads, 2, dtype=torch.int32)
    run(_in_order, (1,), found, Int(blocks), Int(heads), Int(section), Int(leading), leading_first)
    expected = [
        (block, head)
        for part in (range(leading), range(leading, blocks))
        for first in range(0, heads, section)
        for block in part
        for head in range(first, min(first + section, heads))
    ]
    assert [tuple(row) for row in found.tolist()] == expected
