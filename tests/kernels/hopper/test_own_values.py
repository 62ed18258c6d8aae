"""The Hopper backward pass of values with columns of their own: which widths have a kernel, and the kernels
of 64 and 128 columns and of 256 beside fewer, in the emulator."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn, with_more
from emulated import ORDERS, Call, check_backward

from attnlib.bench.oracle import poisoned_empty
from attnlib.kernels.common.tiles import tile_width
from attnlib.kernels.hopper.configs_backward import (
    BackwardKind,
    HopperBackwardConfig,
    OwnValuesBackwardConfig,
    backward_config,
    hopper_backward_config,
)

pytestmark = INTERPRETER_REMARKS

# ---------------------------------------------------------------- which widths have a kernel


def test_widths_of_a_tile() -> None:
    """64 and 128 as they are; 192 beside 128; 256 for values; else as many of both as the wider one has, in
    parts only where neither ends before the second part begins."""
    for D, D_v in product(range(8, 257, 8), repeat=2):
        for how in ({}, {"deterministic": True}, {"kind": BackwardKind(varlen=True)}, {"stays": True}):
            config = backward_config(D, D_v, **how)
            found = config.widths(D, D_v)
            if D == D_v:
                assert config == hopper_backward_config(D, **how)
            elif 128 < D <= 192 and D_v <= 128:
                assert found == (192, 128)
            elif max(D, D_v) <= 128 and tile_width(D) != tile_width(D_v):
                assert found == (tile_width(D), tile_width(D_v))
                assert isinstance(config, OwnValuesBackwardConfig)
            elif (D <= 64 and D_v > 128) or (64 < D <= 128 and D_v > 192):
                assert found == (tile_width(D), 256)
            else:
                assert found == (hopper_backward_config(max(D, D_v), **how).width(max(D, D_v)),) * 2
                assert not config.columns or min(D, D_v) > config.columns[0]
            assert D <= found[0] and D_v <= found[1] and config.deterministic is ("deterministic" in how)


def test_what_is_not_told_of_the_columns_is_that_of_128() -> None:
    for how in ({"deterministic": True}, {"stays": True, "kind": BackwardKind(masked=True)}):
        whole, own = hopper_backward_config(128, **how), backward_config(64, 128, **how)
        assert vars(own) == vars(whole) | {"query_columns": 64, "value_columns": 128}


REFUSED = {
    "query_columns, value_columns: expected 64 and 128 or 128 and 64, got .64, 64.": {"value_columns": 64},
    "query_columns, value_columns: expected 64 or 128 and 256, got .64, 128.": {"block_n": 64},
    "block_m: expected 64 with value_columns=128, got 128": {"block_m": 128},
    "bulk: expected False with persistent=True and query_columns=128, got True": {
        "query_columns": 128, "value_columns": 64, "bulk": True, "persistent": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_without(reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}$"):
        replace(backward_config(64, 128), **REFUSED[reason])


def test_columns_that_do_not_fit() -> None:
    config = backward_config(64, 128)
    assert config.widths(40, 128) == (64, 128) == config.sums_widths(128)
    with pytest.raises(ValueError, match="^query_columns: expected 72 or more, got 64$"):
        config.widths(72, 128)
    with pytest.raises(ValueError, match="^value_columns: expected 136 or more, got 128$"):
        config.widths(64, 136)


# ---------------------------------------------------------------- gradients

CALLS = {
    "64 and 128": Call(64, 2, 2, 150, 200, D_v=128),
    "64 and 128, dense, bfloat16": Call(64, 1, 1, 150, 170, False, dtype=torch.bfloat16, D_v=128),
    "64 and 128, grouped heads, batches": Call(64, 4, 2, 70, 190, B=2, D_v=128),
    "48 and 112, a negative scale": Call(48, 1, 1, 150, 150, sm_scale=-0.1, D_v=112),
    "64 and 96, a window": Call(64, 1, 1, 150, 400, causal=False, window=(60, 20), D_v=96),
    "64 and 128, no right bound": Call(64, 1, 1, 150, 170, causal=False, window=(60, -1), D_v=128),
    "64 and 128, keys that nobody sees": Call(64, 1, 1, 100, 400, window=(30, -1), D_v=128),
    "64 and 128, rows that see nothing": Call(64, 1, 1, 300, 150, D_v=128),
    "64 and 128, one row, one key": Call(64, 1, 1, 1, 1, D_v=128),
    "64 and 128, one key": Call(64, 1, 1, 200, 1, D_v=128),
    "64 and 128, varlen": Call(64, 2, 1, varlen=((40, 170), (0, 5), (150, 70)), D_v=128),
    "128 and 64": Call(128, 2, 2, 150, 200, D_v=64),
    "128 and 64, dense, batches": Call(128, 1, 1, 70, 170, False, B=2, D_v=64),
    "128 and 64, grouped heads": Call(128, 4, 1, 70, 190, D_v=64),
    "112 and 48, bfloat16": Call(112, 1, 1, 150, 150, dtype=torch.bfloat16, D_v=48),
    "80 and 64, a window": Call(80, 1, 1, 150, 400, window=(60, -1), D_v=64),
    "128 and 64, a window on both sides": Call(128, 1, 1, 150, 400, False, window=(60, 20), D_v=64),
    "128 and 64, keys that nobody sees": Call(128, 1, 1, 100, 400, window=(30, -1), D_v=64),
    "128 and 64, rows that see nothing": Call(128, 1, 1, 300, 150, D_v=64),
    "128 and 64, one row, one key": Call(128, 1, 1, 1, 1, D_v=64),
    "128 and 64, one row": Call(128, 1, 1, 1, 333, D_v=64),
    "128 and 64, varlen, dense": Call(128, 1, 1, varlen=((40, 170), (150, 70)), causal=False, D_v=64),
    "128 and 64, varlen, a window": Call(128, 1, 1, varlen=((140, 170), (200, 90)), window=(50, -1), D_v=64),
}
WIDE = {
    "64 and 256": Call(64, 2, 2, 150, 200, D_v=256),
    "64 and 256, dense, batches, grouped heads": Call(64, 4, 2, 70, 90, False, B=2, D_v=256),
    "40 and 136, a window": Call(40, 1, 1, 150, 300, window=(60, 20), dtype=torch.bfloat16, D_v=136),
    "64 and 256, keys that nobody sees": Call(64, 1, 1, 60, 200, window=(30, -1), D_v=256),
    "64 and 256, one row, one key": Call(64, 1, 1, 1, 1, D_v=256),
    "64 and 256, varlen": Call(64, 2, 1, varlen=((40, 70), (0, 5), (150, 90)), D_v=256),
    "128 and 256, rows that see nothing": Call(128, 1, 1, 200, 70, D_v=256),
    "112 and 200, dense": Call(112, 1, 1, 70, 150, causal=False, sm_scale=-0.1, D_v=200),
    "128 and 256, varlen, a window": Call(128, 1, 1, varlen=((140, 170), (60, 90)), window=(50, -1), D_v=256),
}
FILLED = {
    "256 and 128": Call(256, 2, 1, 70, 100, D_v=128),
    "256 and 64, varlen": Call(256, 1, 1, varlen=((40, 70), (70, 70)), D_v=64),
    "192 and 40": Call(192, 2, 1, 70, 100, D_v=40),
    "72 and 160, dense": Call(72, 1, 1, 63, 70, causal=False, D_v=160),
    "96 and 72 in two parts": Call(96, 2, 1, 70, 100, D_v=72),
    "80 and 128": Call(80, 2, 1, 70, 100, D_v=128),
    "16 and 64": Call(16, 2, 1, 70, 100, D_v=64),
    "200 and 40, programs share a key head": Call(200, 2, 1, 70, 90, D_v=40),
}
"""The narrower ones are filled up by the copies."""
SMS = {"eager": 1, "late": 3, "random": 2}


def form(call: Call, **changes) -> HopperBackwardConfig:
    masked, float16 = call.causal or call.window is not None, call.dtype == torch.float16
    kind = BackwardKind(masked, varlen=bool(call.varlen), alone=call.H == call.H_kv, float16=float16)
    return replace(backward_config(call.D, call.D_v, call.deterministic, kind), **changes)


def check(call: Call, order: str, **changes) -> None:
    """Memory that a kernel has not written to is NaN."""
    with poisoned_empty():
        kernel = check_backward(replace(call, config=form(call, **changes)), order, seed=1, sms=SMS[order])
    assert kernel.reports[-1].unwaited == ()


@pytest.mark.parametrize(("name", "order"), in_turn(CALLS | WIDE, ORDERS))
def test_gradients(name: str, order: str) -> None:
    call = (CALLS | WIDE)[name]
    check(call, order, visited=call.H // call.H_kv)


@pytest.mark.parametrize("name", FILLED)
def test_narrower_tensors_are_filled_up_by_copies(name: str) -> None:
    check(FILLED[name], "random", visited=1 if "share" in name else None)


BATCHES = [name for name, call in CALLS.items() if not call.varlen]
STAYING = with_more(in_turn(BATCHES[::2], ORDERS), in_turn(BATCHES, ORDERS))


@pytest.mark.parametrize(("name", "order"), STAYING)
def test_programs_that_stay_on_their_sm(name: str, order: str) -> None:
    call, turns = CALLS[name], {"alternate": True, "pause_every": 4, "early_mask": True}
    check(call, order, persistent=True, visited=call.H // call.H_kv, **(turns if order != "eager" else {}))


OPTIONS = [
    {"bulk": True}, {"half_p": True, "early_mask": True}, {"alternate": True}, {"masked_stagger": 600},
    {"pause_every": 2},
]  # fmt: skip


@pytest.mark.parametrize(("options", "pair"), in_turn(OPTIONS, ((64, 128), (128, 64))), ids=str)
def test_forms_of_a_step(options: dict, pair: tuple[int, int]) -> None:
    check(Call(pair[0], 1, 1, 150, 300, D_v=pair[1]), "random", **options)
    if pair[0] == 64:
        check(Call(pair[0], 1, 1, 150, 300, D_v=pair[1]), "late", **options, persistent=True)


SHARED = {
    "64 and 128": Call(64, 4, 2, 70, 200, D_v=128),
    "128 and 64, dense, batches": Call(128, 4, 1, 70, 200, False, B=2, D_v=64),
    "40 and 128, keys that nobody sees": Call(40, 2, 1, 100, 400, window=(30, -1), D_v=128),
    "128 and 64, varlen": Call(128, 2, 1, varlen=((40, 170), (150, 70)), D_v=64),
    "64 and 256, keys that nobody sees": Call(64, 2, 1, 60, 200, window=(30, -1), D_v=256),
    "128 and 256": Call(128, 4, 2, 70, 100, D_v=256),
}


@pytest.mark.parametrize("added", [True, False], ids=["added", "apart"])
@pytest.mark.parametrize(("name", "order"), in_turn(SHARED, ("late", "random")))
def test_programs_share_a_key_head(name: str, order: str, added: bool) -> None:
    call = SHARED[name]
    check(call, order, visited=1, added=added)
    if not call.varlen and call.window is None and call.D_v <= 128:
        check(call, order, visited=1, added=added, persistent=True)


IN_ORDER = {
    "64 and 128": Call(64, 2, 1, 150, 300, D_v=128),
    "128 and 64, dense": Call(128, 1, 1, 150, 300, causal=False, D_v=64),
    "128 and 64, varlen": Call(128, 2, 1, varlen=((40, 170), (0, 50), (150, 90)), D_v=64),
    "64 and 128, a window": Call(64, 1, 1, 150, 400, causal=False, window=(60, 20), D_v=128),
    "64 and 256": Call(64, 2, 1, 100, 200, D_v=256),
    "128 and 256, dense": Call(128, 1, 1, 70, 150, causal=False, D_v=256),
}
STAYS = [
    (name, stays) for name, stays in product(IN_ORDER, (False, True))
    if not (stays and (IN_ORDER[name].varlen or IN_ORDER[name].D_v > 128))
]  # fmt: skip
STAYS_FIRST = [
    ("64 and 128", True), ("128 and 64, dense", True), ("128 and 64, varlen", False), ("64 and 256", False)
]  # fmt: skip


@pytest.mark.parametrize(("name", "stays"), with_more(STAYS_FIRST, STAYS), ids=str)
def test_the_same_bits_in_every_order(name: str, stays: bool) -> None:
    call = replace(IN_ORDER[name], deterministic=True)
    apart = {"visited": 1, "added": False} if call.H > call.H_kv and stays else {}
    config = form(call, persistent=stays, alternate=stays, **apart)
    kernel, found = check_backward(replace(call, config=config), "random", sms=3), set()
    for seed, (order, sms) in enumerate(zip((*ORDERS, "random"), (1, 2, 5, 2), strict=True)):
        kernel.options["sms"] = sms
        kernel.repeat(order, seed)
        found.add(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in kernel.tensors))
    assert len(found) == 1


@pytest.mark.parametrize("pair", [(64, 128), (128, 64)], ids=str)
def test_many_orders(pair: tuple[int, int]) -> None:
    """Three tiles in one program, whose gradients leave while the next one is computed."""
    call = Call(pair[0], 1, 1, 130, 260, causal=False, D_v=pair[1])
    kernel = check_backward(replace(call, config=form(call, persistent=True, alternate=True)), "eager", sms=1)
    for seed in range(8):
        kernel.repeat("random", seed)
