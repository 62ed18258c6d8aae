"""Which blocks of keys the Hopper kernel visits and masks: its formulas on the CPU, since Gluon has no
interpreter; and what its launcher gives it.

`visits` follows `top` of kernels/common/tile_scheduler.py and all of kernels/hopper/masks.py; `bug` plants a
mistake.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import NamedTuple

import families
import numpy as np
import pytest
import torch
from families import fresh_launches  # noqa: F401

from attnlib.kernels import hopper
from attnlib.kernels.common import device, forward_plan
from attnlib.kernels.hopper import forward_kernel, launch
from attnlib.kernels.hopper.configs import M128N128, M192N128, M256N64, hopper_config
from attnlib.params import MaskWindow, Params, Varlen

LENGTHS = [(512, 512), (130, 130), (512, 576), (300, 900), (700, 200), (1, 400), (257, 300), (64, 0)]
BOUNDS = [None, 0, 1, 63, 64, 70, 200, 10**5]
CONFIGS = {
    "64": M256N64, "64 M192N128": M192N128, "64 M128N128": M128N128,
    "128": hopper_config(128), "256": hopper_config(256),
}  # fmt: skip


class Visit(NamedTuple):
    """A block that a warpgroup computes: its first row, and of the keys; the how many-th block it is."""

    row: int
    key: int
    number: int
    masked: bool
    guarded: bool  # rows may have seen no key before


def visits(S_q, S_k, left, right, config, varlen, bug=""):
    masked, skip = (1 if right is None else 2, True)
    if not varlen:
        masked, skip = launch._masks(right, S_q, S_k, config)
    block_m, block_n, shift = 64 * config.warpgroups, config.block_n, S_k - S_q

    def top(end):
        visible = S_k if right is None else min(max(end + shift + right, 0), S_k)
        return max(-(-visible // block_n), 1)

    for tile in range(0, S_q, block_m):
        low = 0 if left is None else max(tile + shift - left, 0) // block_n
        low += bug == "the first block is skipped"
        for row in range(tile, min(tile + block_m, S_q), 64):
            own = top(row + 64 if skip else tile + block_m) - low
            assert own > 0
            last = row + (0 if bug == "the left mask is that of the first row" else 63)
            for i in range(own):
                key = (low + own - 1 - i) * block_n
                if i == 0:
                    mask = masked > 0 or left is not None
                else:
                    mask = masked == 2 and i == 1 and bug != "one block with a mask"
                    mask = mask or (left is not None and key < last + shift - left)
                yield Visit(row, key, i, mask, masked == 2)


def check(S_q, S_k, left, right, config, varlen, bug=""):
    """AssertionError unless rows see all that they should, and no block without a mask that one misses."""
    left, right = MaskWindow(left, right).clipped(S_q, S_k)
    call, seen = f"{S_q}x{S_k} {left, right}", np.zeros(S_q, int)
    place = np.arange(S_q) + S_k - S_q
    low = np.zeros(S_q, int) if left is None else np.maximum(place - left, 0)
    high = np.full(S_q, S_k - 1) if right is None else np.minimum(place + right, S_k - 1)
    keys = np.maximum(high - low + 1, 0)  # that each row sees
    for visit in visits(S_q, S_k, left, right, config, varlen, bug):
        rows = slice(visit.row, visit.row + 64)
        key, end = visit.key, visit.key + config.block_n - 1
        visible = np.maximum(np.minimum(high[rows], end) - np.maximum(low[rows], key) + 1, 0)
        seen[rows] += visible
        where = f"{call} rows {visit.row}.. keys {key}.."
        assert visit.masked or (visible == config.block_n).all(), f"{where}: no mask"
        none_yet = ((visible == 0) & (keys[rows] > 0)).any() and visit.number == 0
        assert visit.guarded or not none_yet, f"{where}: no key in a row's first block"
    wrong = np.flatnonzero(seen != keys)
    assert not len(wrong), f"{call} rows {wrong}: see {seen[wrong]} keys of {keys[wrong]}"


@pytest.mark.parametrize("varlen", [False, True], ids=["batch", "varlen"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_see_their_keys(name, varlen):
    for (S_q, S_k), left, right in product(LENGTHS, BOUNDS, BOUNDS):
        if S_k or varlen:
            check(S_q, S_k, left, right, CONFIGS[name], varlen)


@pytest.mark.parametrize(
    "bug", ["the first block is skipped", "the left mask is that of the first row", "one block with a mask"]
)
def test_a_planted_bug_is_found(bug):
    with pytest.raises(AssertionError):
        for right in (0, 1):
            check(512, 512, 200, right, CONFIGS["128"], False, bug)


def test_a_window_costs_its_width():
    """Blocks of 128 keys that a warpgroup of 64 rows computes, far from the first key."""
    for left, most in [(0, 1), (64, 2), (128, 2), (200, 3), (1024, 9), (4096, 33)]:
        rows = Counter(visit.row for visit in visits(8192, 8192, left, 0, CONFIGS["128"], False))
        assert max(rows.values()) == most


# ---------------------------------------------------------------- the launcher


@pytest.fixture
def launched(monkeypatch, fresh_launches):  # noqa: F811
    """The arguments of launches, by the names that the kernel has for them, on a GPU that is not there."""
    calls, names = [], set(forward_kernel.attention_forward_hopper.arg_names)
    names -= {name for name in names if name[1:].startswith(("_scale", "_mean"))}  # of e4m3 operands
    names -= {"shared_rows", "key_blocks", "maxima"}  # of DistrAttention's product, and of pooled maps
    names -= {name for name in names if name.startswith("into_")}  # of a result that is merged into
    right = {name for name in names if name.endswith("_right")}  # of head dimensions in two parts
    names -= right
    counter = torch.zeros(1, dtype=torch.int32)

    class Kernel:
        def __getitem__(self, grid):
            return lambda **given: calls.append({"grid": grid} | given)

    monkeypatch.setattr(forward_kernel, "attention_forward_hopper", Kernel())
    monkeypatch.setattr(device, "num_sms", lambda index: 132)
    monkeypatch.setattr(forward_plan, "counter", lambda index: counter)
    yield calls
    for call in calls:
        assert call["counter_ptr"] is counter
        more = right if call["plan"].right.value else set()
        options = {"grid", "num_warps", "maxnreg", "enable_fp_fusion"}
        assert names <= set(call) and set(call) - names == options | more


def forward(q, k, window, varlen=None):
    return families.forward(hopper, q, k, k, Params(window, 0.1, varlen, return_lse=True))


def test_multiprocessors_that_are_left_to_others(launched):
    q = torch.zeros(2, 40, 300, 128, dtype=torch.float16)
    for spare in (0, 16, 1000):
        families.forward(hopper, q, q, q, Params(MaskWindow(None, 0), 0.1, return_lse=True, spare=spare))
    assert [call["grid"] for call in launched] == [(132, 1, 1), (116, 1, 1), (1, 1, 1)]


def test_what_a_window_launches(launched):
    q, k = (torch.zeros(2, 4, rows, 128, dtype=torch.float16) for rows in (300, 400))
    for window in [(None, 0), (70, 0), (10**6, 10**6), (None, 5)]:
        forward(q, k, MaskWindow(*window))
    asked = [[mask.causal, mask.left, mask.shifted] for mask in (call["plan"].mask for call in launched)]
    assert [[flag.value for flag in flags] for flags in asked] == [
        [True, False, False], [True, True, False], [True, True, True], [True, False, True],
    ]  # fmt: skip
    bounds = [(call["left"], call["right"]) for call in launched]
    assert bounds == [(None, None), (70, None), (400, 300), (None, 5)]
    for call in launched:
        assert call["cu_q"] is call["cu_k"] is call["T_q"] is None
        assert (call["S_q"], call["S_k"], call["H"], call["tiles"]) == (300, 400, 4, 3 * 8)
        assert call["desc_q"].shape == [2, 4, 300, 128]


@pytest.mark.parametrize("head_dim", [72, 80])
def test_what_two_parts_launch(launched, head_dim):
    """Descriptors of the second part see a tensor that begins at its first column and ends with the last."""
    wide = torch.zeros(2, 300, 4, 128, dtype=torch.float16)
    q = wide[..., :head_dim].transpose(1, 2)
    forward(q, q, MaskWindow(None, 0))
    forward(q[0].transpose(0, 1), q[0].transpose(0, 1), MaskWindow(None, 0), _varlen(300))
    batch, varlen = launched
    assert batch["desc_k"].shape == [2, 4, 300, 64] and batch["desc_k"].strides == [153600, 128, 512, 1]
    assert batch["desc_k_right"].shape == [2, 4, 300, head_dim - 64]
    assert batch["desc_k_right"].strides == batch["desc_k"].strides
    assert batch["desc_k"].base.data_ptr() == q.data_ptr()
    assert varlen["desc_v_right"].shape == [2**30 + 1, 301, 4, 2**30, head_dim - 64]
    for call in launched:
        for name in "qkvo":
            left, right = call[f"desc_{name}"], call[f"desc_{name}_right"]
            assert right.base.data_ptr() == left.base.data_ptr() + 64 * 2
            assert right.block_shape[-1] == 16 and left.block_shape[-1] == 64
        assert call["plan"].right.value == 16


def _varlen(rows):
    ends = torch.tensor([0, rows], dtype=torch.int32)
    return Varlen(ends, ends, rows, rows)


def test_what_varlen_sequences_launch(launched):
    q, k = (torch.zeros(rows, heads, 64, dtype=torch.float16) for rows, heads in ((900, 4), (1000, 2)))
    varlen = Varlen(*torch.zeros(2, 6, dtype=torch.int32), 700, 800)
    for window in (MaskWindow(None, 0), MaskWindow(None, None)):
        out, lse = forward(q, k, window, varlen)
        assert out.shape == q.shape and lse.shape == (4, 900)
    causal, dense = launched
    assert (causal["plan"].mask.blocks.value, dense["plan"].mask.blocks.value) == (2, 1)
    for call in launched:
        assert call["plan"].varlen.value and call["plan"].mask.skip.value
        assert call["cu_q"] is varlen.cu_seqlens_q and call["cu_k"] is varlen.cu_seqlens_k
        assert (call["S_q"], call["S_k"], call["T_q"], call["HEADS"], call["GROUP"]) == (700, 800, 900, 20, 2)
        blocks = 900 // call["plan"].block_m.value + 5  # at most: each sequence may end with a part of one
        assert (call["B"], call["tiles"], call["grid"]) == (5, 4 * blocks, (min(4 * blocks, 132), 1, 1))
        assert call["desc_q"].shape == [2**30 + 1, 901, 4, 2**30, 64]
        assert call["desc_k"].block_shape == [1, 1, 1, call["plan"].block_n.value, 64]
